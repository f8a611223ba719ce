"""No run leaves processes behind, nor files in shared memory beyond what the MPI leaves of an aborted job."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.private_memory import run_alone
from tests.run_mpi import completed, end_all, environment, marked_again, mpiexec, processes

pytestmark = pytest.mark.slow

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
    done, left = run_alone(2, USE + ORDERLY[ending], AS_USERS_START="1")
    assert done.returncode == 0, done.stderr
    assert left == []


@pytest.mark.parametrize("ending", DISORDERLY)
def test_run_that_is_aborted_leaves_at_most_files_of_the_mpi(ending):
    done, left = run_alone(3, USE + DISORDERLY[ending], AS_USERS_START="1")
    assert done.returncode != 0
    assert [name for name in left if not OF_THE_MPI.match(name)] == []


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes cannot be looked at here"
)
HANG = """
from mpi4py import MPI
MPI.COMM_WORLD.recv()
"""
DEAF = "trap '' TERM; while true; do sleep 0.1; done"
# Of this worker alone: tests run side by side.
MARK = f"[test of leftovers {os.getpid()}]"


def run_plainly(ranks, script, limit, **changes):
    return completed([*mpiexec(ranks), sys.executable, "-m", "mpi4py", "-c", script], limit, **changes)


@needs_proc
@pytest.mark.parametrize("run", [run_plainly, run_alone], ids=["a launcher", "a shell, and a launcher"])
def test_job_past_its_limit_is_ended_with_all_ranks(run):
    with pytest.raises(TimeoutError, match="not over after"):
        run(2, HANG, limit=4, MARKED=MARK)
    assert not processes(f"MARKED={MARK}")


@needs_proc
def test_what_a_job_leaves_is_ended_with_it_and_what_is_not_its_own_is_left_alone():
    leave = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with subprocess.Popen(["sleep", "600"], env=environment(MARKED=MARK)) as other:
        try:
            assert completed([sys.executable, "-c", leave], MARKED=MARK).returncode == 0
            assert [*processes(f"MARKED={MARK}")] == [other.pid]
        finally:
            other.kill()


@needs_proc
def test_commands_of_those_that_have_to_be_ended_are_told_and_of_others_not():
    first = marked_again("")
    second = marked_again(first)
    with (
        subprocess.Popen(["sleep", "600"], env=environment(MARKED=first)) as around,
        subprocess.Popen(["sh", "-c", DEAF], env=environment(MARKED=second)) as job,
    ):
        # The environment of a process can be read a moment after its command has begun.
        while not {around.pid, job.pid} <= {*processes(first)}:
            time.sleep(0.01)
        assert f"sh -c {shlex.quote(DEAF)}" in end_all(second, patience=0)
        assert job.wait() and around.poll() is None
        assert end_all(first, patience=0) == ["sleep 600"] and around.wait()
    assert end_all(first) == []
