"""The heap: blocks never overlap, nothing is lost, freed neighbours become one gap."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from distdl_rma.errors import SegmentError
from distdl_rma.segments.transport.heap import ALIGNMENT, Heap, aligned

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
        "segment exhausted: asked for 100 bytes, 128 of 256 bytes are free, largest block 64 bytes;"
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
