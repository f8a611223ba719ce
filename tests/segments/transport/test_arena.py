"""The arena: what is stored through one mapping is seen through all, and pages are given back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distdl_rma.segments.transport.arena import Arena, attach

PAGE = 4096


@pytest.fixture
def arena():
    try:
        return Arena(64 * PAGE)
    except (OSError, AttributeError):
        pytest.skip("this system has no files in memory")


def test_every_machine_of_a_process_uses_one_mapping(arena):
    def files():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    several = [attach(arena.place) for _ in range(3)]
    assert len({there.ctypes.data for there in several}) == 1
    assert files() == before + 1
    several.clear()
    assert files() == before


def test_blocks_do_not_overlap_and_begin_on_pages(arena):
    blocks = [arena.take(nbytes) for nbytes in (1, PAGE, PAGE + 1, 3)]
    for value, block in enumerate(blocks):
        assert arena.offset(block) % PAGE == 0
        np.asarray(block)[:] = value
    assert all((np.asarray(block) == value).all() for value, block in enumerate(blocks))
    assert arena._heap.used == 5 * PAGE


def test_pages_of_a_dropped_block_are_given_back(arena):
    block = arena.take(2 * PAGE)
    np.asarray(block)[:] = 9
    there = attach(arena.place)
    begin = arena.offset(block)
    arena.drop(block)
    assert arena._heap.used == 0 and not there[begin : begin + 2 * PAGE].any()
    assert arena.offset(arena.take(PAGE)) == begin


def test_an_array_is_at_its_offset_in_the_file_and_its_memory_is_used_again(arena):
    there, first = attach(arena.place), arena.array((3, 5), np.float32)
    first[...] = np.arange(15).reshape(3, 5)
    begin = arena.offset(first)
    assert (there[begin : begin + 60].view(np.float32) == np.arange(15)).all()
    part = first[1:]
    del first
    assert arena.offset(arena.array((3, 5), np.float32)) != begin
    del part
    assert begin in {arena.offset(again) for again in [arena.array((15,), np.int32) for _ in range(2)]}


def test_no_room_is_an_error_that_says_so(arena):
    with pytest.raises(
        MemoryError, match=r"a result of 266240 bytes: \d+ of \d+ bytes are free, largest block \d+$"
    ):
        arena.take(65 * PAGE)
    assert arena.take(64 * PAGE).nbytes == 64 * PAGE


def test_another_file_or_process_of_that_number_is_not_taken_for_the_arena(arena):
    place = arena.place
    assert attach(place._replace(inode=place.inode + 1)) is None
    assert attach(place._replace(nbytes=PAGE)) is None
    assert attach(place._replace(process=2**30)) is None


def test_a_child_of_the_process_gives_nothing_back(arena):
    block = arena.take(PAGE)
    np.asarray(block)[:] = 5
    child = os.fork()
    if not child:
        arena.drop(block)
        os._exit(0)
    os.waitpid(child, 0)
    assert (np.asarray(block) == 5).all() and arena._heap.used == PAGE


def test_memory_outlives_the_arena(arena):
    place, there = arena.place, attach(arena.place)
    block = arena.array((PAGE,), np.uint8)
    block[:] = np.arange(PAGE) % 251
    assert place.nbytes == there.nbytes
    del arena
    assert (there[:PAGE] == block).all()


def test_the_last_tensor_may_die_with_the_interpreter():
    # More than is kept for later, so that its block is given back.
    program = (
        "import numpy, torch; from distdl_rma.segments.transport import arena, pool;"
        "kept = [torch.from_numpy(arena.own_arena().array((pool.IDLE_NBYTES,), numpy.float32))]"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
