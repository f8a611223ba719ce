"""Double-buffered broadcasts from one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from distdl_rma.segments.collectives.engine.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.engine.node_layout import check_count
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.collectives.engine.stepped_algorithm import (
    SteppedAlgorithm,
    in_pieces,
    number_of_pieces,
    slices,
)
from distdl_rma.segments.manager import SegmentManager

_READY, _TAKEN = range(2)


class Bcast(Collective):
    """One rank's vector to all: the root writes to ``active``, all start and wait, and read ``result``.

    On a node every rank loads the vector from its source itself; across nodes MPI's ``Ibcast`` carries it to
    one rank of each. A step is complete at the root once the ranks of its node have it. What others than
    the root write to ``active`` is overwritten. Requirement A15, for one direction of the reduction.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: DTypeLike = np.float32,
        root: int | None = None,
        name: str = "broadcast",
    ) -> None:
        self.count, self.dtype = check_count(count, name), np.dtype(dtype)
        site = CollectiveSite.checked(manager, ranks, name)
        self.root = site.layout.checked_root(root, name)
        super().__init__(_BcastByNodes(site, self.count, self.dtype, self.root))


class _BcastByNodes(SteppedAlgorithm):
    def __init__(self, site: CollectiveSite, count: int, dtype: np.dtype[Any], root: int) -> None:
        layout, self._root = site.layout, root
        leaders = layout.leaders(root)
        pieces = number_of_pieces(count * dtype.itemsize, len(layout.nodes))
        super().__init__(site, count, dtype, leaders, f"collective=Bcast\nroot={root}", pieces)
        self._source, self._root_node = leaders[layout.my_node], leaders.index(root)
        self._pieces = slices(count, pieces)

    def script(self, parity: int) -> Iterator[None]:
        """One step on the vectors of its parity."""
        layout, vector = self.layout, self.vectors[parity]
        if layout.me != self._source:
            source = self.rows[parity][layout.here.index(self._source)]
            for piece, where in enumerate(self._pieces):
                yield from self.wait_for(_READY, (self._source,), piece)
                if where.start < where.stop:
                    self.load(vector[where], source[where])
            self.notify(_TAKEN, (self._source,))
            return
        if layout.me == self._root or not vector.size:
            self.notify(_READY, layout.others_here)
        if len(layout.nodes) > 1 and vector.size:
            yield from in_pieces(self.pieces, [partial(self._pass_on, vector), self._show])
        yield from self.wait_for(_TAKEN, layout.others_here)

    def _pass_on(self, vector: Array, piece: int) -> Iterable[None]:
        data = vector[self._pieces[piece]].view(np.uint8)
        request = self.between.comm.Ibcast([data, MPI.BYTE], self._root_node)
        return self.complete(request, data.nbytes, data)

    def _show(self, piece: int) -> Iterable[None]:
        if self.layout.me != self._root:
            self.notify(_READY, self.layout.others_here, piece)
        return ()
