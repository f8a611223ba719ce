"""The link to another node, over the weakest RMA that MPI allows."""

import random
import threading

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.transport import links
from distdl_rma.segments.transport.links import RemoteLink
from distdl_rma.segments.transport.rma_peer import ByteRuns, RmaPeer

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
    assert len(link._notices) <= 128


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
