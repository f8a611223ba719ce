"""Public models that nobody rewrote, against their tile alone and against one process: time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.console import Console

from benchmarks import memory
from benchmarks.alone import asleep_until_all_are_here, on_those_with, with_threads
from benchmarks.measure import COMM, Row, in_turn, summary
from benchmarks.public_models import MODELS, PublicModel, training
from distdl_rma import Machine, distribute, shard

# Samples by the number of dimensions that images have.
REPETITIONS = {2: 15, 3: 7}
# Of memory; each of them imports the package.
PROCESSES = 2
# Of the tile's time, of the one process's time, of the memory of the tile.
TILE, THREADS, MEMORY = 1.15, 1.0, 1.25

Step = Callable[[], object]


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file that need no fresh ranks."""
    torch.set_num_threads(1)
    for name, model in MODELS.items():
        if not model.missing:
            yield from time_rows(model, machine)
        elif machine.rank == 0:
            needed = " and ".join(model.missing)
            Console(stderr=True).print(f"no rows of {name}: {needed} is not installed", highlight=False)


def time_rows(model: PublicModel, machine: Machine) -> Iterator[Row]:
    """Training steps; all variants are measured in turn."""
    tile, threads = "bare local tile", f"one process, {machine.size} threads"
    whole = training(model.made(), model.image()) if machine.rank == 0 else None
    steps = {
        "ours": distributed_step(model, machine),
        tile: training(model.made(), model.image(machine.size)),
        threads: on_those_with(whole and with_threads(machine.size, whole)),
    }
    samples = in_turn(steps, REPETITIONS[len(model.shape) - 2])
    found = {variant: summary([1e6 * seconds for seconds in taken]) for variant, taken in samples.items()}
    for baseline, target in ((tile, TILE), (threads, THREADS)):
        what = f"model {model.title}, {model.extents}, training step"
        yield Row(what, baseline, *found["ours"], *found[baseline], target)


def distributed_step(model: PublicModel, machine: Machine) -> Step:
    """A step of the model as it is, on split tensors."""
    P_x = machine.partition(tuple(machine.size if d == 2 else 1 for d in range(len(model.shape))))
    return training(distribute(model.made(), P_x), shard(P_x, model.image()))


def memory_rows(name: str, machine: Machine) -> Iterator[Row]:
    """Peak memory of the first steps above what was there before, on the rank with most; of fresh ranks."""
    torch.set_num_threads(1)
    model = MODELS[name]
    most = max(COMM.allgather(memory.peak_kib(distributed_step(model, machine)))) / 1024
    # Two ranks start processes at the same time, if there are two.
    alone = {"one process": (1, 0), "bare local tile": (machine.size, machine.size - 1)}
    found = {
        baseline: memory.alone_mib(name, str(parts), processes=PROCESSES)
        for baseline, (parts, rank) in alone.items()
        if rank == machine.rank
    }
    asleep_until_all_are_here()
    for each in COMM.allgather(found):
        found |= each
    for baseline, target in (("bare local tile", MEMORY), ("one process", None)):
        what = f"model {model.title}, {model.extents}, peak memory of a rank of {machine.size}"
        yield Row(what, baseline, most, 0.0, *found[baseline], target, unit="MiB")


MEMORY_ROWS = {f"memory-{name}": partial(memory_rows, name) for name in MODELS}
