"""What is drawn for samples: the places of crops and the order of an epoch, alike on all ranks.

No rank asks another one what was drawn. All draw from a key of integers (purpose, seed, epoch, item), which
gives the same on any number of ranks and in any order. A generator with a state would have to be at the same
place on all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.geometry.box import Box

_LETTERS = "DHW"
_WORD = 64


class Crops:
    """Boxes of samples; draws follow from numbers alone, so that all ranks draw the same.

    ``crop`` is that of :class:`ShardDataset`, of samples with ``dims`` spatial dimensions, whose letters are
    the last ones of ``DHW``. ``ArgumentError`` if it does not fit.
    """

    def __init__(self, crop: Sequence[int | slice] | None, dims: int) -> None:
        number = dims if crop is None else len(crop) if hasattr(crop, "__len__") else 0
        if number != dims:
            raise ArgumentError(
                f"ShardDataset: samples have {dims} spatial dimensions, but crop has {number}: {crop!r};"
                " if samples have no dimension of channels, say channels=False"
            )
        self._letters = _LETTERS[-dims:]
        # For each spatial dimension an extent, at a random place, or a slice.
        self._crop = (slice(0, None),) * dims if crop is None else tuple(map(_part, crop))

    def draw(self, extents: Sequence[int], *key: int) -> Box:
        """The box of a sample with these spatial extents that belongs to a key of non-negative integers.

        ``ShapeError`` if the crop does not fit the sample.
        """
        words, bounds = map(int, _words(len(self._crop), key)), []
        for letter, n, part in zip(self._letters, extents, self._crop, strict=True):
            start = 0 if isinstance(part, int) else part.start
            stop = part if isinstance(part, int) else n if part.stop is None else part.stop
            if not min(n, 1) <= stop - start <= n - start:
                raise ShapeError(
                    f"the crop {part if isinstance(part, int) else f'{start}:{stop}'} of dimension {letter}"
                    f" does not fit into a sample of extents {tuple(extents)}"
                )
            if isinstance(part, int):
                start = next(words) * (n - part + 1) >> _WORD
                stop = start + part
            bounds.append((start, stop))
        return Box(tuple(bounds))


def _part(part: Any) -> int | slice:
    if isinstance(part, slice) and part.step in (None, 1):
        start = 0 if part.start is None else part.start
        if start >= 0 and (part.stop is None or part.stop > start):
            return slice(start, part.stop)
    elif not isinstance(part, (slice, bool)) and hasattr(part, "__index__") and part.__index__() > 0:
        return int(part.__index__())
    raise ArgumentError(
        "ShardDataset: crop has for each spatial dimension an extent, or a slice with start < stop, both not"
        f" negative, got {part!r}"
    )


def _words(count: int, key: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    # Random integers of 64 bits. Numpy promises the stream of a bit generator for all its versions, but none
    # of its distributions.
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


def permutation(count: int, *key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The integers below ``count`` in a random order that follows from a key of non-negative integers.

    By sorting random words, as numpy does not promise that its own shuffle stays what it is: a job that goes
    on after an update would see some samples twice.
    """
    return np.argsort(_words(count, key), kind="stable")
