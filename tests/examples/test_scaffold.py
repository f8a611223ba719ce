"""The benchmark of procedural volumes, small, as a user runs it; it starts MPI jobs of its own."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.examples.launching import EXAMPLES
from tests.run_mpi import completed, mpiexec

pytestmark = pytest.mark.slow

DEMO = EXAMPLES / "scaffold.py"
SMALL = "--size", "8", "--volumes", "2", "--channels", "4", "--epochs", "2"


def test_losses_and_scores_are_those_of_one_rank_on_every_grid(tmp_path):
    launcher = shlex.join(mpiexec(1)[:-2])
    cut = "--grid", "DHW", "--ranks", "1", "3", "4", "--output", str(tmp_path), "--mpiexec", launcher
    done = completed([sys.executable, str(DEMO), *SMALL, *cut])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ranks", "1", "3", "4"]


def test_a_volume_that_cannot_be_halved_is_refused(tmp_path):
    done = completed([sys.executable, str(DEMO), "--size", "30", "--output", str(tmp_path / "out")])
    assert done.returncode == 2
    assert "--size 30 cannot be halved 2 times" in done.stderr
    assert not (tmp_path / "out").exists()
