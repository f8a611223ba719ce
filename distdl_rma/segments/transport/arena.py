"""Arenas: memory of a process that other ranks of its node store to, and that belongs to no machine.

A result in a segment would have to be copied out, since the segment ends with its machine, while a user may
keep a tensor for ever. A result in an arena is the tensor's own memory, and that of a later one (``pool.py``)
when it is dead::

    rank 0                                  rank 1 of the same node
    arena: a file without a name  <-------  maps /proc/<process of rank 0>/fd/<file>
    |  tensor  | tensor |                   and stores pieces of a result into the tensor

The file has no name, so a killed job leaves nothing behind. Its size is the whole memory of the machine,
which costs addresses only: pages exist from the first store to a block until the block is dropped.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import SegmentError
from distdl_rma.segments.transport.heap import Bytes, Heap
from distdl_rma.segments.transport.pool import Pool

_PAGE_BYTES = mmap.PAGESIZE


class Place(NamedTuple):
    """How another process finds an arena: process, file descriptor there, inode and size in bytes."""

    process: int
    file: int
    inode: int
    nbytes: int


class Arena(Pool):
    """Pool whose blocks lie in one file in memory, without a name; ends with the last process that uses it.

    Unlike a segment, an arena belongs to no machine: users may keep its arrays for ever. ``nbytes`` are
    addresses only: pages are consumed when touched, and freed by ``drop``. ``OSError`` if the system has no
    such files.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        file = os.memfd_create("distdl_rma results")
        try:
            os.ftruncate(file, nbytes)
            self._pages = mmap.mmap(file, nbytes)
        except (OSError, ValueError):
            os.close(file)
            raise
        # How other processes of this node find the arena.
        self.place = Place(os.getpid(), file, os.fstat(file).st_ino, nbytes)
        self._memory = memoryview(self._pages)
        self._begin = _address(self._memory)
        self._heap = Heap(nbytes)

    def offset(self, memory: NDArray[Any] | memoryview) -> int:
        """Offset of a block, or of an array in it."""
        return _address(memory) - self._begin

    def take(self, nbytes: int) -> memoryview:
        """Allocate a block of ``nbytes`` bytes, uninitialised; ``MemoryError`` if there is no room."""
        try:
            offset = self._heap.allocate(_in_pages(nbytes))
        except SegmentError:
            free = f"{self._heap.free_bytes} of {self._heap.nbytes} bytes are free, largest block"
            raise MemoryError(
                f"no room for a result of {nbytes} bytes: {free} {self._heap.largest_gap}"
            ) from None
        return self._memory[offset : offset + nbytes]

    def drop(self, block: memoryview) -> None:
        """Free a block that is not used any more, with its pages."""
        # Runs at the deletion of a tensor: also in a child process, which must not change it.
        if os.getpid() == self.place.process:
            offset = self.offset(block)
            with suppress(OSError):
                self._pages.madvise(mmap.MADV_REMOVE, offset, _in_pages(block.nbytes))
            self._heap.free(offset)


def _address(memory: NDArray[Any] | memoryview) -> int:
    # Not by ``ctypes``, which imports: a tensor may be deleted while the interpreter ends.
    return np.asarray(memory).__array_interface__["data"][0]


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


# Mappings of other processes' arenas, shared by all machines: each mapping keeps a file open.
_mapped: weakref.WeakValueDictionary[Place, mmap.mmap] = weakref.WeakValueDictionary()


def attach(place: Place) -> Bytes | None:
    """Map the arena of another process of this node; None if this process cannot reach it.

    Another user, a container or a security module may forbid it: then peers use slots, and one copy more.
    """
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


def addresses_left() -> int:
    """Bytes of addresses that this process may still map (``ulimit -v``)."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    return max(0, limit - mapped)


@cache
def own_arena() -> Arena | None:
    """Arena of this process, created by the first call; None if the system has none."""
    try:
        # Where addresses are few, segments need them.
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Arena(nbytes) if addresses_left() == sys.maxsize else None
    except (OSError, ValueError, AttributeError, OverflowError):
        return None


# A child has one of its own.
os.register_at_fork(after_in_child=own_arena.cache_clear)
