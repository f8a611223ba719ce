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
        assert arena.offset(block.ctypes.data) % PAGE == 0
        block[:] = value
    assert all((block == value).all() for value, block in enumerate(blocks))
    assert arena._heap.used == 5 * PAGE


def test_pages_of_a_dropped_block_are_given_back(arena):
    block = arena.take(2 * PAGE)
    block[:] = 9
    there = attach(arena.place)
    begin = arena.offset(block.ctypes.data)
    arena.drop(block)
    assert arena._heap.used == 0 and not there[begin : begin + 2 * PAGE].any()
    assert arena.offset(arena.take(PAGE).ctypes.data) == begin


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
    block[:] = 5
    child = os.fork()
    if not child:
        arena.drop(block)
        os._exit(0)
    os.waitpid(child, 0)
    assert (block == 5).all() and arena._heap.used == PAGE


def test_memory_outlives_the_arena(arena):
    place, there = arena.place, attach(arena.place)
    block = arena.take(PAGE)
    block[:] = np.arange(PAGE) % 251
    assert place.nbytes == there.nbytes
    del arena
    assert (there[:PAGE] == block).all()


def test_the_last_tensor_may_die_with_the_interpreter():
    # More than is kept for later, so that its block is given back.
    program = (
        "import torch; from distdl_rma.layers.ops.core import result_memory;"
        "kept = [result_memory.landing((result_memory.IDLE_NBYTES,), torch.float32).owner]"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
