"""What hangs in a call ends its process at the deadline, with words."""

import ctypes
import errno
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


FULL = """
import os, sys
from mpi4py import MPI
from distdl_rma import Machine
from distdl_rma.errors import DistdlError
from distdl_rma.segments.transport import node_memory
comm = MPI.COMM_WORLD

def fill(*arguments):
    # Somebody else, between the look at the free memory and the use of it.
    if comm.rank == 0:
        with open("/dev/shm/somebody", "wb") as file:
            file.write(bytes(114 << 20))
    comm.Barrier()
    take(*arguments)

take, node_memory.NodeMemory.reserve = node_memory.NodeMemory.reserve, fill
advise = node_memory._advise
look = node_memory._free
for free, provide in (look, advise), (lambda: 1e12, advise), (look, lambda *a, **k: 22):
    node_memory._free, node_memory._advise = free, provide
    try:
        Machine(segment_size="32MiB", reserve=True)
    except DistdlError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}" + chr(10))
    comm.Barrier()
    if comm.rank == 0:
        os.unlink("/dev/shm/somebody")
    comm.Barrier()
node_memory.NodeMemory.reserve, node_memory._advise = take, advise
with Machine(segment_size="32MiB", reserve=True) as machine, Machine(segment_size="32MiB") as lazy:
    fill = os.statvfs("/dev/shm")
    used = (fill.f_blocks - fill.f_bfree) * fill.f_frsize
    machine.segments.get_segment_buffer(16 << 20).array[:] = 1
    sys.stdout.write(f"{used >= 64 << 20 and used < 128 << 20}" + chr(10))
    comm.Barrier()
"""


def test_memory_that_somebody_else_fills_is_an_error_on_all_ranks_if_it_is_reserved():
    done, _ = run_alone(2, FULL, size="160m")
    told = [line for line in done.stdout.splitlines() if line.startswith("SegmentError: rank")]
    assert done.returncode == 0 and len(told) == 6, (done.stdout, done.stderr)
    for line in told:
        assert "the segment could not be reserved" in line and " of 33554496 bytes can be had" in line
        assert "DISTDL_RMA_SEGMENT_SIZE" in line
    # By looking, by the kernel's word alone, and on kernels that give none.
    assert sum("Bad address" in line for line in told) == 2
    assert sum("too little is left, " in line for line in told) == 4
    # Nothing of what failed is kept, and what is reserved does not count twice.
    assert done.stdout.count("True") == 2, (done.stdout, done.stderr)


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
    Machine(segment_size="32MiB", reserve=True, timeout=5)
except SegmentError as error:
    sys.stdout.write(f"SegmentError: {error}" + chr(10))
    sys.stdout.flush()
"""


def test_memory_that_somebody_fills_before_the_window_is_made_is_no_silent_hang():
    done, _ = run_alone(2, FULL_BEFORE_THE_WINDOW, size="160m")
    told = [line for line in done.stdout.splitlines() if line.startswith("SegmentError: rank 0: ")]
    if launcher_is_hydra():
        # MPICH makes the window, which takes no memory yet.
        assert done.returncode == 0 and len(told) == 2, (done.stdout, done.stderr)
        assert all("the segment could not be reserved" in line for line in told)
    else:
        # Open MPI refuses it on the first rank of the node, and does not return on the other.
        assert done.returncode == 1 and len(told) == 1, (done.stdout, done.stderr)
        assert "no window of" in told[0] and "MPI does not return on other ranks of its node" in told[0]
        assert "distdl_rma: rank 1 ends: MPI has not made a window of" in done.stderr
    assert all("DISTDL_RMA_SEGMENT_SIZE" in line for line in told)


@pytest.mark.parametrize("problem", [0, errno.EINVAL])
def test_memory_that_is_taken_is_zero_as_before(monkeypatch, problem):
    if problem:
        monkeypatch.setattr(node_memory, "_advise", lambda *arguments, **options: problem)
    memory = np.zeros((3 << 20) + 100, np.uint8)[7:]
    assert node_memory.reserve_pages(memory, 1) == "" and not memory.any()


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
    monkeypatch.setattr(node_memory, "_of_system", lambda *arguments: None)
    assert node_memory.has_pages(memory)


def lock(memory):
    assert ctypes.CDLL(None).mlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([True, False], "reserve is True on rank 0 and False on rank 1"),
        (["yes", True], "rank 0: reserve is True or False, got 'yes'"),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_ranks_agree_on_whether_to_reserve(comm, options, message):
    from distdl_rma.errors import ConfigurationError
    from distdl_rma.segments import SegmentManager

    with pytest.raises(ConfigurationError, match=message):
        SegmentManager(comm, None, "8MiB", 15, reserve=options[min(comm.rank, 1)])


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
