"""Planning the data movement of one rank among thousands."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.measure import REPETITIONS, Row, summary
from distdl_rma import Machine, Partition
from distdl_rma.geometry import Decomposition, Exchange, Window
from distdl_rma.geometry.halo import WindowSplit
from distdl_rma.geometry.intervals import Balanced

BUDGET_US = 10_000.0
GRIDS = ((4096,), (64, 64), (16, 16, 16))


def rows(_machine: Machine) -> Iterator[Row]:
    """All rows of this file; the budget stands in for a baseline."""
    for grid in GRIDS:
        samples = []
        for _ in range(REPETITIONS):
            begin = time.perf_counter()
            plan(grid, rank=2081)
            samples.append((time.perf_counter() - begin) * 1e6)
        shape = " x ".join(map(str, grid))
        yield Row(
            f"plan a halo and its adjoint, one rank of {shape}",
            "10 ms",
            *summary(samples),
            BUDGET_US,
            0.0,
            1.0,
        )


def plan(grid: tuple[int, ...], rank: int) -> int:
    """Everything from the partition to the pieces, as a rank would do it; the number of pieces."""
    size = 4096
    P_x = Partition(tuple(range(size)), grid, me=rank)
    extents = tuple(100 * n + 7 for n in grid)
    own = Decomposition.balanced(P_x, extents)
    window = Window(5, left=2, right=2)
    reads = {
        d: WindowSplit(Balanced(window.outputs(n), parts), window, n)
        for d, (n, parts) in enumerate(zip(extents, grid, strict=True))
    }
    exchange = Exchange(rank, own, own.with_splits(reads))
    pieces = exchange.sends + exchange.receives + exchange.T.sends + exchange.T.receives
    return len(pieces) + exchange.fingerprint % 2
