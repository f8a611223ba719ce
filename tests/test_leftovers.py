"""No run leaves files in shared memory, however it ended, beyond what the MPI leaves of an aborted job."""

import re

import pytest

from tests.private_memory import run_alone

# Names of MPICH, of Open MPI and of UCX; ours would have another.
OF_THE_MPI = re.compile(r"mpich_|psm\d|osc_|(sm|vader)_segment|ucx_|shmem_|ompi|prte|pmix|hwloc")
USE = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from distdl_rma import Machine
comm = MPI.COMM_WORLD
machine = Machine(comm, segment_size="8MiB", timeout=60)
buffer = machine.segments.get_segment_buffer(1 << 20, notifications=1)
peers = buffer.exchange({rank: () for rank in range(comm.size) if rank != comm.rank})
for remote in peers.values():
    remote.put(np.ones(1 << 20, np.uint8))
comm.Barrier()
machine.segments.waiter.timeout = 3
"""
ORDERLY = {
    "closed": "machine.close()",
    "not closed": "",
    "exit without close": "sys.exit(0)",
    "transport over MPI": "Machine(comm, segment_size='8MiB', transport='remote').describe()",
}
DISORDERLY = {
    "exception on one rank": "if comm.rank == 1: raise OSError('gone')\nbuffer.notify_wait(0)",
    "killed": "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nbuffer.notify_wait(0)",
    "timeout": "buffer.notify_wait(0)",
    "status on one rank": "if comm.rank == 1: sys.exit(3)\nbuffer.notify_wait(0)",
}


@pytest.mark.parametrize("ending", ORDERLY)
def test_run_that_ends_by_itself_leaves_nothing(ending):
    done, left = run_alone(2, USE + ORDERLY[ending])
    assert done.returncode == 0, done.stderr
    assert left == []


@pytest.mark.parametrize("ending", DISORDERLY)
def test_run_that_is_aborted_leaves_at_most_files_of_the_mpi(ending):
    done, left = run_alone(3, USE + DISORDERLY[ending])
    assert done.returncode != 0
    assert [name for name in left if not OF_THE_MPI.match(name)] == []
