"""Training steps whose saved tensors are on disk, against the same steps in memory: time and peak memory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks.alone import asleep_until_all_are_here
from benchmarks.measure import COMM, Row, compare, summary
from benchmarks.memory import peak_kib, said_alone
from benchmarks.split import distributed_step
from benchmarks.training_step import step_of
from benchmarks.unet import UNet, image
from distdl_rma import Machine, spill

WIDTH, SIDE, REPETITIONS, PROCESSES = 16, 768, 31, 5
WHAT = f"U-Net, width {WIDTH}, {SIDE}x{SIDE}"
# DISTDL_RMA_BENCH_FOLDER chooses the disk.
DISK = os.environ.get("DISTDL_RMA_BENCH_FOLDER", tempfile.gettempdir())


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file; on two ranks. Of the first two, one process computes, and a core is free."""
    torch.set_num_threads(1)
    taken: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()
    if machine.rank == 0:
        mine, theirs = json.loads(said_alone(__name__, "times"))
        taken = *summary(mine), *summary(theirs)
        peaks = tuple(
            each
            for way in ("spill", "memory")
            for each in summary([int(said_alone(__name__, way)) / 1024 for _ in range(PROCESSES)])
        )
    asleep_until_all_are_here()
    (mine_us, mine_spread, us, spread), (most, its_spread, mib, spread_mib) = COMM.bcast((taken, peaks))
    same = "the same steps in memory"
    yield Row(f"{WHAT}, step with saved tensors on disk", same, mine_us, mine_spread, us, spread, 1.15)
    what = f"peak memory, {WHAT}, saved tensors on disk"
    yield Row(what, same, most, its_spread, mib, spread_mib, 0.5, unit="MiB")
    step = distributed_step(machine.partition((1, 1, machine.size, 1)), WIDTH, SIDE)
    yield compare(
        f"{WHAT}, unmodified, split on {machine.size} ranks, step with saved tensors on disk",
        within(spill(DISK, machine=machine), step),
        step,
        against=same,
        repetitions=REPETITIONS,
    )


def times() -> list[list[float]]:
    """Microseconds of steps on disk and in memory, in turn."""
    plain, disk = alone(), spill(DISK)
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(REPETITIONS + 1):
        for step, found in zip((within(disk, plain), plain), taken, strict=True):
            begin = time.perf_counter()
            step()
            found.append(1e6 * (time.perf_counter() - begin))
    return [found[1:] for found in taken]


def alone() -> Callable[[], object]:
    """A step of the whole model in this process."""
    x, target = image(SIDE)
    return step_of(UNet(WIDTH), x, target, F.mse_loss)


def within(disk: spill | nullcontext[None], step: Callable[[], object]) -> Callable[[], object]:
    """The step in a context."""

    def call() -> None:
        with disk:
            step()

    return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "times":
        print(json.dumps(times()))
    else:
        print(peak_kib(within(spill(DISK) if sys.argv[1] == "spill" else nullcontext(), alone())))
