"""Works and futures: how torch waits for what a group has begun.

A *work* waits in the thread that calls it, and advances operations meanwhile. A *future* is waited for by
torch, in C++, where nothing advances. So while the future of an operation is pending, a thread of the driver
looks at the operation, at short intervals, and settles the future when it is over.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import Work

from distdl_rma.errors import ExchangeTimeout, ProtocolError
from distdl_rma.torch_backend.operations import OperationQueue, PendingCall

# Looks before a pause, and how long it is.
_LOOKS, _PAUSE_SECONDS = 20, 5e-5
# So often a thread looks whether other ranks live, and tells them what it waits for.
_LOOK_SECONDS = 0.1
# A thread that has nothing to do stays for so long.
_IDLE_SECONDS = 1.0
# How long the end of a process waits for what callbacks of futures do, which may wait for other ranks.
_CALLBACK_SECONDS = 2.0

# Typed as anything: the methods answer more than torch says of them.
_Work: Any = Work


class GroupWork(_Work):  # type: ignore[misc]
    """torch's work of operations of a group; ``result`` are the tensors that they fill.

    It has one operation, or all of a block of coalesced calls, or none, if it was over when it was made.
    ``source`` has the rank that a message comes from, perhaps only when the message has come.
    """

    def __init__(
        self,
        queue: OperationQueue,
        operations: Sequence[PendingCall],
        tensors: Any,
        timeout: float | None,
        source: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.queue, self._timeout, self._source = queue, timeout, source
        self.operations, self._tensors = operations, tensors
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the operation is over; raises its error, or ``ExchangeTimeout`` at the deadline."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        for operation in self.operations:
            self.queue.wait(operation, seconds or self._timeout)
        return True

    def synchronize(self) -> None:
        """As ``wait``: there are no streams."""
        self.wait()

    @property
    def pending(self) -> PendingCall | None:
        """The first operation that is not over."""
        return next((operation for operation in self.operations if not operation.done), None)

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without an error; advances it, does not block."""
        if self.pending is not None:
            self.queue.manager.waiter.advance()
        return self.pending is None

    def is_success(self) -> bool:
        """Whether the operation is over, and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Error that ended the operation, if any."""
        return next((each.error for each in self.operations if each.error is not None), None)

    def result(self) -> Any:
        """The tensors that the operation fills."""
        return self._tensors

    def source_rank(self) -> int:
        """Rank in the group that a message came from."""
        return self._source[0] if self._source else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of the tensors. A thread advances the operation, since torch's wait does not.

        From now on it has the group's timeout; then ``ExchangeTimeout`` settles it, as it would end a wait.
        """
        if self._future is None:
            self._future = torch.futures.Future()
            if self.pending is None:
                self.settle(self.exception())
            else:
                limit = self.queue.manager.waiter.timeout if self._timeout is None else self._timeout
                _driver.add(_Wait(self, limit, time.monotonic()))
        return self._future

    def settle(self, error: BaseException | None) -> None:
        """Set the future, which runs its callbacks: to the tensors, or to an error that its users get."""
        future: torch.futures.Future[Any] = self.get_future()
        if error is None:
            future.set_result(self._tensors)
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


class _Wait(NamedTuple):
    """A work that is pending, and whose future someone may wait for."""

    work: GroupWork
    # How long in seconds, which may be for ever, and since when.
    timeout: float
    begun: float

    def go_on(self, look: bool) -> None:
        """Advance the work as a wait would; ``look`` whether other ranks live, and how late it is."""
        manager = self.work.queue.manager
        # The operation continues after the group is destroyed: other ranks may wait for it.
        manager.check_open()
        manager.waiter.progress()
        pending = self.work.pending
        if not look or pending is None:
            return
        manager.watch.look(pending.reason())
        if time.monotonic() - self.begun > self.timeout:
            raise ExchangeTimeout(manager.watch.timeout_message(pending.reason(), self.timeout))

    def end(self) -> None:
        """Write to the header that this rank waits for it no more, if a look wrote that it does."""
        manager = self.work.queue.manager
        if time.monotonic() - self.begun > _LOOK_SECONDS:
            with manager.segment.lock:
                if not manager.closed:
                    manager.watch.write_end_of_wait()


class _Driver:
    """Threads that advance operations as long as someone may wait for their futures.

    The thread that settles a future runs its callbacks, which may wait for other futures. So it stops driving
    before it settles a future, and another thread drives on::

        thread 1   drives ... over: settles future 1, whose callback waits for future 2 ...   idle, drives
        thread 2                  drives ........................ over: settles future 2      idle, ends

    At most one thread drives. Whenever the lock is free and a work is pending, or over and not settled, one
    thread drives or an idle one has been called; a new one is made only if none is idle.
    """

    def __init__(self) -> None:
        self._pending: list[_Wait] = []
        # Works that are over or late, and whose futures are to be settled.
        self._over: deque[tuple[_Wait, BaseException | None]] = deque()
        self._change = threading.Condition()
        # Whether a thread drives, and how many wait to drive or settle a future.
        self._driving, self._idle, self._settling = False, 0, 0

    def rest(self) -> None:
        """Wait, for a short time at most, until no thread settles a future: at the end of a process.

        The interpreter ends the threads that it leaves behind; one that is within torch then ends the process
        by SIGABRT.
        """
        with self._change:
            self._change.wait_for(lambda: not (self._settling or self._over), _CALLBACK_SECONDS)

    def add(self, item: _Wait) -> None:
        """Settle a future when its work is over, or at the deadline."""
        with self._change:
            self._pending.append(item)
            self._call()

    def _wanted(self) -> bool:
        return not self._driving and bool(self._pending or self._over)

    def _call(self) -> None:
        # Needs the lock. An idle thread that is called looks once more before it ends, also if it is late.
        if self._wanted():
            if self._idle:
                self._change.notify_all()
            else:
                self._driving = True
                threading.Thread(target=self._run, name="distdl_rma futures", daemon=True).start()

    def _run(self) -> None:
        drives = True
        while drives:
            found = self._drive()
            with self._change:
                self._driving = False
                for item, _ in found:
                    self._pending.remove(item)
                self._over += found
                # One each: the callback of one future may wait for the next one.
                mine = [self._over.popleft()] if self._over else []
                self._call()
                self._settling += 1
            try:
                for item, error in mine:
                    item.work.settle(error)
            finally:
                with self._change:
                    self._settling -= 1
                    self._change.notify_all()
            with self._change:
                self._idle += 1
                drives = self._change.wait_for(self._wanted, _IDLE_SECONDS)
                self._idle -= 1
                self._driving |= drives

    def _drive(self) -> list[tuple[_Wait, BaseException | None]]:
        # Until a work is over or late, or none is pending; not at all if a future is to be settled.
        looked, looks = time.monotonic(), 0
        while not self._over and (pending := self._all()):
            now = time.monotonic()
            look = now - looked > _LOOK_SECONDS
            looked = now if look else looked
            settled: list[tuple[_Wait, BaseException | None]] = []
            before = [item.work.queue.progress() for item in pending]
            for item in pending:
                operation = item.work.pending
                if operation is not None:
                    try:
                        item.go_on(look)
                    except ExchangeTimeout as error:
                        # The operation continues and can be waited for.
                        settled.append((item, error))
                        continue
                    except BaseException as error:  # noqa: BLE001
                        # A rank failed, or the machine was closed: whoever waits for the future raises it.
                        item.work.queue.fail(operation, error)
                if item.work.pending is None:
                    settled.append((item, item.work.exception()))
            if settled:
                for item, _ in settled:
                    item.end()
                return settled
            # An operation that has advanced may soon advance again.
            looks = looks + 1 if before == [item.work.queue.progress() for item in pending] else 0
            if looks > _LOOKS:
                time.sleep(_PAUSE_SECONDS)
        return []

    def _all(self) -> tuple[_Wait, ...]:
        with self._change:
            return tuple(self._pending)


_driver = _Driver()
atexit.register(_driver.rest)
