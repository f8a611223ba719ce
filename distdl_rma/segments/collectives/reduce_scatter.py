"""Double-buffered reductions of which every rank gets a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.split import Balanced, Listed
from distdl_rma.segments.collectives.engine.double_buffered import Collective, SteppedAlgorithm
from distdl_rma.segments.collectives.engine.node_layout import (
    NodeLayout,
    Span,
    check_count,
    check_lengths,
    only_node,
)
from distdl_rma.segments.collectives.engine.reduction import Array, Reduction, element_of
from distdl_rma.segments.collectives.engine.team import Team
from distdl_rma.segments.manager import SegmentManager

_READY, _DONE = range(2)


class Reducescatter(Collective):
    """Reduction of which every rank gets a part: ``active`` is a whole vector, ``result`` this rank's part.

    The parts lie one behind the other in the order of the ranks. Bitwise what :class:`Allreduce` gives on
    one node; across nodes MPI's ``Ireduce_scatter`` combines the sums of the nodes, or ``Ireduce`` where one
    node gets all.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    ranks
        Rank ids that take part, in the order of summation, this one included.
    count
        Elements of the whole vector, cut into balanced parts; or a sequence with the elements of each part.
    dtype, op, name
        As for :class:`Allreduce`.

    Raises
    ------
    ShapeError
        If count, dtype or op is none of these.
    PartitionError
        If ranks are listed twice, not of the machine, or without this one.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int | Sequence[int],
        dtype: npt.DTypeLike | str = np.float32,
        op: str = "sum",
        name: str = "reduce_scatter",
    ) -> None:
        self.element = element_of(dtype, name)
        layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        size = len(layout.ranks)
        self.dtype, self.op = self.element.storage, op
        self.counts = _lengths(count, size, name)
        self.count = sum(self.counts)
        reduction = Reduction(op, self.element, size, name)
        super().__init__(manager, layout.ranks, name, self._plan(manager, layout, reduction, name))

    def _plan(
        self, manager: SegmentManager, layout: NodeLayout, reduction: Reduction, name: str
    ) -> SteppedAlgorithm:
        plan = fingerprint(type(self).__name__, self.element.name, self.op, self.counts)
        terms = f"collective={type(self).__name__}\n{reduction.terms}\ncounts={self.counts}"
        team = Team(manager, layout, self.count, self.dtype, layout.lane_ranks, name, plan, terms)
        pieces = layout.scatter_pieces(self.counts)
        work = _Share(team, layout, reduction, pieces)

        def script(parity: int) -> Iterator[None]:
            team.tell(_READY, layout.holders)
            if layout.lane is not None:
                yield from team.hear(_READY, layout.here)
                if any(pieces):
                    yield from work.reduce(team.rows[parity])
                team.tell(_DONE, layout.here)
            yield from team.hear(_DONE, layout.holders)

        mine = slice(*Listed(self.counts).interval(layout.ranks.index(layout.me)))
        return SteppedAlgorithm(manager, team, script, team.mine, tuple(row[mine] for row in team.mine), name)


class _Share:
    """What one rank reduces, for ranks of its own node and of others."""

    def __init__(
        self, team: Team, layout: NodeLayout, reduction: Reduction, pieces: tuple[tuple[Span, ...], ...]
    ) -> None:
        self._team, self._layout, self._reduction, self._pieces = team, layout, reduction, pieces
        self._counts = [sum(span.size for span in spans) for spans in pieces]
        self._at = {rank: at for at, rank in enumerate(layout.here)}

    def reduce(self, rows: list[Array]) -> Iterator[None]:
        """Reduce the node's vectors, combine with other nodes, store to those of the node who get it."""
        team, reduction, layout = self._team, self._reduction, self._layout
        itemsize = reduction.element.storage.itemsize
        loads = len(rows) - 1
        team.count_gets(loads, loads * itemsize * sum(self._counts))
        own = self._pieces[layout.my_node]
        if len(layout.nodes) == 1:
            for span in own:
                cuts = [row[span.start : span.stop] for row in rows]
                reduction.reduce(cuts, (cuts[self._at[span.peer]],))
        else:
            # In the order of the nodes, as MPI scatters it.
            sums = np.empty(sum(self._counts), reduction.element.wide)
            at = 0
            for span in (span for spans in self._pieces for span in spans):
                reduction.partial([row[span.start : span.stop] for row in rows], sums[at : at + span.size])
                at += span.size
            part = np.empty(self._counts[layout.my_node], reduction.element.wide)
            yield from team.complete(self._combine(sums, part), sums.nbytes)
            at = 0
            for span in own:
                target = rows[self._at[span.peer]][span.start : span.stop]
                reduction.finish(part[at : at + span.size], target)
                at += span.size
        stored = [span.size for span in own if span.peer != layout.me]
        team.count_puts(len(stored), itemsize * sum(stored))

    def _combine(self, sums: Array, part: Array) -> MPI.Request:
        # What one node alone gets takes a tree to it.
        comm, root = self._team.comm, only_node(self._counts)
        if root is None:
            return comm.Ireduce_scatter(sums, part, self._counts, self._reduction.mpi)
        return comm.Ireduce(sums, part, self._reduction.mpi, root)


def _lengths(count: int | Sequence[int], size: int, name: str) -> tuple[int, ...]:
    if isinstance(count, Sequence):
        return check_lengths(count, size, name)
    whole = Balanced(check_count(count, name), size)
    return tuple(stop - start for start, stop in map(whole.interval, range(size)))
