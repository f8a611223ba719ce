"""What users see when something goes wrong; every case runs in processes of its own, with a time limit."""

import sys
import tempfile

import pytest

from tests.run_mpi import completed, mpiexec

pytestmark = pytest.mark.slow

PREAMBLE = """
import os, signal, sys, time
import torch
from mpi4py import MPI
import distdl_rma
from distdl_rma import *
from distdl_rma.layers import *
comm = MPI.COMM_WORLD
"""
# For stories without a layer: torch takes longer to load than most of them take.
LIGHT = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from distdl_rma import Machine
from distdl_rma.errors import *
comm = MPI.COMM_WORLD
"""
# Outlives the rank that it started until all ranks are over, so that the launcher has nothing to see.
STAND_IN = """
import os, subprocess, sys, time
folder, ranks = sys.argv[1], int(sys.argv[2])
subprocess.run(sys.argv[3:], close_fds=False)
open(f"{folder}/{os.getpid()}", "w").close()
while len(os.listdir(folder)) < ranks:
    time.sleep(0.05)
"""


def run(ranks, body, main=("-m", "mpi4py"), survive=False, preamble=PREAMBLE, **changes):
    """Run a script on some ranks; its exit status, standard output and standard error.

    With ``survive`` the launcher does not notice that a rank was killed, and lets the others live.
    """
    with tempfile.TemporaryDirectory() as folder:
        stand_in = [sys.executable, "-c", STAND_IN, folder, str(ranks)] if survive else []
        script = [*stand_in, sys.executable, *main, "-c", preamble + body]
        done = completed([*mpiexec(ranks), *script], **changes)
    return done.returncode, done.stdout, done.stderr


CONV = """
P_x = MPIPartition(comm).create_cartesian_topology_partition((1, 1, comm.size))
layer = DistributedConv1d(P_x, 1, 1, 3, padding=1, name="enc1.conv")
x = torch.ones(1, 1, 4)
layer(x)
"""


def test_rank_that_never_comes_is_named_with_the_layer():
    # Not before: to make a machine may take long where others compute.
    body = "Machine.of(P_x).segments.waiter.timeout = 1.5\nif comm.rank == 1: time.sleep(60)\nlayer(x)"
    code, _, err = run(3, CONV + body)
    assert code != 0
    assert "ExchangeTimeout: rank " in err
    assert "waited 1.5 s for rank 1 to send in 'enc1.conv" in err


MACHINE = """
group = Machine(comm, segment_size="8MiB").group()
group.barrier()
"""


def test_killed_rank_ends_the_job():
    kill = "if comm.rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\ngroup.barrier()"
    code, _, err = run(3, MACHINE + kill, preamble=LIGHT)
    assert code != 0
    assert "ExchangeTimeout" not in err


def test_different_layers_on_two_ranks_are_named():
    body = """
P_x = MPIPartition(comm).create_cartesian_topology_partition((1, 1, comm.size))
layer = DistributedConv1d(P_x, 1, 1, 3 if comm.rank else 5, padding=1, name=f"conv of {comm.rank}")
"""
    code, _, err = run(2, body)
    assert code != 0
    assert "MismatchError" in err
    assert "conv of 0" in err and "conv of 1" in err


@pytest.mark.parametrize("ending", ["", "P_x.deactivate()"])
def test_leaving_without_close_is_clean(ending):
    code, out, err = run(2, CONV + "sys.stdout.write('done\\n')\n" + ending)
    assert code == 0
    assert out.count("done") == 2
    assert "Traceback" not in err and "WARN" not in err


def _printed(ranks, body, **changes):
    # Lines of this library, and tracebacks, in standard error.
    code, _, err = run(ranks, body, **changes)
    assert code != 0
    ours = sorted(line for line in err.splitlines() if line.startswith("distdl_rma: rank"))
    return ours, err.count("Traceback (most recent call last)"), err


def test_an_error_of_one_rank_is_one_traceback_and_a_line_on_each_other_but_for_who_wants_all():
    body = CONV + "if comm.rank == 1:\n    raise ValueError('wrong')\nlayer(x)\n"
    lines, tracebacks, err = _printed(3, body)
    assert tracebacks == 1 and "runpy" not in err and "mpi4py/" not in err
    assert len(lines) == 2, err
    for rank, line in zip((0, 2), lines, strict=True):
        assert line.startswith(f"distdl_rma: rank {rank} ended at <string>:")
        assert "PeerFailedError: rank 1 failed: ValueError: wrong; rank" in line
    lines, tracebacks, err = _printed(3, body, DISTDL_RMA_FULL_TRACEBACKS="1")
    assert tracebacks == 3 and not lines and "runpy" in err


@pytest.mark.parametrize(
    ("act", "kind"),
    [("layer(torch.ones(1, 2, 4))", "ShapeError"), ("raise KeyboardInterrupt", "KeyboardInterrupt")],
)
def test_an_error_of_all_ranks_is_one_traceback_and_the_same_on_each_other(act, kind):
    lines, tracebacks, err = _printed(3, f"{CONV}comm.Barrier()\n{act}\n")
    assert tracebacks == 1 and len(lines) == 2 and "runpy" not in err, err
    assert all(f" by the same {kind} as rank 0" in line for line in lines), err


def test_rank_whose_answer_comes_behind_large_transfers_is_busy_and_not_silent():
    body = """
with Machine(segment_size="24MiB", transport="remote", progress="none", timeout=60) as machine:
    buffer = machine.segments.get_segment_buffer(16 << 20, 1)
    peer = buffer.exchange([1 - comm.rank])[1 - comm.rank]
    comm.Barrier()
    if comm.rank == 0:
        peer.put_notify(np.ones(16 << 20, np.uint8), 0)
        try:
            peer.flush(timeout=0.3)
            sys.stdout.write("over by " + MPI.get_vendor()[0] + chr(10))
        except ExchangeTimeout as error:
            sys.stdout.write(str(error) + chr(10))
        sys.stdout.flush()
        peer.flush()
    else:
        time.sleep(3)
        buffer.notify_wait(0)
        assert buffer.array.all()
"""
    code, out, err = run(2, body, preamble=LIGHT)
    assert code == 0, err
    # Open MPI may write into the memory of a process of the same host by itself.
    busy = "rank 1 is busy: no answer within 0.3 s, behind 16777216 bytes that are under way"
    assert busy in out or "over by Open MPI" in out, out
