"""Taking memory from the node at once, where running out of it is an error and not the end of the process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
from pathlib import Path

from distdl_rma.segments.transport.rma_peer import Bytes

SHARED_MEMORY = Path("/dev/shm")
# Of Linux: provides all pages, or fails where a store would end in SIGBUS (5.14); gives pages back.
_MADV_POPULATE_WRITE, _MADV_REMOVE = 23, 9
_CHUNK_BYTES = 1 << 20
# What MPI may still need for itself; its own memory is consumed when it is touched, too.
_SPARE_BYTES = 4 << 20


def reserve_pages(memory: Bytes, ranks: int) -> str:
    """Have the kernel provide all pages of new memory, which is zero before and after; blocking.

    All or nothing; so many ranks of the node do the same now, and its last bytes are left alone. Returns what
    is missing, for a message; empty if nothing is.
    """
    for begin in range(0, memory.nbytes, _CHUNK_BYTES):
        problem = "too little is left" if _free() < _SPARE_BYTES + ranks * _CHUNK_BYTES else ""
        problem = problem or _provide(memory[begin : begin + _CHUNK_BYTES])
        if problem:
            left = f", {_free():.0f} bytes left in {SHARED_MEMORY}" if SHARED_MEMORY.is_dir() else ""
            _advise(memory, _MADV_REMOVE, inside=True)
            return f"only {begin} of {memory.nbytes} bytes can be had: {problem}{left}"
    return ""


def _provide(chunk: Bytes) -> str:
    problem = _advise(chunk, _MADV_POPULATE_WRITE)
    if problem in (errno.EINVAL, errno.ENOSYS):
        # An older kernel. Looked before: only who takes as much in the same moment is not seen.
        chunk[:] = 0
        return ""
    return os.strerror(problem) if problem else ""


def _advise(memory: Bytes, advice: int, inside: bool = False) -> int:
    # Number of the error; 0 if there was none. The pages at both ends may be shared with other ranks.
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    begin = (-(-begin // mmap.PAGESIZE) if inside else begin // mmap.PAGESIZE) * mmap.PAGESIZE
    end = end // mmap.PAGESIZE * mmap.PAGESIZE if inside else end
    if end <= begin:
        return 0
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return errno.ENOSYS
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise.restype = ctypes.c_int
    return ctypes.get_errno() if madvise(begin, end - begin, advice) else 0


def _free() -> float:
    # Infinite where shared memory is no file system of its own.
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else float("inf")
