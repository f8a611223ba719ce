"""What the ranks of a loss tell each other: their sums, and whether they fit together, in one allreduce."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.segments.collectives.allreduce import Allreduce

# Sum of the terms, what they count in a mean, ranks that complain, sum and sum of squares of the codes.
_TOTALS = 5
# Bits of a code: squares of codes add up exactly in float64 on thousands of ranks.
_CODES = (1 << 20) - 1


class Totals(NamedTuple):
    """Sums over all ranks: of their terms, and of what these count; and their batch sizes, if asked for."""

    terms: float
    counted: float
    batches: list[float]


class LossSums:
    """One allreduce in float64 over the ranks of a partition, for a loss built with some ``arguments``.

    That ranks pass the same is told by a code of it: P ranks have the same one just if P times the sum of
    their squares is the square of their sum. With ``batches`` they tell each other their batch sizes as well.
    Local to make; in the first call ranks that differ in the arguments raise ``MismatchError``.
    """

    def __init__(self, site: CallSite, P_x: Partition, arguments: str, batches: bool) -> None:
        self._P_x, self.name = P_x, site.name
        title = f"{site.name}, {fingerprint(arguments):014x}"
        count = _TOTALS + (P_x.size if batches else 0)
        self._sums = Allreduce(site.machine.segments, P_x.ranks, count, np.float64, name=title)
        self._batches = batches
        weakref.finalize(self, self._sums.close)

    def of_all(self, terms: float, count: float, batch: int, problem: str, alike: str) -> Totals | None:
        """Totals of all ranks; None if one has a problem, or what must be alike is not. Blocking."""
        code = fingerprint(alike) & _CODES
        row = self._sums.active
        row[:] = 0
        row[:_TOTALS] = (terms, count, bool(problem), code, code**2)
        if self._batches:
            row[_TOTALS + (self._P_x.rank or 0)] = batch
        self._sums.start()
        total, counted, problems, codes, squares, *batches = self._sums.wait().tolist()
        if problems or int(squares) * self._P_x.size != int(codes) ** 2:
            return None
        return Totals(total, counted, batches)

    def global_batch(self, batches: list[float]) -> float:
        """Sum of the ranks' batch sizes, each batch block counted once; ``ShapeError`` if it has several."""
        if not self._P_x.dim:
            return 1.0
        ranks, per_block = self._P_x.ranks, self._P_x.size // self._P_x.shape[0]
        for at, size in enumerate(batches):
            first = at - at % per_block
            if size != batches[first]:
                raise ShapeError(
                    f"{self.name!r}: ranks {ranks[first]} and {ranks[at]} share a batch block of P_x"
                    f" {self._P_x.shape} but have batch sizes {batches[first]:g} and {size:g}"
                )
        return sum(batches[::per_block])
