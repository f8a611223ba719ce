"""The numbers of each network in a file: what one run of one commit measured, replaced as a whole.

bench-output/gains-unet-512.json            a job: steps of all variants, in turn
bench-output/gains-unet-512-memory-2.json   a job of fresh ranks: memory
                   |
                   v   keep
benchmarks/history/gains.json               "unet-512": commit, time, software, machine, rows
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gains.networks import NETWORKS
from benchmarks.results.run import ROOT, Run, machine_name, row_of
from benchmarks.row import Row

KEPT = ROOT / "benchmarks" / "history" / "gains.json"
OUTPUT = Path("bench-output")


@dataclass(frozen=True)
class Measured:
    """What is known of a network, and of which run."""

    commit: str
    time: str
    software: str
    machine: str
    rows: tuple[Row, ...]

    def row(self, what: str, baseline: str) -> Row | None:
        """A row, or None where this machine has too few cores for it."""
        return next((row for row in self.rows if (row.what, row.baseline) == (what, baseline)), None)


def read(path: Path = KEPT) -> dict[str, Measured]:
    """Networks and their numbers."""
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: Measured(**{**of, "rows": tuple(row_of(row) for row in of["rows"])})
        for name, of in told.items()
    }


def keep(output: Path = OUTPUT, path: Path = KEPT) -> None:
    """Replace the numbers of those networks that the folder has runs of."""
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in NETWORKS:
        runs = list(_runs(output, name))
        if runs:
            rows = [row.as_dict() for run in runs for row in run.rows]
            of = {key: getattr(runs[0], key) for key in ("commit", "time", "software")}
            told[name] = {**of, "machine": machine_name(), "rows": rows}
    path.write_text(json.dumps({name: told[name] for name in NETWORKS if name in told}, indent=1) + "\n")


def _runs(output: Path, name: str) -> Iterator[Run]:
    """The runs of a network, that of times first; ``SystemExit`` if they are of several commits."""
    times = output / f"gains-{name}.json"
    if not times.exists():
        return
    runs = [Run.read(each) for each in (times, *sorted(output.glob(f"gains-{name}-memory-*.json")))]
    if len({(run.commit, run.software) for run in runs}) > 1:
        raise SystemExit(f"{times} and its memory are of several commits: measure {name} as a whole")
    yield from runs
