"""Waiting for what another rank does: advance, look at the others, give up at a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from distdl_rma.errors import ConfigurationError, ExchangeTimeout
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.waiting.peer_watch import PeerWatch
from distdl_rma.segments.waiting.pending_work import PendingWork
from distdl_rma.segments.waiting.wait_reason import WaitReason

TIMEOUT_VARIABLE = "DISTDL_RMA_TIMEOUT"
DEFAULT_TIMEOUT = 300.0

_YIELD_SECONDS = 2e-3
_SLEEP_SECONDS = (5e-5, 1e-3)
# How often a long wait says what it waits for, and looks at those that it waits for.
_LOOK_SECONDS = 0.1


class Waiter:
    """How a rank waits for something that another rank does: it advances all work, looks, and gives up.

    ``timeout`` is the default deadline in seconds. ``spins`` are turns of the busy loop at the start, 0 where
    ranks outnumber cores or MPI must make progress; on every turn after it the steps of ``work`` are taken,
    and now and then ``watch`` looks at the other ranks. ``counters`` add up the time.
    """

    def __init__(
        self, timeout: float, spins: int, work: PendingWork, watch: PeerWatch, counters: Counters
    ) -> None:
        self.timeout = check_timeout(timeout)
        self.spins = spins
        self._work, self._watch = work, watch
        self.defer, self.withdraw = work.defer, work.withdraw
        self._counters = counters

    def until(
        self, ready: Callable[[], bool], reason: Callable[[], WaitReason], timeout: float | None = None
    ) -> None:
        """Return as soon as ``ready()`` is true; blocking.

        ``ready`` is a cheap test without side effects, or one that advances what is waited for. ``reason``
        says who is waited for, and is called only when the wait takes long. ``timeout`` is in seconds, 0 to
        look once. ``ExchangeTimeout`` at the deadline, after which the wait can be repeated;
        ``PeerFailedError`` if a rank of the machine failed, or one that is waited for has left.
        """
        if ready():
            return
        begin = time.perf_counter()
        try:
            self._wait(ready, reason, self.timeout if timeout is None else check_timeout(timeout), begin)
        finally:
            self._counters.waits += 1
            self._counters.seconds_waited += time.perf_counter() - begin

    def _wait(
        self, ready: Callable[[], bool], reason: Callable[[], WaitReason], timeout: float, begin: float
    ) -> None:
        if timeout > 0:
            for _ in range(self.spins):
                if ready():
                    return
        work, watch, notices = self._work, self._watch, self._work.notices
        pause, looked = _SLEEP_SECONDS[0], 0.0
        try:
            while True:
                work.advance()
                notices.check(reason)
                if ready():
                    return
                elapsed = time.perf_counter() - begin
                if elapsed >= _YIELD_SECONDS and (not looked or elapsed - looked > _LOOK_SECONDS):
                    looked = elapsed
                    watch.look(reason())
                if elapsed > timeout:
                    raise ExchangeTimeout(watch.timeout_message(reason(), timeout))
                if elapsed < _YIELD_SECONDS:
                    os.sched_yield()
                else:
                    time.sleep(pause)
                    pause = min(pause * 1.5, _SLEEP_SECONDS[1])
        finally:
            if looked:
                watch.done()

    def progress(self) -> None:
        """Take all steps that can be taken at once, and raise if a rank failed; does not block."""
        self._work.advance()
        self._work.notices.check()


def check_timeout(seconds: float | None, default: float = 0.0) -> float:
    """Return a timeout in seconds, the default for None; raise if it is none."""
    try:
        value = default if seconds is None else float(seconds)
    except (TypeError, ValueError):
        value = -1.0
    if not value >= 0:
        raise ConfigurationError(f"a timeout is a number of seconds, at least 0, got {seconds!r}")
    return value


def chosen_timeout(seconds: float | None) -> float:
    """Return a timeout as asked for, else that of the environment, else 300 seconds; raise if it is none."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if seconds is not None or text is None:
        return check_timeout(seconds, DEFAULT_TIMEOUT)
    try:
        return check_timeout(float(text))
    except (ValueError, ConfigurationError):
        raise ConfigurationError(
            f"{TIMEOUT_VARIABLE} is a number of seconds, at least 0, got {text!r}"
        ) from None
