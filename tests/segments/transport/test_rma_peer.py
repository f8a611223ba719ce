"""When what was put has arrived at a peer: questions, answers and flushes."""

import numpy as np
import pytest

from distdl_rma.segments.counters import Counters
from distdl_rma.segments.transport.rma_peer import ByteRuns, RmaPeer

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
