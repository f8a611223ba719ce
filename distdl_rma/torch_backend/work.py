"""What a group has begun: pending calls, their queue, and the works and futures that torch waits for."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed import Work

from distdl_rma.errors import DistdlError, ExchangeTimeout, ProtocolError
from distdl_rma.segments.collectives.between_nodes import Script
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason

# Looks before a wait lets others have the core.
_SPINS = 30


class PendingCall:
    """An operation under way: a script that yields as long as it waits, then ``finish``.

    ``begin`` makes the script; ``reason`` says which ranks it waits for. ``error`` is what ended it.
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
        """Advance as far as possible; return whether it is over. Keeps the error that it raises."""
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
        # Drops the references to its data and to the operation before it.
        self.done, self._begin, self._script, self._finish = True, _nothing, None, None


def _nothing() -> Script:
    return iter(())


def done() -> PendingCall:
    """Return an operation that is over."""
    operation = PendingCall(_nothing, lambda: WaitReason((), ""), None)
    operation.done = True
    return operation


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

    def append(self, operation: PendingCall) -> PendingCall:
        """Begin a collective when those before it are over."""
        self.check()
        with self._lock:
            self._collectives.append(operation)
            if len(self._collectives) == 1:
                self._begin(self.advance)
        return operation

    def add(self, operation: PendingCall) -> PendingCall:
        """Begin a message; it waits for no other operation."""
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
        # Whoever waits for the operation raises its error.
        over = False
        with suppress(DistdlError):
            over = advance()
        if not over:
            self.manager.defer(advance)

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
    """torch's work of an operation of a group; ``result`` are the tensors that it fills."""

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
        """Wait until the operation is over; raises its error, or ``ExchangeTimeout`` at the deadline."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._queue.wait(self._operation, seconds or self._timeout)
        return True

    def synchronize(self) -> None:
        """As ``wait``: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without an error; advances it, does not block."""
        if not self._operation.done:
            self._queue.manager.waiter.advance()
        return self._operation.done

    def is_success(self) -> bool:
        """Whether the operation is over, and nothing went wrong."""
        return self.is_completed() and self._operation.error is None

    def exception(self) -> BaseException | None:
        """Error that ended the operation, if any."""
        return self._operation.error

    def result(self) -> Any:
        """The tensors that the operation fills."""
        return self._tensors

    def source_rank(self) -> int:
        """Rank in the group that a message came from."""
        return self._source if isinstance(self._source, int) else (self._source or [-1])[0]

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of the tensors. A thread advances the operation, since torch's wait does not.

        From now on it has the group's timeout; then ``ExchangeTimeout`` settles it, as it would end a wait.
        """
        if self._future is None:
            self._future = torch.futures.Future()
            if self._operation.done:
                _settle(self._future, self._tensors, self._operation.error)
            else:
                limit = self._queue.manager.waiter.timeout if self._timeout is None else self._timeout
                call = self._queue, self._operation, self._future, self._tensors
                _driver.add(_Pending(*call, limit, time.monotonic()))
        return self._future


class _Several(_Work):  # type: ignore[misc]
    """The works of a block of coalesced calls as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait(timeout) for work in self._works])  # noqa: C419

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        return [*chain.from_iterable(work.result() for work in self._works)]

    def get_future(self) -> torch.futures.Future[Any]:
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: list(chain.from_iterable(one.value() for one in done.value())))


def together(works: Sequence[Work]) -> Work:
    """One work of a block of coalesced calls."""
    return works[0] if len(works) == 1 else _Several(works)


class _Over(_Work):  # type: ignore[misc]
    """A work that is over; only the call that has waited for it sees it."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


OVER = _Over()


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
    # Result of a future that failed. torch's set_exception stores the error itself as the result.
    # DistributedDataParallel searches a result for tensors, and crashes on an error.
    def __init__(self, error: Exception) -> None:
        self._error = error

    def raised(self, _result: object) -> None:
        raise self._error

    def __reduce_ex__(self, protocol: Any) -> Any:
        # DistributedDataParallel searches a result by this method.
        raise self._error


class _Pending(NamedTuple):
    """An operation under way whose future someone may wait for."""

    queue: OperationQueue
    operation: PendingCall
    future: torch.futures.Future[Any]
    tensors: Any
    # How long in seconds, which may be for ever, and since when.
    timeout: float
    begun: float

    def end_wait(self) -> None:
        """Write to the header that this rank waits for it no more, if a look wrote that it does."""
        manager = self.queue.manager
        if time.monotonic() - self.begun > _LOOK_SECONDS:
            with manager.segment.lock:
                if not manager.closed:
                    manager.watch.write_end_of_wait()


class _Driver:
    """A thread that advances operations as long as someone may wait for their futures.

    The thread that settles a future runs its callbacks, which may wait for other futures. So it leaves the
    driving to another thread before it settles a future.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        # Operations that are over or late, and whose futures are to be settled.
        self._over: deque[tuple[_Pending, BaseException | None]] = deque()
        self._change = threading.Condition()
        # Whether a thread drives, how many threads wait to drive, and how many of these are to begin.
        self._driving, self._idle, self._appointed = False, 0, 0
        self._settling = 0

    def rest(self) -> None:
        """Wait, for a short time at most, until no thread settles a future: at the end of a process.

        The interpreter ends the threads that it leaves behind; one that is within torch then ends the process
        by SIGABRT.
        """
        with self._change:
            self._change.wait_for(lambda: not (self._settling or self._over), _CALLBACK_SECONDS)

    def add(self, item: _Pending) -> None:
        """Settle a future when its operation is over, or at the deadline."""
        with self._change:
            self._pending.append(item)
            self._appoint()

    def _appoint(self) -> None:
        # Needs the lock. Some thread drives as long as anything is pending or to be settled.
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
        # Until an operation is over or late, or none is pending; not at all if a future is to be settled.
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
                    # The operation continues and can be waited for.
                    settled.append((item, error))
                except BaseException as error:  # noqa: BLE001
                    # A rank failed, or the machine was closed: whoever waits for the future raises it.
                    item.queue.fail(item.operation, error)
            late = [item.operation for item, _ in settled]
            settled += [
                (item, item.operation.error)
                for item in pending
                if item.operation.done and item.operation not in late
            ]
            if settled:
                for item, _ in settled:
                    item.end_wait()
                return settled
            # An operation that has advanced may soon advance again.
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
        # The operation continues after the group is destroyed: other ranks may wait for it.
        manager.check_open()
        manager.waiter.progress()
        if not look or operation.done:
            return
        manager.watch.look(operation.reason())
        if time.monotonic() - item.begun > item.timeout:
            raise ExchangeTimeout(manager.watch.timeout_message(operation.reason(), item.timeout))


_driver = _Driver()
atexit.register(_driver.rest)
