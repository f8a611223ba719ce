"""Atomic operations on 64-bit integers in the segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from mpi4py import MPI


class Atomics:
    """Operations on one word at a byte offset of a rank's segment; each returns what the word was before.

    Atomic towards each other on all ranks of a machine, since all go through the same window: two kinds of
    atomic operation on one word would not be. Plain loads and stores of such a word are no part of this.

    ``positions`` tell for every rank id its position in the group of the window, which is locked, and the
    offset of its segment in it. ``immediate`` windows complete an operation without the target's help, as
    shared memory does. ``lock`` is held during an operation: the progress engine is another thread.
    """

    def __init__(
        self,
        window: MPI.Win,
        positions: Mapping[int, tuple[int, int]],
        immediate: bool,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._window, self._positions, self._immediate, self._lock = window, positions, immediate, lock
        self._asked: list[tuple[MPI.Request, object]] = []

    def responding(self, rank: int) -> Callable[[], bool] | None:
        """Test of whether a rank answers; None where its answer is not needed.

        An operation on a rank that answered takes one round trip and cannot hang.
        """
        if self._immediate:
            return None
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

    def fetch(self, rank: int, offset: int, op: MPI.Op, value: int) -> int:
        """Change the word by ``MPI.SUM`` or ``MPI.REPLACE``, or leave it by ``MPI.NO_OP``."""
        target, begin = self._positions[rank]
        operand, before = np.array([value], np.int64), np.empty(1, np.int64)
        with self._lock:
            self._window.Fetch_and_op(operand, before, target, begin + offset, op)
            self._window.Flush(target)
        return int(before[0])

    def compare_swap(self, rank: int, offset: int, expected: int, desired: int) -> int:
        """Set the word to ``desired`` if it is ``expected``."""
        target, begin = self._positions[rank]
        new, old, before = (np.array([value], np.int64) for value in (desired, expected, 0))
        with self._lock:
            self._window.Compare_and_swap(new, old, before, target, begin + offset)
            self._window.Flush(target)
        return int(before[0])
