"""Memory of this process that the ranks of its node store to, and that lives as long as it is used here."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import SegmentError
from distdl_rma.segments.transport.heap import Heap
from distdl_rma.segments.transport.rma_peer import Bytes

_PAGE_BYTES = mmap.PAGESIZE


class Place(NamedTuple):
    """Where another process finds an arena: its process, the file there and its number, its size."""

    process: int
    file: int
    inode: int
    nbytes: int


class Landing(NamedTuple):
    """Memory that peers put to: as an array, by its offset in the arena of its process, and who owns it."""

    array: NDArray[Any]
    offset: int
    owner: object


class Arena:
    """Blocks of one file in memory, which exists nowhere else and ends with the last process that uses it.

    Unlike a segment it belongs to no machine: what lies in it may be handed out to users for ever. Its
    ``nbytes`` are only a range of addresses; pages are taken when they are touched, and given back by
    ``drop``. ``OSError`` where the system has no such files.
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
        """Where other processes of this node find it."""
        return Place(self._process, self._file, os.fstat(self._file).st_ino, self._heap.nbytes)

    @property
    def used(self) -> int:
        """Bytes of the blocks that are taken."""
        return self._heap.used

    def offset(self, address: int) -> int:
        """Offset of an address in one of its blocks."""
        return address - self._address

    def take(self, nbytes: int) -> Bytes:
        """Block of so many bytes, not initialised; ``MemoryError`` if there is no room."""
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            with self._lock:
                offset = self._heap.allocate(size)
        except SegmentError as error:
            raise MemoryError(f"no room for a result of {nbytes} bytes: {error}") from None
        self._sweep()
        return self.memory[offset : offset + nbytes]

    def drop(self, block: Bytes) -> None:
        """Give a block back, that nobody uses any more, with its pages."""
        # Runs wherever a tensor dies: also in the middle of another call, and in children of this process,
        # which must leave it alone.
        if os.getpid() == self._process:
            self._dropped.append(block)
            self._sweep()

    def _sweep(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    block = self._dropped.popleft()
                    # Not by ``ctypes``, which imports: a tensor may die when the interpreter does.
                    offset = self.offset(block.__array_interface__["data"][0])
                    size = -(-block.nbytes // _PAGE_BYTES) * _PAGE_BYTES
                    with suppress(OSError):
                        self._pages.madvise(mmap.MADV_REMOVE, offset, size)
                    self._heap.free(offset)
            finally:
                self._lock.release()


# Other processes' arenas, for all machines that have the process in common: each mapping holds a file open.
_mapped: weakref.WeakValueDictionary[Place, mmap.mmap] = weakref.WeakValueDictionary()


def attach(place: Place) -> Bytes | None:
    """Arena of another process of this node, to store to; None if it cannot be reached from here."""
    try:
        file = os.open(f"/proc/{place.process}/fd/{place.file}", os.O_RDWR)
    except OSError:
        return None
    try:
        # Another process of that number, as one of another namespace would be.
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
    """The arena of this process, made when it is first asked for; None where there can be none."""
    process = os.getpid()
    if process not in _arenas:
        try:
            _arenas[process] = Arena(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError, AttributeError, OverflowError):
            _arenas[process] = None
    return _arenas[process]
