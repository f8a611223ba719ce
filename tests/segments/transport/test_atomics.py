"""Which words of a window atomic operations work on, and when a rank is asked to answer first."""

import contextlib

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma.segments.transport.atomics import Atomics


class Window:
    """Two segments in one process, each at an offset; requests are complete when the test says so."""

    def __init__(self):
        self.words = {position: np.zeros(8, np.int64) for position in (0, 1)}
        self.flushed, self.complete = [], False

    def Fetch_and_op(self, operand, before, target, offset, op):  # noqa: N802
        word = self.words[target][offset // 8 :][:1]
        before[:] = word
        word[:] = word + operand if op == MPI.SUM else operand if op == MPI.REPLACE else word

    def Compare_and_swap(self, new, expected, before, target, offset):  # noqa: N802
        word = self.words[target][offset // 8 :][:1]
        before[:] = word
        if word == expected:
            word[:] = new

    def Flush(self, target):  # noqa: N802
        self.flushed.append(target)

    def Rget(self, answer, target, there):  # noqa: N802
        return self

    def Test(self):  # noqa: N802
        return self.complete


def atomics(window, immediate=True):
    return Atomics(window, {5: (1, 16), 7: (0, 0)}, immediate, contextlib.nullcontext())


def test_each_operation_changes_one_word_of_one_segment_and_returns_what_was_there():
    window = Window()
    there = atomics(window)
    assert there.fetch(5, 8, MPI.SUM, 3) == 0 and there.fetch(5, 8, MPI.SUM, -1) == 3
    assert there.fetch(5, 8, MPI.REPLACE, 9) == 2 and there.fetch(5, 8, MPI.NO_OP, 0) == 9
    assert there.compare_swap(5, 8, 1, 4) == 9 and there.compare_swap(5, 8, 9, 4) == 9
    # Its segment begins two words into the window.
    assert window.words[1].tolist() == [0, 0, 0, 4, 0, 0, 0, 0] and not window.words[0].any()
    assert window.flushed == [1] * 6


@pytest.mark.parametrize("immediate", [True, False])
def test_only_a_rank_whose_help_is_needed_is_asked_to_answer(immediate):
    window = Window()
    answered = atomics(window, immediate).responding(7)
    if immediate:
        assert answered is None
    else:
        assert not answered()
        window.complete = True
        assert answered()


def test_questions_that_were_answered_are_forgotten():
    window = Window()
    there = atomics(window, immediate=False)
    for _ in range(3):
        there.responding(7)
    assert len(there._asked) == 3
    window.complete = True
    there.responding(5)
    assert len(there._asked) == 1
