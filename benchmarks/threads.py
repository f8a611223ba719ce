"""What the threads of a rank do beside torch's functions: in one process, while the other ranks sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.alone import on_those_with, with_threads
from benchmarks.measure import Row, compare
from distdl_rma import Machine
from distdl_rma.layers.arithmetic import reduction_dtype
from distdl_rma.layers.ops.norm.statistics import Rows
from distdl_rma.segments.collectives.reduction import Reduction, element_of
from distdl_rma.segments.large_arrays import copy

# Elements of gradients of 25 MiB, of a copy of 64 MiB, and of a norm.
GRADIENTS, COPIED, NORM = 25 << 18, 64 << 18, (1, 16, 256, 256)
INNER = 10


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    count = machine.size
    for what, step in steps().items():
        one, several = (
            on_those_with(with_threads(n, partial(repeated, step)) if machine.rank == 0 else None)
            for n in (1, count)
        )
        yield compare(f"{what}, {count} threads", several, one, against="1 thread", target=0.8)


def repeated(step: Callable[[], object]) -> None:
    """A step so often that the waking of the other ranks does not matter."""
    for _ in range(INNER):
        step()


def steps() -> dict[str, Callable[[], object]]:
    """By name, what is done to large data."""
    found: dict[str, Callable[[], object]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        element = element_of(reduction_dtype(dtype), "benchmark")
        reduction = Reduction("sum", element, 2, "benchmark")
        rows = [np.zeros(GRADIENTS, element.storage) for _ in range(2)]
        name = f"{INNER} sums of two vectors of {GRADIENTS * dtype.itemsize / 2**20:g} MiB, {element.name}"
        found[name] = lambda reduction=reduction, rows=rows: reduction.reduce(rows, rows[0])  # type: ignore[misc]
    source, target = (np.zeros(COPIED, np.float32) for _ in range(2))
    found[f"{INNER} copies of 64 MiB to another rank"] = lambda: copy(target, source)
    x = torch.zeros(NORM)
    statistics = Rows(NORM, (0, 2, 3))
    found[f"{INNER} times the statistics of 16 channels of 256x256"] = lambda: statistics.sums(x, x)
    return found
