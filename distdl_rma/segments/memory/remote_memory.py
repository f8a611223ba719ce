"""A block of a peer's segment: which bytes are inside, and how bytes get there and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ClosedError, ShapeError
from distdl_rma.segments.memory.array_bytes import as_offset
from distdl_rma.segments.memory.context import SegmentContext
from distdl_rma.segments.memory.queue import Queue
from distdl_rma.segments.transport.rma_peer import ByteRuns, Bytes
from distdl_rma.segments.waiting.header import WaitReason


class Fetch(NamedTuple):
    """One get: where in the peer's segment, the same as memory of this process if it can be, and where to."""

    runs: ByteRuns
    near: npt.NDArray[Any] | None
    target: npt.NDArray[Any]


class RemoteMemory:
    """``nbytes`` from ``begin`` on in the segment of a peer; offsets here are bytes from ``begin``.

    ``near`` are those bytes themselves where this rank can load and store them, else None.
    """

    def __init__(self, context: SegmentContext, peer: int, begin: int, nbytes: int) -> None:
        self.context, self.counters = context, context.counters
        self.peer, self.begin, self.nbytes = peer, begin, nbytes
        self.link = context.segment.link(peer)
        memory = self.link.memory
        self.near: Bytes | None = None if memory is None else memory[begin : begin + nbytes]

    def inside(self, offset: Any, nbytes: int, what: str) -> int:
        """Offset as an integer, or ``ShapeError`` if so many bytes from there on are not inside."""
        begin: int = as_offset(offset, what)
        if begin < 0 or begin + nbytes > self.nbytes:
            raise self.outside(begin, nbytes)
        return begin

    def outside(self, offset: int, nbytes: int) -> ShapeError:
        """Error for bytes that are not inside."""
        return ShapeError(
            f"{nbytes} bytes at offset {offset} are not inside rank {self.peer}'s buffer of"
            f" {self.nbytes} bytes"
        )

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the machine was closed."""
        if self.context.closed:
            raise ClosedError(f"buffer of rank {self.peer}: the machine is already closed")

    def runs(self, offset: int, nbytes: int) -> ByteRuns:
        """Contiguous bytes, as a link takes them."""
        return ByteRuns((self.begin + offset,), nbytes)

    def near_view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
        """Array over bytes of this memory where this rank can load and store them, else None."""
        if self.near is None:
            return None
        return self.near[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)

    def fetch(self, target: npt.NDArray[Any], offset: int) -> Fetch:
        """A get of contiguous bytes into ``target``."""
        nbytes, near = target.nbytes, self.near
        if near is not None:
            near = near[offset : offset + nbytes].view(target.dtype).reshape(target.shape)
        return Fetch(ByteRuns((self.begin + offset,), nbytes), near, target)

    def put(self, runs: ByteRuns, source: Bytes, queue: Queue | None) -> None:
        """Begin a put over the link; with a queue, it looks after the source."""
        requests = self.link.put(runs, source)
        if queue is not None:
            queue.post(self.peer, requests, source)

    def get(self, fetches: Sequence[Fetch], queue: Queue | None = None, timeout: float | None = None) -> None:
        """Get all of some; blocking without a queue."""
        if self.context.closed:
            self.check_open()
        far = []
        for fetch in fetches:
            self.counters.gets += 1
            self.counters.bytes_got += fetch.runs.total
            if fetch.near is not None:
                fetch.target[...] = fetch.near
            else:
                far.append(fetch)
        if not far:
            return
        # After a timeout nobody looks at the queue that is made here, and the targets are left alone.
        posted = Queue(self.context, "get") if queue is None else queue
        for fetch in far:
            landing, finish = _landing(fetch)
            posted.post(self.peer, self.link.get(fetch.runs, landing, keep=True), landing, finish)
        if queue is None:
            total = sum(fetch.runs.total for fetch in far)
            reason = WaitReason((self.peer,), f"to answer a get of {total} bytes")
            self.context.waiter.until(posted.test, lambda: reason, timeout)

    def get_then(self, fetch: Fetch, then: Callable[[], None]) -> None:
        """Begin to get, and have ``then()`` called when the target is filled; does not block."""
        if fetch.near is not None or not fetch.runs.total:
            self.get([fetch])
            then()
            return
        self.counters.gets += 1
        self.counters.bytes_got += fetch.runs.total
        landing, finish = _landing(fetch)

        def filled() -> None:
            finish()
            then()

        self.link.get(fetch.runs, landing, keep=True, then=filled)


def _landing(fetch: Fetch) -> tuple[Bytes, Callable[[], None]]:
    # Memory that the link keeps while a get is under way, whatever becomes of the target, and what copies it.
    landing, target = np.empty(fetch.runs.total, np.uint8), fetch.target

    def finish() -> None:
        target[...] = landing.view(target.dtype).reshape(target.shape)

    return landing, finish
