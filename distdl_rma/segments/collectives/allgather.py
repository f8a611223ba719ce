"""The collective Allgather, of flat vectors, double-buffered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from distdl_rma.geometry.intervals import Listed
from distdl_rma.segments.collectives.engine.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.engine.node_layout import check_lengths
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.collectives.engine.stepped_algorithm import SteppedAlgorithm
from distdl_rma.segments.manager import SegmentManager

_READY, _READ, _SPREAD, _TAKEN = range(4)


class Allgather(Collective):
    """Every rank's vector to all: ``result`` holds those of all ranks, one behind the other, in their order.

    ``active`` is this rank's own part of the coming result. On a node every rank loads the others' vectors
    itself; across nodes MPI's ``Iallgatherv`` combines what one rank of each node has. ``count`` is that of
    every rank's vector, or a sequence with one number for each of ``ranks``, in their order.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int | Sequence[int],
        dtype: DTypeLike = np.float32,
        name: str = "allgather",
    ) -> None:
        site = CollectiveSite.checked(manager, ranks, name)
        self.counts, self.dtype = check_lengths(count, len(site.layout.ranks), name), np.dtype(dtype)
        super().__init__(_AllgatherByNodes(site, self.counts, self.dtype))


class _AllgatherByNodes(SteppedAlgorithm):
    def __init__(self, site: CollectiveSite, counts: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        layout = site.layout
        leaders = layout.leaders(layout.ranks[0])
        self._leader = leaders[layout.my_node]
        super().__init__(site, sum(counts), dtype, leaders, f"collective=Allgather\ncounts={counts}")
        split = Listed(counts)
        self._parts = {rank: slice(*split.interval(at)) for at, rank in enumerate(layout.ranks)}
        self.operands = tuple(vector[self._parts[layout.me]] for vector in self.vectors)
        # Between nodes, what those of one node have lies together.
        vector = self.vectors[0]
        nbytes = (sum(vector[self._parts[rank]].nbytes for rank in node) for node in layout.nodes)
        self._packed_split = Listed(tuple(nbytes))
        # Made by the first step: most ranks never need it.
        self._packed: Array = np.empty(0, np.uint8)

    def script(self, parity: int) -> Iterator[None]:
        """One step on the vectors of its parity."""
        layout, rows = self.layout, self.rows[parity]
        self.notify(_READY, layout.others_here)
        yield from self.wait_for(_READY, layout.others_here)
        for rank, row in zip(layout.here, rows, strict=True):
            if rank != layout.me:
                self._load_parts(parity, row, (rank,))
        self.notify(_READ, layout.others_here)
        if len(layout.nodes) > 1 and layout.me == self._leader:
            yield from self._gather_across(self.vectors[parity])
            self.notify(_SPREAD, layout.others_here)
            yield from self.wait_for(_TAKEN, layout.others_here)
        elif len(layout.nodes) > 1:
            yield from self.wait_for(_SPREAD, (self._leader,))
            row = rows[layout.here.index(self._leader)]
            for node in layout.nodes:
                if node != layout.here:
                    self._load_parts(parity, row, node)
            self.notify(_TAKEN, (self._leader,))
        # Nobody writes its next vector before all have read this one.
        yield from self.wait_for(_READ, layout.others_here)

    def _load_parts(self, parity: int, row: Array, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            part = self._parts[rank]
            if part.start < part.stop:
                self.load(self.vectors[parity][part], row[part])

    def _gather_across(self, vector: Array) -> Iterator[None]:
        # Fills in the parts of the other nodes; those of this node are there.
        layout, split, parts = self.layout, self._packed_split, self._parts
        if not self._packed.size:
            self._packed = np.empty(split.extent, np.uint8)
        begin, end = split.interval(layout.my_node)
        mine = [vector[parts[rank]].view(np.uint8) for rank in layout.here]
        np.concatenate(mine, out=self._packed[begin:end])
        offsets = [split.interval(node)[0] for node in range(len(layout.nodes))]
        received = [self._packed, (split.lengths, offsets), MPI.BYTE]
        request = self.between.comm.Iallgatherv(MPI.IN_PLACE, received)
        yield from self.complete(request, end - begin)
        at = 0
        for rank in (rank for node in layout.nodes for rank in node):
            target = vector[parts[rank]]
            if rank not in layout.here:
                target[...] = self._packed[at : at + target.nbytes].view(vector.dtype)
            at += target.nbytes
