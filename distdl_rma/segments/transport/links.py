"""Links to a peer's segment: load and store on a node, MPI RMA to other nodes; and atomic operations.

The way of two puts and their notification to a rank of another node::

    rank 0 (origin)                                               rank 1 (target)
    put a    Rput ------------------------------------------>
    put b    Rput ------------------------------------------>
    notify   queued: MPI does not order it behind the puts
    advance  sources read? question: Rget of 8 bytes -------->    answered by MPI, without a call of rank 1
    advance  two answers in a row: Flush, which then hardly waits: a and b have arrived
    advance  Rget_accumulate(REPLACE) of the word ----------->    sees the word, and so a and b

The caller of ``notify`` waits for none of these steps: every wait of this rank and its progress engine call
``advance``. On a node there is nothing to queue: a copy, a fence and a store are complete on return, and all
methods that advance something have nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.options import thread_level
from distdl_rma.segments.transport.heap import Bytes
from distdl_rma.trace import Counters

# Shortest put that this rank waits for before it asks the peer whether all has arrived.
_LARGE_PUT_BYTES = 64 << 10
# Longest parts of a list that travel together: packing them takes less time than a transfer each.
SHORT_RUN_BYTES = 2 << 10
# Bytes under way of which the peer learns, so that both call MPI often in waits: a transport in software
# moves a few KiB in each call. Others add the bytes that they move to or from a segment, in transfers that
# are large or many, to a word behind the records of its header.
_TOLD_BYTES = 256 << 10
MOVING_WORD = 255
# Consecutive answers without a new operation after which a flush follows, since some operations may complete
# after the first answer; and most questions before a flush, in case operations begin all the time.
_ANSWERS, _MOST_QUESTIONS = 2, 5
# Longer lists of transfers or notifications than these are searched for complete ones.
_MANY_TRANSFERS = 64


class ByteRuns(NamedTuple):
    """Stretches of contiguous bytes in a segment: their offsets, and the bytes of all together.

    If there are several, ``lengths`` has the bytes of each.

    Examples
    --------
    >>> from distdl_rma.segments.transport.links import ByteRuns
    >>> ByteRuns.together([(0, 8), (100, 4)])
    ByteRuns(offsets=(0, 100), nbytes=12, lengths=(8, 4))
    """

    offsets: tuple[int, ...]
    nbytes: int
    lengths: tuple[int, ...] = ()

    @staticmethod
    def together(parts: Sequence[tuple[int, int]]) -> ByteRuns:
        """Stretches with these offsets and lengths; at least one."""
        offsets, lengths = zip(*parts, strict=True)
        return ByteRuns(offsets, sum(lengths), lengths)


class Transfers:
    """Incomplete transfers, each with what belongs to it, as the memory that MPI reads or writes meanwhile.

    Complete ones are forgotten by ``under_way``, and when the list has doubled: a rank may put or notify all
    the time and never wait, and a search at each addition would make the time quadratic. The caller holds the
    lock of the segment.
    """

    def __init__(self) -> None:
        self._incomplete: list[tuple[MPI.Request, Any, Callable[[], object]]] = []
        self._search_at = _MANY_TRANSFERS

    def __len__(self) -> int:
        return len(self._incomplete)

    @property
    def kept(self) -> list[Any]:
        """What belongs to each transfer."""
        return [kept for _, kept, _ in self._incomplete]

    def add(self, request: MPI.Request, kept: object, then: Callable[[], object] = bool) -> None:
        """Add a transfer that has begun; ``then()`` is called once it is complete."""
        self._incomplete.append((request, kept, then))
        if len(self) > self._search_at:
            self.under_way()
            self._search_at = 2 * len(self) + _MANY_TRANSFERS

    def under_way(self) -> bool:
        """Whether any is incomplete."""
        incomplete = []
        for one in self._incomplete:
            request, _, then = one
            if not request.Test():
                incomplete.append(one)
            else:
                then()
        self._incomplete = incomplete
        return bool(incomplete)


class RmaPeer:
    """Moves bytes to and from the memory of one peer by RMA, and finds out when they have arrived there.

    A put that is complete at this rank may not be complete at the peer. A flush completes all operations, but
    cannot be interrupted: it spins on a core that others need, and for ever if the peer is dead. So this rank
    waits for its large puts first, and sends small gets as questions. It flushes after consecutive answers
    without a new operation, or after several questions. The caller holds the lock.

    The locked window covers the segments of all ranks; ``position`` is the peer's rank in its group.
    ``begun`` counts operations, ``counters`` flushes.

    Operations are numbered from 1 by ``begun``. ``_arrived`` is the largest number up to which all operations
    have certainly arrived, so ``_arrived <= begun``, and both only grow. An answer alone proves nothing: MPI
    may answer a get before it has carried out an earlier put. It only makes likely that a flush will not
    block. The flush is the proof, for all operations begun until then.
    """

    def __init__(self, window: MPI.Win, position: int, counters: Counters) -> None:
        self._window, self._position, self._counters = window, position, counters
        # Pending large puts, each with the value of ``begun`` at that put.
        self._large = Transfers()
        # Numbers of operations that have begun, and that have certainly arrived.
        self.begun, self._arrived = 0, 0
        self._question: tuple[MPI.Request, int] | None = None
        self._answer = np.empty(1, np.int64)
        # Questions since the last flush; consecutive answers without a new operation between them.
        self._asked, self._quiet = 0, 0

    def put(self, runs: ByteRuns, data: Bytes) -> MPI.Request:
        """Begin to copy contiguous bytes to the peer; do not change them until the request is complete."""
        self.begun += 1
        request = _transfer(runs, data, lambda part, there: self._window.Rput(part, self._position, there))
        if runs.nbytes >= _LARGE_PUT_BYTES:
            self._large.add(request, self.begun)
        return request

    def get(self, runs: ByteRuns, out: Bytes) -> MPI.Request:
        """Begin to copy bytes from the peer."""
        self.begun += 1
        return _transfer(runs, out, lambda part, there: self._window.Rget(part, self._position, there))

    def change(
        self, word: int, values: NDArray[np.int64], before: NDArray[np.int64], op: MPI.Op = MPI.REPLACE
    ) -> MPI.Request:
        """Begin to set consecutive words of the peer, each atomically, and to get their old values.

        MPI orders operations on the same word, and no others.
        """
        self.begun += 1
        # The type that mpi4py sees in the arrays: Open MPI adds equal types only.
        there = word * 8, len(values), MPI.LONG
        return self._window.Rget_accumulate(values, before, self._position, there, op=op)

    def arrived(self, begun: int) -> bool:
        """Whether the first ``begun`` operations have arrived; asks the peer, does not block."""
        if self._arrived < begun:
            if self._question is None:
                self._ask()
            else:
                self._take_answer(*self._question)
        return self._arrived >= begun

    def _ask(self) -> None:
        there = 0, 8, MPI.BYTE
        self._question = self._window.Rget(self._answer, self._position, there), self.begun
        self._asked += 1

    def _take_answer(self, question: MPI.Request, then: int) -> None:
        # ``then`` is how many operations had begun when the question was sent. An answer is looked for only
        # when large puts from before it are complete, since a flush would wait for these.
        self._large.under_way()
        if any(begun <= then for begun in self._large.kept) or not question.Test():
            return
        self._question = None
        self._quiet = self._quiet + 1 if then == self.begun else 0
        if self._quiet < _ANSWERS and self._asked < _MOST_QUESTIONS:
            self._ask()
            return
        self._window.Flush(self._position)
        self._counters.flushes += 1
        self._arrived, self._asked, self._quiet = self.begun, 0, 0


def _transfer(runs: ByteRuns, data: Bytes, call: Callable[[Any, Any], MPI.Request]) -> MPI.Request:
    # Short runs travel together, as one datatype.
    if len(runs.offsets) == 1:
        # By far the most frequent case: needs no datatype of its own.
        return call([data, MPI.BYTE], (runs.offsets[0], runs.nbytes, MPI.BYTE))
    first = runs.offsets[0]
    kind = MPI.BYTE.Create_hindexed(runs.lengths, [offset - first for offset in runs.offsets])
    kind.Commit()
    try:
        return call([data, MPI.BYTE], (first, 1, kind))
    finally:
        # MPI keeps the datatype as long as an operation uses it.
        kind.Free()


# Operand and old word of an operation, and both in the form that mpi4py parses fastest. A plain tuple: the
# interpreter unpacks other sequences by their methods, which takes 5 percent of an operation on a node.
_OperationMemory = tuple[memoryview, memoryview, list[Any], list[Any]]


class Atomics:
    """Atomic operations on one word at a byte offset of a rank's segment; each returns the old word.

    All ranks have to reach a word through one window: MPI promises nothing for atomics of two windows over
    the same memory. So a machine with a single rank on another node uses the window of all ranks everywhere.

    They are atomic towards each other on all ranks of a machine, since all use the same window, but not
    towards plain loads and stores. They hold ``lock``, since the progress engine is another thread; functions
    of ``fetching`` do not, if the window is ``immediate`` and MPI allows concurrent calls.

    ``positions`` maps every rank id to its position in the group of the locked window, and to the offset of
    its segment in the window. In an ``immediate`` window, such as shared memory, operations complete without
    the target, and do not wait for an answer first.
    """

    def __init__(
        self,
        window: MPI.Win,
        positions: Mapping[int, tuple[int, int]],
        immediate: bool,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._window, self._positions, self._lock = window, positions, lock
        # Function that asks a rank and returns the test for its answer; None if no answer is needed.
        self.responding = None if immediate else self._responding
        self._asked = Transfers()
        # Whether other threads may call MPI during an operation, which then needs no progress by them.
        self._together = immediate and thread_level() == MPI.THREAD_MULTIPLE
        self._spare: list[_OperationMemory] = []

    def _responding(self, rank: int) -> Callable[[], bool]:
        # An operation on a rank that has just answered takes one round trip and does not hang.
        target, _ = self._positions[rank]
        answer = np.empty(8, np.uint8)
        with self._lock:
            request = self._window.Rget(answer, target, (0, 8, MPI.BYTE))
            # Keeps the memory of pending answers, also if their wait was given up.
            self._asked.under_way()
            self._asked.add(request, answer)

        def answered() -> bool:
            with self._lock:
                return bool(request.Test())

        return answered

    def fetching(self, rank: int, begin: int) -> Callable[[MPI.Op, int, int], int]:
        """Return a function that changes a word of one rank and returns the old word.

        Offsets count from ``begin``; operations are ``MPI.SUM``, ``MPI.REPLACE`` and ``MPI.NO_OP``. A closure
        saves attribute look-ups, which would take as long as the operation in shared memory.
        """
        target, base = self._positions[rank]
        base += begin
        fetch_and_op, flush, lock, spare = (
            self._window.Fetch_and_op,
            self._window.Flush,
            self._lock,
            self._spare,
        )

        def fetch(op: MPI.Op, offset: int, value: int) -> int:
            # Each call takes memory of its own, so that no lock of this library is needed.
            try:
                memory = spare.pop()
            except IndexError:
                words = np.zeros(1, np.int64).data, np.zeros(1, np.int64).data
                memory = (*words, [words[0], MPI.INT64_T], [words[1], MPI.INT64_T])
            given, found, operand, before = memory
            given[0] = value
            fetch_and_op(operand, before, target, base + offset, op)
            flush(target)
            word = found[0]
            spare.append(memory)
            return word

        def fetch_alone(op: MPI.Op, offset: int, value: int) -> int:
            with lock:
                return fetch(op, offset, value)

        return fetch if self._together else fetch_alone

    def compare_swap(self, rank: int, offset: int, expected: int, desired: int) -> int:
        """Set the word to ``desired`` if it is ``expected``; return the old word."""
        target, begin = self._positions[rank]
        new, old, before = [np.array([number], np.int64) for number in (desired, expected, 0)]
        with self._lock:
            specs = [new, MPI.INT64_T], [old, MPI.INT64_T], [before, MPI.INT64_T]
            self._window.Compare_and_swap(*specs, target, begin + offset)
            self._window.Flush(target)
        return int(before[0])


# Most notifications that travel as one message: Open MPI refuses more than 4 KiB between hosts.
_MOST_WORDS = 64


class SharedLink:
    """Link to a peer on this node: its ``memory``, and stores to its words behind a fence.

    There is no put and no get: who has memory at hand copies to and from it. Other methods are those of
    :class:`RemoteLink`, so that their callers need no branch; there is never anything to advance.
    """

    # Bytes under way.
    moving = 0

    def __init__(self, memory: Bytes, fence: Callable[[], object]) -> None:
        self.memory: Bytes | None = memory
        self._words, self._fence = memory.data.cast("q"), fence

    def notify(self, word: int, value: int, *, ordered: bool = True, last: bool = False) -> None:
        """Set a word of the peer; stores become visible in order."""
        self._fence()
        self._words[word] = value

    def close_delivery(self) -> None:
        """Do nothing."""

    def advance(self) -> bool:
        """Return True: nothing is pending."""
        return True


@dataclass
class _Delivery:
    """Some puts, the notification after them, and their progress.

    Open, while puts are added; then pending, from ``notify`` on, in the order of the notifications::

        transfers not complete   MPI still reads sources of the puts
        upto is a number         sources are read; waits until so many operations have arrived
        removed                  its word is on the way
    """

    transfers: Transfers = field(default_factory=Transfers)
    # Whether any put has begun: a put that is complete at this rank may not be complete at the peer.
    begun: bool = False
    notification: tuple[int, int] | None = None
    # Whether the notification also waits for the notifications before it.
    last: bool = False
    # Number of operations whose arrival the notification awaits; None until MPI has read all sources.
    upto: int | None = None


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _reaching(method: Callable[Concatenate[RemoteLink, _P], _T]) -> Callable[Concatenate[RemoteLink, _P], _T]:
    # Some networks lose a killed rank before other ranks notice its death: MPI's error is due to the peer.
    @wraps(method)
    def call(self: RemoteLink, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(self, *args, **kwargs)
        except MPI.Exception as error:
            cause = f"MPI does not reach it any more: {error}"
            raise PeerFailedError(f"rank {self.rank}: {cause}", self.rank, cause) from error

    return call


class RemoteLink:
    """Link to a peer on another node: request-based puts, a flush, then an atomic notification.

    No method blocks for the length of a transfer, or on a peer that does not answer: ``notify`` leaves the
    remaining steps to ``advance``, which every wait and the progress engine call. Every method raises
    ``PeerFailedError`` if MPI does not reach the peer any more, whose rank id is ``rank``.

    MPI orders only operations on the same word, so a notification begins after the puts before it have
    arrived. It waits for other notifications only with ``last``, so that many can be pending at once.
    Notifications of neighbouring words travel as one if they are due together. The link keeps the sources of
    puts until MPI has sent them.

    ``_open`` collects the puts since the last notification. ``_pending`` are closed deliveries, oldest first;
    only the first one is sent, so ordered words leave as they were called. ``_words`` are words under way;
    ``_gets`` are gets that nobody but the link waits for.

    Methods hold ``lock``, since the progress engine is another thread. ``busy`` are the links with pending
    operations: a link adds itself; the caller that advances them all removes it.
    """

    # The peer's memory is not reachable by load and store.
    memory: Bytes | None = None

    def __init__(
        self, rank: int, rma: RmaPeer, lock: AbstractContextManager[Any], busy: set[RemoteLink]
    ) -> None:
        self.rank, self._rma, self._lock, self._busy = rank, rma, lock, busy
        self._open = _Delivery()
        self._pending: deque[_Delivery] = deque()
        self._words, self._gets = Transfers(), Transfers()
        # Bytes of transfers of which the peer knows, and does not know yet, until all are complete here.
        self.moving = self._untold = 0

    @_reaching
    def put(self, runs: ByteRuns, data: Bytes) -> MPI.Request:
        """Begin to copy a byte or more into the peer's segment; do not change them until they are sent."""
        with self._lock:
            self._busy.add(self)
            self._untold += runs.nbytes
            if self._untold >= _TOLD_BYTES:
                self._tell(self._untold)
            request = self._rma.put(runs, data)
            self._open.begun = True
            self._open.transfers.add(request, data)
            return request

    @_reaching
    def get(
        self, runs: ByteRuns, out: Bytes, *, keep: bool = False, then: Callable[[], object] = bool
    ) -> MPI.Request:
        """Begin to copy a byte or more from the peer's segment; ``out`` has them once that is complete.

        With ``keep``, the link keeps ``out`` until then, and calls ``then()`` afterwards; test the request
        only with the lock held.
        """
        with self._lock:
            self._untold += runs.nbytes * keep
            if self._untold >= _TOLD_BYTES:
                self._tell(self._untold)
            request = self._rma.get(runs, out)
            if keep:
                self._busy.add(self)
                self._gets.add(request, out, then)
            return request

    @_reaching
    def notify(self, word: int, value: int, *, ordered: bool = True, last: bool = False) -> None:
        """Set a word of the peer; if ``ordered``, after all earlier puts have arrived there.

        With ``last`` also after all earlier notifications; otherwise only after those of the same word.
        """
        with self._lock:
            self._busy.add(self)
            behind = self._open.begun or self._pending or (last and self._words.under_way())
            if ordered and behind:
                self._open.notification, self._open.last = (word, value), last
                self._close_open()
            else:
                self._send_words(word, [value])

    def close_delivery(self) -> None:
        """Flush all puts so far in later calls of ``advance``, without a notification."""
        with self._lock:
            if self._open.begun:
                self._busy.add(self)
                self._close_open()

    @_reaching
    def advance(self) -> bool:
        """Advance pending operations; return whether all are complete."""
        with self._lock:
            for delivery in self._pending:
                if delivery.upto is None and not delivery.transfers.under_way():
                    delivery.upto = self._rma.begun if delivery.begun else 0
            self._send_arrived()
            gets = self._gets.under_way()
            reads = self._open.transfers.under_way() or any(one.transfers for one in self._pending)
            moves = reads or gets
            self._untold *= moves
            if self.moving and not moves:
                self._tell(-self.moving)
            return not (self._pending or self._words.under_way() or moves)

    def _send_arrived(self) -> None:
        # Consecutive words travel together: a message costs more than its words.
        first, values = 0, list[int]()
        while self._pending and self._arrived(self._pending[0]):
            if values and self._pending[0].last:
                break
            notification = self._pending.popleft().notification
            if notification is None:
                continue
            word, value = notification
            if values and (word != first + len(values) or len(values) == _MOST_WORDS):
                self._send_words(first, values)
                values = []
            first = first if values else word
            values.append(value)
        if values:
            self._send_words(first, values)

    def _close_open(self) -> None:
        self._pending.append(self._open)
        self._open = _Delivery()

    def _arrived(self, delivery: _Delivery) -> bool:
        # Whether the puts of a delivery have arrived, and with ``last`` all earlier notifications.
        there = delivery.upto is not None and self._rma.arrived(delivery.upto)
        return there and not (delivery.last and self._words.under_way())

    def _tell(self, nbytes: int) -> None:
        # Adds to a word of the peer's header, from which the peer learns that it should call MPI often. A
        # negative number takes back what was added, once nothing is under way any more.
        self.moving += nbytes
        self._untold = 0
        self._send_words(MOVING_WORD, [nbytes], MPI.SUM)

    def _send_words(self, word: int, values: list[int], op: MPI.Op = MPI.REPLACE) -> None:
        # The operation returns the old words. Once these have arrived, the new words are set.
        source, before = np.array(values, np.int64), np.empty(len(values), np.int64)
        self._words.add(self._rma.change(word, source, before, op), (source, before))


# Link to the segment of one peer, one without ``memory`` is a ``RemoteLink``; all offsets are bytes from the
# start of that segment.
Link = SharedLink | RemoteLink
