"""Groups of ranks of a machine, with a barrier and collectives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.segments.collectives.allgather import Allgather, Bcast
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.context import SharedByCopies


class Group(SharedByCopies):
    """Ordered ranks of a machine, this one included; construction is local and allocates nothing.

    ``ranks`` are rank ids, unique and in any order, all ranks of the machine if None. Messages name the group
    by ``name``, which is equal on all ranks. ``PartitionError`` if a rank is listed twice or is not of the
    machine, or this rank is missing. The caller owns the collectives that the methods make, and closes them.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> group = machine.group()
    >>> group.ranks, group.rank
    ((0, 1), 0)
    >>> group.barrier()
    """

    def __init__(
        self, manager: SegmentManager, ranks: Sequence[int] | None = None, name: str = "group"
    ) -> None:
        chosen = manager.ranks if ranks is None else tuple(ranks)
        self.name = name
        self.ranks = NodeLayout.checked(chosen, manager.segment.direct_nodes, manager.rank, name).ranks
        self._manager = manager
        self._barrier: EqualityCheck | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Position of this rank in ``ranks``."""
        return self.ranks.index(self._manager.rank)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all ranks of the group have called; blocking, collective.

        A rank stores one line on its node, and between N nodes one rank of each sends O(log N) messages. The
        barrier waits for ranks, not for their puts.
        ``timeout`` is in seconds, 0 to look once, None for the machine's default. ``ExchangeTimeout`` at the
        deadline names ranks that have not come. The call can be repeated; this rank counts as having come.
        """
        if self._barrier is None:
            self._manager.check_open()
            self._barrier = EqualityCheck(self._manager, self.ranks, f"{self.name} (barrier)")
            weakref.finalize(self, self._barrier.close)
        self._barrier.meet(timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all puts and notifications from this rank to those of the group have arrived there.

        Blocking, not collective; takes no time for ranks without pending puts. ``timeout`` is in seconds for
        all ranks together, None for the machine's default. ``ExchangeTimeout`` at the deadline names the
        ranks whose puts are pending. The call can be repeated.
        """
        self._manager.flush(self.ranks, timeout)

    def allreduce(
        self, count: int, dtype: DTypeLike = np.float32, op: str = "sum", name: str = "allreduce"
    ) -> Allreduce:
        """Make an :class:`Allreduce` of the group; local."""
        return Allreduce(self._manager, self.ranks, count, dtype, op, name)

    def allgather(
        self, count: int | Sequence[int], dtype: DTypeLike = np.float32, name: str = "allgather"
    ) -> Allgather:
        """Make an :class:`Allgather` of the group; local."""
        return Allgather(self._manager, self.ranks, count, dtype, name)

    def broadcast(
        self, count: int, dtype: DTypeLike = np.float32, root: int | None = None, name: str = "broadcast"
    ) -> Bcast:
        """Make a :class:`Bcast` of the group from a rank id; local."""
        return Bcast(self._manager, self.ranks, count, dtype, root, name)

    def close(self) -> None:
        """Free the barrier's memory, as the garbage collection of the group does; local, idempotent."""
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks {self.ranks})"
