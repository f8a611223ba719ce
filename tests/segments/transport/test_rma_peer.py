"""When what was put has arrived at a peer: questions, answers and flushes."""

import contextlib

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma.segments.counters import Counters
from distdl_rma.segments.transport.rma_peer import Atomics, ByteRuns, RmaPeer

LARGE = 1 << 17


class Request:
    complete = False

    def Test(self):  # noqa: N802
        return self.complete


class Window:
    """Notes what is asked of MPI; the test says what is complete."""

    def __init__(self):
        self.puts, self.gets, self.flushes = [], [], 0

    def Rput(self, part, rank, target):  # noqa: N802
        self.puts.append(Request())
        return self.puts[-1]

    def Rget(self, part, rank, target):  # noqa: N802
        self.gets.append(Request())
        return self.gets[-1]

    def Flush(self, rank):  # noqa: N802
        self.flushes += 1

    def answer(self):
        self.gets[-1].complete = True


@pytest.fixture
def window():
    return Window()


@pytest.fixture
def wire(window):
    return RmaPeer(window, 0, Counters())


def put(wire, nbytes=8):
    return wire.put(ByteRuns((0,), nbytes), np.ones(nbytes, np.uint8))[0]


def test_stretches_lie_one_behind_the_other_when_they_are_packed():
    even, uneven = ByteRuns((5, 0), 3), ByteRuns.together([(5, 1), (0, 3), (9, 0)])
    assert even.total == 6 and list(even.packed()) == [(5, slice(0, 3)), (0, slice(3, 6))]
    assert uneven.total == 4 and uneven.nbytes == 3
    assert list(uneven.packed()) == [(5, slice(0, 1)), (0, slice(1, 4)), (9, slice(4, 4))]
    assert list(ByteRuns((), 3).packed()) == []


@pytest.mark.parametrize(("nbytes", "transfers"), [(8, 1), (LARGE, 3)])
@pytest.mark.parametrize("way", ["put", "get"])
def test_short_stretches_are_one_transfer_and_long_ones_one_each(window, wire, nbytes, transfers, way):
    stretches = ByteRuns(tuple(range(0, 6 * nbytes, 2 * nbytes)), nbytes)
    begun = getattr(wire, way)(stretches, np.ones(stretches.total, np.uint8))
    assert len(begun) == len(window.puts if way == "put" else window.gets) == transfers


def test_nothing_is_asked_for_what_is_known_to_be_there(window, wire):
    assert wire.arrived(0) and not window.gets and not window.flushes


def test_a_flush_follows_two_answers_between_which_nothing_began(window, wire):
    put(wire)
    begun = wire.begun
    assert not wire.arrived(begun) and len(window.gets) == 1
    assert not wire.arrived(begun) and len(window.gets) == 1
    window.answer()
    # Asked again: what the flush waits for may come behind the first answer.
    assert not wire.arrived(begun) and len(window.gets) == 2 and not window.flushes
    put(wire)
    for questions in (3, 4):
        window.answer()
        assert not wire.arrived(begun) and len(window.gets) == questions and not window.flushes
    window.answer()
    assert wire.arrived(begun) and window.flushes == 1
    # That flush was one of all that had begun.
    assert wire.arrived(wire.begun) and window.flushes == 1 and len(window.gets) == 4


def test_one_flush_serves_all_who_wait(window, wire):
    begun = []
    for _ in range(3):
        put(wire)
        begun.append(wire.begun)
    while not wire.arrived(begun[1]):
        window.answer()
    assert all(wire.arrived(number) for number in begun) and window.flushes == 1


def test_others_that_always_begin_something_do_not_put_a_flush_off_for_ever(window, wire):
    put(wire)
    begun = wire.begun
    while not wire.arrived(begun):
        put(wire)
        window.answer()
        assert len(window.gets) <= 5
    assert window.flushes == 1


def test_no_flush_before_the_large_puts_that_began_before_the_question_are_complete(window, wire):
    large = put(wire, LARGE)
    put(wire)
    begun = wire.begun
    for _ in range(9):
        assert not wire.arrived(begun) and not window.flushes
        window.answer()
    large.complete = True
    while not wire.arrived(begun):
        window.answer()
    assert window.flushes == 1


def test_a_stream_of_large_puts_does_not_put_a_flush_off_for_ever(window, wire):
    puts = [put(wire, LARGE)]
    begun = wire.begun
    while not wire.arrived(begun):
        # There is always one under way.
        puts.append(put(wire, LARGE))
        puts[-2].complete = True
        window.answer()
        assert len(window.gets) <= 5 and len(puts) < 30
    assert window.flushes == 1


def test_large_puts_that_are_complete_are_forgotten(wire):
    for _ in range(100):
        put(wire, LARGE).complete = True
    assert len(wire._large) <= 1


class Words:
    """Two segments in one process, each at an offset; requests are complete when the test says so."""

    def __init__(self):
        self.words = {position: np.zeros(8, np.int64) for position in (0, 1)}
        self.flushed, self.complete = [], False

    def Fetch_and_op(self, operand, before, target, offset, op):  # noqa: N802
        word, given = self.words[target][offset // 8 :][:1], operand[0][0]
        before[0][0] = word[0]
        word[:] = word + given if op == MPI.SUM else given if op == MPI.REPLACE else word

    def Compare_and_swap(self, new, expected, before, target, offset):  # noqa: N802
        word = self.words[target][offset // 8 :][:1]
        before[0][0] = word[0]
        if word == expected[0][0]:
            word[:] = new[0][0]

    def Flush(self, target):  # noqa: N802
        self.flushed.append(target)

    def Rget(self, answer, target, there):  # noqa: N802
        return self

    def Test(self):  # noqa: N802
        return self.complete


def atomics(window, immediate=True):
    return Atomics(window, {5: (1, 16), 7: (0, 0)}, immediate, contextlib.nullcontext())


def test_each_operation_changes_one_word_of_one_segment_and_returns_what_was_there():
    window = Words()
    there = atomics(window)
    fetch = there.fetching(5, 4)
    assert fetch(MPI.SUM, 4, 3) == 0 and fetch(MPI.SUM, 4, -1) == 3
    assert fetch(MPI.REPLACE, 4, 9) == 2 and fetch(MPI.NO_OP, 4, 0) == 9
    assert there.compare_swap(5, 8, 1, 4) == 9 and there.compare_swap(5, 8, 9, 4) == 9
    # Its segment begins two words into the window.
    assert window.words[1].tolist() == [0, 0, 0, 4, 0, 0, 0, 0] and not window.words[0].any()
    assert window.flushed == [1] * 6


@pytest.mark.parametrize("immediate", [True, False])
def test_only_a_rank_whose_help_is_needed_is_asked_to_answer(immediate):
    window = Words()
    responding = atomics(window, immediate).responding
    if immediate:
        assert responding is None
    else:
        answered = responding(7)
        assert not answered()
        window.complete = True
        assert answered()


def test_questions_that_were_answered_are_forgotten():
    window = Words()
    there = atomics(window, immediate=False)
    for _ in range(3):
        there.responding(7)
    assert len(there._asked) == 3
    window.complete = True
    there.responding(5)
    assert len(there._asked) == 1
