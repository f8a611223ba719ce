"""State that the buffers of a rank share: memory, links and waits; and queues of puts and gets.

Who has whom::

    Machine > SegmentManager, a SegmentContext > Segment > links to the peers
                                               > Waiter  > steps of pending operations
                                               > Heap
    SegmentBuffer, RemoteBuffer, Queue: each has the context, and asks it whether the machine is open

A context knows nothing of collectives and channels, which are above it, and these reach memory only by it.

After ``os.fork`` the child has all these objects, but is no rank: MPI would send under the name of its
parent. So every context of the child counts as closed from the first instruction on, with an error that says
why.
"""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NoReturn, Protocol, Self

from mpi4py import MPI

from distdl_rma.errors import ArgumentError, ClosedError, DistdlError, ProtocolError, UnsupportedError
from distdl_rma.segments.options import check_timeout, mpi_runs
from distdl_rma.segments.transport.heap import Heap
from distdl_rma.segments.transport.links import Transfers
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.virtual_ranks.comm import is_virtual
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.segments.waiting.waiter import Waiter


class Uncopyable:
    """Object that cannot be pickled or copied, since other ranks know its address; nor can its holders."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            f"{type(self).__name__} belongs to the processes that run now: layers can be copied and not"
            " pickled, what lies in the segment neither; save state_dict(), or gather_state_dict(model)"
        )


class SharedByCopies(Uncopyable):
    """Object whose copy is the object itself: copies of its holders share it."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Handshake(Protocol):
    """Messages to and from some peers, which contain the ``offset`` of a buffer; None once it was freed."""

    offset: int | None

    def give_up(self, ranks: Iterable[int]) -> bool:
        """End the handshake if one of these ranks takes part in it; return whether one does."""


_FORK = (
    "this process is a fork of a rank and no rank itself: communicate in the rank, or let multiprocessing"
    " start the process by 'spawn'"
)
_contexts: weakref.WeakSet[SegmentContext] = weakref.WeakSet()
# Whether this process was forked while MPI was running, once for each such fork on the way to it.
_forks: list[bool] = []


def refuse_fork(comm: MPI.Intracomm) -> None:
    """Raise ``ProtocolError`` if this process is a fork of a rank, unless the ranks are virtual; local."""
    if _forks and not is_virtual(comm):
        raise ProtocolError(f"machine: {_FORK}")


def _close_in_fork() -> None:
    _forks.extend([True] * mpi_runs())
    for context in tuple(_contexts):
        if not context.closed:
            context.closed = context.forked = True
            # Another thread of the rank may have held the lock, and is not here to release it.
            getattr(context.segment.lock, "_at_fork_reinit", bool)()


os.register_at_fork(after_in_child=_close_in_fork)


class SegmentContext:
    """One rank's access to the segments of a machine: its memory, its links to the peers, and its waits.

    ``ranks`` are the rank ids by position in ``comm``, a communicator that the context owns.

    ``settled`` counts, for each rank, the errors that it and this rank have settled together, and gives the
    tag of their handshakes: messages of a handshake that was given up never match a later one. Both ranks
    count alike, since each settles only together with the other.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: tuple[int, ...], segment: Segment, waiter: Waiter) -> None:
        self.comm, self.ranks, self.rank = comm, ranks, ranks[comm.rank]
        self.segment, self.waiter, self.counters = segment, waiter, waiter.counters
        self.heap = Heap(segment.nbytes)
        # Numbers of notifications begin at random: two ranks rarely write the same number to a word.
        self.sequence = count(random.Random(self.rank).getrandbits(31))
        # How often this rank settled an error with each rank; and handshakes without a success.
        self.settled = dict.fromkeys(ranks, 0)
        self.handshakes: set[Handshake] = set()
        # In a process that was forked from this one, all that checks ``closed`` refuses to work.
        self.closed = self.forked = False
        _contexts.add(self)

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the machine was closed, ``ProtocolError`` in a fork of the rank."""
        if self.closed:
            raise self.closed_error("machine")

    def closed_error(self, what: str) -> DistdlError:
        """Error of something that was closed, or whose machine was closed, or cannot be used in a fork."""
        return ProtocolError(f"{what}: {_FORK}") if self.forked else ClosedError(f"{what}: already closed")

    def has_late_writers(self, offset: int) -> bool:
        """Whether peers may have the address of a buffer by a handshake that has not succeeded here."""
        return any(handshake.offset == offset for handshake in tuple(self.handshakes))

    def forget_late_writers(self, offset: int) -> None:
        """Take a caller's word for it that no peer writes to a buffer any more."""
        for handshake in tuple(self.handshakes):
            if handshake.offset == offset:
                handshake.offset = None

    def forget_handshakes(self, ranks: Sequence[int]) -> list[Handshake]:
        """Give up all handshakes with some ranks, which do the same: later ones match again. Local.

        Returns these handshakes: remove them from ``handshakes`` once no rank uses an address from them.
        """
        for rank in ranks:
            self.settled[rank] += 1
        return [handshake for handshake in tuple(self.handshakes) if handshake.give_up(ranks)]

    def flush(self, ranks: Sequence[int], timeout: float | None) -> None:
        """Wait until all puts and notifications from this rank to some ranks have arrived there; blocking.

        Transfers to different ranks proceed together. ``ExchangeTimeout`` names the ranks whose transfers are
        incomplete; the call can be repeated.
        """
        check_timeout(timeout)
        self.check_open()
        links = {rank: self.segment.link(rank) for rank in ranks}
        for link in links.values():
            link.close_delivery()

        def pending() -> tuple[int, ...]:
            return tuple(rank for rank, link in links.items() if not link.advance())

        self.waiter.until(lambda: not pending(), lambda: WaitReason(pending(), "to take its puts"), timeout)


class Queue:
    """Puts and gets posted together; ``wait`` returns once the local memory may be used again.

    "Locally complete" says nothing of the peer: the data may still be on its way. A notification behind the
    put tells the peer, and :meth:`RemoteBuffer.flush` this rank.

    A put posted to a queue makes no copy: its source must not change before ``wait`` returns. A get posted to
    a queue has filled its array when ``wait`` returns. :meth:`SegmentManager.queue` makes queues, as many as
    wanted; the peer does not see which queue an operation was posted to.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> peer = 1 - machine.rank
    >>> inbox = machine.segments.get_segment_buffer(32, notifications=1)
    >>> there = inbox.exchange([peer], label="inbox")[peer]
    >>> queue, data = machine.segments.queue(), np.full(4, 2.5)
    >>> there.put(data, queue=queue)
    >>> there.notify(0)
    >>> queue.wait()  # now data may change
    >>> inbox.notify_wait(0)  # and the peer's data is here
    1
    """

    def __init__(self, context: SegmentContext, name: str) -> None:
        self._context, self.name = context, name
        # With the peer and the memory of each operation.
        self._posted = Transfers()

    def __len__(self) -> int:
        """Number of posted operations that are not known to be complete."""
        return len(self._posted)

    def post(
        self, peer: int, request: MPI.Request, memory: object, finish: Callable[[], object] = bool
    ) -> None:
        """Add an operation; keeps its memory until it is complete, then calls ``finish()``."""
        with self._context.segment.lock:
            self._posted.add(request, (peer, memory), finish)

    def test(self) -> bool:
        """Whether all operations posted so far are locally complete; does not block."""
        self._context.check_open()
        with self._context.segment.lock:
            return not self._posted.under_way()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all operations posted so far are locally complete; blocking.

        ``ExchangeTimeout`` after ``timeout`` seconds (None: the machine's default): the call can be repeated.
        """
        check_timeout(timeout)
        self._context.check_open()
        self._context.waiter.until(self.test, self._reason, timeout)

    def _reason(self) -> WaitReason:
        peers = tuple(dict.fromkeys(peer for peer, _ in self._posted.kept))
        return WaitReason(peers, f"to take {len(self)} operation(s) of queue {self.name!r}")

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {len(self)} posted)"


def check_queue(queue: Queue | None, what: str) -> None:
    """Raise ``ArgumentError`` if ``queue`` is neither a queue nor None."""
    if not (queue is None or isinstance(queue, Queue)):
        raise ArgumentError(f"{what}: a queue is made by segments.queue(), got {type(queue).__name__}")
