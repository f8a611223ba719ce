"""Allocation of offsets in a block of memory; and arenas: memory that other ranks of the node store to."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

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


_PAGE_BYTES = mmap.PAGESIZE


class Place(NamedTuple):
    """How another process finds an arena: process, file descriptor there, inode and size in bytes."""

    process: int
    file: int
    inode: int
    nbytes: int


class Landing(NamedTuple):
    """Memory that peers put to: the array, its offset in its process's arena, and the memory's owner."""

    array: NDArray[Any]
    offset: int
    owner: object


class Arena:
    """Blocks of one file in memory; the file has no name and ends with the last process that uses it.

    Unlike a segment, an arena belongs to no machine: users may keep its blocks for ever. ``nbytes`` are
    addresses only: pages are consumed when touched, and freed by ``drop``. ``OSError`` if the system has no
    such files.
    """

    def __init__(self, nbytes: int) -> None:
        self._process = os.getpid()
        self._file = os.memfd_create("distdl_rma results")
        try:
            os.ftruncate(self._file, nbytes)
            self._pages = mmap.mmap(self._file, nbytes)
        except (OSError, ValueError):
            os.close(self._file)
            raise
        self.memory: Bytes = np.frombuffer(self._pages, np.uint8)
        self._address = self.memory.ctypes.data
        self._heap = Heap(nbytes)
        self._lock = threading.Lock()
        self._dropped: deque[Bytes] = deque()

    @property
    def place(self) -> Place:
        """How other processes of this node find the arena."""
        return Place(self._process, self._file, os.fstat(self._file).st_ino, self._heap.nbytes)

    @property
    def used(self) -> int:
        """Bytes of allocated blocks."""
        return self._heap.used

    def offset(self, address: int) -> int:
        """Offset of an address that lies in one of the blocks."""
        return address - self._address

    def take(self, nbytes: int) -> Bytes:
        """Allocate a block of ``nbytes`` bytes, uninitialised; ``MemoryError`` if there is no room."""
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            with self._lock:
                offset = self._heap.allocate(size)
        except SegmentError:
            free = f"{self._heap.free_bytes} of {self._heap.nbytes} are free, largest block"
            raise MemoryError(
                f"no room for a result of {nbytes} bytes: {free} {self._heap.largest_gap}"
            ) from None
        self._sweep()
        return self.memory[offset : offset + nbytes]

    def drop(self, block: Bytes) -> None:
        """Free a block that is not used any more, with its pages."""
        # Runs at the deletion of a tensor: also during another call, or in a child process, which must not
        # change it.
        if os.getpid() == self._process:
            self._dropped.append(block)
            self._sweep()

    def _sweep(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    block = self._dropped.popleft()
                    # Not by ``ctypes``, which imports: a tensor may be deleted while the interpreter ends.
                    offset = self.offset(block.__array_interface__["data"][0])
                    size = -(-block.nbytes // _PAGE_BYTES) * _PAGE_BYTES
                    with suppress(OSError):
                        self._pages.madvise(mmap.MADV_REMOVE, offset, size)
                    self._heap.free(offset)
            finally:
                self._lock.release()


# Mappings of other processes' arenas, shared by all machines: each mapping keeps a file open.
_mapped: weakref.WeakValueDictionary[Place, mmap.mmap] = weakref.WeakValueDictionary()


def attach(place: Place) -> Bytes | None:
    """Map the arena of another process of this node; None if this process cannot reach it."""
    try:
        file = os.open(f"/proc/{place.process}/fd/{place.file}", os.O_RDWR)
    except OSError:
        return None
    try:
        # Otherwise the process id belongs to another process, as in another namespace.
        if os.fstat(file).st_ino != place.inode or os.fstat(file).st_size != place.nbytes:
            return None
        pages = _mapped.get(place)
        if pages is None:
            pages = _mapped[place] = mmap.mmap(file, place.nbytes)
        return np.frombuffer(pages, np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


_arenas: dict[int, Arena | None] = {}


def own_arena() -> Arena | None:
    """Arena of this process, created by the first call; None if the system has none."""
    process = os.getpid()
    if process not in _arenas:
        try:
            _arenas[process] = Arena(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError, AttributeError, OverflowError):
            _arenas[process] = None
    return _arenas[process]
