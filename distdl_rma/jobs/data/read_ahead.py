"""Results in the order of their use: a thread makes the next ones while the one before is used.

For the batches of a loader, and for the slabs of a prediction::

    thread     read 0   read 1             read 2             read 3
    user                computes 0         computes 1         computes 2       -> time
                        |                  |
                        takes box 0        takes box 1, and box 2 is begun

So a slow source costs time only as far as a box takes longer than its use, and one box more is in memory, as
its source has it. For slabs, chunks that a box ends within are fetched to their end, for the boxes behind
it::

    rows       0  1  2  3  4  5  6  7  8  9 10 11
    chunks     |           |           |           |
    boxes      |  0  |  1  |  2  |  3  |
    fetched    |     0     |     2     |             box 1 is what is left of the first chunk
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch

from distdl_rma.layers.sources.hdf5 import hdf5_lock
from distdl_rma.layers.sources.reading import Slices, Source, read_box

T = TypeVar("T")


def results_ahead(calls: Iterator[Callable[[], T]], count: int, name: str) -> Generator[T, None, None]:
    """Results of calls, each made once; a thread of this name makes the next ``count`` ones ahead.

    Without a thread if ``count`` is 0. Always true: at most ``count`` results are being made, or are made and
    not taken. An error is raised where its result is taken, and no further call is made. The thread has ended
    when the generator has, whatever ends it: a call that is under way is waited for.
    """
    thread = ThreadPoolExecutor(1, name) if count else None

    def begin(call: Callable[[], T]) -> Callable[[], T]:
        return call if thread is None else thread.submit(call).result

    try:
        begun = deque(map(begin, islice(calls, max(1, count))))
        while begun:
            # No variable keeps a result while the next one is made.
            ready = [begun.popleft()()]
            begun.extend(map(begin, islice(calls, 1)))
            yield ready.pop()
    finally:
        if thread is not None:
            thread.shutdown(cancel_futures=True)


def boxes_ahead(
    source: Any, places: Iterator[Slices], ahead: bool, dim: int = 0, chunk: int = 1
) -> Generator[torch.Tensor, None, None]:
    """Boxes of a source, in new memory; ``ahead`` says whether a thread reads the next one.

    Places begin and end at any row of dimension ``dim``, but fetches end at multiples of ``chunk`` rows.
    """
    rows = _Rows(source, dim, chunk)
    return results_ahead((partial(rows.read, place) for place in places), int(ahead), "read ahead")


class _Rows:
    """Reads boxes of a source in their order; what was fetched of a chunk behind one is kept for the next."""

    def __init__(self, source: Any, dim: int, chunk: int) -> None:
        self._source, self._dim, self._chunk = source, dim, chunk
        # Where rows were fetched last, and these.
        self._kept: tuple[list[slice], torch.Tensor] = [], torch.empty(0)

    def read(self, place: Slices) -> torch.Tensor:
        """The box of a place."""
        # A function of the user may call HDF5's library, which one thread may do at a time.
        with hdf5_lock(isinstance(self._source, Source)):
            return read_box(self._source, place) if self._chunk == 1 else self._of_chunks([*place])

    def _of_chunks(self, place: list[slice]) -> torch.Tensor:
        # The rows that were fetched for an earlier place, and those up to the end of a chunk behind them.
        d, rows, parts = self._dim, place[self._dim], list[torch.Tensor]()
        begin, end = rows.start, min(-(-rows.stop // self._chunk) * self._chunk, self._source.shape[d])
        at, kept = self._kept
        if at and at[:d] == place[:d] and at[d].start <= begin < at[d].stop:
            parts.append(kept.narrow(d, begin - at[d].start, min(rows.stop, at[d].stop) - begin))
            begin = min(rows.stop, at[d].stop)
        if begin < rows.stop or not parts:
            place[d] = slice(begin, max(begin, end))
            self._kept = place, read_box(self._source, place)
            parts.append(self._kept[1].narrow(d, 0, rows.stop - begin))
        # In new memory: of a view, all that was fetched would stay.
        return torch.cat(parts, d)
