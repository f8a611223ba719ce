"""Chunks are read whole: how many bytes more the blocks of a grid fetch than they want.

One dimension of 12, in chunks of 5, cut in three::

    chunks     0  1  2  3  4 | 5  6  7  8  9 | 10 11
    blocks     0  1  2  3 | 4  5  6  7 | 8  9 10 11
    fetched    5            10           7              22 elements for 12: 1.83 times

Dimensions are independent: the factor of a grid is the product of theirs.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.sources.reading import label

# Bytes fetched for a byte wanted, above which a grid deserves a warning.
_ENOUGH = 1.5


def chunks_of(source: Any) -> tuple[Any, ...] | None:
    """Extents of a source's chunks, a tuple of all where they differ; None if boxes are read alone.

    Libraries say it in four ways. What is none of these, or does not fit the shape, counts as no chunks: the
    answer is used for a warning, and by sinks, where a source without chunks can be written anywhere.
    """
    found = getattr(source, "chunks", None)
    if found is None and callable(chunking := getattr(source, "chunking", None)):
        # NetCDF says "contiguous" where there are none.
        found = chunking()
    if found is None and hasattr(source, "chunk_layout"):
        found = source.chunk_layout.read_chunk.shape
    if found is None and isinstance(encoding := getattr(source, "encoding", None), dict):
        found = encoding.get("chunksizes")
    if not isinstance(found, (tuple, list)) or len(found) != len(source.shape) or not all(found):
        return None
    return tuple(found)


def fetched_of(source: Any, intervals: Sequence[Iterable[tuple[int, int]]]) -> float:
    """Bytes that are fetched, for each byte of a source, to read all boxes of a grid of ``intervals``.

    Each dimension has a list of half-open intervals, which may overlap.

    Examples
    --------
    >>> scan = Source((12,), np.float32, read=None, chunks=(5,))
    >>> fetched_of(scan, [[(0, 4), (4, 8), (8, 12)]]), fetched_of(scan, [[(0, 5), (5, 12)]])
    (1.8333333333333333, 1.0)
    """
    return prod(_costs(source, intervals))


def _costs(source: Any, intervals: Iterable[Iterable[tuple[int, int]]]) -> list[float]:
    # For each dimension, which are independent.
    chunks = chunks_of(source) or (1,) * len(source.shape)
    return [*map(_fetched, map(_edges, source.shape, chunks), intervals, source.shape)]


def warn_of_chunks(source: Any, layout: Decomposition, stacklevel: int) -> None:
    """Warn if reading the blocks of a layout fetches more than 1.5 times their bytes; local, on one rank."""
    chunks, partition = chunks_of(source), layout.partition
    if chunks is None or 0 in layout.shape or partition.me != partition.ranks[0]:
        return
    cost = _costs(source, (map(split.interval, range(split.parts)) for split in layout.splits))
    if prod(cost) > _ENOUGH:
        cut = [d for d, each in enumerate(cost) if each > 1]
        warnings.warn(
            f"{label(source)}: chunks of {chunks} are read whole, so that the blocks of grid"
            f" {partition.shape} fetch {prod(cost):.2f} times the bytes that they want; cut other dimensions"
            f" than {cut}, or write the array with chunks that divide the blocks of"
            f" {layout.box(partition.me).shape}",
            stacklevel=stacklevel + 1,
        )


def _edges(extent: int, chunk: Any) -> Sequence[int]:
    # Where chunks begin, and where the last one ends, which may be behind the array.
    if isinstance(chunk, (tuple, list)):
        return [0, *accumulate(chunk)]
    return range(0, extent + int(chunk), int(chunk))


def _fetched(edges: Sequence[int], intervals: Iterable[tuple[int, int]], extent: int) -> float:
    # Extents of the chunks that the intervals touch, against the extent of all.
    total = 0
    for start, stop in intervals:
        if start < stop:
            last = min(edges[bisect_left(edges, stop)], extent)
            total += last - edges[bisect_right(edges, start) - 1]
    return total / max(extent, 1)
