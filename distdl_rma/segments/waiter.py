"""Waiting for what another rank does: spin, yield, sleep, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from distdl_rma.errors import ConfigurationError

TIMEOUT_VARIABLE = "DISTDL_RMA_TIMEOUT"
DEFAULT_TIMEOUT = 300.0

_YIELD_SECONDS = 2e-3
_SLEEP_SECONDS = (5e-5, 1e-3)
# How often a long wait says what it waits for, and looks at those that it waits for.
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class WaitReason:
    """What a rank waits for: ranks, and what they are to do, as in "to send in 'enc1' (epoch 7, ...)".

    ``hint`` ends the message of a wait that reached its deadline. With ``anyone`` the ranks are those that
    may do it, and the wait is in vain only when all of them have left. With ``leavers`` also those that have
    left do it, as long as their processes live.
    """

    ranks: tuple[int, ...]
    what: str
    hint: str = ""
    anyone: bool = False
    leavers: bool = False


@dataclass
class Counters:
    """What this rank moved and waited since the machine started; only grows.

    ``collectives`` are calls of MPI's collectives between nodes, with the bytes handed to them.
    ``notifications`` are those of buffers; ``flushes`` are waits of MPI for all that is under way to a
    peer on another node, of which one serves many puts and notifications. A wait that ends while it still
    spins on a flag of a small collective is not counted.
    """

    bytes_put: int = 0
    puts: int = 0
    bytes_got: int = 0
    gets: int = 0
    bytes_collective: int = 0
    collectives: int = 0
    notifications: int = 0
    flushes: int = 0
    waits: int = 0
    seconds_waited: float = 0.0


class FailureWatch(Protocol):
    """What a long wait tells, and asks."""

    def advance(self, waiting: Callable[[], WaitReason]) -> None:
        """Make progress for everyone, on every turn after the busy loop; raise if a rank failed."""

    def look(self, waiting: WaitReason) -> None:
        """Tell others about a wait that takes long, and raise ``PeerFailedError`` if it is in vain."""

    def done(self) -> None:
        """Tell others that the wait is over."""

    def give_up(self, waiting: WaitReason, seconds: float) -> NoReturn:
        """Raise ``ExchangeTimeout`` for a wait that reached its deadline."""


class Waiter:
    """How a rank waits for something that another rank does.

    Parameters
    ----------
    timeout
        Default deadline of a wait in seconds.
    spins
        Turns of the busy loop at the start; 0 where ranks outnumber cores or MPI must make progress.
    supervisor
        Whom a long wait turns to.
    counters
        Where time spent waiting is added up.
    """

    def __init__(self, timeout: float, spins: int, supervisor: FailureWatch, counters: Counters) -> None:
        self.timeout = check_timeout(timeout)
        self.spins = spins
        self._supervisor = supervisor
        self._counters = counters

    def until(
        self, ready: Callable[[], bool], waiting: Callable[[], WaitReason], timeout: float | None = None
    ) -> None:
        """Return as soon as ``ready()`` is true; blocking.

        Parameters
        ----------
        ready
            Cheap test without side effects, or one that advances what is waited for.
        waiting
            Says who is waited for; called only when the wait takes long.
        timeout
            Seconds, 0 to look once; None for the default.

        Raises
        ------
        ExchangeTimeout
            At the deadline; the wait can be repeated.
        PeerFailedError
            If a rank of the machine failed, or one that is waited for has left.
        """
        if ready():
            return
        begin = time.perf_counter()
        try:
            self._wait(ready, waiting, self.timeout if timeout is None else check_timeout(timeout), begin)
        finally:
            self._counters.waits += 1
            self._counters.seconds_waited += time.perf_counter() - begin

    def _wait(
        self, ready: Callable[[], bool], waiting: Callable[[], WaitReason], timeout: float, begin: float
    ) -> None:
        if timeout > 0:
            for _ in range(self.spins):
                if ready():
                    return
        supervisor, pause = self._supervisor, _SLEEP_SECONDS[0]
        looked = 0.0
        try:
            while True:
                supervisor.advance(waiting)
                if ready():
                    return
                elapsed = time.perf_counter() - begin
                if elapsed >= _YIELD_SECONDS and (not looked or elapsed - looked > _LOOK_SECONDS):
                    looked = elapsed
                    supervisor.look(waiting())
                if elapsed > timeout:
                    supervisor.give_up(waiting(), timeout)
                if elapsed < _YIELD_SECONDS:
                    os.sched_yield()
                else:
                    time.sleep(pause)
                    pause = min(pause * 1.5, _SLEEP_SECONDS[1])
        finally:
            if looked:
                supervisor.done()


def in_seconds(seconds: float) -> str:
    """Time for a message: tenths of a second, less than one to two digits."""
    if seconds < 1:
        return f"{float(f'{seconds:.2g}'):g} s"
    return f"{seconds:.1f}".removesuffix(".0") + " s"


def check_timeout(seconds: float) -> float:
    """Return a timeout in seconds, or raise if it is none."""
    try:
        value = float(seconds)
    except (TypeError, ValueError):
        value = -1.0
    if not value >= 0:
        raise ConfigurationError(f"a timeout is a number of seconds, at least 0, got {seconds!r}")
    return value


def chosen_timeout(seconds: float | None) -> float:
    """Return a timeout as asked for, else that of the environment, else 300 seconds; raise if it is none."""
    if seconds is not None:
        return check_timeout(seconds)
    text = os.environ.get(TIMEOUT_VARIABLE)
    try:
        return DEFAULT_TIMEOUT if text is None else check_timeout(float(text))
    except (ValueError, ConfigurationError):
        raise ConfigurationError(
            f"{TIMEOUT_VARIABLE} is a number of seconds, at least 0, got {text!r}"
        ) from None
