"""Search longer for a configuration in which a distributed layer differs from torch's.

``mpiexec -n 4 python -m mpi4py -m tests.fuzz [family ...] --seconds 60 --first 1000``: every seed is one
random configuration, the same on all ranks; the first that fails ends the search with its family and seed.
Without ``--first`` every day begins with a seed of its own.
"""

from __future__ import annotations

import argparse
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from mpi4py import MPI

from distdl_rma import MPIPartition, Partition

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
# Seeds between two machines: what layers leave behind is given back.
PER_MACHINE = 100
# More than a search comes to in a day.
SEEDS_PER_DAY = 100_000
SECONDS_PER_DAY = 86400

Check = Callable[[Partition, MPI.Intracomm, int], None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="Random search against the torch layers.")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all if none is named")
    parser.add_argument("--seconds", type=float, default=60.0, help="per family")
    parser.add_argument("--first", type=int, help="first seed; one of today's if none is given")
    options = parser.parse_args()
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; families are {', '.join(FAMILIES)}")
    today = int(time.time() // SECONDS_PER_DAY)
    # That of one rank counts: the others may see midnight first.
    first = MPI.COMM_WORLD.bcast(today * SEEDS_PER_DAY if options.first is None else options.first)
    warnings.simplefilter("ignore")
    for family in options.families or FAMILIES:
        check: Check | None = getattr(import_module(f"tests.fuzz.{family}"), "check", None)
        if check is None:
            continue
        count = search(family, check, first, options.seconds)
        if MPI.COMM_WORLD.rank == 0:
            size = MPI.COMM_WORLD.size
            told = f"{family}: {count} configurations on {size} ranks, from seed {first}, no difference"
            print(told, flush=True)


def search(family: str, check: Check, first: int, seconds: float) -> int:
    """Number of seeds that passed within a time."""
    comm = MPI.COMM_WORLD
    end, begin = time.monotonic() + seconds, first
    while comm.bcast(time.monotonic() < end):
        P_world = MPIPartition(comm)
        for seed in range(begin, begin + PER_MACHINE):
            try:
                check(P_world, comm, seed)
            except BaseException:
                traceback.print_exc()
                print(f"rank {comm.rank}: {family} failed with seed {seed} on {comm.size} ranks", flush=True)
                comm.Abort(1)
        begin += PER_MACHINE
        P_world.deactivate()
    return begin - first


if __name__ == "__main__":
    main()
