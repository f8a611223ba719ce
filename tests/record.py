"""What a run of the tests consisted of, and how long its parts took: ``tests/record.py show`` or ``page``.

Each run of pytest that finds ``TEST_RECORD`` in its environment adds a line to the file of that name.
``show`` sums these up in a line, as the end of ``make test`` with ``--rest``; ``page`` writes the table of
docs/contributing.md, after a run of everything on a machine with nobody else.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FILE_VARIABLE, NAME_VARIABLE = "TEST_RECORD", "TEST_PART"
PAGE = Path(__file__).parents[1] / "docs" / "contributing.md"
TABLE = re.compile(r"(?<=\| part \| tests \| seconds \|\n\|---\|---:\|---:\|\n)(\|.*\n)*")


class Part(NamedTuple):
    """One run of pytest: what it ran on, how many tests, how many it left to other days, its seconds."""

    name: str
    ran: int
    left: int
    seconds: float

    def add(self) -> None:
        """Add this part to the record, if one is wanted."""
        if path := os.environ.get(FILE_VARIABLE):
            named = self._replace(name=os.environ.get(NAME_VARIABLE, "") + self.name)
            Path(path).parent.mkdir(exist_ok=True)
            with Path(path).open("a") as file:
                file.write(json.dumps(named) + "\n")


def read(path: Path) -> list[Part]:
    """The parts of a record, those of one name as one."""
    parts: dict[str, Part] = {}
    for line in path.read_text().splitlines():
        part = Part(*json.loads(line))
        before = parts.get(part.name, Part(part.name, 0, 0, 0.0))
        sums = (a + b for a, b in zip(before[1:], part[1:], strict=True))
        parts[part.name] = Part(part.name, *sums)  # type: ignore[arg-type]
    return [*parts.values()]


def summary(parts: Sequence[Part], rest: bool = False) -> str:
    """What ran, what waits for another day, and with ``rest`` which commands have other tests."""
    ran = ", ".join(f"{part.ran:,} {part.name}" for part in parts)
    left = sum(part.left for part in parts)
    waits = (
        f" {left:,} runs wait for another day: DAY=20779 has those of day 20779, DAY= all." if left else ""
    )
    others = (
        " Others: make test-rest has tests that start jobs, MPI tests on 1 and 4 ranks, and those that need"
        " processes; test-openmpi and test-hosts those on another MPI and on two hosts; test-all everything."
    )
    return f"Tests that ran: {ran}.{waits}{others * rest}"


def table(parts: Sequence[Part]) -> str:
    """Rows for the page."""
    return "".join(f"| {part.name} | {part.ran:,} | {part.seconds:.0f} |\n" for part in parts)


def main(command: str, path: str, rest: str = "") -> int:
    """Show a record or write it into the page."""
    parts = read(Path(path))
    if command == "page":
        PAGE.write_text(TABLE.sub(lambda _: table(parts), PAGE.read_text()))
    else:
        print(summary(parts, bool(rest)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
