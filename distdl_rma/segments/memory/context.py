"""What the buffers, queues and handshakes of one rank share."""

from __future__ import annotations

import random
from itertools import count

from mpi4py import MPI

from distdl_rma.errors import ClosedError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.transport.heap import Heap
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiter import Waiter


class SegmentContext:
    """A rank's end of the segments of a machine: its memory, its ways to the peers, and how it waits.

    ``ranks`` are the rank ids of the machine by position in ``comm``, which belongs to it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        segment: Segment,
        waiter: Waiter,
        counters: Counters,
    ) -> None:
        self.comm, self.ranks, self.rank = comm, ranks, ranks[comm.rank]
        self.segment, self.waiter, self.counters = segment, waiter, counters
        self.heap = Heap(segment.nbytes)
        # The number in a notification; ranks begin far from each other, so that no two give the same.
        self.sequence = count(random.Random(self.rank).getrandbits(31))
        self.closed = False

    def check_open(self) -> None:
        """Raise ``ClosedError`` after the close."""
        if self.closed:
            raise ClosedError("segment manager: already closed")
