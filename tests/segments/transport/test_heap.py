"""The heap: blocks never overlap, nothing is lost, freed neighbours become one gap."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from distdl_rma.errors import SegmentError
from distdl_rma.segments.transport.heap import ALIGNMENT, Arena, Heap, aligned, attach

LINE = ALIGNMENT
some = settings(max_examples=80)


@some
@given(st.integers(0, 10_000))
def test_aligned_is_the_smallest_multiple_that_is_large_enough(nbytes):
    assert aligned(nbytes) % LINE == 0
    assert nbytes <= aligned(nbytes) < nbytes + LINE


class Blocks(RuleBasedStateMachine):
    """A heap, and the blocks (offset: nbytes) that it has handed out."""

    @initialize(lines=st.integers(0, 24))
    def make(self, lines):
        self.heap, self.nbytes, self.blocks = Heap(lines * LINE), lines * LINE, {}

    def gaps(self):
        """Free stretches (nbytes, offset) between blocks, computed from the blocks alone."""
        ends, found = 0, []
        for offset in [*sorted(self.blocks), self.nbytes]:
            if offset > ends:
                found.append((offset - ends, ends))
            ends = offset + aligned(max(self.blocks.get(offset, 0), 1))
        return found

    @rule(wanted=st.integers(0, 5 * LINE))
    def the_smallest_gap_that_fits_is_taken(self, wanted):
        fitting = [gap for gap in self.gaps() if gap[0] >= aligned(max(wanted, 1))]
        if fitting:
            offset = self.heap.allocate(wanted)
            assert offset in {at for size, at in fitting if size == min(fitting)[0]}
            self.blocks[offset] = wanted
        else:
            with pytest.raises(SegmentError):
                self.heap.allocate(wanted)

    @rule(which=st.integers(0, 99))
    def free(self, which):
        if self.blocks:
            offset = sorted(self.blocks)[which % len(self.blocks)]
            self.heap.free(offset)
            del self.blocks[offset]
            with pytest.raises(KeyError):
                self.heap.free(offset)

    @invariant()
    def blocks_are_aligned_inside_and_disjoint_and_all_else_is_free_in_as_few_gaps_as_can_be(self):
        ends = 0
        for offset in sorted(self.blocks):
            assert ends <= offset and offset % LINE == 0
            ends = offset + max(self.blocks[offset], 1)
        assert ends <= self.nbytes == self.heap.nbytes
        assert self.heap.used == sum(aligned(max(size, 1)) for size in self.blocks.values())
        assert self.heap.free_bytes == self.nbytes - self.heap.used
        assert self.heap.largest_gap == max((size for size, _ in self.gaps()), default=0)

    def teardown(self):
        for offset in sorted(self.blocks, key=lambda offset: hash((offset, 7))):
            self.heap.free(offset)
        assert (self.heap.used, self.heap.free_bytes, self.heap.largest_gap) == (0, self.nbytes, self.nbytes)
        if self.nbytes:
            assert self.heap.allocate(self.nbytes) == 0


TestHeap = Blocks.TestCase
TestHeap.settings = some


def test_an_exhausted_heap_says_asked_free_and_largest_and_what_to_set():
    heap = Heap(4 * LINE)
    kept = [heap.allocate(LINE) for _ in range(4)]
    heap.free(kept[0])
    heap.free(kept[2])
    with pytest.raises(SegmentError) as caught:
        heap.allocate(100)
    assert str(caught.value) == (
        "segment exhausted: asked for 100 bytes, 128 of 256 are free, largest block 64;"
        " DISTDL_RMA_SEGMENT_SIZE=1MiB or Machine(segment_size='1MiB') is enough for this, and for more take"
        " more"
    )
    assert isinstance(caught.value, MemoryError)


@some
@given(st.lists(st.integers(1, 3 << 20), max_size=6), st.data())
def test_the_size_that_an_exhausted_heap_names_is_enough_and_a_mebibyte_less_is_not(sizes, data):
    nbytes, freed = 4 << 20, data.draw(st.sets(st.integers(0, 5)))

    def last_of(heap):
        blocks = [heap.allocate(size) for size in sizes[:-1]]
        for at in sorted(freed & {*range(len(blocks))}):
            heap.free(blocks[at])
        return heap.allocate(sizes[-1]) if sizes else None

    try:
        last_of(Heap(nbytes))
    except SegmentError as error:
        enough = int(re.search(r"SIZE=(\d+)MiB", str(error))[1]) << 20
        asked = int(re.search(r"asked for (\d+)", str(error))[1])
        if asked == sizes[-1]:
            last_of(Heap(enough))
        with pytest.raises(SegmentError):
            last_of(Heap(max(nbytes, enough - (1 << 20))))


PAGE = 4096


@pytest.fixture
def arena():
    try:
        return Arena(64 * PAGE)
    except (OSError, AttributeError):
        pytest.skip("this system has no files in memory")


def test_what_is_stored_through_another_mapping_is_seen(arena):
    block = arena.take(3 * PAGE)
    there = attach(arena.place)
    begin = arena.offset(block.ctypes.data)
    there[begin : begin + 3 * PAGE] = 7
    assert (block == 7).all()


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
    assert arena.used == 5 * PAGE


def test_pages_of_a_dropped_block_are_given_back(arena):
    block = arena.take(2 * PAGE)
    block[:] = 9
    there = attach(arena.place)
    begin = arena.offset(block.ctypes.data)
    arena.drop(block)
    assert arena.used == 0 and not there[begin : begin + 2 * PAGE].any()
    assert arena.offset(arena.take(PAGE).ctypes.data) == begin


def test_no_room_is_an_error_that_says_so(arena):
    with pytest.raises(
        MemoryError, match=r"a result of 266240 bytes: \d+ of \d+ are free, largest block \d+$"
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
    assert (block == 5).all() and arena.used == PAGE


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
        "import torch; from distdl_rma.ops.core import result_memory;"
        "kept = [result_memory.landing((result_memory.IDLE_NBYTES,), torch.float32).owner]"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
