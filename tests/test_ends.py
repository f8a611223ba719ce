"""What the others learn when a rank ends while all of them close, or does not end with them."""

import re
from pathlib import Path

import pytest

from tests.test_failures import run

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes cannot be looked at here"
)
# Without torch, which takes seconds to load. The machines' own handlers at exit run before this one, in
# whose place the end of MPI would wait for those that are gone.
LIGHT = """
import atexit, os, signal, sys, time
from mpi4py import MPI
from distdl_rma import Machine
from distdl_rma.errors import DistdlError
comm = MPI.COMM_WORLD
atexit.register(os._exit, 0)
"""


def test_rank_that_dies_in_close_or_never_closes_is_named_on_its_node():
    body = """
closed, open_to_the_end = (Machine(segment_size="8MiB", timeout=30) for _ in range(2))
closed.group().barrier()
if comm.rank == 1:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
elif comm.rank == 0:
    time.sleep(1)
try:
    closed.close()
except DistdlError as error:
    sys.stdout.write(f"{comm.rank} was told: {type(error).__name__}: {error}" + chr(10))
    sys.stdout.flush()
"""
    _, out, err = run(3, body, preamble=LIGHT, survive=True)
    for rank in (0, 2):
        assert re.search(
            rf"{rank} was told: PeerFailedError: rank 1 failed: it is silent, its process \d+ has ended;"
            rf" rank {rank} waited for (rank 1|ranks 1, \d) to close the machine",
            out,
        ), (out, err)
        assert re.search(
            rf"distdl_rma: rank 1 will not end together with rank {rank}: it is silent, its process \d+ has"
            r" ended; MPI, which ends now, may wait for it for ever",
            err,
        )


def test_rank_that_ends_long_before_the_others_says_whom_it_waits_for_and_waits_on():
    body = """
machine = Machine(segment_size="8MiB", timeout=0.5)
if comm.rank == 1:
    time.sleep(3)
atexit.unregister(os._exit)
"""
    code, _, err = run(2, body, preamble=LIGHT)
    said = [line for line in err.splitlines() if line.startswith("distdl_rma:")]
    assert code == 0 and len(said) == 1, err
    assert "rank 0 waited 0.5 s for rank 1 to close the machine; rank 1 waits for nobody" in said[0]
    assert said[0].endswith("rank 0 has ended its program and waits on")
