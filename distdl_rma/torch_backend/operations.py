"""What a group has begun, and who advances it: pending calls, and their queue.

An operation is a generator that yields where it has to wait, so that any thread can take it further. Nobody
waits *in* an operation: who waits for one advances all, and so do other waits of the machine and its progress
thread. A collective waits in line, a message does not::

    collectives   [ all_reduce 7 ]  broadcast 8   all_reduce 9      only the first one has begun
    messages      [ send to 2 ]   [ recv from 0 ] [ send to 2 ]     all have begun

All ranks begin collectives in one order, which their rounds and MPI's collectives need. Messages have no such
order: two ranks that first receive from each other would wait for ever.

A short collective takes less time than handing it over to all waits. So if torch waits for a call at once,
the caller first looks some hundred times by itself: mostly the others come meanwhile, and the call is over.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from distdl_rma.errors import DistdlError, ProtocolError
from distdl_rma.segments.collectives.between_nodes import Script
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason

# Looks before a wait lets others have the core.
_SPINS = 30
# Looks of a caller that begins a call and then waits for it, and those before it yields the core: another
# process may keep the core for milliseconds. Where ranks share cores, it yields after each look.
_LOOKS, _LOOKS_BEFORE_YIELD, _CROWDED_LOOKS = 600, 300, 100
# What is called when all data are there.
Finish = Sequence[Callable[[], None]]


class PendingCall:
    """An operation under way: a script that yields as long as it waits, then ``finish``.

    ``begin`` makes the script; ``reason`` says which ranks it waits for. ``error`` is what ended it.
    """

    def __init__(
        self, begin: Callable[[], Script], reason: Callable[[], WaitReason], finish: Finish = ()
    ) -> None:
        self.reason = reason
        self._begin, self._finish = begin, finish
        self._script: Script | None = None
        self.done = False
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """Advance as far as possible; return whether it is over. Keeps the error that it raises."""
        if self.done:
            return True
        try:
            if self._script is None:
                self._script = self._begin()
            for _ in self._script:
                return False
            for finish in self._finish:
                finish()
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
        # Drops the references to its data and to the operation before it.
        self.done, self._begin, self._script, self._finish = True, partial(iter, ()), None, ()


class OperationQueue:
    """The operations of a group: collectives, one after another in the order of the calls, and messages.

    Every wait on the machine advances them, in whatever order the ranks wait for them. An error in a
    collective ends the group: later calls raise it again.
    """

    def __init__(self, manager: SegmentManager, name: str) -> None:
        self.manager, self.name = manager, name
        self._lock = manager.segment.lock
        self._collectives: deque[PendingCall] = deque()
        self._messages: list[PendingCall] = []
        self._broken: BaseException | None = None
        self._closed = False
        crowded = manager.segment.crowded
        # For a caller that goes on, and for one that waits.
        self._patience = range(1), range(_CROWDED_LOOKS if crowded else _LOOKS)
        self._spins = 0 if crowded else _LOOKS_BEFORE_YIELD
        # Its result changes whenever a collective has advanced.
        self.progress: Callable[[], object] = bool

    def check(self) -> None:
        """Raise if the group has ended."""
        if self._closed or self.manager.closed:
            raise self.manager.closed_error(f"process group {self.name!r} or its machine")
        if self._broken is not None:
            if isinstance(self._broken, DistdlError):
                raise self._broken
            why = f"was interrupted by {self._broken!r}"
            raise ProtocolError(f"process group {self.name!r} {why}: make it anew on all its ranks")

    def append(self, operation: PendingCall, waits: bool = False) -> PendingCall:
        """Begin a collective when those before it are over; ``waits`` if the caller then waits for it."""
        self.check()
        with self._lock:
            self._collectives.append(operation)
            if len(self._collectives) == 1:
                over = False
                try:
                    for look in self._patience[waits]:
                        if over := self.advance():
                            break
                        if look > self._spins:
                            os.sched_yield()
                finally:
                    if not over:
                        self.manager.defer(self.advance)
        return operation

    def add(self, operation: PendingCall) -> PendingCall:
        """Begin a message; it waits for no other operation."""
        self.check()
        with self._lock:
            self._messages.append(operation)
            if not self.advance_apart():
                self.manager.defer(self.advance_apart)
        return operation

    @property
    def resting(self) -> bool:
        """Whether no collective is under way."""
        return not self._collectives

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._collectives or self._messages)

    def advance(self) -> bool:
        """Advance the collectives; return whether none is under way."""
        with self._lock:
            line = self._collectives
            while line:
                try:
                    if not line[0].advance():
                        return False
                except BaseException as error:
                    self.break_off(error)
                    # An exception of a signal handler goes to the caller, whatever operation that waits for.
                    if not isinstance(error, Exception):
                        raise
                    return True
                line.popleft()
            return True

    def advance_apart(self) -> bool:
        """Advance the messages; return whether none is under way."""
        with self._lock:
            for operation in tuple(self._messages):
                over = True
                # Whoever waits for it raises it.
                with suppress(DistdlError):
                    over = operation.advance()
                if over:
                    self._messages.remove(operation)
            return not self._messages

    def wait(self, operation: PendingCall, timeout: float | None) -> None:
        """Wait for an operation; blocking. Raises the error that ended it."""
        if not operation.done:
            self._wait(operation, self.manager.waiter.timeout if timeout is None else timeout)
        if operation.error is not None:
            raise operation.error

    def _wait(self, operation: PendingCall, seconds: float) -> None:
        # Waits for each step separately, since a long wait looks less often.
        waiter, whole, deadline = self.manager.waiter, seconds, time.monotonic() + seconds
        # Ranks that share a core take only a few looks.
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

    def fail(self, operation: PendingCall, error: BaseException) -> None:
        """End an operation by an error of another place: a collective and all behind it, or a message."""
        with self._lock:
            if operation in self._collectives:
                self.break_off(error)
            elif not operation.done:
                operation.fail(error)

    def break_off(self, error: BaseException) -> None:
        """End all collectives, and the group, by an error."""
        self._broken = self._broken or error
        for operation in self._collectives:
            operation.fail(error)
        self._collectives.clear()

    def close(self) -> None:
        """Refuse new operations; those under way continue."""
        self._closed = True
