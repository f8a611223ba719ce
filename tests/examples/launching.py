"""Examples as a user runs them: MPI jobs of their own, and what their ranks end with."""

from __future__ import annotations

import functools
import shutil
import sys

import pytest

from tests.run_mpi import completed, mpiexec

# Every rank says what it ends with, which mpiexec sums up in one number.
SHELL = '"$@"; status=$?; echo "status $status"; exit $status'
# Several mistakes one after the other, each of which is told before anything is computed.
MISTAKES = """
import sys
sys.path.insert(0, {folder!r})
import {demo}
for number, arguments in enumerate({cases!r}):
    sys.argv[1:] = arguments
    if {demo}.COMM.rank == 0:
        print("case", number, file=sys.stderr)
    assert {demo}.main() == 2, arguments
{demo}.leave(2)
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


def launch_with_mistakes(ranks, demo, cases, folder):
    """Run a demo once with each of these arguments, in one job; its outcome, and lines on stderr by case."""
    script = folder / "mistakes.py"
    script.write_text(MISTAKES.format(folder=str(demo.parent), demo=demo.stem, cases=cases))
    outcome = launch(ranks, script)
    _, *told = "\n".join(["", *outcome[2]]).split("\ncase ")
    return outcome, [lines.splitlines()[1:] for lines in told]


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
