"""Rows of earlier runs, in a file per kind of machine, and which of them have become slower."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results.run import Run, row_of
from benchmarks.row import Row

FOLDER = Path(__file__).parents[1] / "history"
# Medians of two quiet runs of the same code differ by this much even where each varies less within itself.
TOLERANCE = 0.02
NUMBERS = ("ours_us", "ours_spread_us", "baseline_us", "baseline_spread_us")
COLUMNS = ("commit", "time", "software", "ranks", "what", "baseline", *NUMBERS, "unit", "target")


@dataclass(frozen=True)
class Entry:
    """A row with the run that it is of."""

    commit: str
    time: str
    software: str
    ranks: int
    row: Row

    @property
    def key(self) -> tuple[str, str]:
        """What entries of different runs have in common."""
        return self.row.what, self.row.baseline

    @property
    def spread(self) -> float:
        """How much the ratio varies: the relative spreads of both variants, taken for independent."""
        row = self.row
        mine = row.ours_spread_us / row.baseline_us
        return math.hypot(mine, row.ratio * row.baseline_spread_us / row.baseline_us)


@dataclass(frozen=True)
class Slower:
    """A row whose ratio has grown by more than it varies."""

    before: Entry
    now: Entry

    def __str__(self) -> str:
        row, before = self.now.row, self.before
        then = f"{before.row.ratio:.2f} ± {before.spread:.2f} at {before.commit}"
        return f"{row.what}, against {row.baseline}: {then}, now {row.ratio:.2f} ± {self.now.spread:.2f}"


def entries_of(run: Run) -> list[Entry]:
    """The rows of a run."""
    return [Entry(run.commit, run.time, run.software, run.ranks, row) for row in run.rows]


def read(path: Path) -> list[Entry]:
    """The entries of a machine, the oldest first; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_entry(line) for line in csv.DictReader(file)]


def _entry(line: dict[str, Any]) -> Entry:
    row = row_of(
        {
            **line,
            **{name: float(line[name]) for name in NUMBERS},
            "target": float(line["target"]) if line["target"] else None,
        }
    )
    return Entry(line["commit"], line["time"], line["software"], int(line["ranks"]), row)


def append(path: Path, entries: Iterable[Entry]) -> int:
    """Add to a machine's file what is not yet there; return how many entries."""
    known = {(entry.time, *entry.key) for entry in read(path)}
    new = [entry for entry in entries if (entry.time, *entry.key) not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not begun:
            writer.writeheader()
        for entry in new:
            row = asdict(entry.row)
            told = {name: getattr(entry, name) for name in COLUMNS[:4]}
            writer.writerow({**told, **row, **{name: f"{row[name]:.6g}" for name in NUMBERS}})
    return len(new)


def newest(entries: Sequence[Entry]) -> dict[tuple[str, str], Entry]:
    """Of each row the last entry."""
    return {entry.key: entry for entry in entries}


def slower(entries: Sequence[Entry], since: str | None = None) -> list[Slower]:
    """Rows of the newest commit whose ratio is above the one before by more than both vary.

    Parameters
    ----------
    entries
        Those of one machine, the oldest first.
    since
        The commit to compare with; the entry before the newest, of whatever commit, if None.
    """
    if not entries:
        return []
    found = []
    for key, now in newest(entries).items():
        earlier = [
            entry
            for entry in entries
            if entry.key == key and entry.time < now.time and since in (None, entry.commit)
        ]
        if now.commit == entries[-1].commit and earlier and _is_slower(earlier[-1], now):
            found.append(Slower(earlier[-1], now))
    return found


def _is_slower(before: Entry, now: Entry) -> bool:
    allowed = max(before.spread + now.spread, TOLERANCE * before.row.ratio)
    return now.row.ratio - before.row.ratio > allowed
