"""Double-buffered all-gathers: every rank's vector to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.split import Listed
from distdl_rma.segments.collectives.engine.double_buffered import Collective, SteppedAlgorithm
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout, check_lengths
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.collectives.engine.team import Team
from distdl_rma.segments.manager import SegmentManager

_READY, _READ, _SPREAD, _TAKEN = range(4)


class Allgather(Collective):
    """Every rank's vector to all: ``result`` holds those of all ranks, one behind the other, in their order.

    ``active`` is this rank's own part of the coming result. On a node every rank loads the others' vectors
    itself; across nodes MPI's ``Iallgatherv`` combines what one rank of each node has.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    ranks
        Rank ids that take part, this one included.
    count
        Elements of every rank's vector, or a sequence with one number for each of ``ranks``, in their order.
    dtype
        Any type of numpy without Python objects.
    name
        For messages, alike on all ranks.

    Raises
    ------
    ShapeError
        If a count is none, or there is not one for every rank.
    PartitionError
        If ranks are listed twice, not of the machine, or without this one.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int | Sequence[int],
        dtype: npt.DTypeLike = np.float32,
        name: str = "allgather",
    ) -> None:
        layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        self.counts, self.dtype = check_lengths(count, len(layout.ranks), name), np.dtype(dtype)
        super().__init__(manager, layout.ranks, name, self._plan(manager, layout, name))

    def _plan(self, manager: SegmentManager, layout: NodeLayout, name: str) -> SteppedAlgorithm:
        leaders = layout.leaders(layout.ranks[0])
        leader = leaders[layout.my_node]
        leads = leader == layout.me
        plan = fingerprint(type(self).__name__, self.counts)
        terms = f"collective=AllGather\ncounts={self.counts}"
        total = sum(self.counts)
        team = Team(manager, layout, total, self.dtype, leaders if leads else (), name, plan, terms)
        split = Listed(self.counts)
        parts = {rank: slice(*split.interval(at)) for at, rank in enumerate(layout.ranks)}
        others = tuple(rank for rank in layout.here if rank != layout.me)
        far = [parts[rank] for node in layout.nodes if node != layout.here for rank in node]
        across = _AcrossNodes(team, layout, parts, self.dtype)

        def script(parity: int) -> Iterator[None]:
            mine, rows = team.mine[parity], team.rows[parity]
            team.tell(_READY, others)
            yield from team.hear(_READY, others)
            for rank, row in zip(layout.here, rows, strict=True):
                part = parts[rank]
                if rank != layout.me and part.start < part.stop:
                    team.load(mine[part], row[part])
            team.tell(_READ, others)
            if len(layout.nodes) > 1:
                yield from spread(parity)
            # Nobody writes its next vector before all have read this one.
            yield from team.hear(_READ, others)

        def spread(parity: int) -> Iterator[None]:
            mine = team.mine[parity]
            if leads:
                yield from across.gather(mine)
                team.tell(_SPREAD, others)
                yield from team.hear(_TAKEN, others)
            else:
                yield from team.hear(_SPREAD, (leader,))
                row = team.rows[parity][layout.here.index(leader)]
                for part in far:
                    if part.start < part.stop:
                        team.load(mine[part], row[part])
                team.tell(_TAKEN, (leader,))

        operands = tuple(mine[parts[layout.me]] for mine in team.mine)
        return SteppedAlgorithm(manager, team, script, operands, team.mine, name)


class _AcrossNodes:
    """Combines what one rank of each node has, node by node in memory of its own."""

    def __init__(self, team: Team, layout: NodeLayout, parts: dict[int, slice], dtype: np.dtype) -> None:
        self._team, self._layout, self._parts = team, layout, parts
        self._lengths = [
            dtype.itemsize * sum(parts[rank].stop - parts[rank].start for rank in node)
            for node in layout.nodes
        ]
        self._split = Listed(tuple(self._lengths))
        # Made by the first step: most ranks never need it.
        self._packed: Array = np.empty(0, np.uint8)

    def gather(self, mine: Array) -> Iterator[None]:
        """Fill in the parts of the other nodes; those of this node are there."""
        layout, itemsize = self._layout, mine.itemsize
        if not self._packed.size:
            self._packed = np.empty(self._split.extent, np.uint8)
        begin, end = self._split.interval(layout.my_node)
        at = begin
        for rank in layout.here:
            piece = mine[self._parts[rank]].view(np.uint8)
            self._packed[at : at + piece.size] = piece
            at += piece.size
        offsets = [self._split.interval(node)[0] for node in range(len(layout.nodes))]
        request = self._team.comm.Iallgatherv(
            MPI.IN_PLACE, [self._packed, (self._lengths, offsets), MPI.BYTE]
        )
        yield from self._team.complete(request, end - begin)
        at = 0
        for rank in (rank for node in layout.nodes for rank in node):
            part = self._parts[rank]
            nbytes = itemsize * (part.stop - part.start)
            if rank not in layout.here:
                mine[part] = self._packed[at : at + nbytes].view(mine.dtype)
            at += nbytes
