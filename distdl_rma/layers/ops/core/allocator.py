"""Memory of freed tensors, and of kernels, goes back to the system at once.

A plan counts tensors that are alive. The allocator of the GNU C library counts otherwise: of a freed block of
up to 32 MiB it keeps the memory, and takes it for the next block only if that fits, aligned as torch asks
for. Slabs would so take more memory than was planned. Two numbers of the library change this: from which size
on a block is mapped on its own, and how much free memory at the end of the heap is kept.

Kernels keep memory as well: products of matrices that of their copies, for each thread that has computed a
part of one. Each slab is a thread, which has such threads of its own: 37 slabs that waited for each other
kept an eighth of what was planned for all.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distdl_rma.layers.ops.core.result_memory import MAPPED, Mapped

# Parameters of mallopt, of the GNU C library, with the variables that set them.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_VARIABLES = {_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_", _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_"}
# What the library sets by itself in a process that has freed large blocks; the first is its largest value.
_USUAL = {_MMAP_THRESHOLD: Mapped.nbytes, _TRIM_THRESHOLD: 2 * Mapped.nbytes}
# MKL's function, in builds of torch that have MKL. That for the calling thread leaves what its helpers have.
_FREE_BUFFERS = "mkl_serv_free_buffers"
_lock = threading.Lock()
# Sizes of the contexts that are entered, and whether kernels choose pieces by them.
_sizes: list[tuple[int, bool]] = []


@contextmanager
def freed_at_once(above: int = 1 << 19, pieces: bool = True) -> Iterator[None]:
    """Context in which a block of more than so many bytes is mapped from the system, and unmapped when freed.

    Otherwise the GNU C library keeps freed blocks of up to 32 MiB, for the thread that has allocated them. It
    seldom takes one for a tensor of the same size: with the alignment that torch asks for, that does not fit.
    Kernels then choose ``pieces``, so that they need no such block, and may round otherwise. The context acts
    on all threads of the process; of several contexts the smallest size counts. Other C libraries are left as
    they are.
    """
    with _lock:
        _sizes.append((above, pieces))
        _set()
    try:
        yield
    finally:
        with _lock:
            _sizes.remove((above, pieces))
            _set()


def _set() -> None:
    MAPPED.nbytes = min([Mapped.nbytes, *[size for size, pieces in _sizes if pieces]])
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    for parameter, usual in _USUAL.items():
        text = os.environ.get(_VARIABLES[parameter], "")
        before = int(text) if text.isdecimal() else usual
        library.mallopt(parameter, min([usual, *[size for size, _ in _sizes]]) if _sizes else before)


def free_buffers() -> None:
    """Give back memory that kernels keep and that none uses; the next product of matrices takes it again."""
    library = ctypes.CDLL(torch._C.__file__)
    if hasattr(library, _FREE_BUFFERS):
        getattr(library, _FREE_BUFFERS)()
