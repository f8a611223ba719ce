"""Double-buffered all-to-alls: every rank has a block for every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.engine.alltoall_blocks import AlltoallBlocks
from distdl_rma.segments.collectives.engine.double_buffered import Collective, SteppedAlgorithm
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout, check_count, check_lengths
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.collectives.engine.team import Team
from distdl_rma.segments.manager import SegmentManager

_READY, _DONE = range(2)


class Alltoall(Collective):
    """A block from every rank to every rank: all write ``active``, start and wait, and read ``result``.

    ``active`` holds this rank's blocks for all ranks, one behind the other, in their order; ``result`` those
    that all ranks had for this one. On a node every rank loads its blocks from the others itself; across
    nodes some ranks of each hand on those of a share of its ranks, by MPI's ``Ialltoallv``, and store what
    comes to the ranks of their node.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    ranks
        Rank ids that take part, this one included.
    count
        Elements of every block; or, for every rank, a sequence with the elements of its blocks for each,
        alike on all ranks. The memory is that of the longest operand and the longest result, on all ranks.
    dtype
        Any type of numpy without Python objects.
    name
        For messages, alike on all ranks.

    Attributes
    ----------
    sends, receives
        Elements of the blocks in ``active`` and in ``result``.

    Raises
    ------
    ShapeError
        If a count is none, or there is not one for every pair of ranks.
    PartitionError
        If ranks are listed twice, not of the machine, or without this one.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int | Sequence[Sequence[int]],
        dtype: npt.DTypeLike = np.float32,
        name: str = "alltoall",
    ) -> None:
        layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        size = len(layout.ranks)
        if isinstance(count, Sequence):
            check_lengths([0] * len(count), size, name)
            rows = tuple(check_lengths(row, size, name) for row in count)
        else:
            rows = ((check_count(count, name),) * size,) * size
        self.dtype = np.dtype(dtype)
        blocks = AlltoallBlocks(layout, rows)
        self.sends, self.receives = blocks.sends(layout.me), blocks.receives(layout.me)
        super().__init__(manager, layout.ranks, name, self._plan(manager, layout, blocks, name))

    def _plan(
        self, manager: SegmentManager, layout: NodeLayout, blocks: AlltoallBlocks, name: str
    ) -> SteppedAlgorithm:
        plan = fingerprint(type(self).__name__, blocks.rows)
        # Operand, and behind the place of the longest one the result.
        split, total = blocks.longest_operand, blocks.longest_operand + blocks.longest_result
        terms = f"collective=AllToAll\ncounts={blocks.rows}"
        team = Team(manager, layout, total, self.dtype, layout.lane_ranks, name, plan, terms)
        others = tuple(rank for rank in layout.here if rank != layout.me)
        loads = [
            (at, blocks.in_operand(rank, layout.me), blocks.in_result(rank, layout.me))
            for at, rank in enumerate(layout.here)
        ]
        loads = [(at, source, target) for at, source, target in loads if source.start < source.stop]
        across = _AcrossNodes(team, layout, blocks)

        def script(parity: int) -> Iterator[None]:
            rows, result = team.rows[parity], team.mine[parity][split:]
            team.tell(_READY, others)
            yield from team.hear(_READY, others)
            for at, source, target in loads:
                if layout.here[at] == layout.me:
                    result[target] = rows[at][source]
                else:
                    team.load(result[target], rows[at][source])
            if across.needed:
                yield from across.exchange(rows)
            # Nobody writes its next operand before all have read this one, and no result is incomplete.
            team.tell(_DONE, others)
            yield from team.hear(_DONE, others)

        operands = tuple(mine[: sum(self.sends)] for mine in team.mine)
        results = tuple(mine[split : split + sum(self.receives)] for mine in team.mine)
        return SteppedAlgorithm(manager, team, script, operands, results, name)


class _AcrossNodes:
    """What one rank hands on between nodes: blocks of some ranks of its node, and of others for its node."""

    def __init__(self, team: Team, layout: NodeLayout, blocks: AlltoallBlocks) -> None:
        self._team, self._me = team, layout.here.index(layout.me)
        # All ranks of a lane know whether any of them sends anything.
        self.needed = blocks.crosses
        at, split = {rank: at for at, rank in enumerate(layout.here)}, blocks.longest_operand
        outgoing, incoming = blocks.outgoing(), blocks.incoming()
        # Rank of the node, and where in its vector, in the order of the messages.
        self._packs = [
            (at[route.source], blocks.in_operand(route.source, route.target))
            for routes in outgoing
            for route in routes
        ]
        self._stores = [
            (at[route.target], _behind(blocks.in_result(route.source, route.target), split))
            for routes in incoming
            for route in routes
        ]
        self._sent = [sum(route.size for route in routes) for routes in outgoing]
        self._received = [sum(route.size for route in routes) for routes in incoming]

    def exchange(self, rows: list[Array]) -> Iterator[None]:
        """Send what ranks of this node have for others, and store what these get."""
        team, kind = self._team, rows[0].dtype
        sent, received = (np.empty(sum(counts), kind) for counts in (self._sent, self._received))
        begin = 0
        for at, place in self._packs:
            end = begin + place.stop - place.start
            sent[begin:end] = rows[at][place]
            begin = end
            if at != self._me:
                team.count_gets(1, (place.stop - place.start) * kind.itemsize)
        request = team.comm.Ialltoallv(
            [sent.view(np.uint8), [kind.itemsize * count for count in self._sent], MPI.BYTE],
            [received.view(np.uint8), [kind.itemsize * count for count in self._received], MPI.BYTE],
        )
        yield from team.complete(request, sent.nbytes)
        begin = 0
        for at, place in self._stores:
            end = begin + place.stop - place.start
            rows[at][place] = received[begin:end]
            begin = end
            if at != self._me:
                team.count_puts(1, (place.stop - place.start) * kind.itemsize)


def _behind(place: slice, begin: int) -> slice:
    return slice(begin + place.start, begin + place.stop)
