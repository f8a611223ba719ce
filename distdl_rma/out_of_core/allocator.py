"""Memory of freed tensors goes back to the system at once, whichever thread has allocated it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt, of the GNU C library, with the variables that set them.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_VARIABLES = {_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}
_AT_ONCE = {_MMAP_THRESHOLD: 1 << 19, _TRIM_THRESHOLD: 1 << 19}
# What the library sets by itself in a process that has freed large blocks.
_USUAL = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Context in which each large block of memory is mapped from the system alone, and unmapped when freed.

    Otherwise the GNU C library keeps memory of freed tensors for the thread that has allocated it, and each
    virtual rank is a thread. Process-wide; other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    for parameter, value in _AT_ONCE.items():
        mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _USUAL.items():
            text = os.environ.get(_VARIABLES[parameter], "")
            mallopt(parameter, int(text) if text.isdecimal() else value)
