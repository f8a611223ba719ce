"""Sub-allocation of one block of memory."""

from __future__ import annotations

from bisect import bisect_left, insort

from distdl_rma.errors import SegmentError

# A cache line: two buffers never share one, and every numpy dtype is aligned.
ALIGNMENT = 64
_MEBIBYTE = 1 << 20


def aligned(nbytes: int) -> int:
    """Smallest multiple of the alignment that is not below ``nbytes``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Heap:
    """Best-fit allocator of offsets into a block of ``nbytes`` bytes; freed neighbours coalesce.

    It hands out numbers and touches no memory. ``used`` are the bytes handed out, alignment included, and
    ``peak`` the most that they ever were.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._gaps: list[tuple[int, int]] = [(0, nbytes)]  # (offset, nbytes), by offset
        self._blocks: dict[int, tuple[int, str]] = {}  # offset: (nbytes, owner)
        self.used = self.peak = 0

    def owners(self) -> dict[str, tuple[int, int]]:
        """Number of blocks and bytes by owner."""
        sums: dict[str, tuple[int, int]] = {}
        for nbytes, owner in self._blocks.values():
            blocks, total = sums.get(owner, (0, 0))
            sums[owner] = blocks + 1, total + nbytes
        return sums

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out."""
        return self.nbytes - self.used

    @property
    def largest_gap(self) -> int:
        """Bytes of the largest block that could be handed out."""
        return max((nbytes for _, nbytes in self._gaps), default=0)

    def allocate(self, nbytes: int, owner: str = "") -> int:
        """Offset of a new block of at least so many bytes and a cache line; ``SegmentError`` if none fits."""
        size = aligned(max(nbytes, 1))
        fitting = [gap for gap in self._gaps if gap[1] >= size]
        if not fitting:
            # A larger segment is larger at its end.
            last = next((gap for at, gap in self._gaps if at + gap == self.nbytes), 0)
            enough = -(-(self.nbytes + size - last) // _MEBIBYTE)
            raise SegmentError(
                f"segment exhausted: asked for {nbytes} bytes, {self.free_bytes} of {self.nbytes} are free,"
                f" largest block {self.largest_gap}; DISTDL_RMA_SEGMENT_SIZE={enough}MiB or"
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
        """Give a block back."""
        size, _ = self._blocks.pop(offset)
        self.used -= size
        at = bisect_left(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size:
            size += self._gaps.pop(at)[1]
        if at > 0 and sum(self._gaps[at - 1]) == offset:
            before = self._gaps.pop(at - 1)
            offset, size = before[0], before[1] + size
        insort(self._gaps, (offset, size))
