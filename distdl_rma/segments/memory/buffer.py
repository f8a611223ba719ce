"""Buffers in this rank's segment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import index as as_int
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ArgumentError, ClosedError, MismatchError, PartitionError, ShapeError
from distdl_rma.segments.memory.array_bytes import ArrayLayout, as_offset
from distdl_rma.segments.memory.context import SegmentContext
from distdl_rma.segments.memory.handshake import Handshake, Purpose
from distdl_rma.segments.memory.remote_buffer import NOTIFICATION_BITS, Location, RemoteBuffer
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.transport.heap import Bytes, aligned
from distdl_rma.segments.waiting.header import WaitReason


class SegmentBuffer:
    """Block of this rank's segment that peers can put into, with notifications.

    Made by :meth:`SegmentManager.get_segment_buffer`. Its memory belongs to the segment and stays valid
    until ``free()``, the end of a ``with`` statement or the close of the machine; views of it must not be
    used afterwards.

    A notification is 0 until a peer sets it, and again once it was reset; a value is from 1 to 2**32 - 1.
    Who sees a notification also sees what its sender put before. Notifications that there are not raise
    ``ArgumentError``. Interface document, chapter 2.
    """

    def __init__(self, context: SegmentContext, nbytes: int, notifications: int, owner: str) -> None:
        self._context, self._segment = context, context.segment
        self._acquire, self._looks = context.segment.load_fence, range(context.waiter.spins)
        self.nbytes, self.notifications, self.owner = nbytes, notifications, owner
        # Data first, words behind it: the data is then aligned to a cache line.
        data_nbytes = aligned(nbytes) if nbytes else 0
        # Threads of a rank may make and free buffers at the same time.
        with context.segment.lock:
            self.offset = context.heap.allocate(data_nbytes + notifications * 8, owner)
        self._first_word = (self.offset + data_nbytes) // 8
        self._words = self._segment.words[self._first_word : self._first_word + notifications]
        self._array = np.frombuffer(self._words, np.int64)
        self._array[:] = 0
        # Words of the notifications that were reset. The words themselves have one writer, the peer.
        self._reset = np.zeros(notifications, np.int64)
        self._reset_words = self._reset.data
        self._peers: tuple[int, ...] = ()
        self._handshake: Handshake | None = None
        self._freed = False

    @property
    def location(self) -> Location:
        """What a peer must know."""
        return Location(self.offset, self.nbytes, self._first_word, self.notifications)

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(self.array.ctypes.data)

    @property
    def array(self) -> Bytes:
        """The buffer's bytes; a view, not a copy."""
        return self.view(np.uint8, (self.nbytes,))

    def view(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """Typed view of a part of the buffer, ``offset`` bytes from its start; not a copy."""
        self._check()
        layout, offset = ArrayLayout(dtype, shape), as_offset(offset, "view")
        if offset < 0 or offset + layout.nbytes > self.nbytes:
            wanted = f"{layout.nbytes} bytes at offset {offset}"
            raise ShapeError(f"{wanted} are not inside a buffer of {self.nbytes} bytes")
        start = self.offset + offset
        return self._segment.memory[start : start + layout.nbytes].view(layout.dtype).reshape(layout.shape)

    @property
    def here(self) -> RemoteBuffer:
        """This buffer as its peers see it: for puts, notifications and atomics of this rank itself."""
        self._check()
        return RemoteBuffer(self._context, self._context.rank, self.location, ())

    def notification(self, index: int) -> int:
        """Return the value of a notification, 0 if there is none; does not block, makes no progress."""
        word = self.flag(index)
        if word == self._reset_words[index]:
            return 0
        self._segment.acquire()
        return word >> NOTIFICATION_BITS

    def notify_test(self, first: int = 0, count: int | None = None) -> int | None:
        """Return the lowest notification that is set among ``count`` from ``first`` on, or None.

        Does not block, but makes progress.
        """
        first, stop = self._range(first, count)
        found = self._find(first, stop)
        if found is None:
            self._context.waiter.progress()
            found = self._find(first, stop)
        if found is not None:
            self._segment.acquire()
        return found

    def notify_waitsome(
        self,
        first: int = 0,
        count: int | None = None,
        timeout: float | None = None,
        senders: Collection[int] | None = None,
    ) -> int:
        """Wait until any of ``count`` notifications from ``first`` on is set, and return the lowest.

        Blocking. All to the end if ``count`` is None, at least one. The notification stays until it is reset.
        The ``timeout`` is in seconds, 0 to look once. ``senders`` are the rank ids of those that may set
        them, for messages, and for the wait to end when they have left; all peers of the buffer if None.

        ``ExchangeTimeout`` at the deadline, after which the call can be repeated; ``PeerFailedError`` if a
        rank failed, or all that may set them have left; ``PartitionError`` if a sender is none of the ranks.
        """
        first, stop = self._range(first, count)
        ranks = self._peers if senders is None else self._known(senders)
        if first == stop:
            raise ArgumentError(f"buffer {self.owner!r}: a wait for none of its notifications would not end")
        lowest = self._find(first, stop)
        if lowest is None:
            found: list[int] = []

            def any_set() -> bool:
                lowest = self._find(first, stop)
                found.extend(() if lowest is None else (lowest,))
                return lowest is not None

            self._context.waiter.until(any_set, lambda: self._reason(first, stop, ranks), timeout)
            lowest = found[0]
        if self._acquire is not None:
            self._acquire()
        return lowest

    def notify_reset(self, index: int) -> int:
        """Take a notification back; return the value that it had, 0 if it was not set.

        One that arrives at the same moment is either returned or still set afterwards, never lost.
        """
        word = self.flag(index)
        if word == self._reset_words[index]:
            return 0
        self._reset_words[index] = word
        if self._acquire is not None:
            self._acquire()
        return word >> NOTIFICATION_BITS

    def notify_wait(
        self, index: int = 0, timeout: float | None = None, senders: Collection[int] | None = None
    ) -> int:
        """Wait for one notification, reset it and return its value.

        Blocking; raises as :meth:`notify_waitsome`.
        """
        words, reset = self._words, self._reset_words
        ranks = None if senders is None else self._known(senders)
        try:
            if self._freed or self._context.closed or not 0 <= index < self.notifications:
                raise self._wrong(index)
            word, old = words[index], reset[index]
        except TypeError:
            raise self._wrong(index) from None
        if word == old:
            # As a wait begins, but without a call for each look.
            for _ in self._looks if timeout is None else ():
                word = words[index]
                if word != old:
                    break
            else:
                self._context.waiter.until(
                    lambda: words[index] != old,
                    lambda: self._reason(index, index + 1, self._peers if ranks is None else ranks),
                    timeout,
                )
                word = words[index]
        reset[index] = word
        if self._acquire is not None:
            self._acquire()
        return word >> NOTIFICATION_BITS

    def _find(self, first: int, stop: int) -> int | None:
        if stop == first:
            return None
        # Of all of them without slices, which would cost as much as the comparison.
        words, reset = self._array, self._reset
        if stop - first < self.notifications:
            words, reset = words[first:stop], reset[first:stop]
        pending = words != reset
        lowest = int(pending.argmax())
        return first + lowest if pending[lowest] else None

    def _range(self, first: int, count: int | None) -> tuple[int, int]:
        try:
            first = as_int(first)
            stop = self.notifications if count is None else first + as_int(count)
        except TypeError:
            raise ArgumentError(f"notifications are given by integers, got {first!r} and {count!r}") from None
        self._check()
        if not 0 <= first <= stop <= self.notifications:
            known = f"a buffer that has {self.notifications} of them"
            raise ArgumentError(f"notifications {first} to {stop} of {known}")
        return first, stop

    def _known(self, senders: Collection[int]) -> tuple[int, ...]:
        known = self._context.ranks
        for rank in senders:
            if rank not in known:
                sender = f"buffer {self.owner!r}: sender {rank!r}"
                raise PartitionError(f"{sender} is none of the machine's ranks {known}")
        return tuple(senders)

    def _reason(self, first: int, stop: int, ranks: tuple[int, ...]) -> WaitReason:
        several = stop > first + 1
        which = f"one of notifications {first} to {stop - 1}" if several else f"notification {first}"
        return WaitReason(ranks, f"to set {which} of buffer {self.owner!r}", anyone=True)

    # What channels and collectives are made of: words that hold growing epochs, each with one writer.

    @property
    def flags(self) -> memoryview:
        """All words, 64-bit integers; for loops that cannot afford a check for each."""
        return self._words

    def flag(self, index: int) -> int:
        """Return the raw word of a notification; does not block."""
        try:
            if self._freed or self._context.closed or not 0 <= index < self.notifications:
                raise self._wrong(index)
            return int(self._words[index])
        except TypeError:
            raise self._wrong(index) from None

    def exchange(
        self,
        notes: Mapping[int, tuple[int, ...]] | Iterable[int],
        label: str = "buffer",
        fingerprint: int = 0,
        timeout: float | None = None,
        *,
        terms: str = "",
    ) -> dict[int, RemoteBuffer]:
        """Exchange addresses of buffers with some peers, and only with these.

        Blocking; every peer named must make the matching call. The n-th call that names a peer meets the
        n-th call of that peer that names this rank.

        ``notes`` are the rank ids of the peers; or, for every peer's rank id, up to four integers that it
        shall find in its ``RemoteBuffer.note``. ``label`` and ``fingerprint`` say what the buffer is for, and
        must be alike; ``terms`` what the fingerprint stands for, a line ``name=value`` each: a mismatch says
        which differ. The timeout is in seconds, for all peers together.

        ``MismatchError`` on both sides if a peer's call was for something else; names both.
        ``ExchangeTimeout`` if a peer does not call; names it. The call can be repeated, as it was, or else
        raises ``ProtocolError``. ``PartitionError`` or ``ArgumentError`` if a peer is no rank of the machine,
        or a note not made of integers of 64 bits; nothing was sent then.
        """
        self._check()
        check_timeout(timeout)
        purpose = Purpose(self._context.ranks, notes, label, fingerprint, terms)
        # After a timeout, or whatever else ended the wait, its messages are under way, for the next call.
        if self._handshake is None:
            self._handshake = Handshake(self._context, self.location, purpose)
        else:
            self._handshake.check_same(purpose)
        try:
            remotes = self._handshake.finish(timeout)
        except MismatchError:
            self._handshake = None
            raise
        self._handshake = None
        self._peers = tuple(dict.fromkeys((*self._peers, *purpose.notes)))
        return remotes

    def free(self) -> None:
        """Give the memory back; local. The caller knows that no peer writes to it any more."""
        with self._segment.lock:
            if not self._freed:
                self._freed = True
                if not self._context.closed:
                    self._context.heap.free(self.offset)

    def promise(self, context: SegmentContext, peer: int, index: int, value: int) -> Callable[[], None]:
        """Check a notification that this rank will give to itself when a peer has answered; what gives it.

        Nothing is given after the buffer was freed.
        """
        here = self.here
        if context is not self._context:
            raise ArgumentError(f"buffer {self.owner!r} is of another machine than what notifies it")
        here.check_notification(index, value)
        self._peers = tuple(dict.fromkeys((*self._peers, peer)))

        def give() -> None:
            if not (self._freed or context.closed):
                here.notify(index, value)

        return give

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __repr__(self) -> str:
        gone = ", gone" if self._freed or self._context.closed else ""
        return f"SegmentBuffer({self.owner!r}, {self.nbytes} bytes, {self.notifications} notifications{gone})"

    def _wrong(self, index: int) -> ClosedError | ArgumentError:
        if self._freed or self._context.closed:
            why = "already freed" if self._freed else "its machine is already closed"
            return ClosedError(f"segment buffer {self.owner!r}: {why}")
        return ArgumentError(f"notification {index!r} of a buffer that has {self.notifications}")

    def _check(self) -> None:
        if self._freed or self._context.closed:
            raise self._wrong(0)
