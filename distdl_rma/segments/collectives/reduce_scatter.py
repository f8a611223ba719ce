"""Reducescatter and Reduce, collectives of flat vectors, double-buffered: a part for each, or all for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.segments.collectives.engine.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.engine.node_layout import check_count, check_lengths
from distdl_rma.segments.collectives.engine.reduction import Array, Reduction, element_of
from distdl_rma.segments.collectives.engine.stepped_algorithm import ShareReduction
from distdl_rma.segments.manager import SegmentManager


class Reducescatter(Collective):
    """Reduction of which every rank gets a part: ``active`` is a whole vector, ``result`` this rank's part.

    The parts lie one behind the other in the order of the ranks. Bitwise what :class:`Allreduce` gives on
    one node; across nodes MPI's ``Ireduce_scatter`` combines the sums of the nodes, or ``Ireduce`` where one
    node gets all. ``count`` is that of the whole vector, cut into balanced parts, or a sequence with the
    elements of each part; ``op`` is as for :class:`Allreduce`.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int | Sequence[int],
        dtype: DTypeLike = np.float32,
        op: str = "sum",
        name: str = "reduce_scatter",
    ) -> None:
        self.element = element_of(dtype, name)
        site = CollectiveSite.checked(manager, ranks, name)
        size = len(site.layout.ranks)
        self.dtype, self.op = self.element.storage, op
        if isinstance(count, Sequence):
            self.counts = check_lengths(count, size, name)
        else:
            self.counts = Balanced(check_count(count, name), size).lengths
        self.count = sum(self.counts)
        reduction = Reduction(op, self.element, size, name)
        terms = f"collective={type(self).__name__}\ncounts={self.counts}"
        super().__init__(_ReducescatterByNodes(site, self.counts, reduction, terms))


class Reduce(Reducescatter):
    """Reduction to one rank: all write ``active``, start and wait, and the root reads ``result``.

    The reduce-scatter whose only part is the root's: the ranks of a node reduce a share each and store it to
    the root, or for a tree of MPI's ``Ireduce`` that leads to the root's node. ``result`` has no elements
    on other ranks. Bitwise the same from run to run, and on one node what :class:`Allreduce` gives.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: DTypeLike = np.float32,
        op: str = "sum",
        root: int | None = None,
        name: str = "reduce",
    ) -> None:
        layout = CollectiveSite.checked(manager, ranks, name).layout
        self.root, number = layout.checked_root(root, name), check_count(count, name)
        counts = [number if rank == self.root else 0 for rank in layout.ranks]
        super().__init__(manager, ranks, counts, dtype, op, name)


class _ReducescatterByNodes(ShareReduction):
    def __init__(
        self, site: CollectiveSite, counts: tuple[int, ...], reduction: Reduction, terms: str
    ) -> None:
        layout = site.layout
        self._pieces = layout.scatter_pieces(counts)
        # Elements that this rank reduces for each node.
        self._counts = [sum(piece.size for piece in pieces) for pieces in self._pieces]
        super().__init__(site, sum(counts), sum(self._counts), reduction, terms)
        mine = slice(*Listed(counts).interval(layout.ranks.index(layout.me)))
        self.results = tuple(vector[mine] for vector in self.vectors)

    def reduce(self, rows: list[Array]) -> Iterator[None]:
        """Reduce the node's vectors, combine with other nodes, store to those of the node who get it."""
        layout, reduction = self.layout, self.reduction
        own, at = self._pieces[layout.my_node], {rank: at for at, rank in enumerate(layout.here)}
        if len(layout.nodes) == 1:
            for piece in own:
                cuts = [row[piece.start : piece.stop] for row in rows]
                reduction.reduce(cuts, (cuts[at[piece.rank]],))
        else:
            # In the order of the nodes, as MPI scatters it.
            sums = np.empty(sum(self._counts), reduction.element.wide)
            begin = 0
            for piece in (piece for pieces in self._pieces for piece in pieces):
                end = begin + piece.size
                reduction.partial([row[piece.start : piece.stop] for row in rows], sums[begin:end])
                begin = end
            part = np.empty(self._counts[layout.my_node], reduction.element.wide)
            yield from self.complete(self._combine(sums, part), sums.nbytes)
            begin = 0
            for piece in own:
                end = begin + piece.size
                reduction.finish(part[begin:end], rows[at[piece.rank]][piece.start : piece.stop])
                begin = end
        stored = [piece.size for piece in own if piece.rank != layout.me]
        self.count_puts(len(stored), reduction.element.storage.itemsize * sum(stored))

    def _combine(self, sums: Array, part: Array) -> MPI.Request:
        # What one node alone gets takes a tree to it.
        comm, getting = self.between.comm, [node for node, count in enumerate(self._counts) if count]
        if len(getting) == 1:
            return comm.Ireduce(sums, part, self.reduction.mpi, getting[0])
        return comm.Ireduce_scatter(sums, part, self._counts, self.reduction.mpi)
