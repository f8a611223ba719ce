"""Rows of a network: its steps on some ranks beside one process with as many threads, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks import memory
from benchmarks.alone import Step, asleep_until_all_are_here, on_those_with, with_threads
from benchmarks.gains.networks import NETWORKS, Network
from benchmarks.measure import COMM, Row, in_turn, summary
from benchmarks.training_step import step_of
from distdl_rma import Machine, distribute, shard

RANKS = 1, 2, 4
# Of memory; steps take seconds, and each number of ranks has its own.
PROCESSES = 3
# Of the time of one process; a single rank has the calls of the library for nothing.
ONE_RANK, MORE_RANKS, WEAK = 1.05, 1.0, 1.1
# Of the memory of one process, by the number of ranks.
MEMORY = {2: 0.55, 4: 0.30}


def counted(count: int, noun: str) -> str:
    """A number of things in words."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def alone(size: int) -> str:
    """The honest baseline of so many ranks: one process that has their cores."""
    return f"one process, {counted(size, 'thread')}"


def on_one_rank(size: int) -> str:
    """One rank that has the cores of so many."""
    return f"1 rank, {counted(size, 'thread')}"


def part(size: int) -> str:
    """One rank with the work of one of so many."""
    return f"1 rank with 1/{size} of the image"


def split(size: int) -> str:
    """So many ranks with a thread each."""
    return f"{size} ranks" if size > 1 else on_one_rank(1)


def split_step(network: Network, machine: Machine, shape: tuple[int, ...]) -> Step:
    """A step of the network as it is, cut along the first dimension in space; collective over the machine."""
    P_x = machine.partition((1, 1, machine.size, *(1,) * (len(shape) - 1)))
    x, target = network.sample(shape)
    # Labels, which have no channels, stay whole on every rank.
    wanted = shard(P_x, target) if target.ndim == x.ndim else target
    return step_of(distribute(network.made(), P_x), shard(P_x, x), wanted, network.criterion)


def time_rows(name: str, machine: Machine) -> Iterator[Row]:
    """Rows of time; all variants are measured in turn, in this job, so that their ratios are of one run.

    One rank with more threads has the kernels that the library chooses, and nothing else of it: what remains
    of the gain is that of splitting.
    """
    torch.set_num_threads(1)
    network = NETWORKS[name]
    sizes = [size for size in RANKS if size <= machine.size]
    with ExitStack() as resources:
        steps = _steps(network, machine, sizes, resources)
        samples = in_turn({variant: on_those_with(step) for variant, step in steps.items()}, network.samples)
    found = {variant: summary([1e6 * seconds for seconds in taken]) for variant, taken in samples.items()}
    for size in sizes:
        for kind, baseline, target in _comparisons(size):
            what = f"{kind} scaling, {network.what}, {counted(size, 'rank')}"
            yield Row(what, baseline, *found[split(size)], *found[baseline], target)


def _comparisons(size: int) -> Iterator[tuple[str, str, float | None]]:
    if size == 1:
        yield "strong", alone(1), ONE_RANK
        return
    yield "strong", alone(size), MORE_RANKS
    yield "strong", on_one_rank(size), None
    yield "weak", part(size), WEAK


def _steps(
    network: Network, machine: Machine, sizes: list[int], resources: ExitStack
) -> dict[str, Step | None]:
    """The variants, alike on all ranks; None where this rank has no part in one."""
    names = (alone, on_one_rank, part, split)
    variants = (name(size) for size in sizes for name in names if size > 1 or name is not part)
    steps: dict[str, Step | None] = dict.fromkeys(variants)
    if machine.rank == 0:
        single = resources.enter_context(Machine(COMM, (0,)))
        bare, ours = network.step(), split_step(network, single, network.shape)
        for size in sizes:
            steps[alone(size)] = with_threads(size, bare)
            steps[on_one_rank(size)] = with_threads(size, ours)
            if size > 1:
                steps[part(size)] = split_step(network, single, network.part(size))
    for size in sizes:
        if size > 1 and machine.rank < size:
            some = resources.enter_context(Machine(COMM, tuple(range(size))))
            steps[split(size)] = split_step(network, some, network.shape)
    return steps


def memory_rows(name: str, machine: Machine) -> Iterator[Row]:
    """Peak memory of the first steps above what was there before, on the rank with most; of fresh ranks.

    The one process has a thread: with more it needs more.
    """
    torch.set_num_threads(1)
    network = NETWORKS[name]
    most = max(COMM.allgather(memory.peak_kib(split_step(network, machine, network.shape)))) / 1024
    baseline = memory.alone_mib(name, processes=PROCESSES) if machine.rank == 0 else (0.0, 0.0)
    asleep_until_all_are_here()
    middle, spread = COMM.bcast(baseline)
    what = f"peak memory of a rank of {machine.size}, unmodified {network.what}"
    yield Row(what, "one process", most, 0.0, middle, spread, MEMORY.get(machine.size), unit="MiB")


ROWS = {
    f"gains-{name}{job}": partial(rows, name)
    for name in NETWORKS
    for job, rows in (("", time_rows), ("-memory", memory_rows))
}
