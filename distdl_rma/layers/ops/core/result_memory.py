"""Memory for results of operations: that of dead results of the same size, or torch's allocator.

Large results come from a pool (``segments/transport/pool.py``), since new pages of memory cost more than the
copy into them; not while memory of tensors moves to the disk, for which torch has to own it. What peers have
put data into lies in the arena of this process, a pool as well (``segments/transport/arena.py``), and becomes
a tensor here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray

from distdl_rma.layers.dtypes import BIT_WORDS, MOVING, NUMPY
from distdl_rma.segments.transport.pool import Pool

# torch allocates smaller results: its allocator reuses such memory.
SMALLEST_NBYTES = 1 << 18


class Mapped:
    """Size above which the C library maps a tensor of torch in new pages, and unmaps them when it dies.

    A prediction lowers it, so that memory goes back to the system at once
    (``allocator.py``), and kernels choose pieces by it (``ops/conv/pieces.py``). It is one
    number of the process, as the C library's.
    """

    # Of the GNU C library, in a process that has freed large blocks.
    nbytes = 1 << 25


MAPPED = Mapped()
_results = Pool()
# Frees the memory of all dead results.
drop_idle = _results.drop_idle


@contextmanager
def idle_memory(nbytes: int) -> Iterator[None]:
    """Context in which at most so many bytes of results are idle; none of those before, nor behind it."""
    drop_idle()
    before, _results.limit = _results.limit, nbytes
    try:
        yield
    finally:
        _results.limit = before
        drop_idle()


def result(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor | None = None) -> torch.Tensor:
    """Uninitialised memory for a result that leaves the library; on the device of ``like``, else the CPU."""
    if like is not None and not like.is_cpu:
        return like.new_empty(shape, dtype=dtype)
    if MOVING or prod(shape) * dtype.itemsize < SMALLEST_NBYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return tensor_over(_results.array(shape, BIT_WORDS[dtype.itemsize][1]), dtype)


def result_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for a result with the shape, type and strides of a tensor."""
    if MOVING or x.nbytes < SMALLEST_NBYTES or not x.is_cpu or not x.is_contiguous():
        return torch.empty_like(x)
    return tensor_over(_results.array(x.shape, BIT_WORDS[x.itemsize][1]), x.dtype)


def tensor_over(words: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Tensor in the memory of an array of words; no view of another tensor, so that it can be changed."""
    if dtype in NUMPY:
        return torch.from_numpy(words.view(NUMPY[dtype]))
    # numpy does not know the type.
    bits = torch.from_numpy(words)
    return torch.empty(0, dtype=dtype).set_(bits.untyped_storage(), 0, bits.shape, bits.stride())
