"""Pool of memory for large results: a block whose last tensor died is reused for a result of its size.

The system maps new pages at their first use, and clears them: for a large tensor this takes longer than the
copy into it. A training step makes tensors of the same sizes again and again::

    step 1     y = result(...)    block A, new pages          y dies: A is idle
    step 2     y = result(...)    block A again, no new pages

How a block comes back: torch holds a numpy view of the block for as long as any tensor is in it. A weak
reference to that view (``_Loan``) notices the death of the last one, on whatever thread this happens.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.layers.dtypes import NUMPY, as_words
from distdl_rma.segments.transport.arena import Arena, Landing, own_arena

# torch allocates smaller results: its allocator reuses such memory.
SMALLEST_NBYTES = 1 << 18
# Largest amount of idle memory in a pool, in bytes.
IDLE_NBYTES = 1 << 28
_Block = NDArray[np.uint8]


class Mapped:
    """Size above which the C library maps a tensor of torch in new pages, and unmaps them when it dies.

    A prediction lowers it, so that memory goes back to the system at once
    (``jobs/out_of_core/allocator.py``), and kernels choose pieces by it (``ops/conv/pieces.py``). It is one
    number of the process, as the C library's.
    """

    # Of the GNU C library, in a process that has freed large blocks.
    nbytes = 1 << 25


MAPPED = Mapped()


def _fresh(nbytes: int) -> _Block:
    return np.empty(nbytes, np.uint8)


class _Loan(weakref.ref[NDArray[Any]]):
    # Reference to the view of a lent block that torch holds: the view dies with the last tensor in the block.
    # weakref.finalize takes several times as long.
    __slots__ = ("block",)
    block: _Block


class ResultPool:
    """Blocks of memory, kept after the last tensor in them died, for the next tensor of the same size.

    Always true: a block is either lent, with one entry in ``_lent``, or returned, or idle; ``idle_nbytes``
    are the bytes of the idle ones, at most ``limit``. Tensors die on any thread, also while this one holds
    the lock: such a block goes to the queue of returned ones, and whoever holds the lock sorts it in. Above
    ``limit`` idle bytes, blocks of the longest idle size are dropped. ``take`` and ``drop`` allocate and free
    blocks, of ``smallest`` bytes or more; they are called with the lock held, and so one at a time.
    """

    def __init__(
        self,
        limit: int = IDLE_NBYTES,
        take: Callable[[int], _Block] = _fresh,
        drop: Callable[[_Block], object] = id,
        smallest: int = SMALLEST_NBYTES,
    ) -> None:
        self.limit, self._make, self._drop, self._smallest = limit, take, drop, smallest
        self._idle: OrderedDict[int, list[_Block]] = OrderedDict()
        self.idle_nbytes = 0
        # By the ``id`` of the block.
        self._lent: dict[int, _Loan] = {}
        # Returned blocks that are not yet among the idle ones.
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised tensor, which owns its memory like any other tensor."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < self._smallest:
            return torch.empty(tuple(shape), dtype=dtype)
        block, element = self._take(nbytes), NUMPY.get(dtype)
        # Only torch refers to this view, as long as any tensor is in it.
        lent = block[:] if element is None else np.ndarray(shape, element, block)
        loan = self._lent[id(block)] = _Loan(lent, self._ended)
        loan.block = block
        if element is not None:
            return torch.from_numpy(lent)
        # numpy does not know the type. Not a view of another tensor, so that it can be changed in place.
        storage, extents = torch.from_numpy(lent).untyped_storage(), torch.Size(shape)
        strides = [prod(extents[d + 1 :]) for d in range(len(extents))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, extents, strides)

    def drop_idle(self) -> None:
        """Free all blocks that no tensor uses."""
        with self._lock:
            idle, self.idle_nbytes = list(self._idle.values()), 0
            self._idle.clear()
            for block in chain.from_iterable(idle):
                self._drop(block)

    def _take(self, nbytes: int) -> _Block:
        with self._lock:
            blocks = self._idle.get(nbytes)
            if blocks:
                block = blocks.pop()
                self.idle_nbytes -= nbytes
            else:
                block = self._make(nbytes)
        if self._returned:
            self._sort()
        return block

    def _ended(self, loan: Any) -> None:
        del self._lent[id(loan.block)]
        self._give_back(loan.block)

    def _give_back(self, block: _Block) -> None:
        # Runs on any thread, even during another call of the pool: it must not wait for the lock.
        self._returned.append(block)
        self._sort()

    def _sort(self) -> None:
        # The holder of the lock checks for returned blocks again after its release: no other thread waits.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._keep(self._returned.popleft())
            finally:
                self._lock.release()

    def _keep(self, block: _Block) -> None:
        if block.nbytes > self.limit:
            self._drop(block)
            return
        while self.idle_nbytes + block.nbytes > self.limit and self._idle:
            _, old = self._idle.popitem(last=False)
            self.idle_nbytes -= sum(b.nbytes for b in old)
            for idle in old:
                self._drop(idle)
        self._idle.setdefault(block.nbytes, []).append(block)
        self._idle.move_to_end(block.nbytes)
        self.idle_nbytes += block.nbytes


_results = ResultPool()
# Not empty while torch allocates all results, since the caller resizes their memory.
_UNPOOLED: list[bool] = []


@contextmanager
def unpooled() -> Iterator[None]:
    """Context in which results are in memory of torch's allocator, and none is idle."""
    _UNPOOLED.append(True)
    _results.drop_idle()
    try:
        yield
    finally:
        _UNPOOLED.pop()


@contextmanager
def idle_memory(nbytes: int) -> Iterator[None]:
    """Context in which at most so many bytes of results are idle; none of those before, nor behind it."""
    _results.drop_idle()
    before, _results.limit = _results.limit, nbytes
    try:
        yield
    finally:
        _results.limit = before
        _results.drop_idle()


def result(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor | None = None) -> torch.Tensor:
    """Uninitialised memory for a result that leaves the library; on the device of ``like``, else the CPU."""
    if like is not None and not like.is_cpu:
        return like.new_empty(shape, dtype=dtype)
    if _UNPOOLED or prod(shape) * dtype.itemsize < SMALLEST_NBYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    return _results.empty(shape, dtype)


def landing(shape: Sequence[int], dtype: torch.dtype) -> Landing:
    """Uninitialised memory for a result, in the arena of this process: other ranks of the node put to it.

    It is pooled like the memory of other results. ``RuntimeError`` if this process has no arena.
    """
    arena = own_arena()
    if arena is None:
        raise RuntimeError("no memory that other processes could put results to")
    with _making:
        if _landings.get(arena) is None:
            _landings[arena] = ResultPool(take=arena.take, drop=arena.drop, smallest=0)
    # A call posts the result of a later call, and only the later one may need gradients.
    with torch.inference_mode(False):
        tensor = _landings[arena].empty(shape, dtype)
    return Landing(as_words(tensor), arena.offset(tensor.data_ptr()), tensor)


_landings: dict[Arena, ResultPool] = {}
_making = threading.Lock()


def result_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory for a result with the shape, type and strides of a tensor."""
    if _UNPOOLED or x.nbytes < SMALLEST_NBYTES or not x.is_cpu or not x.is_contiguous():
        return torch.empty_like(x)
    return _results.empty(x.shape, x.dtype)
