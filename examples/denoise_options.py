"""What the denoising demo is asked for."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import skimage.data

from demo_terminal import COMM, Mistake, Parser, steps

# The Hubble deep field, which comes with scikit-image.
PHOTOGRAPH = Path(skimage.data.data_dir) / "hubble_deep_field.jpg"
STEPS = 40


@dataclass(frozen=True)
class Options:
    """What the user asks for."""

    image: Path
    grid: tuple[int, int]
    steps: int
    output: Path


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


def squarest(ranks: int) -> tuple[int, int]:
    """Rows and columns for all ranks, as square as can be, rather more rows than columns."""
    columns = next(n for n in range(isqrt(ranks), 0, -1) if ranks % n == 0)
    return ranks // columns, columns
