"""Boxes of global indices.

All plans are made of boxes: the block of a rank, what a window reads, a piece that travels. Indices are
global, so boxes of different ranks can be compared and intersected without a look at who has which::

    (0, 0)                             box of rank 0:        [0:4, 0:6]
      +-----------+                    box of rank 1:        [4:8, 0:6]
      |  rank 0   |                    what rank 1 reads:    [3:8, 0:6]
      +-----------+  <- row 4          & of the first and the last:  [3:4, 0:6], the halo
      |  rank 1   |
      +-----------+
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from distdl_rma.errors import ShapeError

# Number of leading dimensions, batch and channels, before the spatial dimensions.
LEADING = 2


@dataclass(frozen=True)
class Box:
    """Half-open box of global indices: one ``(start, stop)`` per dimension.

    A box may reach beyond the domain of a tensor; elements that no rank owns read as zero.

    Parameters
    ----------
    bounds
        One pair ``(start, stop)`` per dimension, ``start <= stop``.

    Examples
    --------
    >>> rows = Box.of_shape((8, 6)).replace(0, 2, 5)
    >>> rows.bounds, rows.volume
    (((2, 5), (0, 6)), 18)
    >>> rows & Box(((4, 9), (0, 3)))
    Box(bounds=((4, 5), (0, 3)))
    """

    bounds: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for start, stop in self.bounds:
            if stop < start:
                raise ShapeError(f"box bounds must not fall: got ({start}, {stop}) in {self.bounds}")

    @classmethod
    def of_shape(cls, shape: Iterable[int]) -> Box:
        """Box from the origin with the given shape."""
        return cls(tuple((0, int(extent)) for extent in shape))

    @cached_property
    def start(self) -> tuple[int, ...]:
        """First index in every dimension."""
        return tuple(start for start, _ in self.bounds)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Extent in every dimension."""
        return tuple(stop - start for start, stop in self.bounds)

    @cached_property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.bounds)

    @property
    def empty(self) -> bool:
        """Whether the box holds no element."""
        return self.volume == 0

    def __and__(self, other: Box) -> Box:
        """Intersect two boxes; dimensions without overlap become empty."""
        if self.dim != other.dim:
            raise ShapeError(
                f"boxes of {self.dim} and {other.dim} dimensions do not intersect: {self}, {other}"
            )
        bounds = []
        for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True):
            start = max(a, c)
            bounds.append((start, max(start, min(b, d))))
        return Box(tuple(bounds))

    def shift(self, offset: Sequence[int]) -> Box:
        """Box moved by ``offset`` in every dimension."""
        return Box(tuple((a + o, b + o) for (a, b), o in zip(self.bounds, offset, strict=True)))

    def replace(self, dim: int, start: int, stop: int) -> Box:
        """Box with the bounds of one dimension replaced."""
        return Box((*self.bounds[:dim], (start, stop), *self.bounds[dim + 1 :]))

    def slices(self, origin: Box) -> tuple[slice, ...]:
        """Slices that select this box in an array over ``origin``; ``ShapeError`` if it is not inside.

        A global box minus the begin of a block is local: ``[3:4, 0:6]`` is row 3 of rank 0 above.
        """
        known = self._last_slices
        if known and known[0][0] is origin:
            return known[0][1]
        if self & origin != self:
            raise ShapeError(f"{self} is not inside {origin}")
        found = tuple(slice(a - o, b - o) for (a, b), o in zip(self.bounds, origin.start, strict=True))
        known[:] = [(origin, found)]
        return found

    @cached_property
    def _last_slices(self) -> list[tuple[Box, tuple[slice, ...]]]:
        # Cached: a box of a plan is cut out of the same ``origin`` in every call.
        return []

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{stop}" for start, stop in self.bounds) + "]"
