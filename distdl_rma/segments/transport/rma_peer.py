"""What MPI carries to and from the memory of peers, when it has arrived there, and atomic operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distdl_rma.segments.counters import Counters

Bytes = NDArray[np.uint8]

# From so many bytes on, a contiguous run is a transfer of its own instead of a part of an MPI datatype.
_LONG_RUN_BYTES = 64 << 10
# Up to so many bytes, parts of a list travel together: packing them takes less than a transfer each.
SHORT_RUN_BYTES = 2 << 10
# Answers before a flush, with nothing begun between them: what it waits for may come behind the first.
# Where others begin something all the time, it follows after so many questions.
_ANSWERS, _MOST_QUESTIONS = 2, 5


class ByteRuns(NamedTuple):
    """Stretches of contiguous bytes in a segment: where each begins, and how long all are.

    Where they are not equally long, ``lengths`` are those of each, and ``nbytes`` is the largest.
    """

    offsets: tuple[int, ...]
    nbytes: int
    lengths: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all stretches."""
        return sum(self.lengths) if self.lengths else len(self.offsets) * self.nbytes

    def packed(self) -> Iterator[tuple[int, slice]]:
        """Each stretch's offset, and where it is when they lie one behind the other."""
        end = 0
        for offset, nbytes in zip(self.offsets, self.lengths or repeat(self.nbytes), strict=False):
            end += nbytes
            yield offset, slice(end - nbytes, end)

    @staticmethod
    def together(parts: Sequence[tuple[int, int]]) -> ByteRuns:
        """Those with such offsets and lengths, at least one."""
        offsets, lengths = zip(*parts, strict=True)
        return ByteRuns(offsets, max(lengths), lengths)


class RmaPeer:
    """Carries bytes to and from the memory of one peer, and says when they have arrived there.

    A put that is complete at this end is not yet complete at the peer. Only a flush tells, of everything
    that was begun, and it cannot be interrupted: it would spin on a core that others need, for ever if the
    peer is gone. So it follows small gets that were answered while nothing else began, if others leave
    that much time, and after the large puts before them. The caller has the lock.

    The window, locked, is one over the segments of all ranks, and ``position`` the peer's rank in its group.
    ``begun`` operations have begun so far; flushes are counted.
    """

    def __init__(self, window: MPI.Win, position: int, counters: Counters) -> None:
        self._window, self._position, self._counters = window, position, counters
        # Large puts under way, each with the number that had begun with it.
        self._large: list[tuple[MPI.Request, int]] = []
        # Of the operations begun, how many have arrived for sure.
        self.begun, self._arrived = 0, 0
        self._question: tuple[MPI.Request, int] | None = None
        self._answer = np.empty(1, np.int64)
        # Questions since the last flush; answers in a row between which nothing began.
        self._asked, self._quiet = 0, 0

    def put(self, runs: ByteRuns, data: Bytes) -> list[MPI.Request]:
        """Begin to copy contiguous bytes to the peer; they must not change until that is complete."""
        self.begun += 1
        requests = _transfers(runs, data, lambda part, there: self._window.Rput(part, self._position, there))
        if runs.total >= _LONG_RUN_BYTES:
            self._large = [*self._under_way(), *((request, self.begun) for request in requests)]
        return requests

    def get(self, runs: ByteRuns, out: Bytes) -> list[MPI.Request]:
        """Begin to copy bytes from the peer."""
        self.begun += 1
        return _transfers(runs, out, lambda part, there: self._window.Rget(part, self._position, there))

    def replace(self, word: int, values: NDArray[np.int64], before: NDArray[np.int64]) -> MPI.Request:
        """Begin to set words of the peer, from one on, each atomically; complete when the old ones are here.

        Then they are set. MPI keeps the order of those that set the same word, and of no others.
        """
        self.begun += 1
        there = word * 8, len(values), MPI.INT64_T
        return self._window.Rget_accumulate(values, before, self._position, there, op=MPI.REPLACE)

    def arrived(self, begun: int) -> bool:
        """Whether the first operations have arrived, as many as had begun then; asks, and does not block."""
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
        self._large = self._under_way()
        if any(begun <= then for _, begun in self._large) or not question.Test():
            return
        self._question = None
        self._quiet = self._quiet + 1 if then == self.begun else 0
        if self._quiet < _ANSWERS and self._asked < _MOST_QUESTIONS:
            self._ask()
            return
        self._window.Flush(self._position)
        self._counters.flushes += 1
        self._arrived, self._asked, self._quiet = self.begun, 0, 0

    def _under_way(self) -> list[tuple[MPI.Request, int]]:
        return [large for large in self._large if not large[0].Test()]


def _transfers(runs: ByteRuns, data: Bytes, call: Callable[[Any, Any], MPI.Request]) -> list[MPI.Request]:
    # Many short runs travel together, as one datatype.
    if len(runs.offsets) == 1:
        # By far the most: without slices.
        there = runs.offsets[0], runs.nbytes, MPI.BYTE
        return [call([data, MPI.BYTE], there)] if runs.nbytes else []
    if not runs.total:
        return []
    if runs.nbytes >= _LONG_RUN_BYTES:
        return [
            call([data[part], MPI.BYTE], (offset, part.stop - part.start, MPI.BYTE))
            for offset, part in runs.packed()
        ]
    first = runs.offsets[0]
    begins = [offset - first for offset in runs.offsets]
    if runs.lengths:
        kind = MPI.BYTE.Create_hindexed(runs.lengths, begins)
    else:
        kind = MPI.BYTE.Create_hindexed_block(runs.nbytes, begins)
    kind.Commit()
    try:
        return [call([data, MPI.BYTE], (first, 1, kind))]
    finally:
        # MPI keeps what is still in use.
        kind.Free()


# What an operation is given and finds, and both as MPI takes them soonest. A plain tuple: the interpreter
# takes others apart by their methods, which is a twentieth of an operation on a node.
_OperationMemory = tuple[memoryview, memoryview, list[Any], list[Any]]


def _operation_memory() -> _OperationMemory:
    given, found = (np.zeros(1, np.int64).data for _ in range(2))
    return given, found, [given, MPI.INT64_T], [found, MPI.INT64_T]


class Atomics:
    """Operations on one word at a byte offset of a rank's segment; each returns what the word was before.

    Atomic towards each other on all ranks of a machine, since all go through the same window: two kinds of
    atomic operation on one word would not be. Plain loads and stores of such a word are no part of this.

    ``positions`` tell for every rank id its position in the group of the window, which is locked, and the
    offset of its segment in it. ``immediate`` windows complete an operation without the target's help, as
    shared memory does: no answer is waited for. ``lock`` is held during an operation: the progress engine is
    another thread.
    """

    def __init__(
        self,
        window: MPI.Win,
        positions: Mapping[int, tuple[int, int]],
        immediate: bool,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._window, self._positions, self._lock = window, positions, lock
        # Test of whether a rank answers; None where no answer is needed.
        self.responding = None if immediate else self._responding
        self._asked: list[tuple[MPI.Request, object]] = []
        # Others may call MPI meanwhile, and nothing of theirs has to move on for this.
        self._together = immediate and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._spare: list[_OperationMemory] = []
        # What an exchange hands in, compares with and gets back. Needs the lock.
        words = [np.zeros(1, np.int64).data for _ in range(3)]
        self._operand, self._expected, self._before = words
        self._specs = [[word, MPI.INT64_T] for word in words]

    def _responding(self, rank: int) -> Callable[[], bool]:
        # An operation on a rank that answered takes one round trip and cannot hang.
        target, _ = self._positions[rank]
        answer = np.empty(8, np.uint8)
        with self._lock:
            request = self._window.Rget(answer, target, (0, 8, MPI.BYTE))
            # The answer's memory is kept while it is under way, also when its wait is given up.
            self._asked = [asked for asked in self._asked if not asked[0].Test()]
            self._asked.append((request, answer))

        def answered() -> bool:
            with self._lock:
                return bool(request.Test())

        return answered

    def fetching(self, rank: int, begin: int) -> Callable[[MPI.Op, int, int], int]:
        """What changes a word of one rank, at an offset from ``begin`` on; returns what the word was before.

        By ``MPI.SUM`` or ``MPI.REPLACE`` with a number, or not at all, by ``MPI.NO_OP``. It holds all that it
        needs: looking that up each time would take as long as a word in shared memory.
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
            # No two threads get the same memory, so that only MPI may want them one after the other.
            try:
                memory = spare.pop()
            except IndexError:
                memory = _operation_memory()
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
        """Set the word to ``desired`` if it is ``expected``."""
        target, begin = self._positions[rank]
        new, old, before = self._specs
        with self._lock:
            self._operand[0], self._expected[0] = desired, expected
            self._window.Compare_and_swap(new, old, before, target, begin + offset)
            self._window.Flush(target)
            return self._before[0]
