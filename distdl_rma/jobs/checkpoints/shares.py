"""Which rank writes or reads which bytes of the data file: those that several ranks hold are dealt over them.

A replicated tensor is held by all ranks, and each of them writes an equal share of its bytes. A cut tensor
has parts that one rank holds, or, where some dimension of the grid is not used, a few: these share it. Three
ranks hold two replicated tensors and a cut one::

    held by      bytes, one part behind the other           rank 0     rank 1      rank 2
    0, 1, 2      weight ................. bias ......       [0, 48)    [48, 96)    [96, 104)
    0            rows 0 to 3 of the table                   all
    1            rows 4 to 6                                           all
    2            rows 7 to 9                                                       all

So every byte of the file is moved by one rank, and all ranks move about as many. Saving and restoring deal
alike, whoever has saved: where a byte lies in the file depends on no rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np

from distdl_rma.jobs.checkpoints.items import ALIGNED, Part

# A part, and the first and last of some elements of it.
Share = tuple[Part, int, int]


class Holding:
    """Parts that the same ranks hold, one behind the other: their bytes are dealt over these ranks.

    Parts come with larger elements first, as files have them. So each begins at a multiple of its
    elements' size, and since shares are multiples of the largest such size, none cuts an element.
    """

    def __init__(self, ranks: tuple[int, ...], parts: list[Part]) -> None:
        self.ranks, self.parts = ranks, parts
        *self._starts, self.nbytes = accumulate((part.nbytes for part in parts), initial=0)

    @property
    def share_nbytes(self) -> int:
        """Bytes of each rank's share; the last ranks may have fewer, or none."""
        return -(-self.nbytes // (len(self.ranks) * ALIGNED)) * ALIGNED

    def share(self, rank: int, begin: int = 0, end: int | None = None) -> Iterator[Share]:
        """The elements of a rank's share, or those in its bytes [begin, end), likewise multiples of 16."""
        nbytes = self.share_nbytes
        start = self.ranks.index(rank) * nbytes
        low, high = start + begin, start + (nbytes if end is None else min(end, nbytes))
        # A model has thousands of parts, and is passed on in many slices: no search from the beginning.
        at = max(0, int(np.searchsorted(self._starts, low, "right")) - 1)
        for before, part in zip(self._starts[at:], self.parts[at:], strict=True):
            if before >= high:
                return
            size = part.item.dtype.itemsize
            first, last = (min(max(edge - before, 0), part.nbytes) // size for edge in (low, high))
            if first < last:
                yield part, first, last


def holdings(held: Iterable[tuple[Part, tuple[int, ...]]]) -> list[Holding]:
    """Parts by the ranks that hold them, in an order that is alike on all ranks; without empty ones."""
    found: dict[tuple[int, ...], list[Part]] = {}
    for part, ranks in held:
        if not part.box.empty:
            found.setdefault(ranks, []).append(part)
    return [Holding(ranks, found[ranks]) for ranks in sorted(found)]
