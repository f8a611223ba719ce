"""The manager of a machine's segment: buffers, queues, communicators, progress, closing."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index as as_int
from typing import Protocol

from mpi4py import MPI

from distdl_rma.errors import (
    ArgumentError,
    DistdlError,
    ExchangeTimeout,
    PartitionError,
    PeerFailedError,
    SegmentError,
)
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.context import Queue, SegmentContext, Uncopyable
from distdl_rma.segments.options import SegmentOptions, chosen_progress, chosen_timeout
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiting.header import HEADER_BYTES, HeaderWriter, WaitReason, operation_name
from distdl_rma.segments.waiting.liveness import LOST, FailureNotices, PeerWatch, cause_of, say_state
from distdl_rma.segments.waiting.waiter import Waiter
from distdl_rma.trace import Counters, Tracer

_CREATE_TAG = 11


class Communicators:
    """Communicators of some ranks in order; several users of the same ranks may need one each at a time.

    Making and freeing one is collective, but users come and go at different times on each rank. So a
    communicator that is given back is kept for the next user of the same ranks, and freed in ``close``. There
    are never more than were in use on some rank at one time. ``ranks`` are the rank ids of the positions of
    ``comm``, the communicator of the machine.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self._comm, self._ranks = comm, ranks
        self._made: dict[tuple[int, ...], list[MPI.Intracomm]] = {}
        self._used: dict[tuple[int, ...], set[int]] = {}

    def proposal(self, ranks: Sequence[int]) -> int:
        """Smallest number from which on no communicator of these ranks is in use here; local.

        All ranks ``take`` the largest of their proposals.
        """
        return 1 + max(self._used.get(tuple(ranks), ()), default=-1)

    def take(self, ranks: Sequence[int], number: int) -> MPI.Intracomm:
        """Communicator of the ranks with this number, the same on all of them; belongs to the machine.

        Collective over them, blocking without a deadline, if there is none yet: wait for a barrier first.
        """
        key = tuple(ranks)
        made = self._made.setdefault(key, [])
        while len(made) <= number:
            group = self._comm.group.Incl([self._ranks.index(rank) for rank in key])
            try:
                made.append(self._comm.Create_group(group, _CREATE_TAG))
            finally:
                group.Free()
        self._used.setdefault(key, set()).add(number)
        return made[number]

    def give_back(self, ranks: Sequence[int], number: int) -> None:
        """End a use, in which nothing is under way any more; local."""
        self._used[tuple(ranks)].discard(number)

    def close(self) -> None:
        """Free all of them, in the order in which all ranks made them; collective over the machine."""
        for made in self._made.values():
            for comm in made:
                comm.Free()
        self._made.clear()


_SPINS = 2000
# How long a rank that failed stays for the others to notice.
_NOTICE_SECONDS = 1.0
_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


@dataclass(frozen=True)
class SegmentStats:
    """How a rank's segment is used, in bytes; ``owners`` maps an owner's name to (buffers, bytes)."""

    reserved: int
    used: int
    peak: int
    largest_free: int
    owners: dict[str, tuple[int, int]]


class Tenant(Protocol):
    """Something whose memory lies in the segment."""

    def release(self) -> None:
        """Leave, before the segment goes; local, never refused."""


class SegmentManager(SegmentContext, Uncopyable):
    """Hands out buffers of a segment that the ranks of a machine share.

    Usable without any neural network and without torch. Collective to create and to close; everything
    else is local or involves only the peers named.

    ``comm`` is a communicator of the machine, owned by the caller, and ``ranks`` the rank id of each of its
    positions, by default those of ``comm``. ``nbytes`` is the segment size per rank, a number or text with a
    unit; it and ``timeout``, ``transport``, ``progress`` and ``reserve`` are those of :class:`Machine`. For
    tests, ``node_size`` consecutive ranks of a node count as a node of their own.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int] | None = None,
        nbytes: int | str | None = None,
        timeout: float | None = None,
        transport: str = "auto",
        progress: str | None = None,
        node_size: int | None = None,
        reserve: bool = False,
    ) -> None:
        rank_ids = tuple(range(comm.size)) if ranks is None else tuple(ranks)
        if len(set(rank_ids)) != comm.size or len(rank_ids) != comm.size:
            raise PartitionError(f"one rank id for each of {comm.size} ranks is needed, got {rank_ids}")
        options = SegmentOptions(nbytes, timeout, transport, progress, node_size, reserve)
        counters = Counters()
        # Messages of the library never meet those of the caller.
        comm = comm.Dup()
        try:
            segment = Segment(comm, rank_ids, options, counters)
        except DistdlError:
            comm.Free()
            raise
        self._header = HeaderWriter(segment.memory[:HEADER_BYTES].data, segment.fence)
        self.notices = FailureNotices(comm.Dup(), rank_ids, segment.lock, self._header)
        self.watch = PeerWatch(segment, rank_ids, self._header, self.notices)
        spins = 0 if segment.crowded or segment.has_remote else _SPINS
        waiter = Waiter(segment, self.notices, self.watch, counters, chosen_timeout(timeout), spins)
        super().__init__(comm, rank_ids, segment, waiter)
        self.heap.allocate(HEADER_BYTES, "header")
        # Bound methods, without a call in between: ``defer`` adds a step that all waits take, and ``begin``
        # writes which operation begins, by a name from ``operation`` and its epoch, for the messages of
        # others.
        self.defer, self.withdraw = waiter.defer, waiter.withdraw
        self.begin = self._header.begin
        self.communicators = Communicators(comm, rank_ids)
        self.transport = transport
        self.trace = Tracer()
        # Objects that collectives share as long as the segment exists.
        self.kept: dict[Hashable, object] = {}
        self._retired: list[tuple[SegmentBuffer, Callable[[], bool]]] = []
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._barriers: list[MPI.Request] = []
        waiter.begin(chosen_progress(progress, segment.has_remote))

    def get_segment_buffer(self, size: int, notifications: int = 0, owner: str = "user") -> SegmentBuffer:
        """Allocate a buffer of ``size`` bytes in this rank's segment; local, not blocking.

        0 bytes are legal. So many ``notifications`` belong to the buffer, all unset at first; ``stats()``
        counts it for ``owner``. It is aligned to a cache line, and belongs to the caller, who frees it.
        ``ArgumentError`` if a number is negative or none, ``SegmentError`` if the segment is exhausted.
        Interface document, chapter 2.
        """
        self.check_open()
        try:
            nbytes, words = as_int(size), as_int(notifications)
        except TypeError:
            raise ArgumentError(f"a buffer's size is a whole number of bytes, got {size!r}") from None
        if isinstance(size, bool) or nbytes < 0 or words < 0:
            raise ArgumentError(f"a buffer's size is at least 0 bytes, got {size!r}")
        self._reclaim()
        try:
            return SegmentBuffer(self, nbytes, words, owner)
        except SegmentError:
            # Objects in reference cycles, for example of the user's program, may hold buffers.
            gc.collect()
            self._reclaim()
        return SegmentBuffer(self, nbytes, words, owner)

    def retire(self, buffer: SegmentBuffer, idle: Callable[[], bool]) -> None:
        """Free a buffer as soon as ``idle()`` says that no peer writes to it any more; local."""
        # Appends only: a finalizer calls this at any moment, also in the middle of an allocation.
        self._retired.append((buffer, idle))

    def _reclaim(self) -> None:
        # Finalizers may append meanwhile. If ``idle`` raises, its buffer and those behind it stay.
        with self.segment.lock:
            for _ in range(len(self._retired)):
                buffer, idle = self._retired.pop(0)
                done = False
                try:
                    done = self.closed or idle()
                finally:
                    if not done:
                        self._retired.append((buffer, idle))
                if done:
                    buffer.free()

    def queue(self, name: str = "queue") -> Queue:
        """Make a queue to post puts and gets to; local."""
        self.check_open()
        return Queue(self, name)

    def stats(self) -> SegmentStats:
        """How this rank's segment is used; local."""
        self.check_open()
        self._reclaim()
        heap = self.heap
        return SegmentStats(heap.nbytes, heap.used, heap.peak, heap.largest_gap, heap.owners())

    def describe(self) -> dict[str, object]:
        """Facts of this machine, and how its ranks reach each other; local."""
        self.check_open()
        segment = self.segment
        direct = {rank: segment.link(rank).memory is not None for rank in self.ranks}
        return {
            "rank": self.rank,
            "ranks": self.ranks,
            "nodes": segment.nodes,
            "transport": {rank: "shared" if near else "remote" for rank, near in direct.items()},
            "segment bytes": segment.nbytes,
            "MPI": " ".join(MPI.Get_library_version().splitlines()[0].rstrip("\0").split()),
            "MPI standard": ".".join(map(str, MPI.Get_version())),
            "thread level": _THREAD_LEVELS[MPI.Query_thread()],
            "memory model": "unified" if segment.unified else "separate",
            "progress": self.waiter.engine,
            "timeout seconds": self.waiter.timeout,
            "more ranks than cores": segment.crowded,
        }

    operation = staticmethod(operation_name)

    def progress(self) -> None:
        """Advance operations under way, as waits do; does not block. ``PeerFailedError`` if a rank failed."""
        self.check_open()
        self.waiter.progress()

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on; they raise ``PeerFailedError`` in their next wait.

        Not blocking, not collective. A machine that failed cannot be used any more, only left.
        """
        if self.closed:
            return
        rank, cause = self.rank, cause_of(error)
        say_state(error, LOST)
        if self.notices.failed:
            return
        if isinstance(error, PeerFailedError):
            rank, cause = error.rank, error.cause
        self.notices.tell(cause, rank)
        # The others would take an operation that begins now for an earlier one.
        refuse = self.notices.raise_for
        self.begin = lambda name, epoch: refuse(rank, cause, None, LOST)

    def raised(self, error: BaseException) -> None:
        """Tell the others that a collective call raised here. Those waiting for it raise ``PeerFailedError``.

        They do so after a second, unless the call raised there too, or ``watch.goes_on()`` was called. Local.
        """
        if not self.closed:
            self.watch.raised(cause_of(error))

    def before_close(self, tenant: Tenant) -> None:
        """Have ``tenant.release()`` called before the segment goes; kept by a weak reference."""
        self._tenants.add(tenant)

    def close(self, timeout: float | None = None) -> None:
        """Free the segment; collective, idempotent. All buffers and views of them end here.

        If not all ranks come, ``ExchangeTimeout`` is raised: nothing is freed, and the call can be repeated.
        After a failure it is local, and the memory goes with the process.
        """
        if self.closed:
            return
        if not self.notices.in_vain:
            try:
                self._meet_to_close(timeout)
            except BaseException:
                self.watch.undo_leave()
                raise
        for tenant in tuple(self._tenants):
            tenant.release()
        self._reclaim()
        self.waiter.end()
        self.closed = True
        self.kept.clear()
        if self.notices.in_vain:
            self.keep()
            return
        self._drop_unmatched()
        self.communicators.close()
        self._header.close()
        self.notices.close()
        self.segment.close()
        self.comm.Free()

    def _drop_unmatched(self) -> None:
        # Receives messages of handshakes that were given up: a later communicator may get the same number
        # from MPI and would match them. All ranks have met, so these messages have arrived.
        status = MPI.Status()
        while (found := self.comm.Improbe(status=status)) is not None:
            found.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])

    def meet_at_exit(self, say: Callable[[str], object]) -> bool:
        """Wait until all ranks are about to close, as long as they live; return whether they came.

        Raises no error of the library: no code could catch it. ``MPI_Finalize`` would wait for the others as
        well. ``say`` is called once with each reason why this rank cannot end.
        """
        notices, watch = self.notices, self.watch
        if notices.failed:
            # The others do not close any more. They may be in ``MPI_Finalize``, where they do not answer.
            notices.wait_until_noticed(_NOTICE_SECONDS)
        else:
            with suppress(DistdlError):
                try:
                    self._meet_to_close(None)
                except ExchangeTimeout as error:
                    say(f"{error}; rank {self.rank} has ended its program and waits on")
                    self._meet_to_close(float("inf"))
        if not notices.in_vain:
            return True
        # Others may already wait for this rank to close as well.
        notices.pass_on()
        for rank, why in watch.ended():
            say(
                f"rank {rank} will not end together with rank {self.rank}: {why}; MPI, which ends now,"
                " may wait for it for ever: end the job if it does"
            )
        return False

    def _meet_to_close(self, timeout: float | None) -> None:
        # Freeing windows cannot be interrupted, so no rank begins before all are here. And a rank cannot take
        # back that it joined a barrier of MPI. So the ranks meet twice: a rank that gave up waiting for the
        # first barrier does not come to the second, unless it calls again.
        watch, until = self.watch, self.waiter.until
        # Peers may still wait for this rank's puts. Ranks that have left receive them nevertheless.
        last_puts = WaitReason(watch.others, "to take its last puts", leavers=True)
        until(self.segment.progress, lambda: last_puts, timeout)
        watch.leave("closing the machine or ending its program")
        until(
            self._all_are_here,
            lambda: WaitReason(watch.missing(), "to close the machine", leavers=True),
            timeout,
        )

    def _all_are_here(self) -> bool:
        barriers = self._barriers
        if not barriers:
            barriers.append(self.comm.Ibarrier())
        if not barriers[0].Test():
            return False
        if len(barriers) == 1:
            barriers.append(self.comm.Ibarrier())
        return bool(barriers[1].Test())

    def keep(self) -> None:
        """Keep all memory that MPI may still read or write, until the process has ended; local.

        MPI ends after the interpreter has deleted all objects, and continues operations under way until then.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def stop(self) -> None:
        """End the progress engine, if there is one; idempotent."""
        self.waiter.stop()
