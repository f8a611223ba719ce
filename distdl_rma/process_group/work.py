"""What a group has begun: pending calls, their queue, and the works and futures that torch waits for."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import Work

from distdl_rma.errors import ClosedError, DistdlError, ExchangeTimeout, ProtocolError
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason

Script = Iterator[None]

# Looks before a wait lets others have the core.
_SPINS = 30


class PendingCall:
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


def done() -> PendingCall:
    """An operation that is over."""
    operation = PendingCall(_nothing, lambda: WaitReason((), ""), None)
    operation.done = True
    return operation


class OperationQueue:
    """The operations of a group: collectives one after the other, in the order of the calls, and messages.

    Every wait on the machine takes them further, in whatever order ranks wait for them. What goes wrong in a
    collective ends the group: later calls raise the same.
    """

    def __init__(self, manager: SegmentManager, name: str) -> None:
        self.manager, self.name = manager, name
        self._lock = manager.segment.lock
        self._collectives: deque[PendingCall] = deque()
        self._messages: list[PendingCall] = []
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

    def append(self, operation: PendingCall) -> PendingCall:
        """Begin a collective, as soon as those before it are over."""
        self.check()
        with self._lock:
            self._collectives.append(operation)
            if len(self._collectives) == 1:
                self._begin(self.advance)
        return operation

    def add(self, operation: PendingCall) -> PendingCall:
        """Begin a message, which waits for no other."""
        self.check()
        with self._lock:
            self._messages.append(operation)
            self._begin(self.advance_apart)
        return operation

    @property
    def ready(self) -> bool:
        """Whether a collective can begin now: none is under way, and nothing went wrong."""
        return not (self._collectives or self._closed or self._broken is not None or self.manager.closed)

    @property
    def resting(self) -> bool:
        """Whether no collective is under way."""
        return not self._collectives

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._collectives or self._messages)

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
            line = self._collectives
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
            for operation in tuple(self._messages):
                over = True
                # Whoever waits for it raises it.
                with suppress(DistdlError):
                    over = operation.advance()
                if over:
                    self._messages.remove(operation)
            return not self._messages

    def wait(self, operation: PendingCall, timeout: float | None) -> None:
        """Wait for an operation; blocking. Raises what ended it."""
        if not operation.done:
            self._wait(operation, self.manager.waiter.timeout if timeout is None else timeout)
        if operation.error is not None:
            raise operation.error

    def _wait(self, operation: PendingCall, seconds: float) -> None:
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

    def fail(self, operation: PendingCall, error: BaseException) -> None:
        """End an operation by an error from elsewhere: a collective and those behind it, or a message."""
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
        """Begin nothing any more; what is under way goes on."""
        self._closed = True


# Looks before a pause, and how long it is.
_LOOKS, _PAUSE_SECONDS = 20, 5e-5
_LOOK_SECONDS = 0.1
# A thread that has nothing to do stays for so long.
_IDLE_SECONDS = 1.0
# How long the end of a process waits for what callbacks of futures do, which may wait for other ranks.
_CALLBACK_SECONDS = 2.0

# Typed as anything: the methods answer more than torch says of them.
_Work: Any = Work


class GroupWork(_Work):  # type: ignore[misc]
    """An operation of a group that may be under way; ``result`` are the tensors that it fills."""

    def __init__(
        self,
        queue: OperationQueue,
        operation: PendingCall,
        tensors: Any,
        timeout: float | None,
        source: int | list[int] = -1,
    ) -> None:
        super().__init__()
        self._queue, self._operation, self._tensors = queue, operation, tensors
        self._timeout, self._source = timeout, source
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the operation is over; raises what ended it, ``ExchangeTimeout`` at the deadline."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._queue.wait(self._operation, seconds or self._timeout)
        return True

    def synchronize(self) -> None:
        """As ``wait``: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over, by success or not; goes on with it, and does not block."""
        if not self._operation.done:
            self._queue.manager.waiter.advance()
        return self._operation.done

    def is_success(self) -> bool:
        """Whether the operation is over, and nothing went wrong."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> BaseException | None:
        """What ended the operation, if it was an error."""
        return self._operation.error

    def result(self) -> Any:
        """The tensors that the operation fills."""
        return self._tensors

    def source_rank(self) -> int:
        """Rank in the group that a message came from."""
        return self._source if isinstance(self._source, int) else (self._source or [-1])[0]

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of the tensors. A thread goes on with the operation, since a wait of torch's does not.

        It has the group's time from now on, and is settled by ``ExchangeTimeout`` then, as a wait would be.
        """
        if self._future is None:
            self._future = torch.futures.Future()
            if self._operation.done:
                _settle(self._future, self._tensors, self._operation.error)
            else:
                _driver.add(self._queue, self._operation, self._future, self._tensors, self._timeout)
        return self._future


def _settle(future: torch.futures.Future[Any], tensors: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(tensors)
        return
    if not isinstance(error, Exception):
        # A future takes no KeyboardInterrupt.
        error = ProtocolError(f"the operation was interrupted by {error!r}")
    failure = _Failure(error)
    future._set_unwrap_func(failure.raised)
    future.set_result(failure)


class _Failure:
    # The result of a future that failed. torch's set_exception has the error itself there: of that
    # DistributedDataParallel, which looks into a result for tensors, takes the first, and crashes.
    def __init__(self, error: Exception) -> None:
        self._error = error

    def raised(self, _result: object) -> None:
        raise self._error

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Which is how it looks into it.
        raise self._error


class _Pending(NamedTuple):
    """Somebody may wait for the future of an operation that is under way."""

    queue: OperationQueue
    operation: PendingCall
    future: torch.futures.Future[Any]
    tensors: Any
    # How long in seconds, which may be for ever, and since when.
    timeout: float
    begun: float

    def say_done(self) -> None:
        """Tell others that it is not waited for any more, if they were told that it is."""
        manager = self.queue.manager
        if time.monotonic() - self.begun > _LOOK_SECONDS:
            with manager.segment.lock:
                if not manager.closed:
                    manager.watch.say_done()


class _Driver:
    """A thread that takes operations further as long as somebody may wait for their futures.

    What is to be done then is done by the thread that settles a future, and may wait for other futures. So
    that thread leaves the driving to another one before it settles one, and all others that are over.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        # What is over or late, and is to be settled.
        self._over: deque[tuple[_Pending, BaseException | None]] = deque()
        self._change = threading.Condition()
        # Whether a thread drives, how many wait to do so, and how many of these are to begin.
        self._driving, self._idle, self._appointed = False, 0, 0
        self._settling = 0

    def rest(self) -> None:
        """Wait, for a short time at most, until no thread settles a future: at the end of a process.

        The interpreter ends the threads that it leaves behind; one that is within torch then ends the process
        by SIGABRT.
        """
        with self._change:
            self._change.wait_for(lambda: not (self._settling or self._over), _CALLBACK_SECONDS)

    def add(
        self,
        queue: OperationQueue,
        operation: PendingCall,
        future: torch.futures.Future[Any],
        tensors: Any,
        timeout: float | None,
    ) -> None:
        """Settle a future when an operation is over, or when that took too long."""
        seconds = queue.manager.waiter.timeout if timeout is None else timeout
        item = _Pending(queue, operation, future, tensors, seconds, time.monotonic())
        with self._change:
            self._pending.append(item)
            self._appoint()

    def _appoint(self) -> None:
        # With the lock held: somebody drives as long as anything is pending or to be settled.
        if self._driving or not (self._pending or self._over):
            return
        self._driving = True
        if self._idle > self._appointed:
            self._appointed += 1
            self._change.notify()
        else:
            threading.Thread(target=self._run, name="distdl_rma futures", daemon=True).start()

    def _run(self) -> None:
        appointed = True
        while appointed:
            found = self._drive()
            with self._change:
                self._driving = False
                for item, _ in found:
                    self._pending.remove(item)
                self._over += found
                mine = [self._over.popleft()] if self._over else []
                self._appoint()
                self._settling += 1
            try:
                for item, error in mine:
                    _settle(item.future, item.tensors, error)
            finally:
                with self._change:
                    self._settling -= 1
                    self._change.notify_all()
            with self._change:
                self._idle += 1
                appointed = self._change.wait_for(lambda: self._appointed > 0, _IDLE_SECONDS)
                self._idle -= 1
                self._appointed -= appointed

    def _drive(self) -> list[tuple[_Pending, BaseException | None]]:
        # Until something is over or late, or nothing is pending; not at all where something is to be settled.
        looked, looks = time.monotonic(), 0
        while not self._over and (pending := self._all()):
            now = time.monotonic()
            look = now - looked > _LOOK_SECONDS
            looked = now if look else looked
            settled: list[tuple[_Pending, BaseException | None]] = []
            before = [item.queue.progress() for item in pending]
            for item in pending:
                try:
                    self._go_on(item, look)
                except ExchangeTimeout as error:
                    # The operation goes on, and can be waited for.
                    settled.append((item, error))
                except BaseException as error:  # noqa: BLE001
                    # A rank failed, or the machine was closed: it belongs to who waits for the future.
                    item.queue.fail(item.operation, error)
            late = [item.operation for item, _ in settled]
            settled += [
                (item, item.operation.error)
                for item in pending
                if item.operation.done and item.operation not in late
            ]
            if settled:
                for item, _ in settled:
                    item.say_done()
                return settled
            # What has come further may soon go on.
            looks = looks + 1 if before == [item.queue.progress() for item in pending] else 0
            if looks > _LOOKS:
                time.sleep(_PAUSE_SECONDS)
        return []

    def _all(self) -> tuple[_Pending, ...]:
        with self._change:
            return tuple(self._pending)

    @staticmethod
    def _go_on(item: _Pending, look: bool) -> None:
        operation, manager = item.operation, item.queue.manager
        if operation.done:
            return
        # What is under way goes on after the group is destroyed: others may wait for it.
        manager.check_open()
        manager.waiter.progress()
        if not look or operation.done:
            return
        manager.watch.look(operation.reason())
        if time.monotonic() - item.begun > item.timeout:
            raise ExchangeTimeout(manager.watch.timeout_message(operation.reason(), item.timeout))


_driver = _Driver()
atexit.register(_driver.rest)
