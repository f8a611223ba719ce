"""Pools of memory for large results: a block whose last array died is used again for one of its size.

The system maps new pages at their first use, and clears them: for a large result this takes longer than the
copy into it. A training step makes results of the same sizes again and again::

    step 1     y = pool.array(...)    block A, new pages          y dies: A is idle
    step 2     y = pool.array(...)    block A again, no new pages

How a block comes back: all arrays and tensors in its memory have one array as their base. A weak reference to
that array (``_Loan``) notices the end of the last one, on whatever thread this happens.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distdl_rma.segments.transport.heap import ALIGNMENT

# Largest amount of idle memory in a pool, in bytes.
IDLE_NBYTES = 1 << 28


class _Loan(weakref.ref[NDArray[Any]]):
    # Reference to the base of all arrays in a lent block. weakref.finalize takes several times as long.
    __slots__ = ("block",)
    block: memoryview


class Pool:
    """Blocks of memory, kept after the last array in them died, for the next array of the same size.

    Always true: a block is either lent, with one entry in ``_lent``, or returned, or idle; ``idle_nbytes``
    are the bytes of the idle ones, at most ``limit``. Arrays die on any thread, also while this one holds the
    lock: such a block goes to the queue of returned ones, and whoever holds the lock sorts it in. Above
    ``limit`` idle bytes, blocks of the longest idle size are dropped.

    A pool of other memory overrides ``take`` and ``drop``, which allocate and free a block. They are called
    with the lock held, and so one at a time.
    """

    def __init__(self, limit: int = IDLE_NBYTES) -> None:
        self.limit, self.idle_nbytes = limit, 0
        self._idle: OrderedDict[int, list[memoryview]] = OrderedDict()
        # By the ``id`` of the block.
        self._lent: dict[int, _Loan] = {}
        # Returned blocks that are not yet among the idle ones.
        self._returned: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Uninitialised array, which owns its memory like any other array; any thread may call it."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            blocks = self._idle.get(nbytes)
            if blocks:
                block = blocks.pop()
                self.idle_nbytes -= nbytes
            else:
                block = self.take(nbytes)
        if self._returned:
            self._sort()
        # The base of all views, since its own base is no array.
        lent = np.frombuffer(block, dtype)
        loan = self._lent[id(block)] = _Loan(lent, self._ended)
        loan.block = block
        return lent.reshape(shape)

    def take(self, nbytes: int) -> memoryview:
        """Allocate a block at a cache line, as torch does."""
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        begin = -whole.ctypes.data % ALIGNMENT
        return whole[begin : begin + nbytes].data

    def drop(self, block: memoryview) -> None:
        """Free a block that no array uses."""

    def drop_idle(self) -> None:
        """Free all blocks that no array uses."""
        with self._lock:
            idle, self.idle_nbytes = list(self._idle.values()), 0
            self._idle.clear()
            for block in chain.from_iterable(idle):
                self.drop(block)

    def _ended(self, loan: Any) -> None:
        # Runs on any thread, even during another call of the pool: it must not wait for the lock.
        del self._lent[id(loan.block)]
        self._returned.append(loan.block)
        self._sort()

    def _sort(self) -> None:
        # The holder of the lock checks for returned blocks again after its release: no other thread waits.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._keep(self._returned.popleft())
            finally:
                self._lock.release()

    def _keep(self, block: memoryview) -> None:
        if block.nbytes > self.limit:
            self.drop(block)
            return
        while self.idle_nbytes + block.nbytes > self.limit and self._idle:
            nbytes, old = self._idle.popitem(last=False)
            self.idle_nbytes -= nbytes * len(old)
            for idle in old:
                self.drop(idle)
        self._idle.setdefault(block.nbytes, []).append(block)
        self._idle.move_to_end(block.nbytes)
        self.idle_nbytes += block.nbytes
