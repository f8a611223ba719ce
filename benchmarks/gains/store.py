"""The numbers of each network in a file: what one run of one commit measured, replaced as a whole.

bench-output/gains-unet-512.json            a job: steps of all variants, in turn
bench-output/gains-unet-512-memory-2.json   a job of fresh ranks: memory
                   |
                   v   keep
benchmarks/history/gains.json               "unet-512": commit, time, software, machine, rows
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gains.networks import NETWORKS
from benchmarks.results.run import ROOT, Run, machine_name, row_of
from benchmarks.row import Row

# Of the trainings.
RANKS = 1, 2, 4
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


@dataclass(frozen=True)
class Training:
    """A training of ``examples/scaffold.py`` on some ranks, and how far it is from that of one rank."""

    ranks: int
    seconds: float
    epochs: int
    dice: float
    losses: float
    scores: float


@dataclass(frozen=True)
class Kept:
    """All that the file has."""

    networks: dict[str, Measured]
    trainings: tuple[Training, ...]
    cores: int

    @classmethod
    def read(cls, path: Path = KEPT) -> Kept:
        """What :func:`keep` wrote."""
        told = json.loads(path.read_text())
        networks = {
            name: Measured(**{**of, "rows": tuple(row_of(row) for row in of["rows"])})
            for name, of in told["networks"].items()
        }
        return cls(networks, tuple(Training(**each) for each in told["trainings"]), told["cores"])


def keep(output: Path = OUTPUT, path: Path = KEPT) -> None:
    """Replace the numbers of those networks, and of the trainings, that the folder has runs of."""
    told: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"networks": {}, "trainings": []}
    )
    for name in NETWORKS:
        runs = list(_runs(output, name))
        if runs:
            rows = [row.as_dict() for run in runs for row in run.rows]
            of = {key: getattr(runs[0], key) for key in ("commit", "time", "software")}
            told["networks"][name] = {**of, "machine": machine_name(), "rows": rows}
    told["networks"] = {name: told["networks"][name] for name in NETWORKS if name in told["networks"]}
    told["trainings"] = [asdict(each) for each in _trainings(output)] or told["trainings"]
    told["cores"] = os.cpu_count()
    path.write_text(json.dumps(told, indent=1) + "\n")


def _runs(output: Path, name: str) -> Iterator[Run]:
    """The runs of a network, that of times first; ``SystemExit`` if they are of several commits."""
    times = output / f"gains-{name}.json"
    if not times.exists():
        return
    runs = [Run.read(each) for each in (times, *sorted(output.glob(f"gains-{name}-memory-*.json")))]
    if len({(run.commit, run.software) for run in runs}) > 1:
        raise SystemExit(f"{times} and its memory are of several commits: measure {name} as a whole")
    yield from runs


def _trainings(output: Path) -> Iterator[Training]:
    """What the example logged, that of the fewest ranks first, which the others are compared with."""
    example, first = importlib.import_module("examples.scaffold"), None
    for size in RANKS:
        file = output / "scaffold" / f"{size}-ranks" / example.LOG
        if file.exists():
            log = json.loads(file.read_text())
            first = first or log
            losses, scores = (example.difference(log, first, key, None) for key in ("losses", "scores"))
            yield Training(size, log["seconds"], len(log["scores"]), log["scores"][-1], losses, scores)
