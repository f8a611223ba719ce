"""The command ``distdl_rma``, which is ``python -m distdl_rma`` as well."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from distdl_rma import __version__
from distdl_rma.doctor.command import doctor
from distdl_rma.jobs.out_of_core import command

DAY = 24 * 60 * 60


def seconds(text: str) -> float:
    """Seconds of a wait; ``ArgumentTypeError`` for others than operating systems wait for."""
    value = float(text)
    if not 0 <= value <= DAY:
        raise argparse.ArgumentTypeError(f"a wait takes from 0 to {DAY} seconds, not {text}")
    return value


def main(arguments: Sequence[str]) -> int:
    """Run the command that the arguments name; return its exit status."""
    parser = argparse.ArgumentParser(prog="distdl_rma", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    options = commands.add_parser(
        "doctor",
        help="check whether the installation and the job work",
        description="Check whether the installation and the job work, and say what to do where they do not."
        " Run it alone, or as the job is started: mpiexec -n 4 distdl_rma doctor."
        " The exit status is 1 if an error is found.",
        allow_abbrev=False,
    )
    options.add_argument("--json", metavar="FILE", help="write the result to a file, - for standard output")
    options.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="SECONDS", help="longest wait of a rank (60)"
    )
    command.add_options(
        commands.add_parser(
            "predict",
            help="predict for a file that does not fit into memory",
            description="Write what a model makes of a file, slab by slab and exact, by all ranks of a job.",
            allow_abbrev=False,
        )
    )
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return command.run(chosen) if chosen.command == "predict" else doctor(chosen.json, chosen.timeout)


def script() -> NoReturn:
    """The console script: this process becomes ``python -m mpi4py -m distdl_rma`` with its arguments.

    So an error of one rank ends the whole job, by the means that programs of users have, and modules of the
    present folder are found.
    """
    os.execv(sys.executable, [sys.executable, "-m", "mpi4py", "-m", "distdl_rma", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
