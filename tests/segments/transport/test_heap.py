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

from distdl_rma.errors import SegmentError
from distdl_rma.segments.transport.heap import ALIGNMENT, Arena, Heap, aligned, attach

LINE = ALIGNMENT
some = settings(max_examples=80)
# Sizes to allocate, and None to free one of the blocks.
steps = st.lists(st.one_of(st.integers(0, 5 * LINE), st.none()), max_size=40)
heap_sizes = st.integers(0, 24).map(lambda lines: lines * LINE)


def play(nbytes, steps, draw):
    """Allocate and free; yield the heap and the blocks (offset: nbytes) after each step."""
    heap, blocks = Heap(nbytes), {}
    for step in steps:
        if step is None and blocks:
            offset = draw(st.sampled_from(sorted(blocks)))
            heap.free(offset)
            del blocks[offset]
        elif step is not None:
            try:
                blocks[heap.allocate(step)] = step
            except SegmentError:
                assert heap.largest_gap < aligned(max(step, 1))
        yield heap, blocks


def gaps(nbytes, blocks):
    """Free stretches (offset, nbytes) between blocks, computed from the blocks alone."""
    ends, found = 0, []
    for offset in [*sorted(blocks), nbytes]:
        if offset > ends:
            found.append((ends, offset - ends))
        ends = offset + aligned(max(blocks.get(offset, 0), 1))
    return found


@some
@given(st.integers(0, 10_000))
def test_aligned_is_the_smallest_multiple_that_is_large_enough(nbytes):
    assert aligned(nbytes) % LINE == 0
    assert nbytes <= aligned(nbytes) < nbytes + LINE


@some
@given(heap_sizes, steps, st.data())
def test_blocks_are_aligned_inside_and_disjoint(nbytes, steps, data):
    for _, blocks in play(nbytes, steps, data.draw):
        assert all(offset % LINE == 0 for offset in blocks)
        ends = 0
        for offset in sorted(blocks):
            assert ends <= offset
            ends = offset + max(blocks[offset], 1)
        assert ends <= nbytes


@some
@given(heap_sizes, steps, st.data())
def test_every_byte_is_used_or_free(nbytes, steps, data):
    for heap, blocks in play(nbytes, steps, data.draw):
        assert heap.used == sum(aligned(max(size, 1)) for size in blocks.values())
        assert heap.free_bytes == nbytes - heap.used
        assert heap.nbytes == nbytes


@some
@given(heap_sizes, steps, st.data())
def test_what_lies_free_side_by_side_is_one_gap(nbytes, steps, data):
    for heap, blocks in play(nbytes, steps, data.draw):
        assert heap.largest_gap == max((size for _, size in gaps(nbytes, blocks)), default=0)


@some
@given(heap_sizes, steps, st.data())
def test_the_smallest_gap_that_fits_is_taken(nbytes, steps, data):
    heap, blocks = list(play(nbytes, [*steps, None], data.draw))[-1]
    wanted = data.draw(st.integers(1, 3 * LINE))
    fitting = [(size, offset) for offset, size in gaps(nbytes, blocks) if size >= aligned(wanted)]
    if fitting:
        assert heap.allocate(wanted) in {offset for size, offset in fitting if size == min(fitting)[0]}
    else:
        with pytest.raises(SegmentError):
            heap.allocate(wanted)


@some
@given(heap_sizes, steps, st.data())
def test_after_all_is_freed_the_heap_is_as_new(nbytes, steps, data):
    heap, blocks = list(play(nbytes, [*steps, None], data.draw))[-1]
    for offset in data.draw(st.permutations(sorted(blocks))):
        heap.free(offset)
    assert (heap.used, heap.free_bytes, heap.largest_gap) == (0, nbytes, nbytes)
    if nbytes:
        assert heap.allocate(nbytes) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbours_become_one_gap_in_whatever_order_they_are_freed(order):
    heap = Heap(4 * LINE)
    offsets = [heap.allocate(LINE) for _ in range(4)]
    for which in order:
        heap.free(offsets[which])
    assert heap.largest_gap == 3 * LINE
    assert heap.allocate(3 * LINE) == 0


def test_blocks_without_bytes_are_blocks_of_their_own():
    heap = Heap(4 * LINE)
    assert len({heap.allocate(0), heap.allocate(0)}) == 2
    assert heap.used == 2 * LINE


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


def test_a_request_that_fails_changes_nothing():
    heap = Heap(2 * LINE)
    heap.allocate(1)
    with pytest.raises(SegmentError):
        heap.allocate(2 * LINE)
    assert (heap.used, heap.largest_gap) == (LINE, LINE)
    assert heap.allocate(LINE) == LINE


@pytest.mark.parametrize("offset", [0, 1, LINE])
def test_what_was_not_handed_out_cannot_be_freed(offset):
    heap = Heap(4 * LINE)
    block = heap.allocate(LINE)
    heap.free(block)
    with pytest.raises(KeyError):
        heap.free(offset)
    assert heap.largest_gap == 4 * LINE


def test_a_heap_without_bytes_has_none_to_give():
    heap = Heap(0)
    assert (heap.used, heap.free_bytes, heap.largest_gap) == (0, 0, 0)
    with pytest.raises(SegmentError, match="asked for 1 bytes, 0 of 0 are free"):
        heap.allocate(1)


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
    with pytest.raises(MemoryError, match=r"no room for a result of 266240 bytes"):
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
