"""Double-buffered broadcasts from one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.engine.double_buffered import Collective, SteppedAlgorithm
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout, check_count
from distdl_rma.segments.collectives.engine.team import Team
from distdl_rma.segments.manager import SegmentManager

_READY, _TAKEN = range(2)


class Bcast(Collective):
    """One rank's vector to all: the root writes to ``active``, all start and wait, and read ``result``.

    On a node every rank loads the vector from its source itself; across nodes MPI's ``Ibcast`` carries it to
    one rank of each. A step is complete at the root once the ranks of its node have it. What others than
    the root write to ``active`` is overwritten.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    ranks
        Rank ids that take part, this one included.
    count
        Number of elements; 0 is legal.
    dtype
        Any type of numpy without Python objects.
    root
        Rank id of the root; the first of ``ranks`` if None.
    name
        For messages, alike on all ranks.

    Raises
    ------
    ShapeError
        If the count is none.
    PartitionError
        If ranks are listed twice, not of the machine, or without this one or the root.

    Notes
    -----
    Requirement A15, for one direction of the reduction.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: npt.DTypeLike = np.float32,
        root: int | None = None,
        name: str = "broadcast",
    ) -> None:
        self.count, self.dtype = check_count(count, name), np.dtype(dtype)
        layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        self.root = layout.checked_root(root, name)
        super().__init__(manager, layout.ranks, name, self._plan(manager, layout, name))

    def _plan(self, manager: SegmentManager, layout: NodeLayout, name: str) -> SteppedAlgorithm:
        leaders = layout.leaders(self.root)
        source = leaders[layout.my_node]
        leads = source == layout.me
        plan, terms = fingerprint(type(self).__name__, self.root), f"collective=Broadcast\nroot={self.root}"
        team = Team(manager, layout, self.count, self.dtype, leaders if leads else (), name, plan, terms)
        others = tuple(rank for rank in layout.here if rank != source)
        at = layout.here.index(source)

        def script(parity: int) -> Iterator[None]:
            if leads:
                if len(layout.nodes) > 1 and self.count:
                    data = team.mine[parity].view(np.uint8)
                    request = team.comm.Ibcast([data, MPI.BYTE], leaders.index(self.root))
                    yield from team.complete(request, data.nbytes)
                team.tell(_READY, others)
                yield from team.hear(_TAKEN, others)
            else:
                yield from team.hear(_READY, (source,))
                if self.count:
                    team.load(team.mine[parity], team.rows[parity][at])
                team.tell(_TAKEN, (source,))

        return SteppedAlgorithm(manager, team, script, team.mine, team.mine, name)
