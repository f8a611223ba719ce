"""What the demos hear and say: mistakes, progress, figures, and their proof.

All ranks run all of this; only one is heard.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil, inf, isnan
from typing import IO, NamedTuple, NoReturn, TypeVar

import torch
from mpi4py import MPI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from distdl_rma import Machine

COMM = MPI.COMM_WORLD
CONSOLE = Console(quiet=COMM.rank != 0, highlight=False)
LINES = 6

T = TypeVar("T")


# ----------------------------------------------------------------------------------- options and mistakes


class Mistake(Exception):
    """Something that the user can put right; the same on all ranks."""


class Parser(argparse.ArgumentParser):
    """Parser that every rank runs and that speaks on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        raise Mistake(message)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if COMM.rank == 0:
            super().print_help(file)


def steps(text: str) -> int:
    """Number of training steps."""
    if re.fullmatch(r"[1-9]\d{0,8}", text) is None:
        raise argparse.ArgumentTypeError(f"at least 1 step is needed, not {text!r}")
    return int(text)


def together(action: Callable[[], T]) -> T:
    """Result of an action that all ranks carry out; if one fails, all raise the same ``Mistake``.

    A rank that stopped alone would leave the others waiting for it.
    """
    outcome: T | Mistake
    try:
        outcome = action()
    except (Mistake, OSError, ValueError) as error:
        outcome = Mistake(error)
    for mistake in filter(None, COMM.allgather(outcome if isinstance(outcome, Mistake) else None)):
        raise mistake
    assert not isinstance(outcome, Mistake)
    return outcome


def prepared(prepare: Callable[[], T], program: str) -> T | None:
    """What all ranks prepare, each with its share of the cores; None after a mistake, which is told."""
    if "OMP_NUM_THREADS" not in os.environ:
        # A thread per core on each rank would be far slower.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // COMM.size))
    try:
        return together(prepare)
    except Mistake as mistake:
        if COMM.rank == 0:
            print(f"{program}: {mistake}", file=sys.stderr)
        return None


def leave(status: int) -> NoReturn:
    """End all ranks, each with this exit status."""
    # Under "python -m mpi4py", a status other than 0 aborts the job with messages of MPI's own, unless this
    # rank has left MPI before.
    MPI.Finalize()
    sys.exit(status)


def wait_asleep() -> None:
    """A barrier that leaves the cores to the rank that is still busy; MPI's own would keep them all busy."""
    everyone = COMM.Ibarrier()
    while not everyone.Test():
        time.sleep(0.01)


# --------------------------------------------------------------------------------------- progress and figures


class Step(NamedTuple):
    """One step of training, as one rank sees it."""

    loss: float
    seconds: float
    bytes_put: int
    seconds_waited: float


def measured(losses: Iterator[float], machine: Machine) -> Iterator[Step]:
    """Steps of a training without end, with their time and what this rank put and waited meanwhile."""
    counters = machine.segments.counters
    while True:
        begin, bytes_put, waited = time.perf_counter(), counters.bytes_put, counters.seconds_waited
        loss = next(losses)
        seconds = time.perf_counter() - begin
        yield Step(loss, seconds, counters.bytes_put - bytes_put, counters.seconds_waited - waited)


def shown(steps: Iterator[Step], total: int) -> Iterator[Step]:
    """The first steps, shown by a progress bar, or by some lines where there is no terminal."""
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    spoken = {1, *(ceil(total * part / LINES) for part in range(1, LINES + 1))}
    terminal = CONSOLE.is_terminal and not CONSOLE.quiet
    with Progress(*columns, console=CONSOLE, disable=not terminal) as progress:
        task = progress.add_task("", total=total)
        for number, step in enumerate(islice(steps, total), 1):
            text = f"loss {step.loss:.5f}, {step.seconds:.2f} s"
            progress.update(task, completed=number, description=text)
            if number in spoken and not terminal:
                CONSOLE.print(f"step {number:{len(str(total))}} of {total}: {text}")
            yield step


def show_training(log: Sequence[Step], quality: str, team: MPI.Intracomm) -> None:
    """Print what the training brought and what it took; collective over the ranks that trained."""
    bytes_put = team.allreduce(sum(step.bytes_put for step in log)) / len(log)
    waited = team.allreduce(sum(step.seconds_waited for step in log))
    seconds = team.allreduce(sum(step.seconds for step in log))
    median = statistics.median(step.seconds for step in log)
    table = Table("training", f"{len(log)} steps, {team.size} rank{'s' * (team.size > 1)}")
    table.add_row("peak signal-to-noise ratio", quality)
    table.add_row("step time, median", f"{median:.2f} s")
    table.add_row("bytes put per step, sum of the ranks", f"{bytes_put:,.0f}")
    table.add_row("time spent waiting, mean of the ranks", f"{waited / seconds:.0%}")
    CONSOLE.print(table)


# -------------------------------------------------------------------------------------------------- the proof


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest absolute value of the whole tensor."""
    worst = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return inf if isnan(worst) else worst


def announce_proof(log: Sequence[Step], team: MPI.Intracomm) -> None:
    """Say that one rank computes alone, and about how long, by the steps of all of them."""
    seconds = ceil(sum(step.seconds for step in log) * team.size)
    CONSOLE.print(f"one rank alone takes {len(log)} steps now, for the proof: {seconds} s or less, silently")


def prove(differences: Mapping[str, float], limit: float, steps: int, team: MPI.Intracomm) -> bool:
    """Whether the ranks together come to what the first of them came to alone, which is printed too.

    Collective over the ranks that trained.
    """
    worst = {name: max(team.allgather(value)) for name, value in differences.items()}
    holds: bool = max(worst.values()) <= limit
    table = Table("difference from one rank alone", f"{steps} steps", title="proof")
    for name, value in worst.items():
        table.add_row(name, f"{value:.1e}")
    CONSOLE.print(table)
    CONSOLE.print("largest |difference| / largest |value| of a tensor; the worst tensor counts")
    CONSOLE.print(f"proof {'holds' if holds else 'FAILS'}: the limit is {limit:.0e}")
    return holds
