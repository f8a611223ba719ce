"""Double-buffered broadcasts from one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from distdl_rma.segments.collectives.engine.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.engine.node_layout import check_count
from distdl_rma.segments.collectives.engine.stepped_algorithm import SteppedAlgorithm
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
        leaders = site.layout.leaders(root)
        super().__init__(site, count, dtype, leaders, f"collective=Bcast\nroot={root}")
        self._source, self._root_node = leaders[site.layout.my_node], leaders.index(root)

    def script(self, parity: int) -> Iterator[None]:
        """One step on the vectors of its parity."""
        layout, vector = self.layout, self.vectors[parity]
        if layout.me == self._source:
            if len(layout.nodes) > 1 and vector.size:
                data = vector.view(np.uint8)
                request = self.between.comm.Ibcast([data, MPI.BYTE], self._root_node)
                yield from self.complete(request, data.nbytes)
            self.notify(_READY, layout.others_here)
            yield from self.wait_for(_TAKEN, layout.others_here)
        else:
            yield from self.wait_for(_READY, (self._source,))
            if vector.size:
                self.load(vector, self.rows[parity][layout.here.index(self._source)])
            self.notify(_TAKEN, (self._source,))
