"""Which rank writes or reads which bytes of the data file: those that several ranks hold are dealt over them.

A replicated tensor is held by all ranks, and each of them writes an equal share of its bytes. A cut tensor
has parts that one rank holds, or, where some dimension of the grid is not used, a few: these share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from distdl_rma.jobs.checkpoints.items import Part


class Holding:
    """Parts that the same ranks hold, one behind the other: their bytes are dealt over these ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.parts: list[Part] = []
        self._starts: list[int] = []
        self.nbytes = 0

    def add(self, part: Part) -> None:
        """Append a part."""
        self.parts.append(part)
        self._starts.append(self.nbytes)
        self.nbytes += part.nbytes

    def within(self, low: int, high: int) -> Iterator[tuple[Part, int, int]]:
        """Parts in the bytes [low, high), each with its first and last element; whole elements."""
        at = max(0, int(np.searchsorted(self._starts, low, "right")) - 1)
        for start, part in zip(self._starts[at:], self.parts[at:], strict=True):
            if start >= high:
                return
            size, end = part.item.dtype.itemsize, part.nbytes
            first, last = (min(max(edge - start, 0), end) // size for edge in (low, high))
            if first < last:
                yield part, first, last

    def share(self, number: int, of: int) -> Iterator[tuple[Part, int, int]]:
        """The parts of one of ``of`` shares of about equal size."""
        return self.within(self.nbytes * number // of, self.nbytes * (number + 1) // of)


def holdings(held: Iterable[tuple[Part, tuple[int, ...]]]) -> list[Holding]:
    """Parts by the ranks that hold them, in an order that is alike on all ranks; without empty ones."""
    found: dict[tuple[int, ...], Holding] = {}
    for part, ranks in held:
        if not part.box.empty:
            found.setdefault(ranks, Holding(ranks)).add(part)
    return [found[ranks] for ranks in sorted(found)]
