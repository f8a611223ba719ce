"""Interleaved timing of variants in one process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from mpi4py import MPI

from benchmarks.row import Row

__all__ = ["COMM", "REPETITIONS", "Row", "added", "compare", "in_turn", "summary", "timed"]

COMM = MPI.COMM_WORLD
REPETITIONS, WARM_UPS = 41, 3


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
    samples = in_turn({"ours": ours, "baseline": baseline}, repetitions, inner)
    mine, theirs = ([1e6 * seconds for seconds in taken] for taken in samples.values())
    return Row(what, against, *summary(mine), *summary(theirs), target)


def in_turn(
    variants: dict[str, Callable[[], object]], repetitions: int = REPETITIONS, inner: int = 1
) -> dict[str, list[float]]:
    """Seconds per call of each variant on the slowest rank, timed in turn after a warm-up; collective."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(repetitions + WARM_UPS):
        # The order alternates, so that no variant always runs behind the same other.
        for name in list(variants)[:: 1 if repetition % 2 else -1]:
            seconds = timed(variants[name], inner)
            if repetition >= WARM_UPS:
                samples[name].append(seconds)
    return samples


def added(
    what: str,
    ours: Callable[[], object],
    bare: Callable[[], object],
    limit_us: float,
    inner: int,
    times: int = 1,
) -> Row:
    """Microseconds per call that one variant takes above the other, timed in turn; of ``limit_us``.

    A call does so many ``times`` what is meant.
    """
    samples = []
    for repetition in range(REPETITIONS + WARM_UPS):
        seconds = timed(ours, inner) - timed(bare, inner)
        if repetition >= WARM_UPS:
            samples.append(seconds * 1e6 / times)
    return Row(f"{what}, time added", f"{limit_us:g} us", *summary(samples), limit_us, 0.0, 1.0)


def timed(call: Callable[[], object], inner: int = 1) -> float:
    """Seconds of a call on the slowest rank, the mean of so many calls; collective."""
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
