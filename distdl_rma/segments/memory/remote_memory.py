"""A block of a peer's segment: what is inside, how bytes get there and back, and the block as an array."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ClosedError, ShapeError
from distdl_rma.segments.memory.array_bytes import ArrayLayout, as_offset, as_values
from distdl_rma.segments.memory.context import Queue, SegmentContext, check_queue
from distdl_rma.segments.transport.heap import Bytes
from distdl_rma.segments.transport.links import SHORT_RUN_BYTES, ByteRuns
from distdl_rma.segments.waiting.header import WaitReason


class Fetch(NamedTuple):
    """One get: where in the peer's segment, the same as memory of this process if it can be, and where to."""

    runs: ByteRuns
    near: NDArray[Any] | None
    target: NDArray[Any]


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
        here = f"rank {self.peer}'s buffer of {self.nbytes} bytes"
        return ShapeError(f"{nbytes} bytes at offset {offset} are not inside {here}")

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the machine was closed."""
        if self.context.closed:
            raise ClosedError(f"buffer of rank {self.peer}: the machine is already closed")

    def near_view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Array over bytes of this memory where this rank can load and store them, else None."""
        if self.near is None:
            return None
        return self.near[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)

    def put(self, runs: ByteRuns, source: Bytes, queue: Queue | None) -> None:
        """Begin a put over the link; with a queue, it looks after the source."""
        requests = self.link.put(runs, source)
        if queue is not None:
            queue.post(self.peer, requests, source)

    def fetch(self, target: NDArray[Any], offset: int) -> Fetch:
        """A get of contiguous bytes into ``target``."""
        nbytes, near = target.nbytes, self.near
        if near is not None:
            near = near[offset : offset + nbytes].view(target.dtype).reshape(target.shape)
        return Fetch(ByteRuns((self.begin + offset,), nbytes), near, target)

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
        for runs, fetches_of_it in _short_ones_together(far):
            landing, finish = _landing(fetches_of_it)
            posted.post(self.peer, self.link.get(runs, landing, keep=True), landing, finish)
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
        landing, finish = _landing([fetch])

        def filled() -> None:
            finish()
            then()

        self.link.get(fetch.runs, landing, keep=True, then=filled)


def _short_ones_together(fetches: Sequence[Fetch]) -> list[tuple[ByteRuns, list[Fetch]]]:
    # What is got at once, and by which of them.
    short = [f for f in fetches if len(f.runs.offsets) == 1 and f.runs.nbytes <= SHORT_RUN_BYTES]
    if len(short) < 2:
        return [(fetch.runs, [fetch]) for fetch in fetches]
    # In the order of their places: MPI counts from the first one.
    short.sort(key=lambda fetch: fetch.runs.offsets)
    runs = ByteRuns.together([(fetch.runs.offsets[0], fetch.runs.nbytes) for fetch in short])
    together = set(map(id, short))
    return [(runs, short), *((fetch.runs, [fetch]) for fetch in fetches if id(fetch) not in together)]


def _landing(fetches: Sequence[Fetch]) -> tuple[Bytes, Callable[[], None]]:
    # Memory that the link keeps while a get is under way, whatever becomes of targets, and what copies it.
    landing = np.empty(sum(fetch.runs.total for fetch in fetches), np.uint8)

    def finish() -> None:
        end = 0
        for fetch in fetches:
            begin, end, target = end, end + fetch.runs.total, fetch.target
            target[...] = landing[begin:end].view(target.dtype).reshape(target.shape)

    return landing, finish


class RemoteArray:
    """A peer's memory as an array: ``there[2:4, ::2] = x`` puts, ``there[0]`` gets.

    Slices are those of numpy: integers, slices and an ellipsis. A put does not block for the transfer, and
    ``x`` may be changed on return. A get blocks and returns an array of its own.
    """

    def __init__(self, memory: RemoteMemory, layout: ArrayLayout, offset: int) -> None:
        self._memory, self._layout = memory, layout
        self.dtype, self.shape = layout.dtype, layout.shape
        self._begin = memory.begin + offset
        self._near = memory.near_view(offset, layout.dtype, layout.shape)

    def __setitem__(self, key: Any, data: Any) -> None:
        """Put; data of another shape is broadcast, data of another type is taken if nothing is lost."""
        self.put(key, data)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Get; blocking."""
        part = self._layout.part(key)
        out = np.empty(part.shape, self.dtype)
        if self._near is None:
            fetch = Fetch(part.runs(self._begin), None, out)
        else:
            fetch = Fetch(ByteRuns((0,), part.nbytes), self._near[part.key], out)
        self._memory.get([fetch])
        return out

    def __len__(self) -> int:
        """Number of rows."""
        if not self.shape:
            raise TypeError("len() of a peer's array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Get row after row; blocking."""
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Get all; blocking."""
        if copy is False:
            raise ValueError("a peer's array cannot be seen without a copy")
        whole = self[...]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"RemoteArray(of rank {self._memory.peer}, {self.dtype}, shape {self.shape})"

    def put(self, key: Any, data: Any, queue: Queue | None = None) -> None:
        """Put to a slice, posted to a queue; ``data`` may be changed on return all the same."""
        if queue is not None:
            check_queue(queue, "put")
        part = self._layout.part(key)
        source = as_values(data, self.dtype, "put")
        memory = self._memory
        memory.check_open()
        try:
            if self._near is not None:
                # Straight to its place: packing would be one more pass over the data.
                self._near[part.key] = source
            else:
                packed = np.empty(part.shape, self.dtype)
                packed[...] = source
                memory.put(part.runs(self._begin), packed.reshape(-1).view(np.uint8), queue)
        except ValueError as error:
            raise ShapeError(f"put: {error}") from None
        memory.counters.puts += 1
        memory.counters.bytes_put += part.nbytes
