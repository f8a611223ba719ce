"""Waiting for a notification word: spin, yield, sleep, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from distdl_rma.errors import ConfigurationError, ExchangeTimeout

__all__ = ["Counters", "Patience"]

_YIELD_SECONDS = 2e-3
_SLEEP_SECONDS = (5e-5, 1e-3)


@dataclass
class Counters:
    """What this rank moved and waited since the machine started; only grows."""

    bytes_put: int = 0
    puts: int = 0
    waits: int = 0
    seconds_waited: float = 0.0


class Patience:
    """How a rank waits for something that another rank does.

    Parameters
    ----------
    timeout
        Default deadline of a wait in seconds.
    spins
        Turns of the busy loop at the start; 0 where ranks outnumber cores or MPI must make progress.
    progress
        Called on every turn after the busy loop; advances pending work and MPI.
    counters
        Where time spent waiting is added up.
    """

    def __init__(
        self, timeout: float, spins: int, progress: Callable[[], object], counters: Counters
    ) -> None:
        self.timeout = check_timeout(timeout)
        self._spins = spins
        self._progress = progress
        self._counters = counters

    def until(
        self, ready: Callable[[], bool], describe: Callable[[], str], timeout: float | None = None
    ) -> None:
        """Return as soon as ``ready()`` is true; blocking.

        Parameters
        ----------
        ready
            Cheap test without side effects, or one that advances what is waited for.
        describe
            Says who waits for whom; called only for the error.
        timeout
            Seconds; None for the default.

        Raises
        ------
        ExchangeTimeout
            At the deadline; the wait can be repeated.
        """
        if ready():
            return
        begin = time.perf_counter()
        try:
            self._wait(ready, describe, self.timeout if timeout is None else check_timeout(timeout), begin)
        finally:
            self._counters.waits += 1
            self._counters.seconds_waited += time.perf_counter() - begin

    def _wait(
        self, ready: Callable[[], bool], describe: Callable[[], str], timeout: float, begin: float
    ) -> None:
        for _ in range(self._spins):
            if ready():
                return
        pause = _SLEEP_SECONDS[0]
        while True:
            self._progress()
            if ready():
                return
            elapsed = time.perf_counter() - begin
            if elapsed > timeout:
                raise ExchangeTimeout(f"waited {timeout:g} s: {describe()}")
            if elapsed < _YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, _SLEEP_SECONDS[1])


def check_timeout(seconds: float) -> float:
    """Return a timeout in seconds, or raise if it is none."""
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        value = -1.0
    if not value >= 0:
        raise ConfigurationError(f"a timeout is a number of seconds, at least 0, got {seconds!r}")
    return value
