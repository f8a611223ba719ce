"""Allocation of offsets in a block of memory.

Blocks (``#``) and gaps (``.``) of a heap after three allocations, and after the second one was freed::

    ####|######|###|..........................
    ####|......|###|..........................    the next small block goes into the small gap

The heap stores offsets and sizes beside the memory, never in it: the memory of a segment is shared, and a
peer that writes beyond its buffer would otherwise destroy the list of gaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import SegmentError

Bytes = NDArray[np.uint8]

# Bytes of a cache line: two buffers never share a line, and every numpy dtype is aligned.
ALIGNMENT = 64
_MEBIBYTE = 1 << 20


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Heap:
    """Best-fit allocator of offsets into a block of ``nbytes`` bytes; freed neighbours coalesce.

    It touches no memory. ``used`` are the allocated bytes, alignment included, and ``peak`` is their maximum.

    Gaps and blocks together are the whole block at any time, and no two gaps are neighbours. Best fit, since
    layers allocate a few sizes again and again: a freed block is taken by the next one of its size, and large
    gaps stay large. Not protected against threads: the owner holds a lock.

    Examples
    --------
    >>> from distdl_rma.segments.transport.heap import Heap
    >>> heap = Heap(1024)
    >>> first, second = heap.allocate(10), heap.allocate(100)
    >>> first, second, heap.used  # a cache line, and two of them
    (0, 64, 192)
    >>> heap.free(first)
    >>> heap.allocate(200), heap.allocate(1)  # the freed line is too small for the first of these
    (192, 0)
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._gaps: list[tuple[int, int]] = [(0, nbytes)]  # (offset, nbytes), by offset
        self._blocks: dict[int, tuple[int, str]] = {}  # offset: (nbytes, owner)
        self.used = self.peak = 0

    def owners(self) -> dict[str, tuple[int, int]]:
        """Number of blocks, and their bytes, by owner."""
        sums: dict[str, tuple[int, int]] = {}
        for nbytes, owner in self._blocks.values():
            blocks, total = sums.get(owner, (0, 0))
            sums[owner] = blocks + 1, total + nbytes
        return sums

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        return self.nbytes - self.used

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest block that could be allocated."""
        return max((nbytes for _, nbytes in self._gaps), default=0)

    def allocate(self, nbytes: int, owner: str = "") -> int:
        """Allocate ``nbytes``, at least a cache line; return the offset. ``SegmentError`` if none fits."""
        size = aligned(max(nbytes, 1))
        fitting = [gap for gap in self._gaps if gap[1] >= size]
        if not fitting:
            # A larger segment only extends the last gap.
            last = next((gap for at, gap in self._gaps if at + gap == self.nbytes), 0)
            enough = -(-(self.nbytes + size - last) // _MEBIBYTE)
            raise SegmentError(
                f"segment exhausted: asked for {nbytes} bytes, {self.free_bytes} of {self.nbytes} bytes are"
                f" free, largest block {self.largest_gap} bytes; DISTDL_RMA_SEGMENT_SIZE={enough}MiB or"
                f" Machine(segment_size='{enough}MiB') is enough for this, and for more take more"
            )
        offset, available = min(fitting, key=lambda gap: gap[1])
        self._gaps.remove((offset, available))
        if available > size:
            insort(self._gaps, (offset + size, available - size))
        self._blocks[offset] = size, owner
        self.used += size
        self.peak = max(self.peak, self.used)
        return offset

    def free(self, offset: int) -> None:
        """Free a block."""
        size, _ = self._blocks.pop(offset)
        self.used -= size
        at = bisect_left(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size:
            size += self._gaps.pop(at)[1]
        if at > 0 and sum(self._gaps[at - 1]) == offset:
            before = self._gaps.pop(at - 1)
            offset, size = before[0], before[1] + size
        insort(self._gaps, (offset, size))
