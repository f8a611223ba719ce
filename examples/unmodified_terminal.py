"""What the demo of an unmodified model hears and says."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.table import Table

from demo_terminal import COMM, CONSOLE, Mistake, Parser, steps
from denoise_options import grid, squarest
from distdl_rma.layers.model.compare import Comparison
from distdl_rma.layers.model.report import Call, StepReport
from unet_terminal import size

STEPS = 40
SIZE = (127, 191)
SMALLEST = 32
SAID = {
    "output": "outputs of {} modules",
    "loss": "loss",
    "input gradient": "gradient of the input",
    "gradient": "gradients of {} parameters",
    "buffer": "{} buffers",
}


@dataclass(frozen=True)
class Options:
    """What the user asks for."""

    grid: tuple[int, int]
    size: tuple[int, int]
    steps: int
    output: Path


def options() -> Options:
    """Options from the command line; a ``Mistake`` if they make no sense or do not fit the ranks."""
    parser = Parser(prog="unmodified.py", description="Train a public model, as it is, on MPI ranks.")
    parser.add_argument("--grid", type=grid, default=squarest(COMM.size), help="ROWSxCOLUMNS of blocks")
    parser.add_argument("--size", type=photograph, default=SIZE, help="HEIGHTxWIDTH of the photographs")
    parser.add_argument("--steps", type=steps, default=STEPS, help="of training (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (%(default)s)")
    chosen = Options(**vars(parser.parse_args()))
    rows, columns = chosen.grid
    if rows * columns != COMM.size:
        raise Mistake(f"--grid {rows}x{columns} needs {rows * columns} ranks, but {COMM.size} are running")
    return chosen


def photograph(text: str) -> tuple[int, int]:
    """Height and width that the model can halve four times."""
    found = size(text)
    if min(found) < SMALLEST:
        raise argparse.ArgumentTypeError(
            f"BasicUNet needs a height and a width of {SMALLEST} or more, not {text}"
        )
    return found


def show_report(report: StepReport, path: Path) -> None:
    """Print what a step moved, a row for each part of the model; write all rows to a file."""
    table = Table("a step of", "output, and how it is cut", "bytes sent", "messages")
    for name, some in groupby(report.calls, _part):
        calls = list(some)
        nbytes, messages = sum(call.nbytes for call in calls), sum(call.messages for call in calls)
        table.add_row(name, calls[-1].output, f"{nbytes:,}", f"{messages}")
    table.add_row("with backward", "", f"{report.nbytes:,}", f"{report.messages}")
    CONSOLE.print(table)
    moved = sorted({f"{what} of {call.function}" for call in report.moved for what in call.moved})
    CONSOLE.print(f"moved to another layout by a rule: {', '.join(moved) or 'nothing'}")
    if COMM.rank == 0:
        path.write_text(f"{report.table()}\n")


def _part(call: Call) -> str:
    return call.module.partition(".")[0] or "loss"


def show_comparison(found: Comparison, path: Path) -> None:
    """Print how far the split model is from itself alone; write all rows to a file."""
    table = Table("against the model alone", "largest difference", "largest element")
    for what, said in SAID.items():
        some = [each for each in found.differences if each.what == what]
        if some:
            error, scale = max(each.error for each in some), max(each.scale for each in some)
            table.add_row(said.format(len(some)), f"{error:.1e}", f"{scale:.1e}")
    CONSOLE.print(table)
    CONSOLE.print(f"first difference: {found.first or 'none'}")
    CONSOLE.print(f"not alike on all ranks: {', '.join(found.drifted) or 'nothing'}")
    if COMM.rank == 0:
        path.write_text(f"{found.table()}\n")
