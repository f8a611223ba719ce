"""When what was put has arrived at a peer: questions, answers and flushes."""

import contextlib
import random
import threading

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.transport import links
from distdl_rma.segments.transport.links import Atomics, ByteRuns, RemoteLink, RmaPeer
from distdl_rma.trace import Counters

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


def put_to(wire, nbytes=8):
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
    put_to(wire)
    begun = wire.begun
    assert not wire.arrived(begun) and len(window.gets) == 1
    assert not wire.arrived(begun) and len(window.gets) == 1
    window.answer()
    # Asked again: what the flush waits for may come behind the first answer.
    assert not wire.arrived(begun) and len(window.gets) == 2 and not window.flushes
    put_to(wire)
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
        put_to(wire)
        begun.append(wire.begun)
    while not wire.arrived(begun[1]):
        window.answer()
    assert all(wire.arrived(number) for number in begun) and window.flushes == 1


def test_others_that_always_begin_something_do_not_put_a_flush_off_for_ever(window, wire):
    put_to(wire)
    begun = wire.begun
    while not wire.arrived(begun):
        put_to(wire)
        window.answer()
        assert len(window.gets) <= 5
    assert window.flushes == 1


def test_no_flush_before_the_large_puts_that_began_before_the_question_are_complete(window, wire):
    large = put_to(wire, LARGE)
    put_to(wire)
    begun = wire.begun
    for _ in range(9):
        assert not wire.arrived(begun) and not window.flushes
        window.answer()
    large.complete = True
    while not wire.arrived(begun):
        window.answer()
    assert window.flushes == 1


def test_a_stream_of_large_puts_does_not_put_a_flush_off_for_ever(window, wire):
    puts = [put_to(wire, LARGE)]
    begun = wire.begun
    while not wire.arrived(begun):
        # There is always one under way.
        puts.append(put_to(wire, LARGE))
        puts[-2].complete = True
        window.answer()
        assert len(window.gets) <= 5 and len(puts) < 30
    assert window.flushes == 1


def test_large_puts_that_are_complete_are_forgotten(wire):
    for _ in range(100):
        put_to(wire, LARGE).complete = True
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


_WORDS = 16


class Operation:
    """An operation under way, which is also its request."""

    def __init__(self, window, words, carry_out, complete_when_there):
        self.window, self.words, self.complete_when_there = window, words, complete_when_there
        self._carry_out = carry_out
        self.there = False
        self.complete = False

    def arrive(self):
        self._carry_out()
        self.there = self.complete = True

    def Test(self):  # noqa: N802
        self.window.turn()
        return self.complete


class WeakWindow:
    """A peer's memory, in which operations arrive in any order, those that set one word excepted.

    A put is complete at its origin at any time before it arrives, and then its memory is used again.
    """

    def __init__(self, seed, nbytes=4096):
        self.memory = np.zeros(nbytes, np.uint8)
        self.words = self.memory.view(np.int64)
        self._chance = random.Random(seed)
        self._under_way = []
        self.flushes = 0

    def turn(self):
        while self._under_way and self._chance.random() < 0.5:
            self._step(self._chance.choice(self._under_way))

    def _step(self, operation):
        if not operation.complete_when_there and not operation.complete:
            operation.complete = True
            return
        chosen = operation
        # Of those before it that set one of its words, the first; the same of that one.
        while before := [
            other for other in self._under_way[: self._under_way.index(chosen)] if other.words & chosen.words
        ]:
            chosen = before[0]
        chosen.arrive()
        self._under_way.remove(chosen)

    def _begin(self, words, carry_out, complete_when_there):
        self._under_way.append(Operation(self, frozenset(words), carry_out, complete_when_there))
        return self._under_way[-1]

    def Rput(self, part, rank, target):  # noqa: N802
        offset, nbytes, _ = target
        data = part[0].copy()
        return self._begin((), lambda: self._store(offset, data[:nbytes]), False)

    def Rget(self, part, rank, target):  # noqa: N802
        out, (offset, nbytes, _) = np.asarray(part[0] if isinstance(part, list) else part), target
        return self._begin(
            (), lambda: out.view(np.uint8).__setitem__(..., self.memory[offset : offset + nbytes]), True
        )

    def Rget_accumulate(self, source, before, rank, target, op):  # noqa: N802
        offset, count, _ = target
        assert len(source) == len(before) == count
        words = range(offset // 8, offset // 8 + count)
        return self._begin(words, lambda: self._store(offset, source.view(np.uint8)), True)

    def Flush(self, rank):  # noqa: N802
        self.flushes += 1
        while self._under_way:
            self._under_way.pop(0).arrive()

    def _store(self, offset, data):
        self.memory[offset : offset + data.size] = data


def link_over(seed):
    window = WeakWindow(seed)
    return window, RemoteLink(1, RmaPeer(window, 0, Counters()), threading.RLock(), set())


def put(link, number):
    """Put a number to a place of its own, behind the words of the notifications."""
    link.put(ByteRuns((8 * (_WORDS + number),), 8), np.array([number + 1]).view(np.uint8))


@pytest.mark.parametrize("seed", range(60))
def test_a_notification_is_seen_after_all_earlier_puts_and_a_last_one_after_all_notifications(seed):
    window, link = link_over(seed)
    chance = random.Random(-seed)
    puts, notified, together = 0, [], 0

    def look():
        nonlocal together
        for number, (before, last) in enumerate(notified):
            if window.words[number]:
                assert window.words[_WORDS : _WORDS + before].all()
                assert not last or window.words[:number].all()
        together = max(together, sum(bool(operation.words) for operation in window._under_way))

    while len(notified) < _WORDS:
        if chance.random() < 0.4:
            put(link, puts)
            puts += 1
        elif chance.random() < 0.5:
            notified.append((puts, chance.random() < 0.3))
            link.notify(len(notified) - 1, 7, last=notified[-1][1])
        else:
            link.advance()
        window.turn()
        look()
    while not link.advance():
        look()
    look()
    assert window.words[:_WORDS].all()


@pytest.mark.parametrize("seed", range(60))
def test_values_of_one_word_become_visible_in_order_whatever_is_put_between(seed):
    window, link = link_over(seed)
    chance = random.Random(-seed)
    seen, before = [0], {0: 0}
    # Other words of its row travel with it.
    others = chance.random() < 0.5
    puts = 0
    for value in range(1, 40):
        for _ in range(chance.choice((0, 0, 1, 3))):
            put(link, puts)
            puts += 1
        before[value] = puts
        link.notify(0, value, last=chance.random() < 0.1)
        if others:
            link.notify(1, value)
        if chance.random() < 0.5:
            link.advance()
        window.turn()
        seen.append(int(window.words[0]))
        assert window.words[_WORDS : _WORDS + before[seen[-1]]].all()
    while not link.advance():
        seen.append(int(window.words[0]))
    assert seen == sorted(seen) and window.words[0] == 39


@pytest.mark.parametrize("most", [1, 5, 64])
def test_notifications_given_together_need_one_flush_and_travel_together(monkeypatch, most):
    monkeypatch.setattr(links, "_MOST_WORDS", most)
    window, link = link_over(2)
    still(window)
    # All in a row but one.
    numbers = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3]
    for number in numbers:
        put(link, number)
        link.notify(number, 5 + number)
    while not window.flushes:
        arrive(window)
        assert not window.words[:_WORDS].any()
        link.advance()
    assert window.flushes == 1
    runs = [numbers[:3], numbers[3:11], numbers[11:]]
    wanted = [run[at : at + most] for run in runs for at in range(0, len(run), most)]
    assert [sorted(operation.words) for operation in window._under_way] == wanted
    for operation in reversed(window._under_way[:]):
        operation.arrive()
    assert link.advance() and window.flushes == 1
    assert window.words[:12].tolist() == [5 + number for number in range(12)]


def test_notifications_that_are_over_are_forgotten():
    window, link = link_over(1)
    still(window)
    for number in range(1000):
        link.notify(0, number)
        arrive(window)
    assert len(link._words) <= 128


@pytest.mark.parametrize("seed", range(60))
def test_when_nothing_is_left_to_advance_everything_is_there(seed):
    window, link = link_over(seed)
    chance = random.Random(seed)
    word, puts = 0, 0
    for _ in range(20):
        for _ in range(chance.randrange(4)):
            put(link, puts)
            puts += 1
        if chance.random() < 0.5 and word < _WORDS:
            link.notify(word, 5, ordered=chance.random() < 0.7)
            word += 1
        if chance.random() < 0.3:
            link.close_delivery()
            while not link.advance():
                pass
            assert window.words[:word].all() and window.words[_WORDS : _WORDS + puts].all()


def test_an_unordered_notification_waits_for_nothing():
    window, link = link_over(1)
    put(link, 0)
    link.notify(0, 5)
    link.notify(1, 6, ordered=False)
    # Nothing was advanced: the only operations that have begun are the put and this one.
    assert not window.flushes
    assert sorted(sorted(o.words) for o in window._under_way) == [[], [1]]


def go_on(link):
    """As the segment does."""
    for busy in tuple(link._busy):
        if busy.advance():
            link._busy.discard(busy)


def still(window):
    """Nothing arrives by itself."""
    window.turn = lambda: None


def arrive(window):
    for operation in window._under_way[:]:
        operation.arrive()
        window._under_way.remove(operation)


def test_a_flush_that_was_given_up_goes_on():
    window, link = link_over(0)
    put(link, 0)
    arrive(window)
    go_on(link)
    assert not link._busy
    link.close_delivery()
    # Asked, and left there: the links that are busy are advanced all the same.
    window.turn = lambda: None
    assert not link.advance() and link in link._busy
    del window.turn
    while link._busy:
        go_on(link)
    assert window.flushes == 1


def test_nothing_is_flushed_before_the_peer_answered():
    window, link = link_over(1)
    window.turn = lambda: None
    put(link, 0)
    link.notify(0, 5)
    for _ in range(5):
        assert not link.advance() and not window.flushes
    del window.turn
    while not link.advance():
        pass
    assert window.flushes == 1 and window.words[0] == 5


def test_sources_of_puts_are_not_kept_for_ever():
    _, link = link_over(1)
    for number in range(1000):
        put(link, number % 100)
    assert len(link._open.transfers) < 400
    # They are flushed all the same.
    link.close_delivery()
    assert len(link._pending) == 1


def test_an_array_that_is_got_is_kept_until_it_is_there():
    window, link = link_over(1)
    window.turn = lambda: None
    link.get(ByteRuns((0,), 8), np.empty(8, np.uint8), keep=True)
    assert not link.advance() and len(link._gets) == 1
    del window.turn
    while not link.advance():
        pass
    assert not link._gets


def test_a_peer_that_mpi_does_not_reach_has_failed():
    window, link = link_over(1)

    def lost(*arguments, **options):
        raise MPI.Exception(MPI.ERR_OTHER)

    put(link, 0)
    window.Rput = window.Rget = window.Rget_accumulate = lost
    link.notify(0, 1)
    for act in (
        lambda: put(link, 1),
        lambda: link.get(ByteRuns((0,), 8), np.empty(8, np.uint8)),
        lambda: link.notify(1, 1, ordered=False),
        # A notification behind a put asks first whether that has arrived.
        lambda: [link.advance() for _ in range(100)],
    ):
        with pytest.raises(PeerFailedError, match=r"rank 1: MPI does not reach it any more: \w") as found:
            act()
        assert found.value.rank == 1
