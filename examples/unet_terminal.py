"""What the sharpening demo hears and says."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from demo_terminal import COMM, CONSOLE, Mistake, Parser, steps
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
