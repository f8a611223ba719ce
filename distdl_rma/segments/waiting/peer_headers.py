"""Reading what the ranks of a machine say about themselves, without their help."""

from __future__ import annotations

import os
import time

import numpy as np
from mpi4py import MPI

from distdl_rma.segments.transport.rma_peer import ByteRuns, Bytes
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiting.header import (
    HEADER_BYTES,
    HeaderRecord,
    RankState,
    is_gone,
    namespace,
    parse,
)

# A header is read again while its rank changes it; one that cannot be read in so many looks counts as silent.
_LOOKS = 100


class PeerHeaders:
    """Headers of the ranks of a machine, as this rank reads them.

    Those of the same node by load, the others by gets that are answered later, or never.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._namespace = namespace()
        # Gets under way; what ranks of other nodes answered, and when.
        self._asked: dict[int, tuple[list[MPI.Request], Bytes]] = {}
        self._answers: dict[int, tuple[HeaderRecord, float]] = {}
        # When a rank wrote what it last said, by its clock, and since when that has been read, by this one's.
        self._last: dict[int, tuple[float, float]] = {}

    def is_near(self, rank: int) -> bool:
        """Whether a rank's header is read by load."""
        return self._segment.link(rank).memory is not None

    def read(self, rank: int, deadline: float) -> HeaderRecord | None:
        """What a rank says; None if it does not answer. Blocking, until the deadline at most."""
        memory = self._segment.link(rank).memory
        if memory is not None:
            for _ in range(_LOOKS):
                record = parse(bytes(memory[:HEADER_BYTES].data))
                if record is not None:
                    return record
                os.sched_yield()
            return None
        while not self._hear(rank):
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-3)
        return self._answers[rank][0]

    def glance(self, rank: int) -> HeaderRecord | None:
        """What a rank says, or said when it last answered; None if it never did. Does not block."""
        if self.is_near(rank):
            return self.read(rank, 0.0)
        self._hear(rank)
        return self._answers[rank][0] if rank in self._answers else None

    def age(self, rank: int) -> float:
        """Seconds since the rank's last answer; 0 for those that need not be asked."""
        if self.is_near(rank):
            return 0.0
        return time.monotonic() - self._answers[rank][1] if rank in self._answers else float("inf")

    def unchanged(self, rank: int, record: HeaderRecord) -> float:
        """Seconds for which a rank that waits, and ought to say so again and again, has said nothing else.

        As far as this rank has looked before; 0 for one that does not wait.
        """
        now = time.monotonic()
        written, since = self._last.get(rank, (0.0, now))
        if written != record.written:
            since = now
        self._last[rank] = record.written, since
        return now - since if record.state in (RankState.WAITING, RankState.LEFT) else 0.0

    def forget(self) -> None:
        """Believe no answer any more that was given before."""
        self._answers.clear()

    def process_is_gone(self, rank: int, record: HeaderRecord) -> bool:
        """Whether a rank's process has ended; False if it is none of this node, where that cannot be told."""
        near = rank in self._segment.node_ranks and record.namespace == self._namespace
        return near and bool(record.namespace) and is_gone(record.process)

    def _hear(self, rank: int) -> bool:
        # Whether the rank answered just now. Asks, or takes in the answer.
        with self._segment.lock:
            if rank not in self._asked:
                header = np.empty(HEADER_BYTES, np.uint8)
                requests = self._segment.link(rank).get(ByteRuns((0,), HEADER_BYTES), header)
                self._asked[rank] = requests, header
            requests, header = self._asked[rank]
            if not MPI.Request.Testall(requests):
                return False
            del self._asked[rank]
            record = parse(header.tobytes())
            if record is not None:
                self._answers[rank] = record, time.monotonic()
            return record is not None
