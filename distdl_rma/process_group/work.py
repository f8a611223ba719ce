"""What torch gives its callers to wait for: works and futures."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import Work

from distdl_rma.errors import ExchangeTimeout, ProtocolError
from distdl_rma.process_group.operations import Lines, Operation

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
        lines: Lines,
        operation: Operation,
        tensors: Any,
        timeout: float | None,
        source: int | list[int] = -1,
    ) -> None:
        super().__init__()
        self._lines, self._operation, self._tensors = lines, operation, tensors
        self._timeout, self._source = timeout, source
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the operation is over; raises what ended it, ``ExchangeTimeout`` at the deadline."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._lines.wait(self._operation, seconds or self._timeout)
        return True

    def synchronize(self) -> None:
        """As ``wait``: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is over, by success or not; goes on with it, and does not block."""
        if not self._operation.done:
            self._lines.manager.waiter.advance()
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
                _driver.add(self._lines, self._operation, self._future, self._tensors, self._timeout)
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

    lines: Lines
    operation: Operation
    future: torch.futures.Future[Any]
    tensors: Any
    # How long in seconds, which may be for ever, and since when.
    timeout: float
    begun: float

    def say_done(self) -> None:
        """Tell others that it is not waited for any more, if they were told that it is."""
        manager = self.lines.manager
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
        lines: Lines,
        operation: Operation,
        future: torch.futures.Future[Any],
        tensors: Any,
        timeout: float | None,
    ) -> None:
        """Settle a future when an operation is over, or when that took too long."""
        seconds = lines.manager.waiter.timeout if timeout is None else timeout
        item = _Pending(lines, operation, future, tensors, seconds, time.monotonic())
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
            before = [item.lines.progress() for item in pending]
            for item in pending:
                try:
                    self._go_on(item, look)
                except ExchangeTimeout as error:
                    # The operation goes on, and can be waited for.
                    settled.append((item, error))
                except BaseException as error:  # noqa: BLE001
                    # A rank failed, or the machine was closed: it belongs to who waits for the future.
                    item.lines.fail(item.operation, error)
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
            looks = looks + 1 if before == [item.lines.progress() for item in pending] else 0
            if looks > _LOOKS:
                time.sleep(_PAUSE_SECONDS)
        return []

    def _all(self) -> tuple[_Pending, ...]:
        with self._change:
            return tuple(self._pending)

    @staticmethod
    def _go_on(item: _Pending, look: bool) -> None:
        operation, manager = item.operation, item.lines.manager
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
