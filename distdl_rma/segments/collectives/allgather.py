"""Allgather and Bcast, double-buffered collectives of flat vectors: all vectors, or one, go to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from distdl_rma.geometry.intervals import Listed
from distdl_rma.segments.collectives.between_nodes import (
    Plan,
    in_pieces,
    number_of_pieces,
    pieces_of_all,
    slices,
)
from distdl_rma.segments.collectives.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.node_layout import RankSlice, check_count, check_lengths
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.collectives.stepped_algorithm import SteppedAlgorithm
from distdl_rma.segments.manager import SegmentManager

# What one rank of a node signals to another in a step, each with a word of its own.
_READY, _READ, _SPREAD, _TAKEN = range(4)


class Allgather(Collective):
    """Every rank's vector to all: ``result`` holds the vectors of all ranks, in their order.

    ``active`` is this rank's own part of the coming result. On a node every rank loads the others' vectors
    itself; across nodes MPI's ``Iallgatherv`` combines the vectors of one rank of each node. ``count`` is the
    length of every rank's vector, or a sequence with one length for each of ``ranks``, in their order.
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
    """One rank of each node receives the vectors of other nodes, and the ranks of its node load them from it.

    Large vectors go in pieces, each with a part of every node's vectors: while one piece travels, the ranks
    of the node load the piece before.
    """

    def __init__(self, site: CollectiveSite, counts: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        layout = site.layout
        leaders = layout.leaders(layout.ranks[0])
        self._leader = leaders[layout.my_node]
        pieces = number_of_pieces(sum(counts) * dtype.itemsize, len(layout.nodes))
        terms = f"collective=Allgather\ncounts={counts}"
        super().__init__(site, sum(counts), dtype, leaders, terms, pieces)
        split = Listed(counts)
        self._parts = {rank: slice(*split.interval(at)) for at, rank in enumerate(layout.ranks)}
        self.operands = tuple(vector[self._parts[layout.me]] for vector in self.vectors)
        # By piece, the contiguous runs of every node's parts in the vector.
        runs = [_joined([self._parts[rank] for rank in node]) for node in layout.nodes]
        self._pieces = pieces_of_all(runs, pieces)
        # If the parts of each node are contiguous, MPI reads and writes the vector itself.
        self._direct = all(len(of_node) <= 1 for of_node in runs)

    def script(self, parity: int) -> Iterator[None]:
        """One step on the vectors of its parity."""
        layout, rows = self.layout, self.rows[parity]
        self.notify(_READY, layout.others_here)
        yield from self.wait_for(_READY, layout.others_here)
        for rank, row in zip(layout.here, rows, strict=True):
            if rank != layout.me:
                self._load(parity, row, self._parts[rank])
        self.notify(_READ, layout.others_here)
        if len(layout.nodes) > 1 and layout.me == self._leader:
            yield from in_pieces(map(self._gather, repeat(self.vectors[parity]), range(self.pieces)))
            yield from self.wait_for(_TAKEN, layout.others_here)
        elif len(layout.nodes) > 1:
            row = rows[layout.here.index(self._leader)]
            for piece, runs in enumerate(self._pieces):
                yield from self.wait_for(_SPREAD, (self._leader,), piece)
                for run in chain(*runs[: layout.my_node], *runs[layout.my_node + 1 :]):
                    self._load(parity, row, slice(run.start, run.stop))
            self.notify(_TAKEN, (self._leader,))
        # Nobody writes its next vector before all have read this one.
        yield from self.wait_for(_READ, layout.others_here)

    def _load(self, parity: int, row: Array, part: slice) -> None:
        if part.start < part.stop:
            self.load(self.vectors[parity][part], row[part])

    def _gather(self, vector: Array, piece: int) -> Plan:
        # Receives the parts of other nodes, and shows them; those of this node are there.
        runs, itemsize = self._pieces[piece], vector.itemsize
        split = Listed(tuple(itemsize * sum(run.size for run in of_node) for of_node in runs))
        begin, end = split.interval(self.layout.my_node)
        if self._direct:
            whole = vector.view(np.uint8)
            offsets = [itemsize * of_node[0].start if of_node else 0 for of_node in runs]
        else:
            whole = np.empty(split.extent, np.uint8)
            offsets = [split.interval(node)[0] for node in range(len(runs))]
            mine = [vector[run.start : run.stop].view(np.uint8) for run in runs[self.layout.my_node]]
            np.concatenate([whole[:0], *mine], out=whole[begin:end])
        received = [whole, (split.lengths, offsets), MPI.BYTE]
        request = self.between.comm.Iallgatherv(MPI.IN_PLACE, received)
        yield self.complete(request, end - begin, whole)
        if not self._direct:
            begin = 0
            for node, of_node in enumerate(runs):
                for run in of_node:
                    end = begin + run.size * itemsize
                    if node != self.layout.my_node:
                        vector[run.start : run.stop] = whole[begin:end].view(vector.dtype)
                    begin = end
        self.notify(_SPREAD, self.layout.others_here, piece)


def _joined(parts: Sequence[slice]) -> list[RankSlice]:
    # Adjacent parts become one; their ranks do not matter.
    found: list[RankSlice] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            found[-1] = RankSlice(0, found[-1].start, part.stop)
        elif part.start < part.stop:
            found.append(RankSlice(0, part.start, part.stop))
    return found


class Bcast(Collective):
    """One rank's vector to all: the root writes to ``active``, all start and wait, and read ``result``.

    On a node every rank loads the vector from its source itself; across nodes MPI's ``Ibcast`` sends it to
    one rank of each. A step is complete at the root once the ranks of its node have the vector. The step
    overwrites ``active`` of all ranks but the root. Requirement A15, for one direction of the reduction.
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
            yield from in_pieces(map(self._pass_on, repeat(vector), range(self.pieces)))
        yield from self.wait_for(_TAKEN, layout.others_here)

    def _pass_on(self, vector: Array, piece: int) -> Plan:
        data = vector[self._pieces[piece]].view(np.uint8)
        request = self.between.comm.Ibcast([data, MPI.BYTE], self._root_node)
        yield self.complete(request, data.nbytes, data)
        if self.layout.me != self._root:
            self.notify(_READY, self.layout.others_here, piece)
