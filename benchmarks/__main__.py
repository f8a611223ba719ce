"""Run benchmarks: ``mpiexec -n 2 python -m mpi4py -m benchmarks [name ...]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import (
    by_hand,
    checkpoints,
    collectives,
    compiled,
    conv,
    data,
    functions,
    layers,
    models,
    planning,
    predict,
    process_group,
    rma,
    spill,
    split,
    split_layers,
    threads,
    training,
)
from benchmarks.gains.rows import ROWS as GAINS
from benchmarks.measure import COMM, Row
from benchmarks.results.run import Run, machine_name
from distdl_rma import Machine

Suite = Callable[[Machine], Iterator[Row]]
SUITES: dict[str, Suite] = {
    "rma": rma.rows,
    "collectives": collectives.rows,
    "conv": conv.rows,
    "layers": layers.rows,
    "training": training.rows,
    "checkpoints": checkpoints.rows,
    "split": split.rows,
    "split_layers": split_layers.rows,
    "functions": functions.rows,
    "models": models.rows,
    "captured": compiled.rows,
    "process_group": process_group.rows,
    "by_hand": by_hand.rows,
    "planning": planning.rows,
    "spill": spill.rows,
    "threads": threads.rows,
}
# Not among those that run if none is named: for more ranks than cores, and for ranks that did nothing before.
OTHERS: dict[str, Suite] = {
    "gloo": collectives.gloo_rows,
    "setup": layers.setup_rows,
    # Files of gigabytes.
    "data": data.rows,
    # In one process, of seconds.
    "predict": predict.rows,
    **models.MEMORY_ROWS,
    # A network in a job.
    **GAINS,
}
RESULTS = Path("bench-output/results.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES, *OTHERS], help="all if none is named")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    run = Run.now(COMM.size)
    with Machine(COMM) as machine:
        for name in options.suites or SUITES:
            for row in shown((SUITES | OTHERS)[name](machine)):
                run = replace(run, rows=(*run.rows, row))
            # What was measured stays, whatever becomes of the next suite.
            if COMM.rank == 0:
                run.write(options.output)
    if COMM.rank == 0:
        report(run)


def shown(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        if COMM.rank == 0:
            Console(stderr=True).print(f"{row.what}: {row.ratio:.2f}", style="dim", highlight=False)
        yield row


def report(run: Run) -> None:
    where = f"{run.ranks} ranks on {machine_name()}, {run.software}, commit {run.commit}"
    table = Table("what", "against", "ratio", "target", "ours", "baseline", title=where)
    for row in run.rows:
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


if __name__ == "__main__":
    main()
