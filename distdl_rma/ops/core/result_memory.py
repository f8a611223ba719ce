"""Memory of large results: kept when the last tensor in it dies, and used for the next one of its size."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.dtypes import NUMPY, as_words
from distdl_rma.segments.transport.heap import Arena, Landing, own_arena

# Smaller results come from torch, whose allocator has touched such memory before.
SMALLEST_NBYTES = 1 << 18
# What is kept for later at most, in bytes of this process.
IDLE_NBYTES = 1 << 28
_Block = NDArray[np.uint8]


def _fresh(nbytes: int) -> _Block:
    return np.empty(nbytes, np.uint8)


class _Loan(weakref.ref[NDArray[Any]]):
    # What torch holds of a block that is lent: with its last tensor it dies. ``finalize`` does more, and
    # takes several times as long.
    __slots__ = ("block",)
    block: _Block


class ResultPool:
    """Blocks of memory, kept from when the last tensor in them dies until one of the same size is made.

    A page that was never touched costs more than the copy into it. Of more than ``limit`` bytes what was idle
    for longest goes. Blocks of ``smallest`` bytes or more come from ``take`` and go to ``drop``.
    """

    def __init__(
        self,
        limit: int = IDLE_NBYTES,
        take: Callable[[int], _Block] = _fresh,
        drop: Callable[[_Block], object] = id,
        smallest: int = SMALLEST_NBYTES,
    ) -> None:
        self._limit, self._make, self._drop, self._smallest = limit, take, drop, smallest
        self._idle: OrderedDict[int, list[_Block]] = OrderedDict()
        self.idle_nbytes = 0
        # By the ``id`` of the block.
        self._lent: dict[int, _Loan] = {}
        # Blocks that came back, and whose turn it is to put them where they belong.
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor of a shape and type, not initialised; it owns its memory like any other."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < self._smallest:
            return torch.empty(tuple(shape), dtype=dtype)
        block, alike = self._take(nbytes), NUMPY.get(dtype)
        # torch keeps this view for as long as any tensor lies in it, and nobody else has it.
        lent = block[:] if alike is None else np.ndarray(shape, alike, block)
        loan = self._lent[id(block)] = _Loan(lent, self._ended)
        loan.block = block
        if alike is not None:
            return torch.from_numpy(lent)
        # No view of another tensor: autograd lets only such be changed in place.
        storage, extents = torch.from_numpy(lent).untyped_storage(), torch.Size(shape)
        strides = [prod(extents[d + 1 :]) for d in range(len(extents))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, extents, strides)

    def _take(self, nbytes: int) -> _Block:
        with self._lock:
            blocks = self._idle.get(nbytes)
            block = blocks.pop() if blocks else None
            self.idle_nbytes -= 0 if block is None else nbytes
        if self._returned:
            self._sort()
        return self._make(nbytes) if block is None else block

    def _ended(self, loan: Any) -> None:
        del self._lent[id(loan.block)]
        self._give_back(loan.block)

    def _give_back(self, block: _Block) -> None:
        # Runs wherever a tensor dies: on any thread, and in the middle of another call of the pool.
        self._returned.append(block)
        self._sort()

    def _sort(self) -> None:
        # Who holds the lock looks again after giving it up, so that nobody has to wait for it.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._keep(self._returned.popleft())
            finally:
                self._lock.release()

    def _keep(self, block: _Block) -> None:
        if block.nbytes > self._limit:
            self._drop(block)
            return
        while self.idle_nbytes + block.nbytes > self._limit and self._idle:
            _, old = self._idle.popitem(last=False)
            self.idle_nbytes -= sum(b.nbytes for b in old)
            for idle in old:
                self._drop(idle)
        self._idle.setdefault(block.nbytes, []).append(block)
        self._idle.move_to_end(block.nbytes)
        self.idle_nbytes += block.nbytes


_results = ResultPool()


def result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result that leaves the library, not initialised."""
    if prod(shape) * dtype.itemsize < SMALLEST_NBYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return _results.empty(shape, dtype)


def landing(shape: Sequence[int], dtype: torch.dtype) -> Landing:
    """Memory for a result that other ranks of the node put to, not initialised, in the arena of this process.

    Kept and used again as that of other results. Only where there is an arena.
    """
    arena = own_arena()
    if arena is None:
        raise RuntimeError("no memory that other processes could put results to")
    with _making:
        if _landings.get(arena) is None:
            _landings[arena] = ResultPool(take=arena.take, drop=arena.drop, smallest=0)
    # Posted by a call before the one that returns it, which may train where this one only infers.
    with torch.inference_mode(False):
        tensor = _landings[arena].empty(shape, dtype)
    return Landing(as_words(tensor), arena.offset(tensor.data_ptr()), tensor)


_landings: dict[Arena, ResultPool] = {}
_making = threading.Lock()


def result_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a result of the shape, type and strides of a tensor, not initialised."""
    if x.nbytes < SMALLEST_NBYTES or not x.is_contiguous():
        return torch.empty_like(x)
    return _results.empty(x.shape, x.dtype)
