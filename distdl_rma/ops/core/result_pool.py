"""Memory of large results, used again: a page that was never touched costs more than the copy into it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Smaller results come from torch, whose allocator has touched such memory before.
SMALLEST_NBYTES = 1 << 18
# What is kept for later at most, in bytes of this process.
IDLE_NBYTES = 1 << 28

Block = npt.NDArray[np.uint8]


class ResultPool:
    """Blocks of memory, kept from when the last tensor in them dies until one of the same size is made.

    Of more than ``limit`` bytes what was idle for longest goes.
    """

    def __init__(self, limit: int = IDLE_NBYTES) -> None:
        self._limit = limit
        self._idle: OrderedDict[int, list[Block]] = OrderedDict()
        self.idle_nbytes = 0
        # Blocks that came back, and whose turn it is to put them where they belong.
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor of a shape and type, not initialised; it owns its memory like any other."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_NBYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(nbytes)
        # torch keeps this view for as long as any tensor lies in it, and nobody else has it.
        lent: Any = block[:]
        weakref.finalize(lent, self._give_back, block).atexit = False
        # No view of another tensor: autograd lets only such be changed in place.
        storage, extents = torch.from_numpy(lent).untyped_storage(), torch.Size(shape)
        strides = [prod(extents[d + 1 :]) for d in range(len(extents))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, extents, strides)

    def _take(self, nbytes: int) -> Block:
        with self._lock:
            blocks = self._idle.get(nbytes)
            block = blocks.pop() if blocks else None
            self.idle_nbytes -= 0 if block is None else nbytes
        self._sort()
        return np.empty(nbytes, np.uint8) if block is None else block

    def _give_back(self, block: Block) -> None:
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

    def _keep(self, block: Block) -> None:
        if block.nbytes > self._limit:
            return
        while self.idle_nbytes + block.nbytes > self._limit and self._idle:
            _, old = self._idle.popitem(last=False)
            self.idle_nbytes -= sum(b.nbytes for b in old)
        self._idle.setdefault(block.nbytes, []).append(block)
        self._idle.move_to_end(block.nbytes)
        self.idle_nbytes += block.nbytes


_results = ResultPool()


def result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result that leaves the library, not initialised."""
    return _results.empty(shape, dtype)


def result_like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a result of the shape, type and strides of a tensor, not initialised."""
    return result(x.shape, x.dtype) if x.is_contiguous() else torch.empty_like(x)
