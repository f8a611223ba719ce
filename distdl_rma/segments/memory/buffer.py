"""Buffers in this rank's segment, and the one-time exchange of their addresses between peers.

A buffer with three notifications, at a cache line of the segment::

    offset                               first word
    |  nbytes of data, and padding       | word 0 | word 1 | word 2 |
    ^ peers put here                     ^ each word has one writer, a peer

    word:    value (32 bits, 0 is unset) | sequence number of the writer (31 bits)
    _reset:  what each word was when this rank reset it, in its own memory

A notification is set if its word differs from ``_reset``. So the reader never writes to a word, and a
notification that comes during a reset is not lost: it makes the word differ again. The sequence number makes
two notifications of the same value differ.

Messages of a handshake, of the same size on both sides::

    | fingerprint | location of the buffer (4) | note (4) | hash of the label | label | terms |

Each side sends its own and receives the other's; only then does a rank know where to put.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from itertools import count
from operator import index as as_int
from typing import Any, Self

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import (
    ArgumentError,
    ClosedError,
    DistdlError,
    MismatchError,
    PartitionError,
    ProtocolError,
    ShapeError,
)
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.memory.array_bytes import ArrayLayout, as_offset
from distdl_rma.segments.memory.context import SegmentContext
from distdl_rma.segments.memory.remote_buffer import NOTIFICATION_BITS, Location, RemoteBuffer
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.transport.heap import Bytes, aligned
from distdl_rma.segments.waiting.header import WaitReason, clip

# The tag changes when ranks settle an error, so that earlier messages never match later ones.
_TAGS = range(1, 1 << 14)
_LABEL_BYTES, _TERMS_BYTES = 120, 240
# A message: fingerprint, location of the buffer, note for the peer, hash of the whole label, and the first
# bytes of the label and of the terms, for error messages.
_NOTE = 4
_MESSAGE = struct.Struct(f"=q4q{_NOTE}qq{_LABEL_BYTES}s{_TERMS_BYTES}s")
# Incomplete requests and their memory for MPI, which outlive their buffer, handshake and machine.
_UNFINISHED: dict[int, tuple[object, ...]] = {}
_NUMBERS = count()


@dataclass
class Purpose:
    """Purpose of a handshake, from the arguments of :meth:`SegmentBuffer.exchange`; raises if invalid."""

    ranks: tuple[int, ...]
    asked: InitVar[Mapping[int, tuple[int, ...]] | Iterable[int]]
    label: str
    fingerprint: int
    terms: str = field(compare=False)
    notes: dict[int, tuple[int, ...]] = field(init=False)

    def __post_init__(self, asked: Mapping[int, tuple[int, ...]] | Iterable[int]) -> None:
        if not isinstance(self.label, str):
            raise ArgumentError(f"an exchange's label is a string, got {self.label!r}")
        what = f"exchange {self.label!r}"
        notes = _as_notes(asked, what)
        for peer in notes:
            if peer not in self.ranks:
                raise PartitionError(f"{what}: {peer!r} is none of the machine's ranks {self.ranks}")
        (self.fingerprint,) = _int64s((self.fingerprint,), 1, f"{what}: a fingerprint")
        self.notes = {
            peer: _int64s(note, _NOTE, f"{what}: the note for rank {peer}") for peer, note in notes.items()
        }

    def message(self, location: Location, peer: int) -> bytes:
        """Message for a peer, with the location of this rank's buffer."""
        note = (*self.notes[peer], *[0] * _NOTE)[:_NOTE]
        texts = clip(self.label, _LABEL_BYTES), clip(self.terms, _TERMS_BYTES)
        return _MESSAGE.pack(self.fingerprint, *location, *note, fingerprint(self.label), *texts)

    def difference(self, rank: int, peer: int, plan: int, hashed: int, label: bytes, terms: bytes) -> str:
        """How the end of a peer's message differs, as text for an error on ``rank``; empty if it does not.

        Both ranks compare the same two messages, so both raise, or none.
        """
        if hashed != fingerprint(self.label):
            theirs = _text(label)
            if theirs == clip(self.label, _LABEL_BYTES).decode():
                return f"another name with the same first {_LABEL_BYTES} bytes"
            return repr(theirs)
        if plan == self.fingerprint:
            return ""
        mine, others = _listed(clip(self.terms, _TERMS_BYTES).decode()), _listed(_text(terms))
        different = [
            f"{key} is {mine.get(key)} on rank {rank} and {others.get(key)} on rank {peer}"
            for key in dict.fromkeys((*mine, *others))
            if mine.get(key) != others.get(key)
        ]
        plans = f"plans {self.fingerprint:014x} and {plan:014x}"
        return f"the same name, another plan ({', '.join(different) or plans})"


class Handshake:
    """Messages to and from some peers; a wait for them can be repeated after a timeout.

    The n-th handshake of a rank with a peer matches the n-th handshake of that peer with the rank. Label and
    fingerprint tell whether both sides mean the same exchange. "On the first call they exchange a pointer to
    the exchange buffers with all their neighbors": interface document, section 3.2; requirement A8.

    Sends and receives begin in the constructor and are never begun again: a caller that gives up leaves them
    to MPI, which may still write to the messages. ``_UNFINISHED`` keeps these, whatever is freed meanwhile.
    Until all are complete, a peer may have the address of the buffer and write to it: ``offset`` keeps the
    buffer from being allocated again (``SegmentContext.has_late_writers``).
    """

    def __init__(self, context: SegmentContext, location: Location, purpose: Purpose) -> None:
        self._context, self._purpose = context, purpose
        self.offset: int | None = location.offset  # of the buffer; None once its owner has freed it
        self._incoming = {peer: bytearray(_MESSAGE.size) for peer in purpose.notes}
        self._outgoing = {peer: purpose.message(location, peer) for peer in purpose.notes}
        self._sends: dict[int, MPI.Request] = {}
        self._receives: dict[int, MPI.Request] = {}
        # Not ``id``: a closed machine's handshake may stay in the table, and another may get its address.
        self._number = next(_NUMBERS)
        with context.segment.lock:
            _UNFINISHED[self._number] = self._sends, self._receives, self._incoming, self._outgoing
            context.waiter.defer(self.test)
            context.handshakes.add(self)
            for peer in purpose.notes:
                position = context.ranks.index(peer)
                tag = _TAGS[context.settled[peer] % len(_TAGS)]
                self._sends[peer] = context.comm.Isend(self._outgoing[peer], position, tag)
                self._receives[peer] = context.comm.Irecv(self._incoming[peer], position, tag)

    def test(self) -> bool:
        """Whether all messages are complete; does not block. Every wait calls it until they are."""
        with self._context.segment.lock:
            # All of them, since each test also makes progress.
            late = _pending(self._receives) + _pending(self._sends)
            if not late:
                _UNFINISHED.pop(self._number, None)
        return not late

    def check_same(self, purpose: Purpose) -> None:
        """Raise ``ProtocolError`` if a call that repeats this handshake has another purpose."""
        mine = self._purpose
        if purpose != mine:
            raise ProtocolError(
                f"an exchange of {mine.label!r} with ranks {sorted(mine.notes)} is unfinished and has to"
                f" be repeated as it was, got one of {purpose.label!r} with ranks {sorted(purpose.notes)}"
                + (" and another plan or notes" if purpose.label == mine.label else "")
            )

    def give_up(self, ranks: Iterable[int]) -> bool:
        """End the handshake if one of these ranks takes part in it; return whether one does."""
        if not self._incoming.keys() & set(ranks):
            return False
        with self._context.segment.lock:
            self._context.waiter.withdraw(self.test)
            for request in self._receives.values():
                if request:
                    request.Cancel()
        return True

    def finish(self, timeout: float | None) -> dict[int, RemoteBuffer]:
        """Wait for all peers until a common deadline; return their buffers by rank id."""
        waiter = self._context.waiter
        waiter.until(self.test, self._reason, timeout)
        waiter.withdraw(self.test)
        remotes = {peer: self._remote(peer, reply) for peer, reply in self._incoming.items()}
        self._context.handshakes.discard(self)
        return remotes

    def _reason(self) -> WaitReason:
        hint = "did every rank build and call the same things in the same order?"
        # The progress thread may test the same requests.
        with self._context.segment.lock:
            # A peer whose message has come has called too, and only has to take this rank's.
            missing = _pending(self._receives) or _pending(self._sends)
        return WaitReason(missing, f"to connect {self._purpose.label!r}", hint, in_step=True)

    def _remote(self, peer: int, reply: bytearray) -> RemoteBuffer:
        # The peer's buffer by its message; raises if its purpose was another one.
        context, label = self._context, self._purpose.label
        plan, offset, nbytes, first_word, notifications, *note, hashed, theirs, terms = _MESSAGE.unpack(reply)
        different = self._purpose.difference(context.rank, peer, plan, hashed, theirs, terms)
        if different:
            raise MismatchError(
                f"rank {context.rank} connects {label!r} but rank {peer} connects {different}:"
                " do all ranks build and call the same things in the same order, with the same arguments?"
            )
        location = Location(offset, nbytes, first_word, notifications)
        return RemoteBuffer(context, peer, location, tuple(note))


def _as_notes(notes: Mapping[int, tuple[int, ...]] | Iterable[int], what: str) -> dict[int, tuple[int, ...]]:
    # Notes by rank id; empty notes if only rank ids are given.
    if isinstance(notes, Mapping):
        return dict(notes)
    try:
        peers = [as_int(peer) for peer in notes]
    except TypeError:
        raise ArgumentError(f"{what} takes rank ids, or notes by rank id, got {notes!r}") from None
    twice = [peer for at, peer in enumerate(peers) if peer in peers[:at]]
    if twice:
        raise PartitionError(f"{what}: rank {twice[0]} is listed more than once in {peers}")
    return dict.fromkeys(peers, ())


def _pending(requests: Mapping[int, MPI.Request]) -> tuple[int, ...]:
    # Ranks whose request is not complete.
    return tuple(rank for rank, request in requests.items() if not request.Test())


def _int64s(values: Any, most: int, what: str) -> tuple[int, ...]:
    try:
        numbers = tuple(as_int(value) for value in values)
    except TypeError:
        numbers = None
    if numbers is None or len(numbers) > most or any(not -(1 << 63) <= n < 1 << 63 for n in numbers):
        raise ArgumentError(f"{what} is made of at most {most} integer(s) of 64 bits, got {values!r}")
    return numbers


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def _listed(terms: str) -> dict[str, str]:
    lines = (line.partition("=") for line in terms.splitlines())
    return {key: value for key, equals, value in lines if equals}


class SegmentBuffer:
    """Block of this rank's segment that peers can put into, with notifications.

    :meth:`SegmentManager.get_segment_buffer` makes it. Its memory belongs to the segment; the buffer and its
    views are valid until ``free()``, the end of a ``with`` statement or the close of the machine.

    A notification is 0 until a peer sets it, and again after a reset; its value is from 1 to 2**32 - 1. A
    rank that sees a notification also sees its sender's earlier puts. An index out of range raises
    ``ArgumentError``. Interface document, chapter 2.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> peer = 1 - machine.rank
    >>> inbox = machine.segments.get_segment_buffer(32, notifications=1)
    >>> there = inbox.exchange([peer], label="inbox")[peer]
    >>> there.put_notify(np.full(4, 2.5), index=0)
    >>> inbox.notify_wait(0)
    1
    >>> inbox.view(np.float64, (4,))
    array([2.5, 2.5, 2.5, 2.5])
    """

    def __init__(self, context: SegmentContext, nbytes: int, notifications: int, owner: str) -> None:
        self._context, self._segment = context, context.segment
        self._acquire, self._looks = context.segment.load_fence, range(context.waiter.spins)
        self.nbytes, self.notifications, self.owner = nbytes, notifications, owner
        # The data is first, so that it is aligned to a cache line; the words follow.
        data_nbytes = aligned(nbytes) if nbytes else 0
        # Threads of a rank may make and free buffers at the same time.
        with context.segment.lock:
            self.offset = context.heap.allocate(data_nbytes + notifications * 8, owner)
        self._first_word = (self.offset + data_nbytes) // 8
        # All words, as 64-bit integers. Channels and collectives read them too, in loops without a check.
        self.flags = self._segment.words[self._first_word : self._first_word + notifications]
        self._array = np.frombuffer(self.flags, np.int64)
        self._array[:] = 0
        # Copies of the words at their last reset. Only the peer writes the words themselves.
        self._reset = np.zeros(notifications, np.int64)
        self._reset_words = self._reset.data
        self._peers: tuple[int, ...] = ()
        self._handshake: Handshake | None = None
        self._freed = False

    @property
    def location(self) -> Location:
        """Location by which a peer reaches the buffer."""
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
        """This buffer as a remote buffer, for puts, notifications and atomics of this rank itself."""
        self._check()
        return RemoteBuffer(self._context, self._context.rank, self.location, ())

    def notification(self, index: int) -> int:
        """Return the value of a notification, 0 if it is not set; does not block, makes no progress."""
        word = self.flag(index)
        if word == self._reset_words[index]:
            return 0
        self._segment.acquire()
        return word >> NOTIFICATION_BITS

    def notify_test(self, first: int = 0, count: int | None = None) -> int | None:
        """Lowest set index among ``count`` from ``first`` on, or None; does not block, makes progress."""
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
        """Wait until any of ``count`` notifications from ``first`` on is set; return the lowest set index.

        Blocking. The notification stays set until it is reset. If ``count`` is None, all notifications from
        ``first`` on count; there must be at least one. ``timeout`` is in seconds, 0 to test once. ``senders``
        are the rank ids that may set the notifications, all peers of the buffer if None: messages name them,
        and the wait ends when all of them have left.

        ``ExchangeTimeout`` at the deadline: the call can be repeated. ``PeerFailedError`` if a rank failed,
        or all senders have left. ``PartitionError`` if a sender is no rank of the machine.
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
        """Reset a notification; return its value, 0 if it was not set.

        A notification that arrives at the same moment is either returned or still set afterwards, never lost.
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
        """Wait for a notification and reset it; return its value.

        Blocking; raises as :meth:`notify_waitsome`.
        """
        words, reset = self.flags, self._reset_words
        ranks = None if senders is None else self._known(senders)
        try:
            if self._freed or self._context.closed or not 0 <= index < self.notifications:
                raise self._wrong(index)
            word, old = words[index], reset[index]
        except TypeError:
            raise self._wrong(index) from None
        if word == old:
            # First turns of a wait, without a call for each test.
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
        # Lowest notification of the range that is set; one comparison of arrays, however many there are.
        if stop == first:
            return None
        # Slices would take as long as the comparison.
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
        hint = "" if ranks else "no rank has its address yet: exchange() gives it to peers"
        return WaitReason(ranks, f"to set {which} of buffer {self.owner!r}", hint, anyone=True)

    # For channels and collectives: words that hold growing epochs, each with one writer.

    def flag(self, index: int) -> int:
        """Return the raw word of a notification; does not block."""
        try:
            if self._freed or self._context.closed or not 0 <= index < self.notifications:
                raise self._wrong(index)
            return int(self.flags[index])
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
        """Exchange addresses of buffers with some peers, and with no other rank.

        Blocking; every peer must make the matching call. The n-th call of a rank that names a peer matches
        the n-th call of that peer that names the rank.

        ``notes`` are the peers' rank ids; or a mapping from each peer's rank id to at most four integers,
        which the peer finds in its ``RemoteBuffer.note``. ``label`` and ``fingerprint`` identify the purpose
        and must be equal on both sides. ``terms`` are the facts behind the fingerprint, one line
        ``name=value`` each: the error of a mismatch names those that differ. ``timeout`` is in seconds, for
        all peers together.

        ``MismatchError`` on both sides if a peer's call had another purpose; names both. ``ExchangeTimeout``
        if a peer does not call; names the peer. The call can be repeated with the same arguments, else it
        raises ``ProtocolError``. ``PartitionError`` or ``ArgumentError`` if a peer is no rank of the machine,
        or a note is not made of 64-bit integers; nothing was sent then.
        """
        self._check()
        check_timeout(timeout)
        purpose = Purpose(self._context.ranks, notes, label, fingerprint, terms)
        # After a timeout or another error, messages are still pending; the next call waits for them.
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
        """Free the memory; local. The caller must know that no peer writes to it any more."""
        with self._segment.lock:
            if not self._freed:
                self._freed = True
                if not self._context.closed:
                    self._context.forget_late_writers(self.offset)
                    self._context.heap.free(self.offset)

    def notifier(self, context: SegmentContext, peer: int, index: int, value: int) -> Callable[[], None]:
        """Check a notification; return the function that sets it later, or does nothing after ``free``."""
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

    def _wrong(self, index: int) -> DistdlError:
        if self._freed:
            return ClosedError(f"segment buffer {self.owner!r}: already freed")
        if self._context.closed:
            return self._context.closed_error(f"machine of segment buffer {self.owner!r}")
        return ArgumentError(f"notification {index!r} of a buffer that has {self.notifications}")

    def _check(self) -> None:
        if self._freed or self._context.closed:
            raise self._wrong(0)
