"""The ranks of a collective, node by node: their memory, their flags, and MPI between the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.errors import ExchangeTimeout, MismatchError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.barrier import Barrier
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout
from distdl_rma.segments.collectives.engine.reduction import Array
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.transport.heap import aligned
from distdl_rma.segments.waiting.wait_reason import WaitReason

_PARITIES = 2
# Notifications that one rank of a node may give another in one step, each for a reason of its own.
_PHASES = 4


class Team:
    """What a hierarchical collective is made of, for one rank.

    A vector of each rank in the segment, twice; between the ranks of a node flags and direct load and
    store; between nodes a communicator of MPI for one rank of each. Everything that waits is a generator
    that yields as long as it must.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    layout
        The ranks by node.
    count, dtype
        Number and type of the elements of a rank's vector.
    across
        Ranks of all nodes, this one included, that MPI's collectives combine; empty if this rank is not
        among those of its node.
    name
        For messages, alike on all ranks.
    plan, terms
        Number that must be the same on all ranks; what it stands for, a line ``name=value`` for each fact.

    Attributes
    ----------
    mine
        This rank's vector for even and odd steps.
    rows
        For even and odd steps the vectors of the node's ranks, in their order, once connected.
    """

    def __init__(
        self,
        manager: SegmentManager,
        layout: NodeLayout,
        count: int,
        dtype: np.dtype[Any],
        across: Sequence[int],
        name: str,
        plan: int,
        terms: str = "",
    ) -> None:
        self._manager, self.layout, self._name = manager, layout, name
        self._across = tuple(across) if len(across) > 1 else ()
        self._plan = fingerprint("team", layout.ranks, count, dtype.str, plan)
        self._terms = f"count={count}\ndtype={dtype}\n{terms}\nranks={layout.ranks}"
        self._count, self._dtype = count, dtype
        self.here = layout.here
        self._me = self.here.index(manager.rank)
        self._stride = aligned(count * dtype.itemsize)
        words = _PHASES * len(self.here)
        self.memory = manager.get_segment_buffer(_PARITIES * self._stride, words, name)
        self._words = self.memory.flags
        self.mine = tuple(self.memory.view(dtype, (count,), k * self._stride) for k in range(_PARITIES))
        self.rows: tuple[list[Array], ...] = ()
        self._theirs: list[memoryview] = []
        self._assembly: Barrier | None = None
        self._comm: MPI.Intracomm | None = None
        self._number = 0
        self._request: MPI.Request | None = None
        self._connected = False
        self.step = 0
        self._waits_for: tuple[tuple[int, ...], str] = ((), "")
        self.counters = manager.counters

    def connect(self, timeout: float | None) -> None:
        """Exchange addresses on the node, and make the communicator between nodes; once, blocking."""
        if self._connected:
            return
        manager = self._manager
        if not self.rows:
            remotes = self._meet_here(timeout)
            remotes[manager.rank] = self.memory.here
            direct = [
                [remotes[rank].direct(self._dtype, self._count, k * self._stride) for rank in self.here]
                for k in range(_PARITIES)
            ]
            self.rows = tuple([row for row in rows if row is not None] for rows in direct)
            flags = [remotes[rank].flags for rank in self.here]
            self._theirs = [words for words in flags if words is not None]
        if self._across and self._comm is None:
            # Making a communicator cannot be interrupted: not before all its ranks are here.
            assembly, shared = self._assemble(), manager.communicators
            self._number = assembly.wait(timeout, shared.proposal(self._across))
            self._comm = shared.take(self._across, self._number)
            assembly.close()
        self._connected = True

    def _meet_here(self, timeout: float | None) -> dict[int, RemoteBuffer]:
        peers: dict[int, tuple[int, ...]] = {rank: () for rank in self.here if rank != self._manager.rank}
        if not peers:
            return {}
        try:
            return self.memory.exchange(peers, self._name, self._plan, timeout, terms=self._terms)
        except MismatchError:
            # The other nodes would wait for this one: let them see what it connects.
            if self._across:
                with suppress(MismatchError, ExchangeTimeout):
                    self._assemble().connect(0.0)
            raise

    def _assemble(self) -> Barrier:
        if self._assembly is None:
            self._assembly = Barrier(
                self._manager, self._across, f"{self._name} (connect)", self._plan, self._terms
            )
        return self._assembly

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator between nodes; only where there is one."""
        if self._comm is None:
            raise RuntimeError(f"{self._name!r}: no communicator between nodes on this rank")
        return self._comm

    def tell(self, phase: int, ranks: Sequence[int]) -> None:
        """Notify ranks of the node that a phase of this step is over here; what was stored is visible."""
        self._manager.segment.fence()
        word = phase * len(self.here) + self._me
        for rank in ranks:
            self._theirs[self.here.index(rank)][word] = self.step

    def hear(self, phase: int, ranks: Sequence[int]) -> Iterator[None]:
        """Wait until ranks of the node have told this one that a phase of this step is over."""
        words, step, first = self._words, self.step, phase * len(self.here)
        silent = [rank for rank in ranks if words[first + self.here.index(rank)] < step]
        while silent:
            self._waits_for = tuple(silent), "on this node"
            yield
            silent = [rank for rank in silent if words[first + self.here.index(rank)] < step]
        self._manager.segment.acquire()

    def complete(self, request: MPI.Request, nbytes: int) -> Iterator[None]:
        """Wait until a collective between nodes, which took so many bytes from here, is complete."""
        # It holds the buffers, which MPI uses even if what waits for it is interrupted.
        self._request = request
        self.counters.collectives += 1
        self.counters.bytes_collective += nbytes
        self._waits_for = tuple(rank for rank in self._across if rank != self._manager.rank), "between nodes"
        while not request.Test():
            yield
        self._request = None

    def load(self, target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        """Load from a peer's vector, and count it."""
        target[...] = source
        self.count_gets(1, source.nbytes)

    def count_puts(self, number: int, nbytes: int) -> None:
        """Count stores that were made elsewhere."""
        self.counters.puts += number
        self.counters.bytes_put += nbytes

    def count_gets(self, number: int, nbytes: int) -> None:
        """Count loads that were made elsewhere."""
        self.counters.gets += number
        self.counters.bytes_got += nbytes

    def waiting(self) -> WaitReason:
        """Which ranks the step waits for; for messages."""
        ranks, where = self._waits_for
        what = f"in {self._name!r} (step {self.step}, {where})"
        return WaitReason(ranks, what, "did every rank make the same calls?")

    def free(self) -> None:
        """Give the communicator back, local; for when no step is running."""
        if self._comm is not None:
            self._manager.communicators.give_back(self._across, self._number)
        self._comm = None
