"""Measure what the model takes, or write what it predicts: ``python -m benchmarks.scaling measure | docs``.

``measure`` is started by mpiexec on two ranks of one node, or by ``tests/two_hosts.py`` on two hosts; it adds
what is missing in ``measured.json`` beside this file. ``docs`` writes the tables and the figure of the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PARTS = ["wires", "calls", "tiny", "compute", "shares", "steps"]
MEASURED = Path(__file__).with_name("measured.json")
DOCS = Path(__file__).parents[2] / "docs"
PAGE, IMAGE = DOCS / "scaling.md", DOCS / "images" / "scaling.svg"


def measure(parts: list[str], cable: str, repetitions: int) -> None:
    """Measure parts of the constants so many times, and keep them; collective."""
    from benchmarks.measure import COMM
    from benchmarks.results.run import Run, machine_name
    from benchmarks.scaling import constants
    from benchmarks.scaling.cases import CASES
    from distdl_rma import Machine

    torch.set_num_threads(1)
    run = Run.now(COMM.size)
    with Machine(COMM) as machine:
        hosts = len(machine.segments.segment.nodes)
        where = f"{hosts} hosts, {cable}" if hosts > 1 else "one node"
        kinds: dict[str, Callable[[], dict[str, Any]]] = {
            "wires": lambda: {where: constants.wire(machine)},
            "calls": lambda: constants.calls(machine, repetitions),
            "tiny": lambda: {case.name: constants.tiny_step(machine, case, repetitions) for case in CASES},
            "compute": lambda: {case.name: constants.compute(case, repetitions) for case in CASES},
            "shares": lambda: {case.name: constants.shares(case, repetitions) for case in CASES},
            "steps": lambda: {
                f"{case.name}, {machine.size} ranks, {where}": constants.step(machine, case, repetitions)
                for case in CASES
            },
        }
        for part in parts:
            found = kinds[part]()
            if machine.rank == 0:
                keep(part, found, [run.commit, run.time[:10], run.software, machine_name()])


def keep(part: str, found: dict[str, Any], of: list[str]) -> None:
    """Add what was found to the file, and of which commit it is."""
    known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    known[part] = {**known.get(part, {}), **found}
    known.setdefault("of", {})[part] = of
    MEASURED.write_text(json.dumps(rounded(known), indent=1) + "\n")
    print(part, json.dumps(rounded(found)), flush=True)


def rounded(value: Any) -> Any:
    """The same with numbers of four digits, which is more than they are good for."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def document() -> None:
    """Write the tables and the figure."""
    PAGE.write_text(documented(PAGE.read_text()))
    IMAGE.write_text(picture())


def documented(text: str) -> str:
    """The page as the constants have it."""
    from benchmarks.scaling import page
    from benchmarks.scaling.model import Constants

    of = json.loads(MEASURED.read_text())["of"]
    return page.written(text, Constants.read(MEASURED), page.said_of(of))


def picture() -> str:
    """The figure as the constants have it."""
    from benchmarks.results.picture import svg
    from benchmarks.scaling.figure import drawn
    from benchmarks.scaling.model import Constants

    return svg(lambda: drawn(Constants.read(MEASURED)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=__doc__)
    parser.add_argument("what", choices=("measure", "docs"))
    parser.add_argument(
        "--parts", nargs="*", default=["wires", "calls", "tiny", "compute", "shares", "steps"]
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--cable", default="no limit", help="what the hosts' cable is called")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.parts, options.cable, options.repetitions)
    else:
        document()
    return 0


if __name__ == "__main__":
    sys.exit(main())
