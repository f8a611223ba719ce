"""What hangs in a call ends its process at the deadline, with words."""

import ctypes
import mmap
import re
import subprocess
import sys

import numpy as np
import pytest

from distdl_rma.segments.transport import node_memory
from tests.examples.launching import launcher_is_hydra
from tests.private_memory import run_alone
from tests.run_mpi import completed, environment, mpiexec

HANG = """
import time
from distdl_rma.segments.transport.node_memory import ends_process_after
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


LOST_AGAIN_AND_AGAIN = """
from mpi4py import MPI
from distdl_rma import Machine
comm = MPI.COMM_WORLD
for time in range(9):
    machine = Machine(comm.Dup(), segment_size="32MiB")
    machine.segments.get_segment_buffer(1 << 10).array[:] = 1
    comm.Barrier()
    machine.segments.fail(RuntimeError(f"time {time}"))
    machine.close()
    comm.Barrier()
"""


def test_segments_of_machines_that_are_lost_and_closed_take_the_pages_that_were_used():
    done, _ = run_alone(2, LOST_AGAIN_AND_AGAIN, size="160m")
    assert done.returncode == 0, (done.stdout, done.stderr)


FULL_BEFORE_THE_WINDOW = """
import sys
from mpi4py import MPI
from distdl_rma import Machine
from distdl_rma.errors import SegmentError
from distdl_rma.segments.transport.node_memory import NodeMemory
comm = MPI.COMM_WORLD

def fill(*arguments):
    look(*arguments)
    if comm.rank == 0:
        with open("/dev/shm/somebody", "wb") as file:
            file.write(bytes(114 << 20))
    comm.Barrier()

look, NodeMemory.check_room = NodeMemory.check_room, fill
try:
    Machine(segment_size="32MiB", timeout=5)
except SegmentError as error:
    sys.stdout.write(f"SegmentError: {error}" + chr(10))
    sys.stdout.flush()
"""


def test_memory_that_somebody_fills_before_the_window_is_made_is_no_silent_hang():
    done, _ = run_alone(2, FULL_BEFORE_THE_WINDOW, size="160m")
    told = [line for line in done.stdout.splitlines() if line.startswith("SegmentError: rank 0: ")]
    if launcher_is_hydra():
        # MPICH makes the window, which takes no memory yet.
        assert done.returncode == 0 and not told, (done.stdout, done.stderr)
    else:
        # Open MPI refuses it on the first rank of the node, and does not return on the other.
        assert done.returncode == 1 and len(told) == 1, (done.stdout, done.stderr)
        assert "no window of" in told[0] and "MPI does not return on other ranks of its node" in told[0]
        assert "distdl_rma: rank 1 ends: MPI has not made a window of" in done.stderr
    assert all("DISTDL_RMA_SEGMENT_SIZE" in line for line in told)


def test_pages_that_are_touched_or_locked_are_known_and_others_are_not(monkeypatch):
    memory = np.frombuffer(mmap.mmap(-1, 5 * mmap.PAGESIZE), np.uint8)
    # What a network registers is locked, and nobody has written to it.
    for at, take in (2, lambda part: part.fill(0)), (3, lock):
        assert not node_memory.has_pages(memory)
        part = memory[at * mmap.PAGESIZE : (at + 1) * mmap.PAGESIZE]
        take(part)
        assert node_memory.has_pages(part) and node_memory.has_pages(memory[:-1])
        assert not node_memory.has_pages(memory[: at * mmap.PAGESIZE])
        memory = np.frombuffer(mmap.mmap(-1, 5 * mmap.PAGESIZE), np.uint8)
    # A system without the call.
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert node_memory.has_pages(memory)


def lock(memory):
    assert ctypes.CDLL(None).mlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)) == 0


FEW_ADDRESSES = """
import os, resource, sys
os.environ.pop("DISTDL_RMA_SEGMENT_SIZE", None)
from pathlib import Path
from mpi4py import MPI
from distdl_rma import Machine
from distdl_rma.errors import SegmentError
from distdl_rma.segments.transport.arena import own_arena
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), resource.getrlimit(resource.RLIMIT_AS)[1]))
assert own_arena() is None
with Machine() as machine:
    assert 32 << 20 <= machine.segments.segment.nbytes <= (1 << 29) // machine.size
    machine.group().barrier()
try:
    Machine(segment_size="2GiB")
except SegmentError as error:
    sys.stdout.write(str(error) + chr(10))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_segments_take_no_more_addresses_than_a_process_may_have(ranks):
    command = [*mpiexec(ranks), sys.executable, "-m", "mpi4py", "-c", FEW_ADDRESSES]
    done = completed(command)
    assert done.returncode == 0, done.stderr
    wanted = rf"{ranks << 31} bytes \({ranks} ranks x {1 << 31} bytes\) wanted"
    said = rf"memory: {wanted}, \d+ bytes of addresses left to a process \(ulimit -v\)"
    assert len(re.findall(said, done.stdout)) == ranks, done.stdout
