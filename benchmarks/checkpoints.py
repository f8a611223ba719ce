"""Checkpoints: saved and restored by all ranks, against torch's own functions in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.disk import disk_alone
from benchmarks.measure import COMM, Row, compare, summary, timed
from distdl_rma import Checkpoints, Machine

# Bytes of the state; DISTDL_RMA_BENCH_CHECKPOINT has another number, and DISTDL_RMA_BENCH_FOLDER the disk.
NBYTES = int(os.environ.get("DISTDL_RMA_BENCH_CHECKPOINT", "1073741824"))
WIDTH, REPETITIONS = 1024, 11


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file; on two ranks. Both variants end on the disk, by fsync."""
    torch.set_num_threads(1)
    disk = os.environ.get("DISTDL_RMA_BENCH_FOLDER")
    home = COMM.bcast(tempfile.mkdtemp(dir=disk) if COMM.rank == 0 else "")
    try:
        yield from _rows(machine, Path(home))
    finally:
        COMM.Barrier()
        if COMM.rank == 0:
            shutil.rmtree(home)


def _rows(machine: Machine, folder: Path) -> Iterator[Row]:
    torch.manual_seed(0)
    count = max(1, NBYTES // (4 * WIDTH * WIDTH))
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
    what, file = f"checkpoint of {NBYTES >> 20} MiB, whole on {machine.size} ranks", folder / "torch.pt"
    state: dict[str, Any] = {"model": model}

    def torch_saves() -> None:
        if machine.rank == 0:
            with file.open("wb") as opened:
                torch.save(model.state_dict(), opened)
                opened.flush()
                os.fsync(opened.fileno())

    against, share = "torch.save by one process", np.ones(NBYTES // machine.size, np.uint8)
    yield disk_alone(what, folder, share, torch_saves, against=against, repetitions=REPETITIONS)
    del share
    with Checkpoints(folder / "run", keep=1, machine=machine) as kept:
        yield compare(
            f"{what}, save",
            lambda: kept.save(state, 1),
            torch_saves,
            against=against,
            target=0.6,
            repetitions=REPETITIONS,
        )
        yield compare(
            f"{what}, restore",
            lambda: kept.restore(state),
            lambda: model.load_state_dict(torch.load(file)),
            against="torch.load on each rank",
            target=0.7,
            repetitions=REPETITIONS,
        )
        yield _cold_row(
            f"{what}, restore of files that are not in memory",
            [folder / "run" / "step-1" / "data.safetensors", file],
            [lambda: kept.restore(state), lambda: model.load_state_dict(torch.load(file))],
        )
    yield _asynchronous_row(machine, folder / "background", state, what)


def _cold_row(what: str, paths: list[Path], calls: list[Callable[[], object]]) -> Row:
    taken: list[list[float]] = [[], []]
    for _ in range(REPETITIONS):
        for path, call, seconds in zip(paths, calls, taken, strict=True):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            seconds.append(1e6 * timed(call))
    return Row(what, "torch.load on each rank", *summary(taken[0]), *summary(taken[1]), 0.7)


def _asynchronous_row(machine: Machine, folder: Path, state: dict[str, Any], what: str) -> Row:
    # A step with a checkpoint that is written meanwhile, in turn with one without.
    x, product = torch.rand(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)
    mine: list[float] = []
    theirs: list[float] = []

    def step(number: int) -> None:
        torch.mm(x, x, out=product)
        kept.due(number)

    with Checkpoints(folder, keep=1, asynchronous=True, machine=machine) as kept:
        for number in range(REPETITIONS + 1):
            for taken, saves in ((mine, True), (theirs, False)):
                kept.wait()
                if saves:
                    kept.save(state, number)
                taken.append(1e7 * timed(partial(step, number), inner=10))
    found = *summary(mine[1:]), *summary(theirs[1:])
    return Row(f"{what}, step beside its asynchronous writing", "the same step alone", *found, 1.1)
