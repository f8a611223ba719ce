"""Interleaved timing of variants in one process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from mpi4py import MPI

from benchmarks.row import Row

__all__ = ["COMM", "REPETITIONS", "Row", "added", "compare", "summary"]

COMM = MPI.COMM_WORLD
REPETITIONS = 41


def compare(
    what: str,
    ours: Callable[[], object],
    baseline: Callable[[], object],
    *,
    against: str,
    target: float | None = None,
    inner: int = 1,
    repetitions: int = REPETITIONS,
) -> Row:
    """Time two variants in turn, after a warm-up, and compare their medians.

    Parameters
    ----------
    what, against
        Names of the measurement and of the baseline.
    ours, baseline
        Called on all ranks alike.
    target
        Ratio to reach.
    inner
        Calls per sample; a sample is the time per call on the slowest rank.
    repetitions
        Samples of each variant.
    """
    samples: dict[bool, list[float]] = {True: [], False: []}
    for repetition in range(repetitions + 3):
        # The order alternates, so that neither variant always runs behind the other.
        for mine in (True, False) if repetition % 2 else (False, True):
            seconds = _time(ours if mine else baseline, inner)
            if repetition >= 3:
                samples[mine].append(seconds * 1e6)
    return Row(
        what,
        against,
        *summary(samples[True]),
        *summary(samples[False]),
        target,
    )


def added(
    what: str, ours: Callable[[], object], bare: Callable[[], object], limit_us: float, inner: int
) -> Row:
    """Microseconds per call that one variant takes above the other, timed in turn; of ``limit_us``."""
    samples = []
    for repetition in range(REPETITIONS + 3):
        seconds = _time(ours, inner) - _time(bare, inner)
        if repetition >= 3:
            samples.append(seconds * 1e6)
    return Row(f"{what}, time added", f"{limit_us:g} us", *summary(samples), limit_us, 0.0, 1.0)


def _time(call: Callable[[], object], inner: int) -> float:
    COMM.Barrier()
    begin = time.perf_counter()
    for _ in range(inner):
        call()
    mine = (time.perf_counter() - begin) / inner
    slowest: float = COMM.allreduce(mine, op=MPI.MAX)
    return slowest


def summary(values: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, (high - low) / 2
