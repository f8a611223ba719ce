"""Steps that only some ranks make, while the others leave them their cores."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.measure import COMM

Step = Callable[[], object]


def with_threads(count: int, step: Step) -> Step:
    """A step that computes with so many threads."""

    def call() -> None:
        torch.set_num_threads(count)
        step()
        torch.set_num_threads(1)

    return call


def on_those_with(step: Step | None) -> Step:
    """A step of those ranks that have one, while the others sleep.

    Numbers that it draws leave the generators of all ranks alike.
    """

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
