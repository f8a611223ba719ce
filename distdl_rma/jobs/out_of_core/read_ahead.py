"""Boxes of a source in the order of their use: a thread reads one while the one before is computed.

::

    thread     read 0   read 1             read 2             read 3
    slabs               compute 0          compute 1          compute 2        -> time
                        |                  |
                        takes box 0        takes box 1, and box 2 is begun

So a slow source costs time only as far as a box takes longer than a slab, and one box more is in memory, as
its source has it. Chunks that a box ends within are fetched to their end, for the boxes behind it::

    rows       0  1  2  3  4  5  6  7  8  9 10 11
    chunks     |           |           |           |
    boxes      |  0  |  1  |  2  |  3  |
    fetched    |     0     |     2     |             box 1 is what is left of the first chunk
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from distdl_rma.layers.sources.hdf5 import hdf5_lock
from distdl_rma.layers.sources.reading import Slices, Source, read_box


class ReadAhead:
    """Context that reads the ``places`` of a source, each once; ``take`` returns the next one.

    Always true: at most one box is being read, or is read and not taken. An error of a read is raised where
    its box is taken, and no further box is read. The thread has ended when the context has, whatever ends it:
    a read that is under way is waited for. ``ahead`` says whether there is a thread at all. Places begin and
    end at any row of dimension ``dim``, but fetches end at multiples of ``chunk`` rows.
    """

    def __init__(
        self, source: Any, places: Iterator[Slices], ahead: bool, dim: int = 0, chunk: int = 1
    ) -> None:
        self._source, self._places, self._dim, self._chunk = source, places, dim, chunk
        # Where rows were fetched last, and these.
        self._kept: tuple[list[slice], torch.Tensor] | None = None
        self._thread = ThreadPoolExecutor(1, "read ahead") if ahead else None
        self._begun: Future[torch.Tensor] | None = None

    def __enter__(self) -> ReadAhead:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def take(self) -> torch.Tensor:
        """The next box, in new memory; blocking."""
        if self._begun is None:
            return self._read(next(self._places))
        box, self._begun = self._begun.result(), None
        self._begin()
        return box

    def _begin(self) -> None:
        place = next(self._places, None) if self._thread is not None else None
        if self._thread is not None and place is not None:
            self._begun = self._thread.submit(self._read, place)

    def _read(self, place: Slices) -> torch.Tensor:
        # A function of the user may call HDF5's library, which one thread may do at a time.
        with hdf5_lock(isinstance(self._source, Source)):
            return read_box(self._source, place) if self._chunk == 1 else self._of_chunks([*place])

    def _of_chunks(self, place: list[slice]) -> torch.Tensor:
        # The rows that were fetched for an earlier place, and those up to the end of a chunk behind them.
        d, rows, parts = self._dim, place[self._dim], list[torch.Tensor]()
        begin, end = rows.start, min(-(-rows.stop // self._chunk) * self._chunk, self._source.shape[d])
        if self._kept is not None:
            at, kept = self._kept
            if at[:d] == place[:d] and at[d].start <= begin < at[d].stop:
                parts.append(kept.narrow(d, begin - at[d].start, min(rows.stop, at[d].stop) - begin))
                begin = min(rows.stop, at[d].stop)
        if begin < rows.stop or not parts:
            place[d] = slice(begin, max(begin, end))
            self._kept = place, read_box(self._source, place)
            parts.append(self._kept[1].narrow(d, 0, rows.stop - begin))
        # In new memory: of a view, all that was fetched would stay.
        return torch.cat(parts, d)
