"""What the denoising demo hears and says: options, mistakes, progress and figures.

All ranks run all of this; only rank 0 is heard.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, isqrt
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, TypeVar

import skimage.data
from mpi4py import MPI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from distdl_rma import Machine

COMM = MPI.COMM_WORLD
CONSOLE = Console(quiet=COMM.rank != 0, highlight=False)
# The Hubble deep field, which comes with scikit-image.
PHOTOGRAPH = Path(skimage.data.data_dir) / "hubble_deep_field.jpg"
STEPS = 40
LINES = 6

T = TypeVar("T")


# ----------------------------------------------------------------------------------- options and mistakes


class Mistake(Exception):
    """Something that the user can put right; the same on all ranks."""


@dataclass(frozen=True)
class Options:
    """What the user asks for."""

    image: Path
    grid: tuple[int, int]
    steps: int
    output: Path


class Parser(argparse.ArgumentParser):
    """Parser that every rank runs and that speaks on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        raise Mistake(message)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if COMM.rank == 0:
            super().print_help(file)


def options() -> Options:
    """Options from the command line; a ``Mistake`` if they make no sense or do not fit the ranks."""
    parser = Parser(prog="denoise.py", description="Denoise a picture that is split over MPI ranks.")
    parser.add_argument("--image", type=Path, default=PHOTOGRAPH, help="a picture of your own")
    parser.add_argument("--grid", type=grid, default=squarest(COMM.size), help="ROWSxCOLUMNS of shards")
    parser.add_argument("--steps", type=steps, default=STEPS, help="of training (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (%(default)s)")
    chosen = Options(**vars(parser.parse_args()))
    rows, columns = chosen.grid
    if rows * columns != COMM.size:
        raise Mistake(f"--grid {rows}x{columns} needs {rows * columns} ranks, but {COMM.size} are running")
    return chosen


def grid(text: str) -> tuple[int, int]:
    """Rows and columns of shards."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"a grid is ROWSxCOLUMNS, such as 2x2, not {text!r}")
    return int(match[1]), int(match[2])


def steps(text: str) -> int:
    """Number of training steps."""
    if re.fullmatch(r"[1-9]\d{0,8}", text) is None:
        raise argparse.ArgumentTypeError(f"at least 1 step is needed, not {text!r}")
    return int(text)


def squarest(ranks: int) -> tuple[int, int]:
    """Rows and columns for all ranks, as square as can be, rather more rows than columns."""
    columns = next(n for n in range(isqrt(ranks), 0, -1) if ranks % n == 0)
    return ranks // columns, columns


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


def show_figures(log: Sequence[Step], psnr_before: float, psnr_after: float) -> None:
    """Print what the training brought and what it took; collective."""
    bytes_put = COMM.allreduce(sum(step.bytes_put for step in log)) / len(log)
    waited = COMM.allreduce(sum(step.seconds_waited for step in log))
    seconds = COMM.allreduce(sum(step.seconds for step in log))
    median = statistics.median(step.seconds for step in log)
    table = Table("training", f"{len(log)} steps, {COMM.size} rank{'s' * (COMM.size > 1)}")
    table.add_row("peak signal-to-noise ratio", f"{psnr_before:.1f} dB before, {psnr_after:.1f} dB after")
    table.add_row("step time, median", f"{median:.2f} s")
    table.add_row("bytes put per step, sum of the ranks", f"{bytes_put:,.0f}")
    table.add_row("time spent waiting, mean of the ranks", f"{waited / seconds:.0%}")
    CONSOLE.print(table)
