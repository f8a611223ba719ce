"""The demo of a job that is killed, small, as a user runs it; it starts MPI jobs of its own."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
import skimage.io

from tests.examples.launching import EXAMPLES
from tests.run_mpi import completed, mpiexec

pytestmark = pytest.mark.slow

DEMO = EXAMPLES / "volumes.py"
SMALL = "--size", "40", "--crop", "12", "--steps", "40", "--every", "3", "--kill", "8", "--memory", "0"


# Half a minute: the example itself starts three jobs, one after another.
def test_a_job_that_is_killed_goes_on_with_the_same_losses_on_fewer_ranks(tmp_path):
    folder = tmp_path / "out"
    launcher = shlex.join(mpiexec(1)[:-2])
    done = completed([sys.executable, str(DEMO), *SMALL, "--output", str(folder), "--mpiexec", launcher])
    assert done.returncode == 0, done.stdout + done.stderr
    last = int(re.search(r"killed a rank of 3 by SIGKILL after step (\d+);", done.stdout)[1])
    first = int(re.search(r"the 2 ranks began with step (\d+);", done.stdout)[1])
    # A checkpoint was complete, of one of the last steps: two are under way at most.
    assert last >= 8
    assert last - 9 <= first <= last + 1
    assert first % 3 == 1 < first
    assert skimage.io.imread(folder / "volumes.png").size


def test_a_kill_without_a_checkpoint_before_it_is_refused(tmp_path):
    done = completed([sys.executable, str(DEMO), "--kill", "3", "--output", str(tmp_path / "out")])
    assert done.returncode == 2
    assert "at least one checkpoint before the kill" in done.stderr
    assert not (tmp_path / "out").exists()
