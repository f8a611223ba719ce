"""The disk alone: the least that any writing of the same bytes can take."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import COMM, Row, compare


def disk_alone(
    what: str, folder: Path, bytes_of_rank: np.ndarray[Any, Any], baseline: Callable[[], object], **how: Any
) -> Row:
    """Each rank writes its bytes to a file of its own, against a baseline that writes all of them."""
    path = folder / f"alone-{COMM.rank}"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            rest = bytes_of_rank.data.cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    try:
        return compare(f"{what}, the disk alone", write, baseline, **how)
    finally:
        path.unlink(missing_ok=True)
