"""Allgather and Bcast: the vectors of all ranks, or that of one, go to all ranks; double-buffered.

The phases of a step on two nodes, where ranks 0 and 2 are leaders::

    phase    rank 0                     rank 1                     ranks 2 and 3 of node 1
    READY    -> 1                       -> 0                       likewise
             loads the vector of 1      loads the vector of 0
    READ     -> 1                       -> 0                       "your vector may be written again"
             Iallgatherv with rank 2    waits
    SPREAD   -> 1                       loads them from 0          "vectors of other nodes are here"
    TAKEN    waits                      -> 0                       "and may be overwritten"

A rank without elements gives nothing: nobody waits for it in the first phase, and on one node its step is
complete as soon as it has loaded those of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.intervals import Listed
from distdl_rma.segments.collectives.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.node_layout import check_count
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
        size = len(site.layout.ranks)
        counts = count if isinstance(count, Sequence) else (count,) * size
        if len(counts) != size:
            raise ShapeError(f"{name!r}: {size} ranks need {size} numbers of elements, got {tuple(counts)}")
        self.counts = tuple(check_count(number, name) for number in counts)
        self.dtype = ArrayLayout(dtype, sum(self.counts)).dtype
        terms = f"collective=Allgather\ncounts={self.counts}"
        super().__init__(_AllgatherByNodes(site, self.counts, self.dtype, terms))


class _AllgatherByNodes(SteppedAlgorithm):
    """One rank of each node, its leader, receives the vectors of other nodes; its node loads them from there.

    Only ranks with elements wait for ranks without elements.
    """

    def __init__(
        self, site: CollectiveSite, counts: tuple[int, ...], dtype: np.dtype[Any], terms: str
    ) -> None:
        layout = site.layout
        filled = [rank for rank, count in zip(layout.ranks, counts, strict=True) if count]
        leaders = layout.leaders(filled[0] if filled else layout.ranks[0])
        self._leader = leaders[layout.my_node]
        super().__init__(site, sum(counts), dtype, leaders, terms)
        split = Listed(counts)
        self._parts = {rank: slice(*split.interval(at)) for at, rank in enumerate(layout.ranks)}
        self.operands = tuple(vector[self._parts[layout.me]] for vector in self.vectors)
        # Ranks of this node with elements: whether this one is among them, and the others.
        self._gives = layout.me in filled
        self._sources = [rank for rank in layout.others_here if rank in filled]
        # By node, the parts of its ranks with elements.
        self._nodes = [[self._parts[rank] for rank in node if rank in filled] for node in layout.nodes]
        # Parts of other nodes, and whether MPI is needed.
        self._far = [*chain(*self._nodes[: layout.my_node], *self._nodes[layout.my_node + 1 :])]
        self._crosses = len(layout.nodes) > 1 and bool(filled)

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
            yield from self._gather(vector)
            if self._far:
                self.notify(_SPREAD, others)
                yield from self.wait_for(_TAKEN, others)
        elif self._far:
            row = rows[self._at[self._leader]]
            yield from self.wait_for(_SPREAD, (self._leader,))
            for part in self._far:
                self.load(vector[part], row[part])
            self.notify(_TAKEN, (self._leader,))
        if self._gives:
            # This rank may write its next vector only after all have read this one.
            yield from self.wait_for(_READ, others)

    def _gather(self, vector: Array) -> Iterator[None]:
        # Receives the parts of other nodes; those of this node are in the vector. The parts of a node may lie
        # apart in it, so all travel packed, one node behind the other.
        here, size = self.layout.my_node, vector.itemsize
        mine = np.concatenate([vector[:0], *(vector[part] for part in self._nodes[here])])
        whole = np.empty_like(vector)
        nbytes = [size * sum(part.stop - part.start for part in parts) for parts in self._nodes]
        yield from self.across(self.between.gather_all(mine, whole, nbytes), mine.nbytes)
        begin = 0
        for node, parts in enumerate(self._nodes):
            for part in parts:
                end = begin + part.stop - part.start
                if node != here:
                    copy(vector[part], whole[begin:end])
                begin = end


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
        ranks = site.layout.ranks
        self.root = ranks[0] if root is None else root
        if self.root not in ranks:
            raise PartitionError(f"{name!r}: the root is one of the ranks {ranks}, got {root!r}")
        counts = tuple(self.count if rank == self.root else 0 for rank in ranks)
        algorithm = _AllgatherByNodes(site, counts, self.dtype, f"collective=Bcast\nroot={self.root}")
        # Ranks other than the root may write to ``active`` as well.
        algorithm.operands = algorithm.vectors
        super().__init__(algorithm)
