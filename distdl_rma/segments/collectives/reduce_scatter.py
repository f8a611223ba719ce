"""Reducescatter and Reduce, collectives of flat vectors, double-buffered: a part for each, or all for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.segments.collectives.engine.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.engine.node_layout import check_count, check_lengths
from distdl_rma.segments.collectives.engine.reduction import Array, Reduction, element_of
from distdl_rma.segments.collectives.engine.stepped_algorithm import ShareReduction, in_pieces, pieces_of_all
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
        parts = layout.scatter_pieces(counts)
        elements = sum(part.size for of_node in parts for part in of_node)
        super().__init__(site, sum(counts), elements, reduction, terms)
        # What this rank reduces for each node, by piece.
        self._parts = pieces_of_all(parts, self.pieces)
        self._at = {rank: at for at, rank in enumerate(layout.here)}
        mine = slice(*Listed(counts).interval(layout.ranks.index(layout.me)))
        self.results = tuple(vector[mine] for vector in self.vectors)
        stored = [part.size for part in parts[layout.my_node] if part.rank != layout.me]
        self._puts = len(stored), reduction.element.storage.itemsize * sum(stored)

    def reduce(self, rows: list[Array]) -> Iterator[None]:
        """Reduce the node's vectors, combine with other nodes, store to those of the node who get it."""
        if len(self.layout.nodes) == 1:
            for part in self._parts[0][0]:
                cuts = [row[part.start : part.stop] for row in rows]
                self.reduction.reduce(cuts, (cuts[self._at[part.rank]],))
        else:
            reduced: dict[int, Array] = {}
            stages = partial(self._combine, rows, reduced), partial(self._store, rows, reduced)
            yield from in_pieces(self.pieces, stages)
        self.count_puts(*self._puts)

    def _combine(self, rows: list[Array], reduced: dict[int, Array], piece: int) -> Iterable[None]:
        reduction, node = self.reduction, self.layout.my_node
        # In the order of the nodes, as MPI scatters it.
        counts = [sum(part.size for part in of_node) for of_node in self._parts[piece]]
        sums, begin = np.empty(sum(counts), reduction.element.wide), 0
        for part in chain.from_iterable(self._parts[piece]):
            end = begin + part.size
            reduction.partial([row[part.start : part.stop] for row in rows], sums[begin:end])
            begin = end
        reduced[piece] = np.empty(counts[node], reduction.element.wide)
        comm, getting = self.between.comm, [at for at, count in enumerate(counts) if count]
        if len(getting) == 1:
            # What one node alone gets takes a tree to it.
            request = comm.Ireduce(sums, reduced[piece], reduction.mpi, getting[0])
        else:
            request = comm.Ireduce_scatter(sums, reduced[piece], counts, reduction.mpi)
        return self.complete(request, sums.nbytes, sums, reduced[piece])

    def _store(self, rows: list[Array], reduced: dict[int, Array], piece: int) -> Iterable[None]:
        total, begin = reduced.pop(piece), 0
        for part in self._parts[piece][self.layout.my_node]:
            end = begin + part.size
            self.reduction.finish(total[begin:end], rows[self._at[part.rank]][part.start : part.stop])
            begin = end
        return ()
