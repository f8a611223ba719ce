"""The manager of a machine's segment: buffers, queues, communicators, progress, closing.

How memory comes back, which other ranks may still write to::

    get_segment_buffer ---> in use ---> free()                 the caller knows that nobody writes
                               |
                               +------> retire(buffer, idle)   freed at a later allocation, if idle() is true
                               +------> never                  a handshake with its address did not succeed

How a machine ends::

    close() on all ranks   wait for own puts > say LEFT > two barriers that a wait can leave > free windows
    after a failure        nothing is freed: a peer that does not know yet may still read and write
    exit of the process    meet_at_exit: as close(), but without errors, which no code could catch
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from mpi4py import MPI

from distdl_rma.errors import DistdlError, ExchangeTimeout, PartitionError, PeerFailedError, SegmentError
from distdl_rma.segments.memory.array_bytes import as_count
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.context import Queue, SegmentContext, Uncopyable, refuse_fork
from distdl_rma.segments.options import SegmentOptions, chosen_progress, chosen_timeout, thread_level
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.virtual_ranks.comm import is_virtual, world
from distdl_rma.segments.waiting.error_texts import LOST, append_state, cause_of
from distdl_rma.segments.waiting.header import HEADER_BYTES, HeaderWriter, WaitReason, operation_name
from distdl_rma.segments.waiting.liveness import NOTICE_SECONDS, FailureNotices, PeerWatch
from distdl_rma.segments.waiting.waiter import Waiter
from distdl_rma.trace import Counters, Tracer

_CREATE_TAG = 11


class Communicators:
    """Pool of communicators by their ordered list of ranks; each user of a list has one for itself.

    Two users of one communicator could match each other's collective calls. MPI has few communicators (about
    2000 in MPICH), and a program makes and drops groups all the time: so they are used again.

    Creating and freeing a communicator is collective, but ranks begin and end a use at different times. So
    the pool keeps a communicator that was given back for the next user of the same ranks, and frees all in
    ``close``. ``ranks`` are the rank ids by position in ``comm``, the communicator of the machine.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: tuple[int, ...]) -> None:
        self._comm, self._ranks = comm, ranks
        self._made: dict[tuple[int, ...], list[MPI.Intracomm]] = {}
        self._used: dict[tuple[int, ...], set[int]] = {}

    def reserve(self, ranks: Sequence[int], least: int) -> int:
        """Mark the first number from ``least`` on that these ranks do not use as used, and return it; local.

        A number is agreed on once all ranks have reserved it.
        """
        used = self._used.setdefault(tuple(ranks), set())
        number = next(number for number in count(least) if number not in used)
        used.add(number)
        return number

    def take(self, ranks: Sequence[int], number: int) -> MPI.Intracomm:
        """Return a communicator of these ranks by a number that all have reserved; the machine owns it.

        If the communicator does not exist yet, the call is collective over the ranks and blocks without a
        deadline: complete a barrier first.
        """
        key = tuple(ranks)
        made = self._made.setdefault(key, [])
        while len(made) <= number:
            group = self._comm.group.Incl([self._ranks.index(rank) for rank in key])
            try:
                made.append(self._comm.Create_group(group, _CREATE_TAG))
            finally:
                group.Free()
        return made[number]

    def give_back(self, ranks: Sequence[int], number: int) -> None:
        """End the use of a number, on whose communicator no operation is pending; local."""
        self._used[tuple(ranks)].discard(number)

    def close(self) -> None:
        """Free all communicators, in an order equal on all ranks; collective over the machine."""
        for made in self._made.values():
            for comm in made:
                comm.Free()
        self._made.clear()


_SPINS = 2000
_THREAD_LEVELS = "single", "funneled", "serialized", "multiple"


@dataclass(frozen=True)
class SegmentStats:
    """Use of a rank's segment, in bytes; ``owners`` maps an owner's name to (number of buffers, bytes).

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> buffer = machine.segments.get_segment_buffer(4096, owner="mine")
    >>> machine.segments.stats().owners["mine"]
    (1, 4096)
    """

    reserved: int
    used: int
    peak: int
    largest_free: int
    owners: dict[str, tuple[int, int]]


class Tenant(Protocol):
    """Object whose memory lies in the segment."""

    def release(self) -> None:
        """Stop using the segment, which is about to be freed; local, must not raise."""


class SegmentManager(SegmentContext, Uncopyable):
    """Allocates buffers in this rank's segment, which all ranks of the machine can reach.

    It needs neither torch nor a neural network. Creation, ``close`` and ``meet_at_exit`` are collective; all
    other methods are local or involve only the ranks named.

    ``comm`` is a communicator of the machine, which the manager duplicates. ``ranks`` are the rank ids by
    position, by default the positions. ``nbytes`` is the segment size per rank, a number or text with a unit;
    it and ``timeout``, ``transport`` and ``progress`` are those of :class:`Machine`. In tests, ``node_size``
    consecutive ranks of a node count as a node of their own.

    Examples
    --------
    >>> segments = SegmentManager(MPI.COMM_WORLD, nbytes="8MiB")  # that of a machine is Machine(...).segments
    >>> with segments.get_segment_buffer(64, owner="mine") as buffer:
    ...     buffer.view(np.float32, (4, 4))[:] = 1
    >>> segments.close()
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
    ) -> None:
        comm = world(comm)
        refuse_fork(comm)
        rank_ids = tuple(range(comm.size)) if ranks is None else tuple(ranks)
        if len(set(rank_ids)) != comm.size or len(rank_ids) != comm.size:
            raise PartitionError(f"one rank id for each of {comm.size} ranks is needed, got {rank_ids}")
        options = SegmentOptions(nbytes, timeout, transport, progress, node_size)
        counters = Counters()
        # On a duplicate, messages of the library never match messages of the caller.
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
        # Bound methods save a call. ``defer`` adds a step to all waits. ``begin`` writes to the header which
        # operation begins (a name from ``operation``, an epoch): messages of other ranks quote it.
        self.defer, self.withdraw = waiter.defer, waiter.withdraw
        self.begin = self._header.begin
        self.communicators = Communicators(comm, rank_ids)
        self.transport, self.trace = transport, Tracer()
        # Objects that collectives share until the segment is freed.
        self.shared_objects: dict[Hashable, object] = {}
        self._retired: list[tuple[SegmentBuffer, Callable[[], bool]]] = []
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._barriers: list[MPI.Request] = []
        waiter.begin(chosen_progress(progress, segment.has_remote))

    def get_segment_buffer(self, size: int, notifications: int = 0, owner: str = "user") -> SegmentBuffer:
        """Allocate a buffer of ``size`` bytes in this rank's segment; local, not blocking.

        ``size`` may be 0. The buffer has ``notifications`` notifications, initially unset; ``stats()`` counts
        it for ``owner``. It is aligned to a cache line and belongs to the caller, who frees it.
        ``ArgumentError`` if a number is negative or no integer, ``SegmentError`` if the segment is exhausted.
        Interface document, chapter 2.
        """
        self.check_open()
        nbytes = as_count(size, "a buffer's size is a whole number of bytes")
        words = as_count(notifications, "a buffer has a whole number of notifications")
        self._reclaim()
        try:
            return SegmentBuffer(self, nbytes, words, owner)
        except SegmentError:
            # Reference cycles, for example of the user's program, may hold buffers.
            gc.collect()
            self._reclaim()
        return SegmentBuffer(self, nbytes, words, owner)

    def retire(self, buffer: SegmentBuffer, idle: Callable[[], bool]) -> None:
        """Free a buffer at a later allocation, once ``idle()`` says that no peer writes to it; local.

        No message tells a rank that its peers are done. But a protocol with words knows the last word that
        each peer writes: ``idle`` looks whether it is there.

        A buffer is never freed if a handshake with its address has not succeeded.
        """
        # Only appends: a finalizer may call this at any moment, also during an allocation.
        self._retired.append((buffer, idle))

    def _reclaim(self) -> None:
        # Finalizers may append meanwhile. If ``idle`` raises, its buffer and all later ones stay in the list.
        with self.segment.lock:
            for retired in tuple(self._retired):
                buffer, idle = retired
                done = self.closed or (not self.has_late_writers(buffer.offset) and idle())
                # ``idle`` may have come here itself, and freed it.
                if done and retired in self._retired:
                    self._retired.remove(retired)
                    buffer.free()

    def queue(self, name: str = "queue") -> Queue:
        """Make a queue to post puts and gets to; local."""
        self.check_open()
        return Queue(self, name)

    def stats(self) -> SegmentStats:
        """Return the use of this rank's segment; local."""
        self.check_open()
        self._reclaim()
        heap = self.heap
        return SegmentStats(heap.nbytes, heap.used, heap.peak, heap.largest_gap, heap.owners())

    def describe(self) -> dict[str, object]:
        """Describe this machine and how its ranks reach each other; local."""
        self.check_open()
        segment, level = self.segment, thread_level()
        direct = {rank: segment.link(rank).memory is not None for rank in self.ranks}
        return {
            "rank": self.rank,
            "ranks": self.ranks,
            "nodes": segment.nodes,
            "transport": {rank: "shared" if near else "remote" for rank, near in direct.items()},
            "segment bytes": segment.nbytes,
            "MPI": " ".join(MPI.Get_library_version().splitlines()[0].rstrip("\0").split()),
            "MPI standard": ".".join(map(str, MPI.Get_version())),
            "thread level": next(x for x in _THREAD_LEVELS if getattr(MPI, f"THREAD_{x.upper()}") == level),
            "memory model": "unified" if segment.unified else "separate",
            "progress": self.waiter.engine,
            "timeout seconds": self.waiter.timeout,
            "more ranks than cores": segment.crowded,
        }

    operation = staticmethod(operation_name)

    def progress(self) -> None:
        """Advance pending operations, as waits do; does not block. ``PeerFailedError`` if a rank failed."""
        self.check_open()
        self.waiter.progress()

    def fail(self, error: BaseException) -> None:
        """Notify all ranks that this one failed; they raise ``PeerFailedError`` in their next wait.

        Not blocking, not collective. A failed machine can only be closed.
        """
        if self.closed:
            return
        rank, cause = self.rank, cause_of(error)
        append_state(error, LOST)
        if self.notices.failed:
            return
        if isinstance(error, PeerFailedError):
            rank, cause = error.rank, error.cause
        self.notices.send(cause, rank)
        # No operation may begin now: other ranks would take it for an earlier one.
        refuse = self.notices.raise_for
        self.begin = lambda name, epoch: refuse(rank, cause, None, LOST)

    def announce_error(self, error: BaseException) -> None:
        """Announce to the other ranks that a collective call raised here; local.

        Ranks that wait for this one raise ``PeerFailedError`` after a second, unless the call raised there
        too, or this rank calls ``watch.resume()``.
        """
        if not self.closed:
            self.watch.announce_error(cause_of(error))

    def before_close(self, tenant: Tenant) -> None:
        """Call ``tenant.release()`` before the segment is freed; keeps a weak reference only."""
        self._tenants.add(tenant)

    def close(self, timeout: float | None = None) -> None:
        """Free the segment; collective, idempotent. All buffers and their views become invalid.

        ``ExchangeTimeout`` if not all ranks call it in time: nothing is freed, and the call can be repeated.
        After a failure the call is local. Pages that were used stay until the process ends; the others count
        as free again, so that a job can lose and make machines as often as it likes.
        """
        if self.closed:
            return
        if not self.notices.any_failed:
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
        self.shared_objects.clear()
        if self.notices.any_failed:
            self.keep_until_process_ends()
            self.segment.abandon()
            return
        # Receives messages of abandoned handshakes: MPI may give a later communicator the same context, and
        # its receives would match them. All ranks have met, so these messages have arrived.
        status = MPI.Status()
        while (found := self.comm.Improbe(status=status)) is not None:
            found.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
        self.communicators.close()
        self._header.close()
        self.notices.close()
        self.segment.close()
        self.comm.Free()

    def meet_at_exit(self, say: Callable[[str], object]) -> bool:
        """Wait until all ranks are about to close; return whether all came. Blocking while all ranks live.

        Raises no error of the library, since no code could catch it. ``MPI_Finalize`` would wait for the
        other ranks as well. ``say`` is called once with each reason why this rank cannot end.
        """
        notices, watch = self.notices, self.watch
        if notices.failed:
            # The other ranks do not close any more; in ``MPI_Finalize`` they do not answer.
            notices.wait_until_noticed(NOTICE_SECONDS)
        else:
            with suppress(DistdlError):
                try:
                    self._meet_to_close(None)
                except ExchangeTimeout as error:
                    say(f"{error}; rank {self.rank} has ended its program and waits on")
                    self._meet_to_close(float("inf"))
        if not notices.any_failed:
            return True
        # Other ranks may already wait for this rank to close.
        notices.pass_on()
        for rank, why in watch.ended():
            say(
                f"rank {rank} will not end together with rank {self.rank}: {why}; MPI, which ends now,"
                " may wait for it for ever: end the job if it does"
            )
        return False

    def _meet_to_close(self, timeout: float | None) -> None:
        # Freeing windows cannot be interrupted, so no rank begins before all have come. A rank cannot leave
        # an MPI barrier, so there are two: a rank that gave up in the first does not join the second, unless
        # it calls again.
        watch, until = self.watch, self.waiter.until
        # Peers may still wait for this rank's puts. Ranks that have left receive the puts nevertheless.
        last_puts = WaitReason(watch.others, "to take its last puts", leavers=True)
        until(self.segment.progress, lambda: last_puts, timeout)
        watch.leave("closing the machine or ending its program")
        until(
            self._all_are_here,
            lambda: WaitReason(watch.missing(), "to close the machine", leavers=True),
            timeout,
        )

    def _all_are_here(self) -> bool:
        # Tests the two barriers of ``_meet_to_close`` in turn; a repeated call goes on with the same ones.
        barriers = self._barriers
        if not barriers:
            barriers.append(self.comm.Ibarrier())
        if not barriers[0].Test():
            return False
        if len(barriers) == 1:
            barriers.append(self.comm.Ibarrier())
        return bool(barriers[1].Test())

    def keep_until_process_ends(self) -> None:
        """Keep this object until the process has ended: MPI continues pending operations until then."""
        if is_virtual(self.comm):
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def stop(self) -> None:
        """End the progress engine, if there is one; idempotent."""
        self.waiter.stop()
