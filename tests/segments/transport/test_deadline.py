"""What hangs in a call ends its process at the deadline, with words."""

import subprocess
import sys

import pytest

from tests.run_mpi import environment

HANG = """
import time
from distdl_rma.segments.transport.deadline import ends_process_after
with ends_process_after({deadline}, "rank 3 ends: the call does not return"):
    time.sleep({seconds})
print("it went on")
"""


@pytest.mark.parametrize(("deadline", "seconds"), [(0, 60), (60, 0), (float("inf"), 0)])
def test_process_ends_with_words_where_the_block_takes_longer_and_goes_on_where_not(deadline, seconds):
    program = HANG.format(deadline=f"float('{deadline}')", seconds=seconds)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    if seconds:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "distdl_rma: rank 3 ends: the call does not return\n"
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "it went on\n", "")
