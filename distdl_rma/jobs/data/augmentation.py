"""Crops, flips and quarter turns of whole samples: drawn alike on all ranks, read box by box.

A rank reads only its block of a view. A turned view is no copy of which ranks have parts: each rank asks
which box of the file its block shows, reads this box, and turns what it has read. Columns 4 to 8 of a sample,
flipped, on two ranks::

    file      column   4  5  6  7        rank 0 wants columns 0, 1 of the view: it reads 6, 7 and flips them
    view      column   0  1  2  3        rank 1 wants columns 2, 3 of the view: it reads 4, 5 and flips them
              shows    7  6  5  4

No rank asks another one what was drawn. All draw from a key of integers (purpose, seed, epoch, item), which
gives the same on any number of ranks, in any order, and in a worker process. A generator with a state would
have to be at the same place on all of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.layers.dtypes import BIT_WORDS

T = TypeVar("T")
# For each spatial dimension an extent, at a random place, or a slice.
Crop = tuple[int | slice, ...]
_LETTERS = "DHW"
# A flip exchanges the two halves of a block in so many pieces, so that it needs little memory: torch's flip
# has the block twice, and the blocks of volumes are what memory is filled with.
_PIECES = 64
_WORD = 64


@dataclass(frozen=True)
class View:
    """A box of the spatial dimensions of a sample, reversed in some dimensions, then transposed in two.

    All eight turns and flips of a plane are of this form, and so are those of a volume about one axis. So
    there is one rule for the box that a block shows, in place of one for each turn.

    Examples
    --------
    >>> view = View(Box(((0, 8), (4, 8))), flipped=frozenset({1}))
    >>> view.source(Box(((0, 8), (0, 2))))
    Box(bounds=((0, 8), (6, 8)))
    """

    crop: Box  # in the sample
    flipped: frozenset[int] = frozenset()
    swapped: tuple[int, ...] = ()  # two dimensions, or none

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the view."""
        return tuple(self.exchanged(self.crop.shape))

    def exchanged(self, items: Sequence[T]) -> list[T]:
        """One item for each dimension, those of the transposed dimensions exchanged."""
        found = list(items)
        for d, other in zip(self.swapped, reversed(self.swapped), strict=True):
            found[d] = items[other]
        return found

    def source(self, box: Box) -> Box:
        """The box of the sample whose elements a box of the view shows.

        From the view back to the sample: first the transposition, which exchanges two bounds, then the
        flips, which count from the other end of the crop.
        """
        bounds = []
        for d, (start, stop) in enumerate(self.exchanged(box.bounds)):
            first, last = self.crop.bounds[d]
            bounds.append((last - stop, last - start) if d in self.flipped else (first + start, first + stop))
        return Box(tuple(bounds))

    def turned(self, part: torch.Tensor) -> torch.Tensor:
        """The elements of :meth:`source` in the order of the view; its spatial dimensions are the last.

        A flip overwrites ``part``. A transposition returns new memory.
        """
        leading = part.dim() - self.crop.dim
        # As words of bits: torch does not flip all types.
        words = part.view(BIT_WORDS[part.element_size()][0])
        _flip(words, [leading + d for d in sorted(self.flipped)])
        if not self.swapped:
            return part
        return part.transpose(*(leading + d for d in self.swapped)).contiguous()


class Augmentation:
    """What may be done to samples; draws follow from numbers alone, so that all ranks draw the same.

    A view equals ``numpy.rot90(numpy.flip(sample[crop], flipped), turns, plane)``. ``crop``, ``flip`` and
    ``rotate`` are those of :class:`ShardDataset`, of samples with ``dims`` spatial dimensions, whose letters
    are the last ones of ``DHW``. ``ArgumentError`` if they do not fit.
    """

    def __init__(self, crop: Sequence[int | slice] | None, flip: str, rotate: str, dims: int) -> None:
        letters = _LETTERS[-dims:]
        for name, given in (("flip", flip), ("rotate", rotate)):
            known = [letter for letter in letters if letter in str(given)]
            if len(known) != len(str(given)) or (name == "rotate" and len(known) not in (0, 2)):
                count = "two dimensions" if name == "rotate" else "dimensions, each once,"
                raise ArgumentError(f"ShardDataset: {name} names {count} of {letters!r}, got {given!r}")
        number = dims if crop is None else len(crop) if hasattr(crop, "__len__") else 0
        if number != dims:
            raise ArgumentError(
                f"ShardDataset: samples have {dims} spatial dimensions, but crop has {number}: {crop!r};"
                " if samples have no dimension of channels, say channels=False"
            )
        self._letters = letters
        self._crop: Crop = (slice(0, None),) * dims if crop is None else tuple(map(_part, crop))
        self._flip = tuple(letters.index(letter) for letter in flip)
        self._plane = tuple(letters.index(letter) for letter in rotate)

    @property
    def fixed(self) -> bool:
        """Whether all views have the same extents, whatever those of the samples are."""
        return all(isinstance(part, int) or part.stop for part in self._crop)

    def draw(self, extents: Sequence[int], *key: int) -> View:
        """The view of a sample with these spatial extents that belongs to a key of non-negative integers.

        ``ShapeError`` if the crop does not fit the sample, or a turn would change the extents of the view.
        """
        sizes = self._sizes(extents)
        words = _words(key)
        flipped = {d for d in self._flip if next(words) & 1}
        turns = next(words) & 3 if self._plane else 0
        # One turn reverses the second dimension of the plane and transposes, three turns the first one.
        flipped ^= set((self._plane[2:], self._plane[1:], self._plane, self._plane[:1])[turns])
        view = View(Box.of_shape(extents), frozenset(flipped), self._plane if turns & 1 else ())
        bounds = []
        for d, size in enumerate(view.exchanged(sizes)):
            part = self._crop[d]
            start = part.start if isinstance(part, slice) else next(words) * (extents[d] - size + 1) >> _WORD
            bounds.append((start, start + size))
        return View(Box(tuple(bounds)), view.flipped, view.swapped)

    def _sizes(self, extents: Sequence[int]) -> tuple[int, ...]:
        # Extents of views.
        sizes = tuple(
            part if isinstance(part, int) else (n if part.stop is None else part.stop) - part.start
            for n, part in zip(extents, self._crop, strict=True)
        )
        for letter, n, part, size in zip(self._letters, extents, self._crop, sizes, strict=True):
            start = part.start if isinstance(part, slice) else 0
            if not min(n, 1) <= size <= n - start:
                what = f"{start}:{start + size}" if isinstance(part, slice) else size
                raise ShapeError(
                    f"the crop {what} of dimension {letter} does not fit into a sample of extents"
                    f" {tuple(extents)}"
                )
        if self._plane:
            one, other = self._plane
            fits = max(sizes[one], sizes[other]) <= min(extents[one], extents[other])
            moves = all(isinstance(self._crop[d], int) for d in self._plane)
            if sizes[one] != sizes[other] and not (fits and moves):
                raise ShapeError(
                    f"rotate={self._letters[one] + self._letters[other]!r}: a view of extents {sizes} of a"
                    f" sample of {tuple(extents)} cannot be turned: give a crop whose extents in this plane"
                    " fit into both dimensions of the sample"
                )
        return sizes


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


def _words(key: Sequence[int]) -> Iterator[int]:
    # Random integers of 64 bits. Numpy promises the stream of a bit generator for all its versions, but none
    # of its distributions.
    source = np.random.Philox(np.random.SeedSequence(key))
    while True:
        yield int(source.random_raw())


def permutation(count: int, *key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The integers below ``count`` in a random order that follows from a key of non-negative integers.

    By sorting random words, as numpy does not promise that its own shuffle stays what it is: a job that goes
    on after an update would see some samples twice.
    """
    words = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(words, kind="stable")


def _flip(part: torch.Tensor, dims: list[int]) -> None:
    # Reverses dimensions in place: exchanges the halves of the first, then reverses its middle.
    if not dims or part.numel() == 0:
        return
    first, *rest = dims
    half = part.size(first) // 2
    step = max(1, half // _PIECES)
    for start in range(0, half, step):
        size = min(step, half - start)
        low = part.narrow(first, start, size)
        high = part.narrow(first, part.size(first) - start - size, size)
        saved = low.flip(dims)
        low.copy_(high.flip(dims))
        high.copy_(saved)
    _flip(part.narrow(first, half, part.size(first) % 2), rest)
