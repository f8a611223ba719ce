"""Memory of large tensors that goes back to the system as soon as they are freed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# glibc's option, and its largest value, which the allocator itself comes to when large tensors are freed.
_M_MMAP_THRESHOLD, _LARGEST = -3, 32 << 20
_lock = threading.Lock()
_thresholds: list[int] = []


@contextmanager
def memory_goes_back(above: int) -> Iterator[None]:
    """Context in which the system gets memory back when a tensor of more than so many bytes is freed.

    Otherwise glibc keeps freed memory of up to 32 MiB, and seldom uses it for a tensor of the same size: with
    the alignment that torch asks for, that does not fit in there again. With another C library the context
    has no effect. It acts on all threads of the process; the smallest size of several contexts counts.
    """
    with _lock:
        _thresholds.append(above)
        _set_threshold()
    try:
        yield
    finally:
        with _lock:
            _thresholds.remove(above)
            _set_threshold()


def _set_threshold() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_MMAP_THRESHOLD, min(_thresholds, default=_LARGEST))
