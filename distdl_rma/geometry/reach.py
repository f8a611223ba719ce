"""Outputs that read from one input to another, by a table instead of a rule."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from distdl_rma.geometry.split import Split

__all__ = ["Reach", "ReachSplit", "ReaderSplit"]


@dataclass(frozen=True)
class Reach:
    """First and last input that each output of one dimension reads; both rise (weakly) with the output.

    Parameters
    ----------
    first, last
        One index of the input per output.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    @classmethod
    def adaptive(cls, extent: int, outputs: int) -> Reach:
        """Windows of adaptive pooling: from ``floor(j * n / m)`` to behind ``ceil((j + 1) * n / m)``."""
        return cls(
            tuple(j * extent // outputs for j in range(outputs)),
            tuple(-(-(j + 1) * extent // outputs) - 1 for j in range(outputs)),
        )

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.first)

    def reads(self, start: int, stop: int) -> tuple[int, int]:
        """From the first to behind the last input that outputs ``[start, stop)`` read."""
        if not self.first:
            return 0, 0
        return self.first[min(start, self.outputs - 1)], self.last[max(stop - 1, 0)] + 1

    def readers(self, start: int, stop: int) -> tuple[int, int]:
        """Outputs that read from inputs ``[start, stop)``."""
        return bisect_left(self.last, start), bisect_left(self.first, stop)


@dataclass(frozen=True)
class ReachSplit:
    """What each part of an output dimension reads.

    Parameters
    ----------
    base
        How the outputs are cut.
    reach
        What they read.
    extent
        Extent of the input.
    """

    base: Split
    reach: Reach
    extent: int

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.base.parts

    def ends(self, part: int) -> tuple[int, int]:
        """Rising ends of a part; they may cross where it is empty."""
        return self.reach.reads(*self.base.ends(part))

    def interval(self, part: int) -> tuple[int, int]:
        """Half-open interval of the inputs that a part reads."""
        return _interval(self.base.interval(part), self.ends(part))


@dataclass(frozen=True)
class ReaderSplit:
    """Which outputs read each part of an input dimension; neighbours may share some.

    Parameters
    ----------
    base
        How the input is cut.
    reach
        What the outputs read of it.
    """

    base: Split
    reach: Reach

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.base.parts

    @property
    def extent(self) -> int:
        """Number of outputs."""
        return self.reach.outputs

    def ends(self, part: int) -> tuple[int, int]:
        """Rising ends of a part; they may cross where it is empty."""
        return self.reach.readers(*self.base.ends(part))

    def interval(self, part: int) -> tuple[int, int]:
        """Half-open interval of the outputs that read a part."""
        return _interval(self.base.interval(part), self.ends(part))


def _interval(base: tuple[int, int], ends: tuple[int, int]) -> tuple[int, int]:
    # Where the part is empty, its image is, too.
    start, stop = ends
    return (start, max(start, stop)) if base[0] < base[1] else (start, start)
