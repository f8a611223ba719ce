"""What the documents of linear layers and convolutions print, in one job of the most ranks that one needs."""

import sys

import pytest

from tests.layers import printed_conv, printed_linear
from tests.run_mpi import completed, mpiexec

RANKS = 12
SECONDS = 300


@pytest.mark.timeout(SECONDS + 30)
def test_printed_examples_and_set_ups_equal_the_sequential_layers():
    # In one job: most of its time is that of starting so many ranks.
    printed = printed_linear, printed_conv
    script = "".join(f"exec({each.PROGRAM!r}, {{}})\n" for each in printed)
    command = [*mpiexec(RANKS), sys.executable, "-m", "mpi4py", "-c", script]
    done = completed(command, SECONDS, DISTDL_RMA_SEGMENT_SIZE="16MiB", DISTDL_RMA_TIMEOUT="60")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [line for each in printed for line in each.EQUAL]
