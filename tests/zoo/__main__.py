"""Try public models, and write docs/models.md: ``python -m tests.zoo [name ...]``.

They run on two ranks, one after the other, each under a time limit. With names of packages or models, or of
both, ``monai/UNet``, only their rows are written anew. Packages that are not installed keep their rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence

from tests.run_mpi import completed, mpiexec
from tests.zoo.page import PAGE, read, written
from tests.zoo.zoo import Found, Tried, compared, models, one_line

RANKS = 2
# In one job, which ends with the first model that is not exact.
TOGETHER = 8
SIGN = "found: "


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.zoo", description="Public models beside themselves alone.")
    parser.add_argument("names", nargs="*", help="of packages or models; all if none is named")
    parser.add_argument("--limit", type=int, default=200, help="seconds for each model")
    parser.add_argument("--here", action="store_true", help="in this job, and print what is found")
    options = parser.parse_args()
    names = {*options.names}
    chosen = [
        model
        for model in models()
        if not names or names.intersection((model.name, model.package, model.path))
    ]
    if options.here:
        here(chosen, options.limit)
        return
    left = [model for model in chosen if importlib.util.find_spec(model.module.partition(".")[0])]
    while left:
        package = left[0].package
        together = [model for model in left[:TOGETHER] if model.package == package]
        for path, found in tried(together, options.limit):
            print(path, *found, sep=": ", flush=True)
            PAGE.write_text(written(read() | {path: found}))
            left = [model for model in left if model.path != path]


def here(chosen: Sequence[Tried], limit: int) -> None:
    """Compare models in this job, up to the first that is not exact; its first rank prints what is found."""
    from mpi4py import MPI

    warnings.simplefilter("ignore")
    for model in chosen:
        signal.alarm(limit)
        found = compared(model)
        if MPI.COMM_WORLD.rank == 0:
            print(f"\n{SIGN}{json.dumps([model.path, *found])}", flush=True)
        if found.outcome != "exact":
            return


def tried(chosen: Sequence[Tried], limit: int) -> Iterator[tuple[str, Found]]:
    """What is found of models in a job of their own, up to the first that is not exact."""
    command = [*mpiexec(RANKS), sys.executable, "-m", "mpi4py", "-m", "tests.zoo", "--limit", str(limit)]
    small = {"DISTDL_RMA_TIMEOUT": "60", "DISTDL_RMA_SEGMENT_SIZE": "1GiB"}
    job = completed([*command, "--here", *(model.path for model in chosen)], limit * len(chosen), **small)
    found, left = Found("exact", ""), [model.path for model in chosen]
    for line in job.stdout.splitlines():
        if line.startswith(SIGN):
            # Another rank may have written behind it.
            (path, *said), _ = json.JSONDecoder().raw_decode(line.removeprefix(SIGN))
            found = Found(*said)
            left.remove(path)
            yield path, found
    if job.returncode in (signal.SIGALRM, 128 + signal.SIGALRM):
        yield left[0], Found("fails", f"not over after {limit} s")
    elif job.returncode and found.outcome == "exact":
        last = [line for line in job.stderr.splitlines() if line.strip()][-1:]
        yield left[0], Found("fails", one_line(f"exit status {job.returncode}: {' '.join(last)}"))


if __name__ == "__main__":
    main()
