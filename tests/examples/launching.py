"""Examples as a user runs them: MPI jobs of their own, and what their ranks end with."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.run_mpi import completed, mpiexec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Every rank says what it ends with, which mpiexec sums up in one number.
SHELL = '"$@"; status=$?; echo "status $status"; exit $status'
# One demo several times: most of the time of a small run is that of starting Python on all ranks.
IN_TURN = """
import sys
sys.path.insert(0, {folder!r})
import torch
import {demo} as demo
for number, (arguments, status, change) in enumerate({cases!r}):
    sys.argv[1:] = arguments
    # What a user's environment said, and the case before may have changed.
    torch.set_num_threads(1)
    exec(change)
    if demo.COMM.rank == 0:
        print("case", number, file=sys.stderr)
    found = demo.main()
    assert found == status, (arguments, found)
if demo.COMM.rank == 0:
    print("case over", file=sys.stderr)
demo.leave(status)
"""
# Wide: a path may be long.
SETTINGS = {"TTY_COMPATIBLE": "0", "COLUMNS": "300"}


def launch(ranks, script, *arguments):
    """Run a script on some ranks; return its exit status, lines on stdout, and lines on stderr."""
    if shutil.which(mpiexec(1)[0]) is None:
        pytest.skip("no mpiexec, neither beside this Python nor on the path")
    python = [sys.executable, "-m", "mpi4py", str(script), *map(str, arguments)]
    done = completed([*mpiexec(ranks), "sh", "-c", SHELL, "sh", *python], **SETTINGS)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def ended(status, ranks, script, *arguments):
    """Lines on stdout, and lines on stderr, of a script that all ranks end with this status."""
    outcome = launch(ranks, script, *arguments)
    assert_all_ranks_end_with(status, ranks, outcome)
    return outcome[1:]


class Case(NamedTuple):
    """Arguments of a demo, its exit status, and what is changed in the module ``demo`` before."""

    arguments: Sequence[object]
    status: int = 0
    change: str = ""


def launch_in_turn(ranks, demo, cases, folder):
    """Run a demo once for each of the cases, in one job that ends with the status of the last.

    Its outcome, and the lines on stderr by case.
    """
    listed = [([*map(str, case.arguments)], case.status, case.change) for case in cases]
    script = folder / "in_turn.py"
    script.write_text(IN_TURN.format(folder=str(demo.parent), demo=demo.stem, cases=listed))
    outcome = launch(ranks, script)
    assert_all_ranks_end_with(cases[-1].status, ranks, outcome)
    # After the last, a launcher may have words of its own.
    before, *told, _ = "\n".join(["", *outcome[2]]).split("\ncase ")
    assert not before and len(told) == len(cases), outcome[2]
    return outcome, [lines.splitlines()[1:] for lines in told]


def assert_mistakes_are_told_once(demo, messages, told):
    """Each message is one line behind the name of the demo, and nothing else is said."""
    for message, lines in zip(messages, told, strict=True):
        assert len(lines) == 1 and lines[0].startswith(f"{demo.name}: ") and message in lines[0], lines


@functools.cache
def launcher_is_hydra():
    return "HYDRA" in completed([mpiexec(1)[0], "--version"]).stdout


def assert_all_ranks_end_with(status, ranks, outcome):
    code, stdout, _ = outcome
    assert code == status
    said = [line for line in stdout if line.startswith("status ")]
    assert set(said) == {f"status {status}"}
    # When one rank ends with a status, Open MPI's launcher ends the others, perhaps before they said theirs.
    assert len(said) == ranks or (status and not launcher_is_hydra())
