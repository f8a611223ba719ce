"""Reductions: ranks of a node reduce a share each by direct load, and MPI combines what the nodes have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from distdl_rma.segments.collectives.engine.collective_site import CollectiveSite
from distdl_rma.segments.collectives.engine.reduction import Array, Reduction
from distdl_rma.segments.collectives.engine.stepped_algorithm import SteppedAlgorithm

_READY, _DONE = range(2)


class ShareReduction(SteppedAlgorithm):
    """A step: all have written their vectors, the holders reduce ``elements`` each, all may read."""

    def __init__(
        self, site: CollectiveSite, count: int, elements: int, reduction: Reduction, terms: str
    ) -> None:
        storage, terms = reduction.element.storage, f"{terms}\n{reduction.terms}"
        super().__init__(site, count, storage, site.layout.same_share, terms)
        self.reduction, self._elements = reduction, elements

    @abstractmethod
    def reduce(self, rows: list[Array]) -> Iterator[None]:
        """Reduce this rank's share of the node's vectors, of all nodes, and store what becomes of it."""

    def script(self, parity: int) -> Iterator[None]:
        """One step on the vectors of its parity."""
        layout = self.layout
        self.notify(_READY, layout.holders)
        if layout.my_share is not None:
            yield from self.wait_for(_READY, layout.here)
            if self._elements:
                loads = len(layout.here) - 1
                self.count_gets(loads, loads * self._elements * self.vectors[0].itemsize)
                yield from self.reduce(self.rows[parity])
            self.notify(_DONE, layout.here)
        yield from self.wait_for(_DONE, layout.holders)
