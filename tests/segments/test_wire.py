"""What is on its way to a peer: large puts in pieces, questions and flushes."""

import random

import numpy as np
import pytest

from distdl_rma.segments.wire import Runs, Wire

PIECE = 100


class Request:
    def __init__(self, nbytes):
        self.nbytes, self.complete = nbytes, False

    def Test(self):  # noqa: N802
        return self.complete


class Window:
    """A peer's memory, to which bytes travel when the test says so; and what was asked of MPI."""

    def __init__(self, nbytes=1 << 16):
        self.memory = np.zeros(nbytes, np.uint8)
        self.puts, self.gets, self.flushes = [], [], 0

    def Rput(self, part, rank, target):  # noqa: N802
        data, (offset, nbytes, kind) = part[0], target
        if nbytes == 1 and kind.Get_size() != 1:
            # Some runs in one datatype.
            lengths, starts, *_ = kind.decode()[2]["blocklength"], kind.decode()[2]["displacements"]
            for i, start in enumerate(starts):
                stop = offset + start + lengths
                self.memory[offset + start : stop] = data[i * lengths : (i + 1) * lengths]
        else:
            self.memory[offset : offset + nbytes] = data
        self.puts.append(Request(data.nbytes))
        return self.puts[-1]

    def Rget(self, part, rank, target):  # noqa: N802
        self.gets.append(Request(8))
        return self.gets[-1]

    def Flush(self, rank):  # noqa: N802
        self.flushes += 1

    @property
    def flying(self):
        return [put for put in self.puts if not put.complete]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def window():
    return Window()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wire(window, clock):
    return Wire(window, 0, least=PIECE, clock=clock)


def put(wire, offset, nbytes):
    return wire.put(Runs((offset,), nbytes), np.ones(nbytes, np.uint8))[0]


def land(window, number=1):
    for request in window.flying[:number]:
        request.complete = True


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_of_any_runs_goes_once_to_its_place(seed, window, wire):
    chance = random.Random(seed)
    nbytes, count = chance.choice([1, 7, 30, 99, 100, 101, 250, 1000]), chance.randrange(1, 20)
    gap = chance.randrange(1, 5)
    runs = Runs(tuple(i * (nbytes + gap) for i in range(count)), nbytes)
    data = np.frombuffer(chance.randbytes(runs.total), np.uint8)
    requests = wire.put(runs, data)
    while not all(request.Test() for request in requests):
        land(window, chance.randrange(1, 4))
    expected = np.zeros_like(window.memory)
    for i, offset in enumerate(runs.offsets):
        expected[offset : offset + nbytes] = data[i * nbytes : (i + 1) * nbytes]
    np.testing.assert_array_equal(window.memory, expected)
    assert sum(request.nbytes for request in window.puts) == runs.total


def test_only_some_of_a_large_put_is_under_way_and_a_small_one_does_not_wait(window, wire):
    large = put(wire, 0, 50 * PIECE)
    assert [request.nbytes for request in window.puts] == [PIECE, PIECE]
    small = put(wire, 60 * PIECE, PIECE)
    assert window.puts[-1] is small
    assert not large.Test() and len(window.flying) == 3


def test_large_puts_take_turns(window, wire):
    first, second = put(wire, 0, 10 * PIECE), put(wire, 20 * PIECE, 2 * PIECE)
    while not second.Test():
        land(window)
    assert not first.Test()
    assert sum(request.complete for request in window.puts) <= 6


def test_more_is_under_way_where_all_has_left_before_anybody_looks(window, wire, clock):
    large, before = put(wire, 0, 200 * PIECE), 0
    for _ in range(4):
        begun = sum(request.nbytes for request in window.flying)
        assert begun > before
        before = begun
        land(window, len(window.flying))
        clock.now += 1.0
        assert not large.Test()


def test_less_is_under_way_where_it_takes_long(window, wire, clock):
    large = put(wire, 0, 400 * PIECE)
    for _ in range(4):
        land(window, len(window.flying))
        large.Test()
    many = len(window.flying)
    clock.now += 1.0
    for _ in range(20):
        land(window)
        large.Test()
        clock.now += 0.1
    assert len(window.flying) <= 2 < many
    assert max(request.nbytes for request in window.flying) == PIECE


def test_a_flush_follows_answers_between_which_nothing_began(window, wire):
    done = put(wire, 0, PIECE)
    done.complete = True
    begun = wire.begun
    assert not wire.arrived(begun) and len(window.gets) == 1
    window.gets[0].complete = True
    # Asked again: what the flush waits for may come behind the first answer.
    assert not wire.arrived(begun) and len(window.gets) == 2 and not window.flushes
    put(wire, PIECE, 8)
    window.gets[1].complete = True
    assert not wire.arrived(begun) and len(window.gets) == 3 and not window.flushes
    window.gets[2].complete = True
    assert wire.arrived(begun) and window.flushes == 1
    # That flush was one of all that had begun.
    assert wire.arrived(wire.begun) and window.flushes == 1 and len(window.gets) == 3


def test_others_that_always_begin_something_do_not_put_a_flush_off_for_ever(window, wire):
    begun = put(wire, 0, 8) and wire.begun
    for turn in range(10):
        if wire.arrived(begun):
            break
        put(wire, 8 * (turn + 1), 8)
        window.gets[-1].complete = True
    assert window.flushes == 1 and turn <= 4


def test_nothing_large_begins_between_a_question_and_the_flush(window, wire):
    put(wire, 0, 8).complete = True
    begun = wire.begun
    assert not wire.arrived(begun)
    large = put(wire, 1000, 5 * PIECE)
    assert len(window.puts) == 1
    while not wire.arrived(begun):
        window.gets[-1].complete = True
        large.Test()
        assert len(window.puts) == 1 or window.flushes
    while not large.Test():
        land(window)
    assert sum(request.nbytes for request in window.puts) == 8 + 5 * PIECE
