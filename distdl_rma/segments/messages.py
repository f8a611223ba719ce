"""Messages and collectives of some ranks of a machine by MPI, for what no shared memory leads to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distdl_rma.segments.collectives.engine.stepped_algorithm import BetweenNodes, complete, looks
from distdl_rma.segments.manager import SegmentManager

Array = NDArray[Any]
# Whether what was begun is over; looks once, and does not block.
Test = Callable[[], bool]


class Messages:
    """A communicator of some ranks, for what only they send each other; positions are those in ``ranks``.

    Collective over the ranks to construct, blocking. Whatever is begun keeps its arrays until it is over, and
    is over when the test that it returns has said so. MPI is called with the lock of the segment.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str) -> None:
        self._manager, self._lock, self.ranks = manager, manager.segment.lock, tuple(ranks)
        self._between = BetweenNodes(manager, ranks, name, "")
        self._between.connect(None)
        self._comm: MPI.Intracomm = self._between.comm if len(self.ranks) > 1 else MPI.COMM_SELF
        self._under_way: dict[int, object] = {}

    def send(self, data: Array, position: int, tag: int) -> Test:
        """Begin to send; over once the receiver has begun to take it."""
        return self._begun(lambda: self._comm.Issend(_bytes(data), position, tag), data)

    def receive(self, out: Array, position: int, tag: int) -> Test:
        """Begin to receive from one rank so many bytes as the array has, or less."""
        return self._begun(lambda: self._comm.Irecv(_bytes(out), position, tag), out)

    def probe(self, tag: int) -> int | None:
        """Position of a rank whose message with a tag can be received; None if there is none."""
        status = MPI.Status()
        with self._lock:
            found = self._comm.Iprobe(MPI.ANY_SOURCE, tag, status)
        return int(status.Get_source()) if found else None

    def largest_tag(self) -> int:
        """Largest tag of a message."""
        return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)

    def gather_all(self, mine: Array, out: Array, counts: Sequence[int]) -> Test:
        """Begin to give all ranks the vectors of all, one behind the other; ``counts`` are their bytes."""
        taken = [out.view(np.uint8), (tuple(counts), None), MPI.BYTE]
        return self._begun(lambda: self._comm.Iallgatherv(_bytes(mine), taken), mine, out)

    def broadcast(self, data: Array, position: int) -> Test:
        """Begin to give all ranks the vector of one of them."""
        return self._begun(lambda: self._comm.Ibcast(_bytes(data), position), data)

    def exchange(self, data: Array, counts: Sequence[int], out: Array, received: Sequence[int]) -> Test:
        """Begin to give every rank its bytes; ``counts`` and ``received`` are by position."""
        sent = [data.view(np.uint8), (tuple(counts), None), MPI.BYTE]
        taken = [out.view(np.uint8), (tuple(received), None), MPI.BYTE]
        return self._begun(lambda: self._comm.Ialltoallv(sent, taken), data, out)

    def close(self) -> None:
        """Give the communicator back; local. Kept if something is under way, or ended by an error."""
        if not (self._under_way or self._manager.closed):
            self._between.free()

    def _begun(self, call: Callable[[], MPI.Request], *kept: Array) -> Test:
        with self._lock:
            request = call()
        # MPI uses the arrays even if nobody asks for the outcome any more.
        key = id(request)
        self._under_way[key] = request, kept
        tests = looks(sum(array.nbytes for array in kept))
        over: list[bool] = []

        def test() -> bool:
            with self._lock:
                if not over and complete(request, tests):
                    over.append(True)
                    self._under_way.pop(key, None)
            return bool(over)

        return test


def _bytes(array: Array) -> list[Any]:
    return [array.view(np.uint8), MPI.BYTE]
