"""The manager of a machine's segment: buffers, addresses, waiting, closing."""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import index as as_int

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import ClosedError, MismatchError, SegmentError
from distdl_rma.segments.buffer import RemoteBuffer, SegmentBuffer
from distdl_rma.segments.heap import Heap
from distdl_rma.segments.notification import Counters, Patience
from distdl_rma.segments.segment import Segment

__all__ = ["SegmentManager"]

_SPINS = 2000
_HANDSHAKE_TAG = 1
_NOTE = 4
_LABEL = 120


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
        crowded = len(self.segment.node_ranks) > len(os.sched_getaffinity(0))
        self.patience = Patience(
            timeout,
            0 if crowded or self.segment.has_remote else _SPINS,
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
        self._retired.append((buffer, idle))
        self._reclaim()

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

    def handshake(
        self,
        buffer: SegmentBuffer,
        notes: dict[int, tuple[int, ...]],
        label: str,
        fingerprint: int,
        timeout: float | None,
    ) -> dict[int, RemoteBuffer]:
        """Carry out :meth:`SegmentBuffer.exchange`."""
        place = (buffer.offset, buffer.nbytes, buffer._first_word, buffer.notifications)
        text = label.encode()[:_LABEL]
        incoming = {peer: np.zeros(5 + _NOTE + _LABEL // 8, dtype=np.int64) for peer in notes}
        outgoing, requests = [], {}
        for peer, note in notes.items():
            message = np.zeros_like(incoming[peer])
            message[: 5 + len(note)] = (fingerprint, *place, *note)
            message[5 + _NOTE :].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
            position = self.ranks.index(peer)
            outgoing.append((self._comm.Isend(message, position, _HANDSHAKE_TAG), message))
            requests[peer] = self._comm.Irecv(incoming[peer], position, _HANDSHAKE_TAG)
        for peer, request in requests.items():
            self.patience.until(
                request.Test,
                lambda peer=peer: (  # type: ignore[misc]
                    f"rank {self.rank} for rank {peer} to connect {label!r}: did every rank build and call"
                    " the same layers in the same order?"
                ),
                timeout,
            )
        for request, _ in outgoing:
            self.patience.until(request.Test, lambda: f"rank {self.rank} to connect {label!r}", timeout)
        remotes = {}
        for peer, reply in incoming.items():
            if int(reply[0]) != fingerprint:
                theirs = reply[5 + _NOTE :].tobytes().rstrip(b"\0").decode(errors="replace")
                raise MismatchError(
                    f"rank {self.rank} connects {label!r} but rank {peer} connects {theirs!r}"
                    f" (plans {fingerprint:014x} and {int(reply[0]):014x}): do all ranks build the same"
                    " layers in the same order, with the same arguments?"
                )
            there = (int(reply[1]), int(reply[2]), int(reply[3]), int(reply[4]))
            note_there = tuple(int(value) for value in reply[5 : 5 + _NOTE])
            remotes[peer] = RemoteBuffer(self, self.segment.link(peer), peer, there, note_there)
        return remotes

    def defer(self, advance: Callable[[], bool]) -> None:
        """Have ``advance()`` called by every wait and every ``progress()`` until it returns True."""
        self._work.append(advance)

    def progress(self) -> None:
        """Advance deliveries and collectives under way; does not block. Every wait does so too."""
        self.segment.progress()
        if self._work and not self._advancing:
            # Work may wait itself, for an acknowledgement: that wait must not come back here.
            self._advancing = True
            try:
                work, self._work = self._work, []
                self._work += [advance for advance in work if not advance()]
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
