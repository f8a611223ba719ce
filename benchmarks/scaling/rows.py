"""Strong and weak scaling of training steps on this machine, beside one process with as many threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from benchmarks.measure import COMM, in_turn, summary
from benchmarks.row import Row
from benchmarks.scaling.cases import CASES, Case, Step
from distdl_rma import Machine

REPETITIONS = 15


def rows(machine: Machine) -> Iterator[Row]:
    """All rows of this file."""
    torch.set_num_threads(1)
    for case in CASES:
        yield from rows_of(case, machine)


def rows_of(case: Case, machine: Machine) -> Iterator[Row]:
    """Rows of one network; all its variants are measured in turn."""
    plain, threads = "one process, 1 thread", f"one process, {machine.size} threads"
    one, part, ranks = "1 rank", f"1 rank with 1/{machine.size} of the image", f"{machine.size} ranks"
    steps: dict[str, Step] = {}
    with ExitStack() as resources:
        if machine.rank == 0:
            alone = resources.enter_context(Machine(COMM, (0,)))
            steps[plain] = case.plain_step()
            steps[threads] = with_threads(machine.size, steps[plain])
            steps[one] = case.split_step(case.rows_of(alone))
            steps[part] = case.split_step(case.rows_of(alone), case.tile(machine.size))
        steps = {name: on_the_first(steps.get(name)) for name in (plain, threads, one, part)}
        steps[ranks] = case.split_step(case.rows_of(machine))
        samples = in_turn(steps, REPETITIONS)
    found = {name: summary([1e6 * seconds for seconds in taken]) for name, taken in samples.items()}
    for kind, ours, baseline, target in (
        ("strong", one, plain, 1.05),
        ("strong", ranks, plain, 1.1 / machine.size),
        ("strong", ranks, threads, 1.0),
        ("weak", ranks, part, 1.1),
    ):
        yield Row(f"{kind} scaling, {case.title}, {ours}", baseline, *found[ours], *found[baseline], target)


def with_threads(count: int, step: Step) -> Step:
    """A step that computes with so many threads."""

    def call() -> None:
        torch.set_num_threads(count)
        step()
        torch.set_num_threads(1)

    return call


def on_the_first(step: Step | None) -> Step:
    """A step of one rank, while the others sleep; numbers that it draws leave the generators alike."""

    def call() -> None:
        if step is not None:
            with torch.random.fork_rng(devices=()):
                step()
        asleep_until_all_are_here()

    return call


def asleep_until_all_are_here() -> None:
    """A barrier that leaves the core to those who compute."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(1e-4)
