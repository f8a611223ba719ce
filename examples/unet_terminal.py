"""What the sharpening demo hears and says."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI
from rich.table import Table

from denoise_terminal import COMM, CONSOLE, Mistake, Parser, Step, steps
from distdl_rma import Machine
from unet_network import Level, layouts

STEPS = 60
SIZE = (255, 383)
SMALLEST = 16


@dataclass(frozen=True)
class Options:
    """What the user asks for."""

    layout: str
    ranks: tuple[int, ...]
    size: tuple[int, int]
    steps: int
    output: Path


def options() -> Options:
    """Options from the command line; a ``Mistake`` if they make no sense or do not fit the ranks."""
    everyone = tuple(range(COMM.size))
    parser = Parser(prog="unet.py", description="Sharpen photographs that are split over MPI ranks.")
    parser.add_argument(
        "--layout", choices=list(layouts(1)), default="columns", help="of half and quarter resolution"
    )
    parser.add_argument("--ranks", type=order, default=everyone, help="the machine M, such as 2,0,3,1")
    parser.add_argument("--size", type=size, default=SIZE, help="HEIGHTxWIDTH of the photographs")
    parser.add_argument("--steps", type=steps, default=STEPS, help="of training (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder (%(default)s)")
    chosen = Options(**vars(parser.parse_args()))
    for rank in chosen.ranks:
        if rank not in everyone:
            raise Mistake(f"--ranks names rank {rank}, but {COMM.size} are running, from 0 on")
    if len(set(chosen.ranks)) < len(chosen.ranks):
        raise Mistake(f"--ranks names a rank twice: {','.join(map(str, chosen.ranks))}")
    return chosen


def order(text: str) -> tuple[int, ...]:
    """Ranks in the order of the machine."""
    if re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) is None:
        raise argparse.ArgumentTypeError(f"ranks are numbers with commas between them, not {text!r}")
    return tuple(map(int, text.split(",")))


def size(text: str) -> tuple[int, int]:
    """Height and width of the photographs."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match is None or min(int(match[1]), int(match[2])) < SMALLEST:
        raise argparse.ArgumentTypeError(
            f"a size is HEIGHTxWIDTH, such as 255x383, both at least {SMALLEST}, not {text!r}"
        )
    return int(match[1]), int(match[2])


def show_levels(machine: Machine, places: Sequence[Level]) -> None:
    """Print how the tensors of each resolution are distributed."""
    table = Table("pixels", "distribution over n, c, h, w", "ranks with a shard", "idle")
    for level in places:
        active = machine.distribute(level.distribution).ranks
        idle = [rank for rank in machine.ranks if rank not in active]
        lists = (" ".join(map(str, ranks)) for ranks in (active, idle))
        table.add_row(
            f"{level.height} x {level.width}", " x ".join(map(str, level.distribution.shape)), *lists
        )
    CONSOLE.print(table)


def show_training(log: Sequence[Step], before: float, after: float, team: MPI.Intracomm) -> None:
    """Print what the training brought and what it took; collective over the machine."""
    bytes_put = team.allreduce(sum(step.bytes_put for step in log)) / len(log)
    waited = team.allreduce(sum(step.seconds_waited for step in log))
    seconds = team.allreduce(sum(step.seconds for step in log))
    median = statistics.median(step.seconds for step in log)
    table = Table("training", f"{len(log)} steps, {team.size} rank{'s' * (team.size > 1)}")
    table.add_row("peak signal-to-noise ratio", f"{before:.1f} dB out of focus, {after:.1f} dB sharpened")
    table.add_row("step time, median", f"{median:.2f} s")
    table.add_row("bytes put per step, sum of the ranks", f"{bytes_put:,.0f}")
    table.add_row("time spent waiting, mean of the ranks", f"{waited / seconds:.0%}")
    CONSOLE.print(table)


def show_proof(worst: Mapping[str, float], limit: float, holds: bool, alone: Sequence[Step]) -> None:
    """Print how far the ranks together are from one alone."""
    table = Table("difference from one rank alone", f"{len(alone)} steps", title="proof")
    for name, value in worst.items():
        table.add_row(name, f"{value:.1e}")
    CONSOLE.print(table)
    CONSOLE.print("largest |difference| / largest |value| of a tensor; the worst tensor counts")
    CONSOLE.print(f"one rank alone: {min(step.seconds for step in alone):.2f} s per step")
    CONSOLE.print(f"proof {'holds' if holds else 'FAILS'}: the limit is {limit:.0e}")
