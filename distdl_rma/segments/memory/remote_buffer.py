"""Buffers and memory of peers: puts, gets, notifications and atomics.

Each operation has two ways. Which one is known when the buffer is made::

    operation   near peer: memory of the node            far peer: MPI
    put         bytes copied, complete on return         Rput of a copy, or of the data itself with a queue
    notify      fence, one store                         queued behind the puts (``transport/links.py``)
    get         bytes copied, complete on return         Rget into memory of its own, then a copy
    atomics     MPI, in the window of the node, or of all ranks if some rank is on another node

A far get lands in memory of its own, which the link keeps: if its caller gives up, MPI writes there, and not
to an array that the caller uses for something else.

``put``, ``notify`` and ``put_notify`` to a near peer are hot: a notified put of 8 bytes takes about as long
as ten calls of Python. So they repeat some lines of each other, and look at the class of a number before they
call the function that checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from operator import index as as_int
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.segments.large_arrays import copy, number_of_threads
from distdl_rma.segments.memory.array_bytes import PLAIN, as_bytes, as_integer, as_offset, as_target
from distdl_rma.segments.memory.context import Queue, SegmentContext, check_queue
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.transport.heap import Bytes
from distdl_rma.segments.transport.links import SHORT_RUN_BYTES, ByteRuns, RemoteLink
from distdl_rma.segments.waiting.header import WaitReason


class Fetch(NamedTuple):
    """One get: the bytes in the peer's segment, an array over them if this rank can load them, the target."""

    runs: ByteRuns
    near: NDArray[Any] | None
    target: NDArray[Any]


def _short_ones_together(fetches: Sequence[Fetch]) -> list[tuple[ByteRuns, list[Fetch]]]:
    # Runs of each transfer, and the gets that it carries out: all short gets in one transfer, since each
    # costs a round trip, and a transfer for each other one.
    short = [f for f in fetches if len(f.runs.offsets) == 1 and f.runs.nbytes <= SHORT_RUN_BYTES]
    if len(short) < 2:
        return [(fetch.runs, [fetch]) for fetch in fetches]
    # In the order of offsets: MPI counts from the first one.
    short.sort(key=lambda fetch: fetch.runs.offsets)
    runs = ByteRuns.together([(fetch.runs.offsets[0], fetch.runs.nbytes) for fetch in short])
    together = set(map(id, short))
    return [(runs, short), *((fetch.runs, [fetch]) for fetch in fetches if id(fetch) not in together)]


def _landing(fetches: Sequence[Fetch]) -> tuple[Bytes, Callable[[], None]]:
    # Memory that the link keeps while a get is pending, and the function that copies it to the targets.
    landing = np.empty(sum(fetch.runs.nbytes for fetch in fetches), np.uint8)

    def finish() -> None:
        end = 0
        for fetch in fetches:
            begin, end, target = end, end + fetch.runs.nbytes, fetch.target
            target[...] = landing[begin:end].view(target.dtype).reshape(target.shape)

    return landing, finish


# Word of a notification: its value, then a number that differs from that of the word before.
NOTIFICATION_BITS = 31
_SEQUENCE = (1 << NOTIFICATION_BITS) - 1
_LARGEST_VALUE = (1 << 32) - 1
# Bytes of a piece: several copies take less time than one of more than about half of a core's cache.
_PIECE_NBYTES = 512 << 10
_SUM, _REPLACE, _NO_OP = MPI.SUM, MPI.REPLACE, MPI.NO_OP

_Memory = TypeVar("_Memory", memoryview, NDArray[Any])


class Location(NamedTuple):
    """Location of a buffer in its owner's segment: its data in bytes, its notifications in words."""

    offset: int
    nbytes: int
    first_word: int
    notifications: int


class Inbox(Protocol):
    """Buffer that a get notifies: a :class:`SegmentBuffer` of this rank."""

    def notifier(self, context: SegmentContext, peer: int, index: int, value: int) -> Callable[[], None]:
        """Check a notification that a peer's answer will set; return the function that sets it."""


class RemoteBuffer:
    """A peer's :class:`SegmentBuffer`, as this rank accesses it.

    Offsets are bytes from the start of the peer's buffer. The peer makes no call for any of these operations.
    ``docs/one-sided.md`` has a table of their order.

    Atomic operations (``fetch_add``, ``compare_swap``, ``atomic_...``) work on a 64-bit integer at an offset.
    They are atomic towards each other on all ranks, but not towards puts and plain stores, and block until
    the word has changed. All raise ``ShapeError`` if the offset is not a multiple of 8 inside the buffer,
    ``ArgumentError`` if a number has more than 64 bits, and ``ExchangeTimeout`` if the peer does not answer:
    then the word is unchanged, and the call can be repeated.

    ``peer`` is the rank id of the owner, ``nbytes`` and ``notifications`` are the sizes of the buffer, and
    ``note`` are the integers that the owner sent to this rank.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> peer = 1 - machine.rank
    >>> inbox = machine.segments.get_segment_buffer(32, notifications=1)
    >>> there = inbox.exchange([peer], label="inbox")[peer]
    >>> there.put_notify(np.full(4, 2.5), index=0)
    >>> inbox.notify_wait(0)
    1
    >>> inbox.view(np.float64, (4,))[0] = -1
    >>> machine.group().barrier()
    >>> there.get(copy := np.empty(4))
    >>> copy
    array([-1. ,  2.5,  2.5,  2.5])
    """

    def __init__(self, context: SegmentContext, peer: int, location: Location, note: tuple[int, ...]) -> None:
        self.peer, self.nbytes, self.note = peer, location.nbytes, note
        self._first_word, self.notifications = location.first_word, location.notifications
        self._begin, segment = location.offset, context.segment
        self._link, self._atomics = segment.link(peer), segment.atomics
        # For puts and gets where this rank has no memory of the peer at hand.
        self._far = cast(RemoteLink, self._link)
        self._context, self._counters, self._sequence = context, context.counters, context.sequence
        self._fetch = self._atomics.fetching(peer, location.offset)
        # Integers at offsets below this one can be changed without asking the peer first.
        self._end_at_hand = 0 if self._atomics.responding else location.nbytes - 7
        # If this rank can load and store the peer's memory, puts and notifications are assignments to it.
        memory = self._link.memory
        self._near: Bytes | None = None if memory is None else memory[self._begin : self._begin + self.nbytes]
        self._bytes = None if self._near is None else self._near.data
        self._fence = segment.store_fence
        # For channels and collectives too: the peer's words, None out of reach. Who stores adds the fences.
        begin, end = self._first_word, self._first_word + self.notifications
        self.flags = None if memory is None else memory.data.cast("q")[begin:end]

    def put(self, data: Any, offset: int = 0, queue: Queue | None = None) -> None:
        """Copy an array, tensor or bytes into the peer's buffer; does not block for the transfer.

        Without a queue the data may be changed on return. With a queue it may be changed only after
        ``queue.wait()``, and contiguous data is not copied. Other data is packed and arrives row-major. The
        bytes travel unchanged, of any dtype and byte order. The peer sees them once it has seen a later
        notification from this rank. ``ShapeError`` if the data does not fit into the buffer, or is no array.
        """
        source = as_bytes(data, "put")
        if queue is not None:
            check_queue(queue, "put")
        nbytes = len(source)
        if offset.__class__ is not int:
            # Integers of numpy overflow.
            offset = as_offset(offset, "put")
        if offset < 0 or offset + nbytes > self.nbytes:
            raise self._outside(offset, nbytes)
        if self._context.closed:
            self._context.check_open()
        near = self._bytes
        if near is not None:
            if nbytes > _PIECE_NBYTES:
                _copy_in_pieces(near, offset, source)
            else:
                near[offset : offset + nbytes] = source
        elif nbytes:
            sent = np.frombuffer(source, np.uint8)
            sent = sent.copy() if queue is None else sent
            self._put(ByteRuns((self._begin + offset,), nbytes), sent, queue)
        counters = self._counters
        counters.puts += 1
        counters.bytes_put += nbytes

    def put_list(self, parts: Iterable[tuple[Any, int]], queue: Queue | None = None) -> None:
        """Put several arrays, each given with its offset; all are checked before data moves.

        Short ones travel to another node together, packed.
        """
        check_queue(queue, "put_list")
        checked = self._checked(parts, "put_list", as_bytes)
        if self._bytes is None:
            checked = self._put_short_ones(checked, queue)
        for source, offset in checked:
            self.put(source, offset, queue)

    def notify(self, index: int, value: int = 1, *, last: bool = False) -> None:
        """Set a notification of the peer's buffer, visible after all earlier puts from this rank to it.

        The value is from 1 to 2**32 - 1. A notification has one writer at a time; the next one overwrites it
        if it was not reset. Notifications with the same index become visible in order, those with different
        indices in any order. With ``last``, this notification also comes after all earlier notifications from
        this rank to that peer: once the peer sees it, all have arrived.
        """
        known = index.__class__ is value.__class__ is int
        if not (known and 0 <= index < self.notifications and 1 <= value <= _LARGEST_VALUE):
            index, value = self.check_notification(index, value)
        if self._context.closed:
            self._context.check_open()
        word = value << NOTIFICATION_BITS | next(self._sequence) & _SEQUENCE
        if self.flags is None:
            self._link.notify(self._first_word + index, word, last=last)
        else:
            if self._fence is not None:
                self._fence()
            self.flags[index] = word
        self._counters.notifications += 1

    def put_notify(
        self, data: Any, index: int, value: int = 1, offset: int = 0, queue: Queue | None = None
    ) -> None:
        """Put, then notify, as the notified put of GASPI does."""
        near = self._bytes
        if near is None or queue is not None:
            self.check_notification(index, value)
            self.put(data, offset, queue)
            self.notify(index, value)
            return
        # Put and notify in one function: for a near peer, the calls would take longer than the copy.
        known = index.__class__ is value.__class__ is offset.__class__ is int
        if not (known and 0 <= index < self.notifications and 1 <= value <= _LARGEST_VALUE):
            index, value = self.check_notification(index, value)
            offset = as_offset(offset, "put_notify")
        try:
            view = memoryview(data)
            # Python objects can be cast too, to their addresses.
            plain = data.__class__ in PLAIN and view.format != "O"
            source = view.cast("B") if plain else as_bytes(data, "put")
        except (TypeError, ValueError, BufferError):
            source = as_bytes(data, "put")
        nbytes = len(source)
        if offset < 0 or offset + nbytes > self.nbytes:
            raise self._outside(offset, nbytes)
        if self._context.closed:
            self._context.check_open()
        if nbytes > _PIECE_NBYTES:
            _copy_in_pieces(near, offset, source)
        else:
            near[offset : offset + nbytes] = source
        if self._fence is not None:
            self._fence()
        self.flags[index] = value << NOTIFICATION_BITS | next(self._sequence) & _SEQUENCE  # type: ignore[index]
        counters = self._counters
        counters.puts += 1
        counters.bytes_put += nbytes
        counters.notifications += 1

    def put_list_notify(
        self, parts: Iterable[tuple[Any, int]], index: int, value: int = 1, queue: Queue | None = None
    ) -> None:
        """Put a list, then notify once, after all of it has arrived."""
        self.check_notification(index, value)
        self.put_list(parts, queue)
        self.notify(index, value)

    def get(
        self, out: Any, offset: int = 0, queue: Queue | None = None, timeout: float | None = None
    ) -> None:
        """Copy from the peer's buffer into an array or tensor of this rank.

        Blocking without a queue; with one, the array is filled after ``queue.wait()``. ``ShapeError`` if the
        array reaches beyond the peer's buffer, or is read-only. ``ExchangeTimeout`` if the peer does not
        answer: the call can be repeated.
        """
        self._get("get", [(out, as_offset(offset, "get"))], queue, timeout)

    def get_list(
        self, parts: Iterable[tuple[Any, int]], queue: Queue | None = None, timeout: float | None = None
    ) -> None:
        """``get`` into several arrays, each given with its offset; all are checked before any data moves."""
        self._get("get_list", parts, queue, timeout)

    def get_notify(self, out: Any, inbox: Inbox, index: int, value: int = 1, offset: int = 0) -> None:
        """Get, and set a notification of this rank's own buffer once the array is filled; does not block.

        The peer does not notice the get. ``out`` belongs to the transfer until the notification is set. The
        get is the only writer of that notification; a wait for it names the peer.

        ``inbox`` is a buffer of this rank; if it is freed before the array is filled, nothing is set.
        ``ArgumentError`` if it is no buffer, or has no such notification; ``ShapeError`` as for :meth:`get`.
        """
        target = as_target(out, "get_notify")
        offset = self._inside(offset, target.nbytes, "get_notify")
        notifier = getattr(inbox, "notifier", None)
        if notifier is None:
            raise ArgumentError(f"get_notify: notifies a buffer of this rank, got {type(inbox).__name__}")
        self._context.check_open()
        notify = notifier(self._context, self.peer, index, value)
        far = self._copy_near([self._fetch_into(target, offset)])
        if not far:
            notify()
            return
        landing, finish = _landing(far)

        def filled() -> None:
            finish()
            notify()

        self._far.get(far[0].runs, landing, keep=True, then=filled)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all puts and notifications from this rank to the peer have arrived there; blocking."""
        self._context.flush((self.peer,), timeout)

    def fetch_add(self, offset: int, value: int, timeout: float | None = None) -> int:
        """Add to the integer; return its old value. The sum wraps around."""
        # As below, without calls in the usual case: MPI's part takes no longer than a few calls in Python.
        at_hand = offset.__class__ is int and 0 <= offset < self._end_at_hand and not offset & 7
        if at_hand and timeout is None and not self._context.closed:
            try:
                return self._fetch(_SUM, offset, value)
            except (TypeError, ValueError):
                # Not an integer of 64 bits; nothing was changed.
                _int64(value)
                raise
        number = _int64(value)
        return self._fetch(_SUM, self._word_at(offset, timeout), number)

    def compare_swap(self, offset: int, expected: int, desired: int, timeout: float | None = None) -> int:
        """Set the integer to ``desired`` if it is ``expected``; return its old value: ``expected`` if set."""
        old, new = _int64(expected), _int64(desired)
        return self._atomics.compare_swap(self.peer, self._begin + self._word_at(offset, timeout), old, new)

    def atomic_swap(self, offset: int, value: int, timeout: float | None = None) -> int:
        """Set the integer; return its old value."""
        number = _int64(value)
        return self._fetch(_REPLACE, self._word_at(offset, timeout), number)

    def atomic_store(self, offset: int, value: int, timeout: float | None = None) -> None:
        """Set the integer; it is set on return."""
        self.atomic_swap(offset, value, timeout)

    def atomic_load(self, offset: int, timeout: float | None = None) -> int:
        """Return the integer."""
        return self._fetch(_NO_OP, self._word_at(offset, timeout), 0)

    def _word_at(self, offset: int, timeout: float | None) -> int:
        # Checked offset in the buffer; waits for the peer's answer first if one is needed.
        if timeout is not None:
            check_timeout(timeout)
        if self._context.closed:
            self._context.check_open()
        if offset.__class__ is not int:
            offset = as_offset(offset, "an atomic")
        if offset % 8 or offset < 0 or offset + 8 > self.nbytes:
            there = f"inside rank {self.peer}'s buffer of {self.nbytes} bytes"
            raise ShapeError(f"an atomic works on 8 bytes at a multiple of 8 {there}, got offset {offset}")
        responding = self._atomics.responding
        if responding is not None:
            reason = WaitReason((self.peer,), "to answer before an atomic operation")
            self._context.waiter.until(responding(self.peer), lambda: reason, timeout)
        return offset

    # For channels and collectives: words that hold growing epochs, and memory without checks.

    def raise_flag(self, index: int, epoch: int) -> None:
        """Set a flag once all earlier puts from this rank have arrived."""
        self._link.notify(self._first_word + index, epoch)

    def flag_raiser(self, index: int, ordered: bool = True) -> Callable[[int], None]:
        """Function that sets a flag: as ``raise_flag``, or if not ``ordered`` without waiting for puts.

        Where a plain store will do, it is the item assignment of the peer's words itself, without a frame.
        """
        words = self.flags
        if words is not None and self._fence is None:
            return partial(words.__setitem__, index)
        return partial(self._link.notify, self._first_word + index, ordered=ordered)

    def put_stable(self, data: Bytes, offset: int) -> None:
        """Put to a far peer without a copy, from memory that does not change until the peer has answered.

        An answer, such as an acknowledgement, proves that the data has arrived, and so that MPI has read it.
        """
        if offset < 0 or offset + data.nbytes > self.nbytes:
            raise self._outside(offset, data.nbytes)
        self._far.put(ByteRuns((self._begin + offset,), data.nbytes), data)
        self._counters.puts += 1
        self._counters.bytes_put += data.nbytes

    def delivered(self) -> bool:
        """Advance pending operations to this peer; does not block.

        Returns whether no notification is pending and MPI has read all sources. A put without a later
        notification may not have arrived yet.
        """
        return self._link.advance()

    def direct(self, dtype: DTypeLike, count: int, offset: int) -> NDArray[Any] | None:
        """View of the peer's memory if this rank can load and store it, else None."""
        kind = np.dtype(dtype)
        return self._near_view(self._inside(offset, count * kind.itemsize, "view"), kind, (count,))

    def check_notification(self, index: int, value: int) -> tuple[int, int]:
        """Return index and value as Python integers; ``ArgumentError`` if one is out of range."""
        index = as_integer(index, "a notification's index is an integer")
        value = as_integer(value, "a notification's value is an integer")
        if not 0 <= index < self.notifications:
            raise ArgumentError(f"notification {index} of a buffer that has {self.notifications}")
        if not 1 <= value <= _LARGEST_VALUE:
            raise ArgumentError(f"a notification's value is from 1 to 2**32 - 1, got {value!r}")
        return index, value

    def _inside(self, offset: Any, nbytes: int, what: str) -> int:
        # Offset as an integer, ``nbytes`` bytes from which on are inside.
        begin: int = as_offset(offset, what)
        if begin < 0 or begin + nbytes > self.nbytes:
            raise self._outside(begin, nbytes)
        return begin

    def _outside(self, offset: int, nbytes: int) -> ShapeError:
        here = f"rank {self.peer}'s buffer of {self.nbytes} bytes"
        return ShapeError(f"{nbytes} bytes at offset {offset} are not inside {here}")

    def _near_view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        if self._near is None:
            return None
        return self._near[offset : offset + dtype.itemsize * math.prod(shape)].view(dtype).reshape(shape)

    def _put(self, runs: ByteRuns, source: Bytes, queue: Queue | None) -> None:
        # Over the link; a queue keeps the source until the put is complete.
        request = self._far.put(runs, source)
        if queue is not None:
            queue.post(self.peer, request, source)

    def _fetch_into(self, target: NDArray[Any], offset: int) -> Fetch:
        near = self._near_view(offset, target.dtype, target.shape)
        return Fetch(ByteRuns((self._begin + offset,), target.nbytes), near, target)

    def _copy_near(self, fetches: Sequence[Fetch]) -> list[Fetch]:
        # Counts all gets, and carries out those that this rank can load; returns the others.
        if self._context.closed:
            self._context.check_open()
        far = []
        for fetch in fetches:
            self._counters.gets += 1
            self._counters.bytes_got += fetch.runs.nbytes
            if fetch.near is not None:
                fetch.target[...] = fetch.near
            elif fetch.runs.nbytes:
                far.append(fetch)
        return far

    def _get(
        self, what: str, parts: Iterable[tuple[Any, int]], queue: Queue | None, timeout: float | None
    ) -> None:
        # Blocking without a queue.
        check_queue(queue, what)
        check_timeout(timeout)
        targets = self._checked(parts, what, as_target)
        far = self._copy_near([self._fetch_into(*target) for target in targets])
        if not far:
            return
        # After a timeout nobody tests the queue made here, so the targets do not change any more.
        posted = Queue(self._context, "get") if queue is None else queue
        for runs, fetches_of_it in _short_ones_together(far):
            landing, finish = _landing(fetches_of_it)
            posted.post(self.peer, self._far.get(runs, landing, keep=True), landing, finish)
        if queue is None:
            total = sum(fetch.runs.nbytes for fetch in far)
            reason = WaitReason((self.peer,), f"to answer a get of {total} bytes")
            self._context.waiter.until(posted.test, lambda: reason, timeout)

    def _checked(
        self, parts: Iterable[tuple[Any, int]], what: str, check: Callable[[Any, str], _Memory]
    ) -> list[tuple[_Memory, int]]:
        # Pairs of memory and offset, all checked before any data moves.
        try:
            pairs = [(data, as_int(offset)) for data, offset in parts]
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{what} takes pairs of an array and its offset: {error}") from None
        checked = [(check(data, what), offset) for data, offset in pairs]
        return [(memory, self._inside(offset, memory.nbytes, what)) for memory, offset in checked]

    def _put_short_ones(
        self, parts: list[tuple[memoryview, int]], queue: Queue | None
    ) -> list[tuple[memoryview, int]]:
        # Puts all short parts at once; returns the parts that remain.
        short = [(offset, source) for source, offset in parts if 0 < len(source) <= SHORT_RUN_BYTES]
        short.sort(key=itemgetter(0))
        places = [(self._begin + offset, len(source)) for offset, source in short]
        # MPI refuses overlapping targets; puts to one place have no order anyway.
        overlap = any(there + nbytes > after for (there, nbytes), (after, _) in pairwise(places))
        if len(short) < 2 or overlap:
            return parts
        if self._context.closed:
            self._context.check_open()
        packed = np.frombuffer(b"".join(source for _, source in short), np.uint8)
        self._put(ByteRuns.together(places), packed, queue)
        self._counters.puts += len(short)
        self._counters.bytes_put += len(packed)
        return [part for part in parts if not 0 < len(part[0]) <= SHORT_RUN_BYTES]

    def __repr__(self) -> str:
        return f"RemoteBuffer(of rank {self.peer}, {self.nbytes} bytes, {self.notifications} notifications)"


def _int64(value: int) -> int:
    number = as_integer(value, "an atomic works on integers of 64 bits")
    if not -(1 << 63) <= number < 1 << 63:
        raise ArgumentError(f"an atomic works on integers of 64 bits, got {number}")
    return number


def _copy_in_pieces(near: memoryview, offset: int, source: memoryview) -> None:
    target, nbytes = near[offset : offset + len(source)], len(source)
    arrays = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    # If source and target overlap, copying a piece could overwrite bytes that are still to be read.
    within = np.may_share_memory(*arrays)
    if number_of_threads() > 1 and not within:
        copy(*arrays)
        return
    size = nbytes if within else _PIECE_NBYTES
    for begin in range(0, nbytes, size):
        target[begin : begin + size] = source[begin : begin + size]
