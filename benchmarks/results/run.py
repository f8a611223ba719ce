"""One run of benchmarks: what was measured, of which commit, when and by what."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.row import Row

ROOT = Path(__file__).parents[2]
# What a run writes itself does not make its commit another one.
WRITTEN = (
    ":!benchmarks/history",
    ":!README.md",
    ":!docs/benchmarks.md",
    ":!docs/scaling.md",
    ":!docs/convert.md",
    ":!docs/images",
)


@dataclass(frozen=True)
class Run:
    """Rows that one job measured.

    ``commit`` ends in ``+`` where tracked files differed from it; ``time`` is when the run began, in UTC;
    ``software`` names versions.
    """

    commit: str
    time: str
    software: str
    ranks: int
    rows: tuple[Row, ...]

    @classmethod
    def now(cls, ranks: int) -> Run:
        """A run that begins, of the commit that is checked out and the versions that are installed."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(checked_out(), now, _software(), ranks, ())

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {name: getattr(self, name) for name in ("commit", "time", "software", "ranks")}
        rows = [row.as_dict() for row in self.rows]
        path.write_text(json.dumps({**told, "rows": rows}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read what :meth:`write` wrote."""
        told = json.loads(path.read_text())
        return cls(**{**told, "rows": tuple(row_of(row) for row in told["rows"])})


def row_of(told: dict[str, Any]) -> Row:
    """A row from its dictionary, which may say more."""
    return Row(**{field.name: told[field.name] for field in fields(Row)})


def checked_out(folder: Path = ROOT) -> str:
    """The commit of the working tree; ``unknown`` where there is no git to ask."""
    try:
        commit = _git(folder, "rev-parse", "--short=10", "HEAD").strip()
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    ).stdout


def machine_name() -> str:
    """A name for machines like this one: the model of the processor and the number of cores."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = re.findall(r"^model name\s*: (.*)$", told, re.MULTILINE)
    model = models[0] if models else platform.processor() or platform.machine()
    return slug(f"{model} {os.cpu_count()} cores")


def slug(text: str) -> str:
    """A text as part of the name of a file."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _software() -> str:
    import torch
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"torch {torch.__version__}, {name} {'.'.join(map(str, version))}"


def runs_in(folder: Path) -> Iterator[Run]:
    """The runs whose files lie in a folder, the oldest first; other files are passed over."""
    found = []
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text())
        if isinstance(told, dict) and {"commit", "rows"} <= told.keys():
            found.append(Run.read(path))
    yield from sorted(found, key=lambda run: run.time)
