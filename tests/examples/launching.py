"""Examples as a user runs them: MPI jobs of their own, and what their ranks end with."""

from __future__ import annotations

import functools
import shutil
import sys

import pytest

from tests.run_mpi import completed, mpiexec

# Every rank says what it ends with, which mpiexec sums up in one number.
SHELL = '"$@"; status=$?; echo "status $status"; exit $status'
SETTINGS = {"TTY_COMPATIBLE": "0", "COLUMNS": "100"}


def launch(ranks, script, *arguments):
    """Run a script on some ranks; return its exit status, lines on stdout, and lines on stderr."""
    if shutil.which(mpiexec(1)[0]) is None:
        pytest.skip("no mpiexec, neither beside this Python nor on the path")
    python = [sys.executable, "-m", "mpi4py", str(script), *map(str, arguments)]
    done = completed([*mpiexec(ranks), "sh", "-c", SHELL, "sh", *python], **SETTINGS)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


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
