"""Search longer for a configuration in which a distributed layer differs from torch's.

``mpiexec -n 4 python -m mpi4py -m tests.fuzz [family ...] --seconds 60 --first 1000``: every seed is one
random configuration, the same on all ranks; the first that fails ends the search with its family and seed.
A search of programs goes on behind one that fails on all ranks, and fails at its end. Without ``--first``
every day begins with a seed of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from mpi4py import MPI

from distdl_rma import MPIPartition, Partition
from tests.fake_device import NAME, register
from tests.fuzz import layers, twins

# Those of layers, which are in one file, and the others by their files.
FILES = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - {"layers"}
FAMILIES = sorted({*layers.FAMILIES, *FILES})
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
    parser.add_argument(
        "--coverage", action="store_true", help="which functions were in no program, or not how"
    )
    parser.add_argument("--device", help="where layers compute: fake, or one of torch's")
    options = parser.parse_args()
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; families are {', '.join(FAMILIES)}")
    today = int(time.time() // SECONDS_PER_DAY)
    # That of one rank counts: the others may see midnight first.
    first = MPI.COMM_WORLD.bcast(today * SEEDS_PER_DAY if options.first is None else options.first)
    warnings.simplefilter("ignore")
    if options.device is not None:
        twins.PLACE = register() if options.device == NAME else torch.device(options.device)
    findings = 0
    for family in options.families or FAMILIES:
        of_layers = family in layers.FAMILIES
        module = layers if of_layers else import_module(f"tests.fuzz.{family}")
        check: Check | None = getattr(module, "check", None)
        if check is None:
            continue
        check = partial(check, family=family) if of_layers else check
        count, found = search(family, check, first, options.seconds, getattr(module, "COLLECTIVE", False))
        findings += found
        if MPI.COMM_WORLD.rank == 0:
            size = MPI.COMM_WORLD.size
            told = f"{found} findings" if found else "no difference"
            print(f"{family}: {count} configurations on {size} ranks, from seed {first}, {told}", flush=True)
            for function, times in getattr(module, "REFUSED", Counter()).most_common():
                print(f"    refused {times} times: {function}", flush=True)
            for line in getattr(module, "coverage", list)() if options.coverage else ():
                print(f"    {line}", flush=True)
    sys.exit(findings > 0)


def search(
    family: str, check: Check, first: int, seconds: float, collective: bool = False
) -> tuple[int, int]:
    """Number of seeds within a time, and of those that failed; ``collective``: on all ranks, if on one."""
    comm = MPI.COMM_WORLD
    end, begin, findings = time.monotonic() + seconds, first, 0
    # Of the machine that the search is on.
    here = comm
    P_world = MPIPartition(here)
    while comm.bcast(begin == first or time.monotonic() < end):
        try:
            check(P_world, comm, begin)
        except BaseException as error:
            ended = f"rank {comm.rank}: {family} failed with seed {begin} on {comm.size} ranks"
            if not (collective and isinstance(error, AssertionError)):
                traceback.print_exc()
                print(ended, flush=True)
                comm.Abort(1)
            if comm.rank == 0:
                where = "".join(traceback.format_tb(error.__cause__ and error.__cause__.__traceback__)[-2:])
                again = f"python -m tests.fuzz {family} --first {begin} --seconds 0"
                print(f"{where}{error}\n{ended}; {again}\n", flush=True)
            findings += 1
            # Ranks that went different ways cannot go on together.
            here = comm.Dup()
            P_world = MPIPartition(here)
        begin += 1
        if not (begin - first) % PER_MACHINE:
            P_world.deactivate()
            P_world = MPIPartition(here)
    P_world.deactivate()
    return begin - first, findings


if __name__ == "__main__":
    main()
