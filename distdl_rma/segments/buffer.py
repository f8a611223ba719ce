"""Buffers in a segment, and the peers' buffers seen from here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ClosedError, ExchangeTimeout, SegmentError, ShapeError
from distdl_rma.segments.heap import aligned
from distdl_rma.segments.transport import Bytes, Link

if TYPE_CHECKING:
    from distdl_rma.segments.handshake import Handshake
    from distdl_rma.segments.manager import SegmentManager

__all__ = ["RemoteBuffer", "SegmentBuffer"]


class SegmentBuffer:
    """Block of this rank's segment that peers can put into, with notification words.

    Made by :meth:`SegmentManager.get_segment_buffer`. Its memory belongs to the segment and stays valid
    until ``free()`` or the close of the machine; views of it must not be used afterwards.
    Notifications are 64-bit numbers, 0 at first; by convention each has one writer and only grows.

    Notes
    -----
    Interface document, chapter 2.
    """

    def __init__(self, manager: SegmentManager, nbytes: int, notifications: int) -> None:
        self._manager = manager
        self.nbytes = nbytes
        self.notifications = notifications
        self._heap_offset = manager.heap.allocate(notifications * 8 + (aligned(nbytes) if nbytes else 0))
        # Data first, words behind it: the data is then aligned to a cache line.
        self.offset = self._heap_offset
        self._first_word = (self.offset + aligned(nbytes)) // 8 if nbytes else self.offset // 8
        self._words = manager.segment.words
        self._words_array()[:] = 0
        self._handshake: Handshake | None = None
        self._freed = False

    def _words_array(self) -> npt.NDArray[np.int64]:
        start = self._first_word * 8
        return self._manager.segment.memory[start : start + self.notifications * 8].view(np.int64)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What a peer must know: offset and bytes of the data, first word and number of notifications."""
        return self.offset, self.nbytes, self._first_word, self.notifications

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(self.array.ctypes.data)

    @property
    def array(self) -> Bytes:
        """The buffer's bytes; a view, not a copy."""
        return self.view(np.uint8, (self.nbytes,))

    def view(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> npt.NDArray[Any]:
        """Typed view of a part of the buffer, ``offset`` bytes from its start; not a copy."""
        self._check()
        kind = np.dtype(dtype)
        nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ShapeError(
                f"{nbytes} bytes at offset {offset} are not inside a buffer of {self.nbytes} bytes"
            )
        start = self.offset + offset
        return self._manager.segment.memory[start : start + nbytes].view(kind).reshape(shape)

    def notification(self, index: int) -> int:
        """Return the value of a notification; does not block."""
        self._check()
        return int(self._words[self._word(index)])

    def reached(self, index: int, value: int) -> Callable[[], bool]:
        """Test of whether a notification is at least ``value``, cheap enough for a busy loop."""
        self._check()
        words, word = self._words, self._word(index)
        return lambda: words[word] >= value

    def notify_wait(
        self,
        index: int,
        value: int,
        timeout: float | None = None,
        describe: Callable[[], str] | None = None,
    ) -> None:
        """Wait until a notification is at least ``value``; what was put before it is then visible.

        Blocking. Raises ``ExchangeTimeout`` at the deadline (seconds; None: the machine's default); it can
        then be called again.
        """
        self._check()
        words, word = self._words, self._word(index)
        if words[word] < value:
            self._manager.patience.until(
                lambda: words[word] >= value,
                describe
                or (
                    lambda: (
                        f"rank {self._manager.rank} for notification {index}"
                        f" to reach {value}, it is {words[word]}"
                    )
                ),
                timeout,
            )
        self._manager.segment.acquire()

    def exchange(
        self,
        notes: dict[int, tuple[int, ...]],
        label: str = "buffer",
        fingerprint: int = 0,
        timeout: float | None = None,
    ) -> dict[int, RemoteBuffer]:
        """Exchange addresses of buffers with some peers, and only with these.

        Blocking; every peer named must make the matching call. The n-th call that names a peer meets the
        n-th call of that peer that names this rank.

        Parameters
        ----------
        notes
            For every peer's rank id up to four integers that it shall find in its ``RemoteBuffer.note``.
        label, fingerprint
            What the buffer is for; a peer with another label or fingerprint is a mismatch.
        timeout
            Seconds; None for the machine's default.

        Raises
        ------
        MismatchError
            On both sides, if a peer's call was for something else; names both.
        ExchangeTimeout
            If a peer does not call; names it. The call can be repeated.
        """
        self._check()
        handshake = self._handshake or self._manager.call(self, notes, label, fingerprint)
        self._handshake = None
        try:
            return handshake.finish(timeout)
        except ExchangeTimeout:
            # Its messages are still under way: the next call waits for these same ones.
            self._handshake = handshake
            raise

    def free(self) -> None:
        """Give the memory back; local. The caller knows that no peer writes to it any more."""
        if not self._freed:
            self._freed = True
            self._manager.release(self._heap_offset)

    def _word(self, index: int) -> int:
        if not 0 <= index < self.notifications:
            raise SegmentError(f"notification {index} of a buffer that has {self.notifications}")
        return self._first_word + index

    def _check(self) -> None:
        if self._freed or self._manager.closed:
            raise ClosedError("segment buffer: already freed")


class RemoteBuffer:
    """A peer's :class:`SegmentBuffer`, seen from here: where puts and notifications go.

    Attributes
    ----------
    peer
        Rank id of the owner.
    nbytes, notifications
        Size of the buffer and number of its notification words.
    note
        The integers that the owner sent for this rank.
    """

    def __init__(
        self,
        manager: SegmentManager,
        link: Link,
        peer: int,
        place: tuple[int, int, int, int],
        note: tuple[int, ...],
    ) -> None:
        self._manager = manager
        self._link = link
        self.peer = peer
        self._offset, self.nbytes, self._first_word, self.notifications = place
        self.note = note

    def put(self, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy a contiguous array into the peer's buffer, ``offset`` bytes from its start.

        Does not block for the transfer. The array may be changed on return. The data is visible to the
        peer once it saw a later notification from this rank.
        """
        self._put(_bytes_of(data), offset, stable=False)

    def notify(self, index: int, value: int) -> None:
        """Set a notification of the peer's buffer once all earlier puts from here have arrived."""
        if not 0 <= index < self.notifications:
            raise SegmentError(f"notification {index} of a buffer that has {self.notifications}")
        self._link.notify(self._first_word + index, value)

    def put_notify(self, data: npt.NDArray[Any], index: int, value: int, offset: int = 0) -> None:
        """Put, then notify: the notified put of GASPI."""
        self._put(_bytes_of(data), offset, stable=False)
        self.notify(index, value)

    def acknowledge(self, index: int, value: int) -> None:
        """Set a notification without waiting for earlier puts from here."""
        self._link.notify(self._first_word + index, value, ordered=False)

    def direct(self, dtype: npt.DTypeLike, count: int, offset: int) -> npt.NDArray[Any] | None:
        """View of the peer's own memory where it can be loaded and stored, else None."""
        memory = self._link.memory
        if memory is None:
            return None
        kind = np.dtype(dtype)
        self._inside(offset, count * kind.itemsize)
        start = self._offset + offset
        return memory[start : start + count * kind.itemsize].view(kind)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all puts and notifications from here to this peer have arrived; blocking."""
        self._manager.patience.until(
            self._link.advance,
            lambda: f"rank {self._manager.rank} for its puts to reach rank {self.peer}",
            timeout,
        )

    def put_stable(self, data: Bytes, offset: int) -> None:
        """Put from memory that the caller leaves alone until the peer has answered; no copy is taken."""
        self._put(data, offset, stable=True)

    def _put(self, data: Bytes, offset: int, stable: bool) -> None:
        nbytes = data.nbytes
        self._inside(offset, nbytes)
        self._link.put(self._offset + offset, data, stable=stable)
        counters = self._manager.counters
        counters.puts += 1
        counters.bytes_put += nbytes

    def _inside(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ShapeError(
                f"{nbytes} bytes at offset {offset} are not inside rank {self.peer}'s buffer of"
                f" {self.nbytes} bytes"
            )


def _bytes_of(data: npt.NDArray[Any]) -> Bytes:
    if not isinstance(data, np.ndarray):
        raise ShapeError(f"put takes a numpy array, got {type(data).__name__}")
    if not data.flags.c_contiguous:
        raise ShapeError(f"put takes a contiguous array, got strides {data.strides} for shape {data.shape}")
    return data.reshape(-1).view(np.uint8)
