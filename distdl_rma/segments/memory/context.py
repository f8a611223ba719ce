"""What the buffers, queues and handshakes of one rank share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from mpi4py import MPI

from distdl_rma.errors import ClosedError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.transport.heap import Heap
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.segments.waiting.waiter import Waiter


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

    def flush(self, ranks: Sequence[int], timeout: float | None) -> None:
        """Wait until all puts and notifications from here to some ranks have arrived there; blocking.

        What is under way to different ranks goes on together. After ``ExchangeTimeout``, which names the
        ranks that have not taken theirs, the call can be repeated.
        """
        check_timeout(timeout)
        self.check_open()
        links = {rank: self.segment.link(rank) for rank in ranks}
        for link in links.values():
            link.close_delivery()

        def late() -> tuple[int, ...]:
            return tuple(rank for rank, link in links.items() if not link.advance())

        self.waiter.until(lambda: not late(), lambda: WaitReason(late(), "to take its puts"), timeout)
