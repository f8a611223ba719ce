"""Double-buffered sums over some ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ClosedError, PartitionError, ProtocolError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.segments.allgather import AllGather
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.patience import Waiting
from distdl_rma.segments.remote import RemoteBuffer

__all__ = ["Allreduce"]

Array = npt.NDArray[Any]
_BUFFERS = 2
# Above this many bytes per rank a share each and two rounds beat everyone's vector to everyone.
_ONE_ROUND_BYTES = 8 << 10
# Elements summed at a time: the block stays in the cache until it is stored to every peer.
_BLOCK = 16 << 10
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
}
_DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float64, np.float16, np.int32, np.int64))


class Allreduce:
    """Reduction over some ranks, double buffered: write to ``active``, start, go on, wait, read ``result``.

    ``start()`` flips ``active`` to the other buffer, so that step k+1 can be written while step k
    travels. The result takes the place of the operand in its buffer and stays valid until the next but
    one start. Bitwise the same on all ranks and from run to run: every element is reduced once, in the
    order of ``ranks`` (float16 in float32). All ranks construct it in the same order with the same
    arguments; starting and waiting only involve these ranks.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    ranks
        Rank ids that take part, in the order of summation, this one included.
    count
        Number of elements; 0 is legal.
    dtype
        float32, float64, float16, int32 or int64.
    op
        ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``.
    name
        For messages, alike on all ranks.
    one_round
        Whether everyone's vector goes to everyone at any size, for latency; otherwise only if it is small.

    Notes
    -----
    Interface document, sections 3.1 and 4.1; requirement A15.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: npt.DTypeLike = np.float32,
        op: str = "sum",
        name: str = "allreduce",
        *,
        one_round: bool = False,
    ) -> None:
        self.ranks, self.count, self.dtype, self.op, self.name = (
            tuple(ranks),
            count,
            np.dtype(dtype),
            op,
            name,
        )
        if self.dtype not in _DTYPES:
            raise ShapeError(f"{name!r}: allreduce takes {[str(d) for d in _DTYPES]}, got {dtype}")
        if op not in _OPERATIONS:
            raise ShapeError(f"{name!r}: operation is one of {list(_OPERATIONS)}, got {op!r}")
        if op == "mean" and self.dtype.kind == "i":
            raise ShapeError(f"{name!r}: a mean of integers is not exact; use sum, or a floating dtype")
        if manager.rank not in self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise PartitionError(
                f"{name!r}: ranks must be unique and hold this rank {manager.rank}, got {self.ranks}"
            )
        self._manager = manager
        nbytes = count * self.dtype.itemsize
        self._algorithm = _choose(manager, self, nbytes, one_round)
        self._buffers = self._algorithm.buffers
        self._steps = 0
        self._running = False  # started and not yet waited for by the caller
        self._complete = True  # nothing left to do for the step
        self._advancing = False
        self._closed = False

    @property
    def active(self) -> Array:
        """Buffer to write the next operand to, ``count`` elements in the segment; not cleared."""
        self._check()
        return self._buffers[self._steps % _BUFFERS]

    @property
    def result(self) -> Array:
        """Result of the last step, in the segment; valid until the next but one start."""
        self._check()
        if self._running or not self._steps:
            raise ProtocolError(f"{self.name!r}: result was asked for before a step was waited for")
        return self._buffers[(self._steps - 1) % _BUFFERS]

    @property
    def running(self) -> bool:
        """Whether a step was started and not yet waited for."""
        return self._running

    def connect(self, timeout: float | None = None) -> None:
        """Exchange addresses with the other ranks, once, blocking; the first ``start`` does it otherwise.

        Ranks that may start several allreduces in different orders connect them first, in the same order.
        """
        self._check()
        self._algorithm.connect(timeout)

    def start(self) -> None:
        """Begin to reduce ``active`` and flip it; waits for no rank, except that the first start connects."""
        self._check()
        if self._running:
            raise ProtocolError(f"{self.name!r}: started while a step is running; wait for it first")
        self._algorithm.start(self._steps % _BUFFERS)
        self._steps += 1
        self._running, self._complete = True, False
        # Every wait advances every running step: ranks may wait for their steps in different orders.
        self._manager.defer(self._advance)

    def test(self) -> bool:
        """Advance the running step; return whether it is complete. Does not block."""
        self._check()
        self._manager.progress()
        return self._arrived()

    def wait(self, timeout: float | None = None) -> Array:
        """Wait for the running step and return ``result``; blocking.

        Raises
        ------
        ProtocolError
            If nothing was started.
        ExchangeTimeout
            At the deadline, naming the rank that is missing; the wait can be repeated.
        """
        self._check()
        if not self._steps:
            raise ProtocolError(f"{self.name!r}: wait without a start")
        if self._running:
            self._manager.patience.until(self._arrived, self._algorithm.waiting, timeout)
        return self.result

    def close(self) -> None:
        """Give the memory back when no rank writes to it any more; local, idempotent."""
        if not self._closed:
            self._closed = True
            self._algorithm.close()

    def _arrived(self) -> bool:
        if self._running and self._advance():
            self._running = False
            self._manager.withdraw(self._advance)
        return not self._running

    def _advance(self) -> bool:
        # An advance may wait, and that wait comes back here to advance everything that is running.
        if not (self._complete or self._closed or self._advancing):
            self._advancing = True
            try:
                self._complete = self._algorithm.advance()
            finally:
                self._advancing = False
        return self._complete or self._closed

    def _check(self) -> None:
        if self._closed or self._manager.closed:
            raise ClosedError(f"allreduce {self.name!r}: already closed")


class _Algorithm(Protocol):
    # One way to reduce buffer k in place; advance() is true when it is done.
    buffers: list[Array]

    def connect(self, timeout: float | None) -> None: ...
    def start(self, which: int) -> None: ...
    def advance(self) -> bool: ...
    def waiting(self) -> Waiting: ...
    def close(self) -> None: ...


def _choose(manager: SegmentManager, job: Allreduce, nbytes: int, one_round: bool) -> _Algorithm:
    alone = len(job.ranks) == 1
    if alone or one_round or nbytes * (len(job.ranks) - 1) <= _ONE_ROUND_BYTES:
        return _OneRound(manager, job)
    if all(manager.segment.link(rank).memory is not None for rank in job.ranks):
        return _DirectLoad(manager, job)
    return _TwoRounds(manager, job)


def _reduce(job: Allreduce, rows: Sequence[Array], out: Array) -> None:
    # Reduces rows in order into out, which may be one of them; float16 goes through float32.
    combine = _OPERATIONS[job.op]
    wide = np.float32 if job.dtype == np.float16 else job.dtype
    total = rows[0].astype(wide)
    for row in rows[1:]:
        combine(total, row, out=total, dtype=wide)
    if job.op == "mean":
        total = (total / len(rows)).astype(wide)
    out[:] = total


class _OneRound:
    """Everyone pushes its vector to everyone, each sums in rank order."""

    def __init__(self, manager: SegmentManager, job: Allreduce) -> None:
        self._manager, self._job = manager, job
        self._gather = AllGather(manager, job.ranks, job.count, job.dtype, f"{job.name} ({job.op})")
        self._memory = manager.get_segment_buffer(_BUFFERS * job.count * job.dtype.itemsize, owner=job.name)
        self.buffers = list(self._memory.view(job.dtype, (_BUFFERS, job.count)))
        self._which = 0

    def connect(self, timeout: float | None) -> None:
        self._gather.connect(timeout)

    def start(self, which: int) -> None:
        self._which = which
        self._gather.start(self.buffers[which])

    def advance(self) -> bool:
        if not self._gather.ready():
            return False
        _reduce(self._job, list(self._gather.wait()), self.buffers[self._which])
        return True

    def waiting(self) -> Waiting:
        return self._gather.missing()

    def close(self) -> None:
        self._gather.close()
        if not self._manager.closed:
            self._manager.retire(self._memory, lambda: True)


class _DirectLoad:
    """On one node: each rank reduces its share by direct load and stores the result to all."""

    def __init__(self, manager: SegmentManager, job: Allreduce) -> None:
        self._manager, self._job = manager, job
        self._me = job.ranks.index(manager.rank)
        size = len(job.ranks)
        nbytes = job.count * job.dtype.itemsize
        # Notifications: one "ready" word per rank, then one "done" word per rank.
        self._memory = manager.get_segment_buffer(_BUFFERS * nbytes, 2 * size, job.name)
        self.buffers = list(self._memory.view(job.dtype, (_BUFFERS, job.count)))
        self._share = slice(*Balanced(job.count, size).interval(self._me))
        self._remotes: dict[int, RemoteBuffer] = {}
        self._rows: list[list[Array]] = []
        self._step = 0
        self._reduced = True

    def start(self, which: int) -> None:
        self.connect(None)
        self._which = which
        self._step += 1
        self._reduced = False
        self._tell(0)

    def advance(self) -> bool:
        if not self._reduced:
            if self._behind(0):
                return False
            self._manager.segment.acquire()
            self._reduce_share()
            self._reduced = True
            self._tell(len(self._job.ranks))
        if self._behind(len(self._job.ranks)):
            return False
        self._manager.segment.acquire()
        return True

    def waiting(self) -> Waiting:
        late = tuple(self._behind(len(self._job.ranks) if self._reduced else 0))
        return Waiting(late, f"in {self._job.name!r} (step {self._step})")

    def close(self) -> None:
        if not self._manager.closed:
            self._manager.retire(
                self._memory, lambda: self._reduced and not self._behind(len(self._job.ranks))
            )

    def connect(self, timeout: float | None) -> None:
        if self._remotes:
            return
        job = self._job
        peers = [rank for rank in job.ranks if rank != self._manager.rank]
        fingerprint = job.count * 64 + _DTYPES.index(job.dtype) * 4 + list(_OPERATIONS).index(job.op)
        self._remotes = self._memory.exchange(dict.fromkeys(peers, ()), job.name, fingerprint, timeout)
        for which, mine in enumerate(self.buffers):
            offset = which * mine.nbytes
            rows = [
                mine
                if rank == self._manager.rank
                else cast(Array, self._remotes[rank].direct(job.dtype, job.count, offset))
                for rank in job.ranks
            ]
            self._rows.append([row[self._share] for row in rows])

    def _tell(self, first: int) -> None:
        for remote in self._remotes.values():
            remote.acknowledge(first + self._me, self._step)

    def _behind(self, first: int) -> list[int]:
        return [
            rank
            for i, rank in enumerate(self._job.ranks)
            if i != self._me and self._memory.flag(first + i) < self._step
        ]

    def _reduce_share(self) -> None:
        rows = self._rows[self._which]
        for begin in range(0, rows[0].size, _BLOCK):
            blocks = [row[begin : begin + _BLOCK] for row in rows]
            _reduce(self._job, blocks, blocks[self._me])
            for i, block in enumerate(blocks):
                if i != self._me:
                    block[:] = blocks[self._me]
        counters = self._manager.counters
        counters.puts += len(rows) - 1
        counters.bytes_put += (len(rows) - 1) * rows[0].nbytes


class _TwoRounds:
    """Over any transport: shares travel to their owners, sums travel back."""

    def __init__(self, manager: SegmentManager, job: Allreduce) -> None:
        self._manager, self._job = manager, job
        ranks = Partition(job.ranks, (len(job.ranks),), manager.rank)
        whole = Decomposition.replicated(ranks, (job.count,))
        blocks = Decomposition.balanced(ranks, (job.count,))
        name = f"{job.name} ({job.op})"
        self._scatter = Channel(manager, Exchange(manager.rank, whole, blocks), job.dtype, name)
        self._gather = Channel(manager, Exchange(manager.rank, blocks, whole), job.dtype, name)
        self._share = slice(*blocks.box(manager.rank).bounds[0])
        self._memory = manager.get_segment_buffer(_BUFFERS * job.count * job.dtype.itemsize, owner=job.name)
        self.buffers = list(self._memory.view(job.dtype, (_BUFFERS, job.count)))
        self._round: tuple[Channel, int] = (self._scatter, 0)

    def connect(self, timeout: float | None) -> None:
        self._scatter.connect(timeout)
        self._gather.connect(timeout)

    def start(self, which: int) -> None:
        self.connect(None)
        self._which = which
        x = self.buffers[which]
        self._round = (self._scatter, self._scatter.start(self._scatter.cut(x)))

    def advance(self) -> bool:
        channel, epoch = self._round
        if not channel.ready(epoch):
            return False
        x = self.buffers[self._which]
        if channel is self._scatter:
            rows = {self._manager.rank: x[self._share]}
            for piece, view in channel.receive(epoch):
                rows[piece.peer] = view.copy()
            # A rank without a share (more ranks than elements) has nothing to sum.
            if x[self._share].size:
                _reduce(self._job, [rows[rank] for rank in self._job.ranks], x[self._share])
            sends = [x[self._share]] * len(self._gather.exchange.sends)
            self._round = (self._gather, self._gather.start(sends))
            return self.advance()
        for piece, view in channel.receive(epoch):
            x[piece.box.slices(channel.exchange.need)] = view
        return True

    def waiting(self) -> Waiting:
        channel, epoch = self._round
        return channel.missing(epoch)

    def close(self) -> None:
        self._scatter.close()
        self._gather.close()
        if not self._manager.closed:
            self._manager.retire(self._memory, lambda: True)
