"""History, page and picture of measured rows: ``python -m benchmarks.results [collect | compare | docs]``.

``collect`` adds the runs in ``bench-output/`` to the history of this kind of machine, writes them as Markdown
and as a picture beside them, and says what has become slower. ``compare`` says it again, with an exit status
of 1 if anything has. ``docs`` writes the newest rows of the history into the documentation, those of the
machine that it shows already.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.results import history, page, picture
from benchmarks.results.history import Entry
from benchmarks.results.run import ROOT, machine_name, runs_in

OUTPUT = Path("bench-output")
PAGE, IMAGE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images" / "benchmarks.svg"
COMMAND = "python -m benchmarks.results docs"
# Sections of the page and patterns of their rows; the first that fits counts. Gains have pages of their own.
GAINS = "gains"
FUNCTIONS = "functions"
# Sections whose rows are measured against several baselines.
SIDE_BY_SIDE = "models", "torch"
SECTIONS = {
    GAINS: " scaling, |^peak memory of a rank of .*, unmodified",
    FUNCTIONS: "^function ",
    "jobs": "shard|^an epoch of|^checkpoint of|saved tensors on disk| slabs$| classes$",
    "models": "^model ",
    "two hosts": "two hosts",
    "torch": "^(torch's|DDP|FSDP2) ",
    "split": "split tensors|U-Net|dispatch",
    "one-sided": "put_notify|notifications|segment of|Allreduce|fetch_add|barrier",
    "layers": "",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.results", description=__doc__)
    parser.add_argument("what", choices=("collect", "compare", "docs"), nargs="?", default="collect")
    parser.add_argument(
        "--machine", help="whose history, this machine's or that of the documentation if not said"
    )
    parser.add_argument("--since", metavar="COMMIT", help="compare with the rows of this commit")
    options = parser.parse_args()
    if options.what == "docs":
        text = PAGE.read_text()
        machine = options.machine or shown_machine(text)
        entries = history.read(file_of(machine))
        PAGE.write_text(documented(text, entries, machine))
        IMAGE.write_text(drawn(entries, machine))
        return 0
    machine = options.machine or machine_name()
    file = file_of(machine)
    if options.what == "collect":
        collect(file, OUTPUT)
    entries = history.read(file)
    worse = history.slower(entries, options.since)
    for row in worse:
        print(f"slower: {row}")
    print(f"{len(worse)} rows are slower by more than they vary, on {machine}")
    return 1 if worse and options.what == "compare" else 0


def file_of(machine: str) -> Path:
    """The history of a kind of machine."""
    return history.FOLDER / f"{machine}.csv"


def shown_machine(text: str) -> str:
    """The kind of machine whose rows a page shows; ``ValueError`` if it does not say."""
    found = re.search(r"^Measured on ([\w.-]+): ", text, re.MULTILINE)
    if found is None:
        raise ValueError("the page does not say what it was measured on: name a machine")
    return found[1]


def collect(file: Path, output: Path) -> None:
    """Add the runs of a folder to a machine's file, and show their rows in the folder."""
    runs = list(runs_in(output))
    if not runs:
        sys.exit(f"no results in {output}: run make bench first")
    for run in runs:
        count = history.append(file, history.entries_of(run))
        print(f"{count} of {len(run.rows)} rows of {run.time} are new in {file}")
    shown = list(history.newest([e for run in runs for e in history.entries_of(run)]).values())
    parts = (
        "# Benchmarks",
        f"{file.stem}, {page.where(shown)}",
        "![ratios](benchmarks.svg)",
        page.table(shown),
    )
    (output / "benchmarks.md").write_text("\n\n".join(parts) + "\n")
    before = history.newest([e for e in history.read(file) if e.time < runs[0].time])
    (output / "benchmarks.svg").write_text(
        picture.svg(lambda: picture.ratios(pictured(shown), before, file.stem))
    )


def documented(text: str, entries: list[Entry], machine: str) -> str:
    """The page with the newest rows of a history."""
    shown = list(history.newest(entries).values())
    text = page.rewritten(text, "run", COMMAND, f"Measured on {machine}: {page.where(shown)}.")
    for name in SECTIONS:
        if name != GAINS:
            rows = [entry for entry in shown if section_of(entry.row.what) == name]
            write = page.side_by_side if name in SIDE_BY_SIDE else page.table
            content = page.functions(rows) if name == FUNCTIONS else write(rows)
            text = page.rewritten(text, name, COMMAND, content)
    return text


def section_of(what: str) -> str:
    """The section of the page that has a row."""
    return next(name for name, pattern in SECTIONS.items() if re.search(pattern, what))


def drawn(entries: list[Entry], machine: str) -> str:
    """The picture of the newest rows of a history, with the ones before."""
    latest = history.newest(entries)
    before = history.newest([e for e in entries if e.time < latest[e.key].time])
    return picture.svg(lambda: picture.ratios(pictured(latest.values()), before, machine))


def pictured(entries: Iterable[Entry]) -> list[Entry]:
    """The rows of the picture; those of functions are too many for it, gains have a table."""
    return [entry for entry in entries if section_of(entry.row.what) not in (FUNCTIONS, GAINS)]


if __name__ == "__main__":
    sys.exit(main())
