"""One dimension split into intervals, one per part, and the search for the parts that meet an interval.

Ten elements in three parts, and what other kinds of splits make of them::

    Balanced(10, 3)                 0 1 2 3 | 4 5 6 | 7 8 9
    Listed((1, 7, 2))               0 | 1 2 3 4 5 6 7 | 8 9
    Copies(Listed((4, 6)), (0, 0, 1))   0 1 2 3 | 0 1 2 3 | 4 5 6 7 8 9     two ranks have the first part
    Section(Balanced(10, 3), 2, 6)      0 1 | 2 3 4 | 5                     elements 2 to 7, counted anew
    Grouped(Balanced(10, 3), 5, 1)      0 | 0 1 | 1                         fives that each part meets

Splits are values that compute their intervals. Balanced ones store two numbers, however many parts there are.
For all of them both ends never decrease from part to part, so that a bisection finds the parts that meet an
interval (``meeting``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from distdl_rma.errors import PartitionError


class Split(Protocol):
    """Intervals of one dimension, one per part; both ends never decrease from part to part."""

    @property
    def parts(self) -> int:
        """Number of parts."""

    @property
    def extent(self) -> int:
        """Extent of the dimension."""

    def ends(self, part: int) -> tuple[int, int]:
        """Ends of a part, non-decreasing, for searching; of an empty part, the second may be the smaller.

        ``interval`` makes empty parts proper intervals, which could break the order of the ends.
        """

    def interval(self, part: int) -> tuple[int, int]:
        """Half-open interval of a part, ``start <= stop``."""


@dataclass(frozen=True)
class Balanced:
    """Balanced blocks: the first ``extent % parts`` parts get one element more (requirement A2)."""

    extent: int
    parts: int

    def __post_init__(self) -> None:
        if self.extent < 0 or self.parts < 1:
            raise PartitionError(f"cannot cut extent {self.extent} into {self.parts} parts")

    def interval(self, part: int) -> tuple[int, int]:
        """Half-open interval of a part; computed, not stored."""
        quotient, longer = divmod(self.extent, self.parts)
        start = part * quotient + min(part, longer)
        return start, start + quotient + (part < longer)

    ends = interval

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of every part."""
        return lengths_of(self)


@dataclass(frozen=True)
class Listed:
    """Consecutive blocks of the given lengths."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 0:
            raise PartitionError(f"lengths of parts must be at least 0, got {self.lengths}")

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.lengths)

    @property
    def extent(self) -> int:
        """Extent of the dimension."""
        return self._cuts[-1]

    def interval(self, part: int) -> tuple[int, int]:
        """Half-open interval of a part."""
        return self._cuts[part], self._cuts[part + 1]

    ends = interval


@dataclass(frozen=True)
class Copies:
    """Replicated parts: part ``p`` is part ``held[p]`` of ``base``; ``held`` never decreases."""

    base: Split
    held: tuple[int, ...]

    @property
    def parts(self) -> int:
        """Number of parts, replicas included."""
        return len(self.held)

    @property
    def extent(self) -> int:
        """Extent of the dimension."""
        return self.base.extent

    def ends(self, part: int) -> tuple[int, int]:
        """Ends of a part, non-decreasing."""
        return self.base.ends(self.held[part])

    def interval(self, part: int) -> tuple[int, int]:
        """Half-open interval of a part."""
        return self.base.interval(self.held[part])


@dataclass(frozen=True)
class Mapped:
    """Images of the parts of another dimension under a map of intervals whose ends never decrease.

    Images may overlap and leave gaps, and are empty where parts of ``base`` are. Subclasses define the image
    of an interval, and the extent of its dimension.
    """

    base: Split

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.base.parts

    def image(self, start: int, stop: int) -> tuple[int, int]:
        """Ends of the image of an interval; of an empty image, the second may be the smaller."""
        raise NotImplementedError

    def ends(self, part: int) -> tuple[int, int]:
        """Ends of a part, non-decreasing."""
        return self.image(*self.base.ends(part))

    def interval(self, part: int) -> tuple[int, int]:
        """Half-open interval of a part."""
        start, stop = self.base.interval(part)
        low, high = self.ends(part)
        return (low, max(low, high)) if start < stop else (low, low)


@dataclass(frozen=True)
class Grouped(Mapped):
    """Groups of elements that the parts of another dimension meet; two parts may share a group.

    A group is ``size`` elements of the other dimension and ``width`` elements of this one.
    """

    size: int
    width: int

    @property
    def extent(self) -> int:
        """Extent of the dimension."""
        return self.base.extent // self.size * self.width

    def image(self, start: int, stop: int) -> tuple[int, int]:
        """All groups that an interval meets."""
        return start // self.size * self.width, -(-stop // self.size) * self.width


@dataclass(frozen=True)
class Section(Mapped):
    """Parts of a section, the interval of length ``extent`` from ``offset``; indices count from there."""

    offset: int
    extent: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.extent < 0 or self.offset + self.extent > self.base.extent:
            raise PartitionError(
                f"[{self.offset}, {self.offset + self.extent}) is no interval of extent {self.base.extent}"
            )

    def image(self, start: int, stop: int) -> tuple[int, int]:
        """Intersection of an interval with the section."""
        low, high = (min(max(end - self.offset, 0), self.extent) for end in (start, stop))
        return low, high


def lengths_of(split: Split) -> tuple[int, ...]:
    """Length of every part."""
    return tuple(stop - start for start, stop in map(split.interval, range(split.parts)))


def meeting(split: Split, start: int, stop: int) -> range:
    """Parts that share an element with ``[start, stop)``, by bisection; empty parts may be among them.

    Examples
    --------
    >>> from distdl_rma.geometry.intervals import Balanced, meeting
    >>> meeting(Balanced(10, 3), 3, 5)  # parts [0, 4), [4, 7), [7, 10)
    range(0, 2)
    """
    if start >= stop:
        return range(0)
    parts = range(split.parts)
    first = bisect_right(parts, start, key=lambda part: split.ends(part)[1])
    last = bisect_left(parts, stop, key=lambda part: split.ends(part)[0])
    return range(first, max(first, last))
