"""Queues of puts and gets whose local completion is waited for together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from distdl_rma.errors import ArgumentError
from distdl_rma.segments.memory.context import SegmentContext
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.waiting.header import WaitReason


class Queue:
    """Puts and gets posted together; ``wait`` returns when the memory at this end may be used again.

    A put posted to a queue takes no copy: its source must not change before ``wait``. A get posted to a
    queue has filled its array after ``wait``. Made by :meth:`SegmentManager.queue`; there may be several,
    and which one an operation was posted to changes nothing at the other end.
    """

    def __init__(self, context: SegmentContext, name: str) -> None:
        self._context = context
        self.name = name
        # Peer, requests, memory that they use, and what to call once they are complete.
        self._posted: list[tuple[int, list[MPI.Request], Any, Callable[[], None] | None]] = []

    def __len__(self) -> int:
        """Operations posted and not known to be complete."""
        return len(self._posted)

    def post(
        self, peer: int, requests: list[MPI.Request], keep: Any, finish: Callable[[], None] | None = None
    ) -> None:
        """Add an operation; its memory is kept until it is complete, then ``finish()`` is called."""
        if requests:
            self._posted.append((peer, requests, keep, finish))
        elif finish is not None:
            finish()

    def test(self) -> bool:
        """Whether all operations posted so far are complete at this end; does not block."""
        self._context.check_open()
        with self._context.segment.lock:
            under_way = []
            for operation in self._posted:
                _, requests, _, finish = operation
                if not MPI.Request.Testall(requests):
                    under_way.append(operation)
                elif finish is not None:
                    finish()
            self._posted = under_way
        return not self._posted

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all operations posted so far are complete at this end; blocking.

        Raises ``ExchangeTimeout`` at the deadline (seconds; None: the machine's default); it can then be
        called again.
        """
        check_timeout(timeout)
        self._context.check_open()
        self._context.waiter.until(self.test, self._reason, timeout)

    def _reason(self) -> WaitReason:
        peers = tuple(dict.fromkeys(peer for peer, *_ in self._posted))
        return WaitReason(peers, f"to take {len(self)} operation(s) of queue {self.name!r}")

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {len(self)} posted)"


def check_queue(queue: Queue | None, what: str) -> None:
    """Raise if what an operation shall be posted to is neither a queue nor None."""
    if not (queue is None or isinstance(queue, Queue)):
        raise ArgumentError(f"{what}: a queue is made by segments.queue(), got {type(queue).__name__}")
