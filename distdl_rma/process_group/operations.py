"""What a group has begun: operations that follow one another, messages that do not, and waiting for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from distdl_rma.errors import ClosedError, DistdlError, ProtocolError
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason

Script = Iterator[None]

# Looks before a wait lets others have the core.
_SPINS = 30


class Operation:
    """Something under way: a script that yields as long as it waits, and what is done when it is over.

    ``begin`` makes the script; ``reason`` says for whom it waits. ``error`` is what ended it, if anything.
    """

    def __init__(
        self, begin: Callable[[], Script], reason: Callable[[], WaitReason], finish: Callable[[], None] | None
    ) -> None:
        self.reason = reason
        self._begin, self._finish = begin, finish
        self._script: Script | None = None
        self.done = False
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """Go on as far as possible; return whether it is over. What it raises is kept as well."""
        if self.done:
            return True
        try:
            if self._script is None:
                self._script = self._begin()
            for _ in self._script:
                return False
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self.fail(error)
            raise
        self._end()
        return True

    def fail(self, error: BaseException) -> None:
        """End it by an error."""
        self.error = error
        self._end()

    def _end(self) -> None:
        # It lets go of its data, and of the operation that it followed.
        self.done, self._begin, self._script, self._finish = True, _nothing, None, None


def _nothing() -> Script:
    return iter(())


def done() -> Operation:
    """An operation that is over."""
    operation = Operation(_nothing, lambda: WaitReason((), ""), None)
    operation.done = True
    return operation


class Lines:
    """The operations of a group: collectives one after the other, in the order of the calls, and messages.

    Every wait on the machine takes them further, in whatever order ranks wait for them. What goes wrong in a
    collective ends the group: later calls raise the same.
    """

    def __init__(self, manager: SegmentManager, name: str) -> None:
        self.manager, self.name = manager, name
        self._lock = manager.segment.lock
        self._line: deque[Operation] = deque()
        self._apart: list[Operation] = []
        self._broken: BaseException | None = None
        self._closed = False
        # Changes whenever a collective has come further.
        self.progress: Callable[[], object] = bool

    def check(self) -> None:
        """Raise if nothing can be begun any more."""
        if self._closed or self.manager.closed:
            raise ClosedError(f"process group {self.name!r} was destroyed, or its machine closed")
        if self._broken is not None:
            if isinstance(self._broken, DistdlError):
                raise self._broken
            why = f"was interrupted by {self._broken!r}"
            raise ProtocolError(f"process group {self.name!r} {why}: make it anew on all its ranks")

    def append(self, operation: Operation) -> Operation:
        """Begin a collective, as soon as those before it are over."""
        self.check()
        with self._lock:
            self._line.append(operation)
            if len(self._line) == 1:
                self._begin(self.advance)
        return operation

    def add(self, operation: Operation) -> Operation:
        """Begin a message, which waits for no other."""
        self.check()
        with self._lock:
            self._apart.append(operation)
            self._begin(self.advance_apart)
        return operation

    @property
    def ready(self) -> bool:
        """Whether a collective can begin now: none is under way, and nothing went wrong."""
        return not (self._line or self._closed or self._broken is not None or self.manager.closed)

    @property
    def resting(self) -> bool:
        """Whether no collective is under way."""
        return not self._line

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._line or self._apart)

    def _begin(self, advance: Callable[[], bool]) -> None:
        # An error belongs to who waits for the operation.
        over = False
        with suppress(DistdlError):
            over = advance()
        if not over:
            self.manager.defer(advance)

    def advance(self) -> bool:
        """Take the collectives as far as they go; return whether none is under way."""
        with self._lock:
            line = self._line
            while line:
                try:
                    if not line[0].advance():
                        return False
                except BaseException as error:
                    self.break_off(error)
                    # What was raised in it by a signal is for whoever goes on here, and may wait for another.
                    if not isinstance(error, Exception):
                        raise
                    return True
                line.popleft()
            return True

    def advance_apart(self) -> bool:
        """Take the messages as far as they go; return whether none is under way."""
        with self._lock:
            for operation in tuple(self._apart):
                over = True
                # Whoever waits for it raises it.
                with suppress(DistdlError):
                    over = operation.advance()
                if over:
                    self._apart.remove(operation)
            return not self._apart

    def wait(self, operation: Operation, timeout: float | None) -> None:
        """Wait for an operation; blocking. Raises what ended it."""
        if not operation.done:
            self._wait(operation, self.manager.waiter.timeout if timeout is None else timeout)
        if operation.error is not None:
            raise operation.error

    def _wait(self, operation: Operation, seconds: float) -> None:
        # Every step that is made is waited for by itself: a wait that takes long looks less often.
        waiter, whole, deadline = self.manager.waiter, seconds, time.monotonic() + seconds
        # Whoever shares this core with others helps them by no more than a few looks.
        spins = min(waiter.spins, _SPINS)
        before: object = None

        def further() -> bool:
            if not operation.done:
                self.advance()
                self.advance_apart()
            return operation.done or self.progress() != before

        while not operation.done:
            before = self.progress()
            waiter.until(further, operation.reason, seconds, spins, whole)
            seconds = max(deadline - time.monotonic(), 0.0)

    def fail(self, operation: Operation, error: BaseException) -> None:
        """End an operation by an error from elsewhere: a collective and those behind it, or a message."""
        with self._lock:
            if operation in self._line:
                self.break_off(error)
            elif not operation.done:
                operation.fail(error)

    def break_off(self, error: BaseException) -> None:
        """End all collectives, and the group, by an error."""
        self._broken = self._broken or error
        for operation in self._line:
            operation.fail(error)
        self._line.clear()

    def close(self) -> None:
        """Begin nothing any more; what is under way goes on."""
        self._closed = True
