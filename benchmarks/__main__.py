"""Run benchmarks: ``mpiexec -n 2 python -m mpi4py -m benchmarks [name ...]``."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import collectives, conv, layers, planning, rma, split, training
from benchmarks.measure import COMM, Row
from distdl_rma import Machine

SUITES: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "rma": rma.rows,
    "collectives": collectives.rows,
    "conv": conv.rows,
    "layers": layers.rows,
    "training": training.rows,
    "split": split.rows,
    "planning": planning.rows,
}
# Not among those that run if none is named: for more ranks than cores, and for ranks that did nothing before.
OTHERS = {"gloo": collectives.gloo_rows, "setup": layers.setup_rows, "memory": split.memory_rows}
RESULTS = Path("bench-output/results.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES, *OTHERS], help="all if none is named")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with Machine(COMM) as machine:
        rows = [row for name in options.suites or SUITES for row in shown((SUITES | OTHERS)[name](machine))]
    if COMM.rank == 0:
        report(rows, options.output)


def shown(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        if COMM.rank == 0:
            Console(stderr=True).print(f"{row.what}: {row.ratio:.2f}", style="dim", highlight=False)
        yield row


def report(rows: list[Row], output: Path) -> None:
    where = f"{COMM.size} ranks on {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    table = Table("what", "against", "ratio", "target", "ours", "baseline", title=where)
    for row in rows:
        target = "" if row.target is None else f"<= {row.target:g}"
        met = row.target is None or row.ratio <= row.target
        table.add_row(
            row.what,
            row.baseline,
            f"{row.ratio:.2f}" if met else f"[bold red]{row.ratio:.2f}",
            target,
            f"{row.ours_us:.1f} ± {row.ours_spread_us:.1f} {row.unit}",
            f"{row.baseline_us:.1f} ± {row.baseline_spread_us:.1f} {row.unit}",
        )
    Console(width=160).print(table)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"where": where, "rows": [row.as_dict() for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
