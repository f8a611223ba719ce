"""Allgather and Bcast: the vectors of all ranks, or that of one, go to all ranks; double-buffered.

The phases of a step on two nodes, where ranks 0 and 2 are leaders::

    phase    rank 0                     rank 1                     ranks 2 and 3 of node 1
    READY    -> 1                       -> 0                       likewise
             loads the vector of 1      loads the vector of 0
    READ     -> 1                       -> 0                       "your vector may be written again"
             Iallgatherv with rank 2    waits
    SPREAD   -> 1, for each piece       loads the piece from 0     "vectors of other nodes are here"
    TAKEN    waits                      -> 0                       "and may be overwritten"

A rank without elements gives nothing: nobody waits for it in the first phase, and on one node its step is
complete as soon as it has loaded those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.geometry.intervals import Listed
from distdl_rma.segments.collectives.between_nodes import Stages, in_pieces, number_of_pieces, pieces_of_all
from distdl_rma.segments.collectives.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.node_layout import Run, check_count, check_lengths
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.collectives.stepped_algorithm import SteppedAlgorithm
from distdl_rma.segments.large_arrays import copy
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.array_bytes import ArrayLayout

# Phases of a step: a rank notifies others of its node of each, by a word of its own.
_READY, _READ, _SPREAD, _TAKEN = range(4)


class Allgather(Collective):
    """All ranks get the vectors of all ranks: ``result`` holds them in the order of ``ranks``.

    ``active`` is this rank's part of the next result. On a node every rank loads the vectors of the others;
    between nodes MPI's ``Iallgatherv`` combines the vectors of the nodes. ``count`` is the length of every
    vector, or a sequence with one length for each of ``ranks``.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> everyone = machine.group().allgather(2)
    >>> everyone.active[:] = [machine.rank, 7]
    >>> everyone.start()
    >>> everyone.wait()
    array([0., 7., 1., 7.], dtype=float32)
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
        self.counts = check_lengths(count, len(site.layout.ranks), name)
        self.dtype = ArrayLayout(dtype, sum(self.counts)).dtype
        terms = f"collective=Allgather\ncounts={self.counts}"
        super().__init__(_AllgatherByNodes(site, self.counts, self.dtype, terms))


class _AllgatherByNodes(SteppedAlgorithm):
    """One rank of each node, its leader, receives the vectors of other nodes; its node loads them from there.

    Large vectors travel in pieces. Each piece has a part of every node's vectors: while it travels, the ranks
    of the node load the piece before. Only ranks with elements wait for ranks without elements.
    """

    def __init__(
        self, site: CollectiveSite, counts: tuple[int, ...], dtype: np.dtype[Any], terms: str
    ) -> None:
        layout = site.layout
        filled = [rank for rank, count in zip(layout.ranks, counts, strict=True) if count]
        leaders = layout.leaders(filled[0] if filled else layout.ranks[0])
        self._leader = leaders[layout.my_node]
        pieces = number_of_pieces(sum(counts) * dtype.itemsize, len(layout.nodes))
        super().__init__(site, sum(counts), dtype, leaders, terms, pieces)
        split = Listed(counts)
        self._parts = {rank: slice(*split.interval(at)) for at, rank in enumerate(layout.ranks)}
        self.operands = tuple(vector[self._parts[layout.me]] for vector in self.vectors)
        # Ranks of this node with elements: whether this one is among them, and the others.
        self._gives = layout.me in filled
        self._sources = [rank for rank in layout.others_here if rank in filled]
        # By piece, the contiguous runs of every node's parts in the vector.
        runs = [_joined([self._parts[rank] for rank in node]) for node in layout.nodes]
        self._pieces = pieces_of_all(runs, pieces)
        # By piece, the bytes of every node, and where these begin: in the vector if the parts of each node
        # are contiguous in it, else in memory in which all parts are contiguous.
        itemsize = dtype.itemsize
        self._direct = all(len(of_node) <= 1 for of_node in runs)
        self._splits = [
            Listed(tuple(itemsize * sum(run.size for run in of_node) for of_node in piece))
            for piece in self._pieces
        ]
        self._offsets = [
            [
                (itemsize * of_node[0].start if of_node else 0) if self._direct else split.interval(node)[0]
                for node, of_node in enumerate(piece)
            ]
            for piece, split in zip(self._pieces, self._splits, strict=True)
        ]
        # Whether MPI is needed, and whether this node receives elements.
        self._crosses = len(layout.nodes) > 1 and bool(filled)
        self._comes = any(runs[: layout.my_node]) or any(runs[layout.my_node + 1 :])

    def script(self, parity: int) -> Iterator[None]:
        layout, others = self.layout, self.layout.others_here
        rows, vector = self.rows[parity], self.vectors[parity]
        if self._gives:
            self.notify(_READY, others)
        yield from self.wait_for(_READY, self._sources)
        for rank in self._sources:
            self.load(vector[self._parts[rank]], rows[self._at[rank]][self._parts[rank]])
        self.notify(_READ, self._sources)
        if self._crosses and layout.me == self._leader:
            yield from in_pieces(map(self._gather, repeat(vector), range(self.pieces)))
            if self._comes:
                yield from self.wait_for(_TAKEN, others)
        elif self._comes:
            row = rows[self._at[self._leader]]
            for piece, runs in enumerate(self._pieces):
                yield from self.wait_for(_SPREAD, (self._leader,), piece)
                for run in chain(*runs[: layout.my_node], *runs[layout.my_node + 1 :]):
                    self.load(vector[run.start : run.stop], row[run.start : run.stop])
            self.notify(_TAKEN, (self._leader,))
        if self._gives:
            # This rank may write its next vector only after all have read this one.
            yield from self.wait_for(_READ, others)

    def _gather(self, vector: Array, piece: int) -> Stages:
        # Receives the parts of other nodes, and notifies this node; the parts of this node are in the vector.
        runs, split, offsets = self._pieces[piece], self._splits[piece], self._offsets[piece]
        begin, end = split.interval(self.layout.my_node)
        if self._direct:
            whole = vector.view(np.uint8)
        else:
            whole = np.empty(split.extent, np.uint8)
            mine = [vector[run.start : run.stop].view(np.uint8) for run in runs[self.layout.my_node]]
            np.concatenate([whole[:0], *mine], out=whole[begin:end])
        yield self.across(self.between.gather_all(None, whole, split.lengths, offsets), end - begin)
        if not self._direct:
            begin = 0
            for node, of_node in enumerate(runs):
                for run in of_node:
                    end = begin + run.size * vector.itemsize
                    if node != self.layout.my_node:
                        copy(vector[run.start : run.stop], whole[begin:end].view(vector.dtype))
                    begin = end
        if self._comes:
            self.notify(_SPREAD, self.layout.others_here, piece)


def _joined(parts: Sequence[slice]) -> list[Run]:
    # Adjacent parts become one.
    found: list[Run] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            found[-1] = Run(found[-1].start, part.stop)
        elif part.start < part.stop:
            found.append(Run(part.start, part.stop))
    return found


class Bcast(Collective):
    """All ranks get the vector of one: the root writes ``active``, all start and wait, and read ``result``.

    An allgather whose only vector is the root's: on a node every rank loads it; between nodes MPI's
    ``Ibcast`` sends it to one rank of each node. At the root a step is complete once the ranks of its node
    have the vector. A step overwrites ``active`` on all ranks except the root. Requirement A15, for one
    direction of the reduction.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> settings = machine.group().broadcast(2, root=0)
    >>> if machine.rank == 0:
    ...     settings.active[:] = [0.1, 8]
    >>> settings.start()
    >>> settings.wait()
    array([0.1, 8. ], dtype=float32)
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
        self.count = check_count(count, name)
        self.dtype = ArrayLayout(dtype, self.count).dtype
        site = CollectiveSite.checked(manager, ranks, name)
        self.root = site.layout.checked_root(root, name)
        counts = tuple(self.count if rank == self.root else 0 for rank in site.layout.ranks)
        algorithm = _AllgatherByNodes(site, counts, self.dtype, f"collective=Bcast\nroot={self.root}")
        # Ranks other than the root may write to ``active`` as well.
        algorithm.operands = algorithm.vectors
        super().__init__(algorithm)
