"""MPI between the nodes of a collective: a communicator of some ranks, made once all of them are there."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from distdl_rma.segments.collectives.barrier import Barrier
from distdl_rma.segments.manager import SegmentManager


class BetweenNodes:
    """Communicator of ranks of several nodes, in the order given; ``ranks`` is empty where there is none.

    ``name`` and ``terms`` are alike on all of the ranks, as for :class:`Barrier`.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str, terms: str) -> None:
        self._manager, self._name, self._terms = manager, name, terms
        self.ranks = tuple(ranks) if len(ranks) > 1 else ()
        self._barrier: Barrier | None = None
        self._comm: MPI.Intracomm | None = None
        self._number = 0

    def connect(self, timeout: float | None) -> None:
        """Make the communicator; once, blocking. After a timeout it can be repeated."""
        if self.ranks and self._comm is None:
            # Making a communicator cannot be interrupted: not before all its ranks are here.
            barrier, shared = self._gathering(), self._manager.communicators
            self._number = barrier.wait(timeout, shared.proposal(self.ranks))
            self._comm = shared.take(self.ranks, self._number)
            barrier.close()

    def announce(self) -> None:
        """Let the others see what this rank connects, without waiting for them."""
        if self.ranks:
            self._gathering().connect(0.0)

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator; only where there is one."""
        if self._comm is None:
            raise RuntimeError(f"{self._name!r}: no communicator between nodes on this rank")
        return self._comm

    def free(self) -> None:
        """Give the communicator back, local; for when nothing is under way on it."""
        if self._comm is not None:
            self._manager.communicators.give_back(self.ranks, self._number)
        self._comm = None

    def _gathering(self) -> Barrier:
        if self._barrier is None:
            self._barrier = Barrier(self._manager, self.ranks, f"{self._name} (connect)", self._terms)
        return self._barrier
