"""MPI between nodes: communicators of some ranks, their messages and collectives, and vectors in pieces.

A *script* is work that cannot be done at once: a generator that yields where it would wait, and never blocks.
So one thread has several of them under way, and any wait of the rank advances them. MPI's nonblocking
collectives become scripts by a test of their request (``Messages.begun``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from mpi4py import MPI

from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.manager import SegmentManager

# Generator that yields while it has to wait.
Script = Iterator[None]

# Over sockets each test lets MPI move one fragment, and a waiting rank sleeps between two looks. So a look
# makes about as many tests as fragments may have arrived meanwhile. A test that finds nothing takes 0.2 us.
_FRAGMENT_NBYTES = 64 << 10
_MOST_TESTS = 128


def looks(nbytes: int) -> range:
    """Tests that one look at a request of ``nbytes`` bytes makes."""
    return range(min(_MOST_TESTS, 1 + nbytes // _FRAGMENT_NBYTES))


# Generator of the stages of a piece: begins a stage without waiting, and yields a script that completes it.
Stages = Iterator[Iterable[None]]

# Fewest bytes of a piece, in all and for each node: the latency of smaller ones outweighs the overlap.
_LEAST_NBYTES, _LEAST_OF_NODE = 8 << 20, 64 << 10
_MOST_PIECES = 4


def number_of_pieces(nbytes: int, nodes: int) -> int:
    """Number of pieces in which a vector of ``nbytes`` bytes travels between nodes; one on one node."""
    if nodes == 1:
        return 1
    return min(_MOST_PIECES, max(1, nbytes // max(_LEAST_NBYTES, _LEAST_OF_NODE * nodes)))


def slices(count: int, number: int) -> list[slice]:
    """Cut ``count`` elements into balanced pieces, some of them empty if there are few elements."""
    return [slice(*ends) for ends in map(Balanced(count, number or 1).interval, range(number))]


def in_pieces(pieces: Iterable[Stages]) -> Script:
    """Carry out the stages of pieces as a pipeline; yields while it has to wait.

    Three pieces with stages a, b and c, time to the right; the stages of a column are under way together::

        piece 0    a  b  c
        piece 1       a  b  c
        piece 2          a  b  c

    A stage of a piece is complete before the next stage of that piece begins. Meanwhile earlier stages begin
    on the pieces after it, and later stages continue with the pieces before it. The order of all calls
    depends on the numbers of pieces and stages only, so that all ranks call MPI's collectives of one
    communicator in the same order. A rank without work in a stage yields ``()`` for it. Each stage has at
    most two pieces under way: memory that a stage needs is bounded, however long the vector is.
    """
    under_way: list[tuple[Stages, Iterable[None]]] = []
    for new in chain(pieces, repeat(None)):
        before, under_way = under_way, []
        if new is not None:
            before.insert(0, (new, ()))
        elif not before:
            return
        for piece, script in before:
            yield from script
            for stage in piece:
                under_way.append((piece, stage))
                break


class Messages:
    """Messages and collectives by MPI of some ranks, on a communicator that ``connect`` makes for them.

    ``ranks``, their order, ``name`` and ``terms`` are equal on all ranks. Positions are those in ``ranks``; a
    single rank needs no communicator. Each call begins an operation and keeps its arrays until the operation
    is complete. It returns a script that waits for this. Whoever calls it or advances the script holds the
    lock of the segment.

    Communicators are few, some 2,000 in MPICH, and slow to make. So those of the same ranks are used again:
    ``connect`` takes one that is free on all ranks, with the largest number that any of them has reserved.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str, terms: str = "") -> None:
        self._manager, self._name, self._terms = manager, name, terms
        self.ranks = tuple(ranks)
        self.comm: MPI.Intracomm = MPI.COMM_SELF
        self._connected = len(self.ranks) < 2
        self._barrier: EqualityCheck | None = None
        # Number of the communicator among those of these ranks, None if there is none; and the largest one
        # that a rank has reserved, None before all have met.
        self._number: int | None = None
        self._largest: int | None = None
        self._under_way: dict[int, object] = {}

    def connect(self, timeout: float | None = None) -> None:
        """Make the communicator; once, collective, blocking. The call can be repeated after a timeout."""
        if not self._connected:
            # Making a communicator cannot be interrupted, so all its ranks meet before, at least twice: a
            # rank that gave up waiting in the first meeting does not come to the second.
            barrier, shared = self._meeting(), self._manager.communicators
            while True:
                if self._number is None:
                    self._number = shared.reserve(self.ranks, self._largest or 0)
                largest = barrier.meet(timeout, self._number)
                if largest == self._largest:
                    break
                # All reserve again, from the largest on: the ranks that have it keep it.
                self._largest = largest
                if self._number != largest:
                    shared.give_back(self.ranks, self._number)
                    self._number = None
            self.comm = shared.take(self.ranks, self._number)
            self._connected = True
            barrier.close()

    def announce(self) -> None:
        """Send the other ranks this rank's address, so that they notice a mismatch; does not wait."""
        if not self._connected:
            self._meeting().connect(0.0)

    def _meeting(self) -> EqualityCheck:
        if self._barrier is None:
            name = f"{self._name} (connect)"
            self._barrier = EqualityCheck(self._manager, self.ranks, name, self._terms)
        return self._barrier

    def send(self, data: Array, position: int, tag: int) -> Script:
        """Begin to send; complete once the receiver has begun to receive."""
        return self.begun(self.comm.Issend(_bytes(data), position, tag), data.nbytes, data)

    def receive(self, out: Array, position: int, tag: int) -> Script:
        """Begin to receive a message of one rank, of at most as many bytes as the array has."""
        return self.begun(self.comm.Irecv(_bytes(out), position, tag), out.nbytes, out)

    def probe(self, tag: int) -> int | None:
        """Position of a rank from which a message with a tag has arrived; None if there is none."""
        status = MPI.Status()
        return int(status.Get_source()) if self.comm.Iprobe(MPI.ANY_SOURCE, tag, status) else None

    def largest_tag(self) -> int:
        """Largest tag of a message."""
        return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)

    def gather_all(self, mine: Array, out: Array, counts: Sequence[int]) -> Script:
        """Begin an all-gather of vectors into ``out``; ``counts`` are their bytes, 0 of ranks without one."""
        filled = [position for position, count in enumerate(counts) if count]
        if len(filled) == 1:
            data = out.view(np.uint8)[: counts[filled[0]]]
            if self.comm.rank == filled[0]:
                data[...] = mine.view(np.uint8)
            return self.broadcast(data, filled[0])
        request = self.comm.Iallgatherv(_bytes(mine), [out.view(np.uint8), (tuple(counts), None), MPI.BYTE])
        return self.begun(request, out.nbytes, mine, out)

    def gather(self, mine: Array, out: Array, counts: Sequence[int], position: int) -> Script:
        """Begin to gather the vectors of all ranks in ``out`` of one rank; ``counts`` are their bytes."""
        sent = [mine.nbytes if at == position else 0 for at in range(len(counts))]
        return self.exchange(mine, sent, out, counts if self.comm.rank == position else [0] * len(counts))

    def broadcast(self, data: Array, position: int) -> Script:
        """Begin a broadcast of the vector of one rank."""
        return self.begun(self.comm.Ibcast(_bytes(data), position), data.nbytes, data)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: MPI.Op) -> Script:
        """Begin a reduce-scatter by MPI; ``counts`` are the elements of each rank's part of the result."""
        request = self.comm.Ireduce_scatter(data, out, counts, op)
        return self.begun(request, data.nbytes, data, out)

    def exchange(self, data: Array, counts: Sequence[int], out: Array, received: Sequence[int]) -> Script:
        """Begin an all-to-all; ``counts`` and ``received`` are the bytes for and from each position."""
        sent = [data.view(np.uint8), (tuple(counts), None), MPI.BYTE]
        taken = [out.view(np.uint8), (tuple(received), None), MPI.BYTE]
        return self.begun(self.comm.Ialltoallv(sent, taken), data.nbytes + out.nbytes, data, out)

    def begun(self, request: MPI.Request, nbytes: int, *kept: Array) -> Script:
        """Keep the arrays of a request for ``nbytes`` bytes; return a script that waits for it."""
        # MPI uses the arrays even if nobody waits to the end.
        self._under_way[id(request)] = request, kept
        return self._completed(request, looks(nbytes))

    def _completed(self, request: MPI.Request, tests: range) -> Script:
        while True:
            for _ in tests:
                if request.Test():
                    del self._under_way[id(request)]
                    return
            yield

    def close(self) -> None:
        """Give the communicator back, unless an operation is under way or ended by an error; local."""
        if self._barrier is not None:
            self._barrier.close()
        if self._number is not None and not (self._under_way or self._manager.closed):
            self._manager.communicators.give_back(self.ranks, self._number)
            self._number = None


def _bytes(array: Array) -> list[Any]:
    return [array.view(np.uint8), MPI.BYTE]
