"""The manager of a machine's segment: buffers, addresses, waiting, closing."""

from __future__ import annotations

from collections.abc import Callable
from operator import index as as_int

from mpi4py import MPI

from distdl_rma.errors import ClosedError, SegmentError
from distdl_rma.segments.buffer import SegmentBuffer
from distdl_rma.segments.handshake import Handshake
from distdl_rma.segments.heap import Heap
from distdl_rma.segments.notification import Counters, Patience
from distdl_rma.segments.segment import Segment

__all__ = ["SegmentManager"]

_SPINS = 2000


class SegmentManager:
    """Hands out buffers of a segment that the ranks of a machine share.

    Usable without any neural network and without torch. Collective to create and to close; everything
    else is local or involves only the peers named.

    Parameters
    ----------
    comm
        Communicator of the machine, owned by the caller; positions follow ``ranks``.
    ranks
        Rank id of every position.
    nbytes
        Segment size per rank in bytes, as text with a unit, or None for the default.
    timeout
        Default timeout of every wait in seconds.
    transport
        ``"auto"`` or ``"remote"``, see :class:`Segment`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        nbytes: int | str | None = None,
        timeout: float = 300.0,
        transport: str = "auto",
    ) -> None:
        self._comm = comm
        self.ranks = ranks
        self.rank = ranks[comm.rank]
        self.segment = Segment(comm, ranks, nbytes, transport)
        self.heap = Heap(self.segment.nbytes)
        self.counters = Counters()
        self.patience = Patience(
            timeout,
            0 if self.segment.crowded or self.segment.has_remote else _SPINS,
            self.progress,
            self.counters,
        )
        self._work: list[Callable[[], bool]] = []
        self._advancing = False
        self._retired: list[tuple[SegmentBuffer, Callable[[], bool]]] = []
        self.closed = False

    def get_segment_buffer(self, size: int, notifications: int = 0) -> SegmentBuffer:
        """Allocate a buffer of ``size`` bytes in this rank's segment; local, not blocking.

        Parameters
        ----------
        size
            Bytes; 0 is legal.
        notifications
            Number of 64-bit notification words that belong to the buffer, 0 at first.

        Returns
        -------
        SegmentBuffer
            Aligned to a cache line; owned by the caller, who frees it.

        Raises
        ------
        SegmentError
            If a number is negative or none, or the segment is exhausted.

        Notes
        -----
        Interface document, chapter 2: ``get_segment_buffer(size)``.
        """
        self.check_open()
        try:
            nbytes, words = as_int(size), as_int(notifications)
        except TypeError:
            raise SegmentError(f"a buffer's size is a whole number of bytes, got {size!r}") from None
        if isinstance(size, bool) or nbytes < 0 or words < 0:
            raise SegmentError(f"a buffer's size is at least 0 bytes, got {size!r}")
        self._reclaim()
        return SegmentBuffer(self, nbytes, words)

    def retire(self, buffer: SegmentBuffer, idle: Callable[[], bool]) -> None:
        """Free a buffer as soon as ``idle()`` says that no peer writes to it any more; local."""
        # Only noted here: a finalizer calls this at any moment, also in the middle of an allocation.
        self._retired.append((buffer, idle))

    def _reclaim(self) -> None:
        waiting = self._retired
        self._retired = []
        for buffer, idle in waiting:
            if self.closed or idle():
                buffer.free()
            else:
                self._retired.append((buffer, idle))

    def release(self, offset: int) -> None:
        """Give a block of the heap back; buffers call it."""
        if not self.closed:
            self.heap.free(offset)

    def call(
        self, buffer: SegmentBuffer, notes: dict[int, tuple[int, ...]], label: str, fingerprint: int
    ) -> Handshake:
        """Begin :meth:`SegmentBuffer.exchange`."""
        return Handshake(self, self._comm, buffer, notes, label, fingerprint)

    def defer(self, advance: Callable[[], bool]) -> None:
        """Have ``advance()`` called by every wait and every ``progress()`` until it returns True."""
        if advance not in self._work:
            self._work.append(advance)

    def withdraw(self, advance: Callable[[], bool]) -> None:
        """Undo ``defer``; whoever finds its work done early calls it."""
        if advance in self._work:
            self._work.remove(advance)

    def progress(self) -> None:
        """Advance deliveries and collectives under way; does not block. Every wait does so too."""
        self.segment.progress()
        if self._work and not self._advancing:
            # Work may wait itself, and that wait comes back here.
            self._advancing = True
            try:
                for advance in tuple(self._work):
                    if advance():
                        self.withdraw(advance)
            finally:
                self._advancing = False

    def check_open(self) -> None:
        """Raise ``ClosedError`` after the close."""
        if self.closed:
            raise ClosedError("segment manager: already closed")

    def close(self) -> None:
        """Free the segment; collective, idempotent. All buffers and views of them end here."""
        if self.closed:
            return
        # Peers may still wait for what this rank began to send.
        self.patience.until(self.segment.progress, lambda: f"rank {self.rank} for its last puts to arrive")
        self._reclaim()
        self.closed = True
        self.segment.close()
