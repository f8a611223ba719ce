"""When what was put has arrived at a peer: questions, answers, flushes, and the notifications behind them."""

import contextlib
import functools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.transport import links
from distdl_rma.segments.transport.links import Atomics, ByteRuns, RemoteLink, RmaPeer
from distdl_rma.segments.virtual_ranks.network import Event, Network, VirtualRequest, VirtualWindow
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
    return wire.put(ByteRuns((0,), nbytes), np.ones(nbytes, np.uint8))


@pytest.mark.parametrize("way", ["put", "get"])
def test_stretches_are_one_transfer(window, wire, way):
    stretches = ByteRuns.together([(5, 1), (0, 3), (9, 4)])
    assert stretches.nbytes == 8
    getattr(wire, way)(stretches, np.ones(8, np.uint8))
    assert len(window.puts if way == "put" else window.gets) == 1


def test_a_flush_follows_two_answers_between_which_nothing_began(window, wire):
    assert wire.arrived(0) and not window.gets and not window.flushes
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
    # Those that are complete are forgotten, and one flush serves all who wait.
    assert window.flushes == 1 and len(wire._large) <= 2
    assert all(wire.arrived(number) for number in range(begun))


class Held(Network):
    """Holds everything back until ``advance``."""

    def __init__(self):
        super().__init__(0, (0, 1))
        self.held = []

    def later(self, action, after=0):
        self.held.append(Event(action, 0))
        return self.held[-1]

    def advance(self):
        while self.held:
            self.held.pop(0).happen()


class Memories(VirtualWindow):
    """Two segments in one process, over a network; notes flushes, and the words that are set together."""

    def __init__(self, network):
        look = bool if isinstance(network, Held) else network.advance
        request = functools.partial(VirtualRequest, look=look, wait=None)
        super().__init__(np.zeros((2, 4096), np.uint8), SimpleNamespace(network=network, request=request))
        self.network, self.words = network, self._memories.view(np.int64)
        self.flushed, self.sent = [], []

    def Flush(self, target):  # noqa: N802
        self.flushed.append(target)
        super().Flush(target)

    def Rget_accumulate(self, values, before, target, there, op):  # noqa: N802
        self.sent.append(list(range(there[0] // 8, there[0] // 8 + there[1])))
        return super().Rget_accumulate(values, before, target, there, op)


@pytest.fixture
def held():
    return Memories(Held())


def atomics(window, immediate=True):
    return Atomics(window, {5: (1, 16), 7: (0, 0)}, immediate, contextlib.nullcontext())


def test_each_operation_changes_one_word_of_one_segment_and_returns_what_was_there(held):
    there = atomics(held)
    fetch = there.fetching(5, 4)
    assert fetch(MPI.SUM, 4, 3) == 0 and fetch(MPI.SUM, 4, -1) == 3
    assert fetch(MPI.REPLACE, 4, 9) == 2 and fetch(MPI.NO_OP, 4, 0) == 9
    assert there.compare_swap(5, 8, 1, 4) == 9 and there.compare_swap(5, 8, 9, 4) == 9
    # Its segment begins two words into the window.
    assert held.words[1, 3] == 4 and held.words.sum() == 4
    assert held.flushed == [1] * 6


def test_only_a_rank_whose_help_is_needed_is_asked_to_answer_and_the_question_is_forgotten(held):
    assert atomics(held).responding is None
    there = atomics(held, immediate=False)
    first, *_ = [there.responding(7) for _ in range(3)]
    assert not first() and len(there._asked) == 3
    held.network.advance()
    assert first()
    there.responding(5)
    assert len(there._asked) == 1


# Words of notifications; each put has a word of its own behind them.
WORDS = 16


def link_over(window):
    return RemoteLink(1, RmaPeer(window, 1, Counters()), threading.RLock(), set())


def put(link, number):
    link.put(ByteRuns((8 * (WORDS + number),), 8), np.array([number + 1]).view(np.uint8))


class Deliveries(RuleBasedStateMachine):
    """What a peer sees of puts and notifications, over a network that has the orders that MPI allows."""

    @initialize(seed=st.integers(0, 1 << 30))
    def connect(self, seed):
        window = Memories(Network(seed, (0, 1)))
        self.network, self.words, self.link = window.network, window.words[1], link_over(window)
        # By notification, in the order in which they are given: word, value, puts before it, last.
        self.given, self.puts, self.seen = [], 0, self.words[:WORDS].copy()

    @rule(number=st.integers(1, 4))
    def put(self, number):
        for _ in range(number):
            put(self.link, self.puts)
            self.puts += 1

    @rule(word=st.integers(0, WORDS - 4), number=st.integers(1, 3), last=st.booleans())
    def notify(self, word, number, last):
        """Neighbouring words are due together."""
        for at in range(word, word + number):
            self.given.append((at, len(self.given) + 1, self.puts, last))
            self.link.notify(at, len(self.given), last=last)

    @rule()
    def notify_at_once(self):
        self.given.append((WORDS - 1, len(self.given) + 1, 0, False))
        self.link.notify(WORDS - 1, len(self.given), ordered=False)

    @rule()
    def time_passes(self):
        self.network.advance()

    @rule()
    def advance(self):
        if self.link.advance():
            assert all(self.visible())

    @rule()
    def flush(self):
        self.link.close_delivery()
        while not self.link.advance():
            self.what_is_visible_has_its_order()
        assert all(self.visible()) and self.words[WORDS : WORDS + self.puts].all()

    def visible(self):
        words = self.words.tolist()
        return [words[word] >= value for word, value, *_ in self.given]

    @invariant()
    def what_is_visible_has_its_order(self):
        visible, arrived = self.visible(), self.words[WORDS : WORDS + self.puts].astype(bool)
        for number, (*_, before, last) in enumerate(self.given):
            assert not visible[number] or arrived[:before].all()
            assert not (visible[number] and last) or all(visible[:number])
        assert (self.seen <= self.words[:WORDS]).all()
        self.seen = self.words[:WORDS].copy()


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = settings(max_examples=60)


@pytest.mark.parametrize("most", [1, 5, 64])
def test_notifications_given_together_need_one_flush_and_travel_together(held, monkeypatch, most):
    monkeypatch.setattr(links, "_MOST_WORDS", most)
    link = link_over(held)
    # All in a row but one.
    numbers = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3]
    for number in numbers:
        put(link, number)
        link.notify(number, 5 + number)
    while not held.flushed:
        held.network.advance()
        assert not held.words[1, :WORDS].any()
        link.advance()
    runs = [numbers[:3], numbers[3:11], numbers[11:]]
    assert held.sent == [run[at : at + most] for run in runs for at in range(0, len(run), most)]
    held.network.advance()
    assert link.advance() and held.flushed == [1]
    assert held.words[1, :12].tolist() == [5 + number for number in range(12)]


def test_what_is_over_is_forgotten(held):
    link = link_over(held)
    for number in range(1000):
        put(link, number % 100)
        link.notify(0, number, ordered=False)
        held.network.advance()
    assert len(link._words) <= 128 and len(link._open.transfers) < 400
    # They are flushed all the same.
    link.close_delivery()
    assert len(link._pending) == 1


def test_an_unordered_notification_waits_for_nothing(held):
    link = link_over(held)
    put(link, 0)
    link.notify(0, 5)
    link.notify(1, 6, ordered=False)
    assert held.sent == [[1]] and not held.flushed


def go_on(link):
    """As the segment does."""
    for busy in tuple(link._busy):
        if busy.advance():
            link._busy.discard(busy)


def test_a_flush_waits_for_the_answer_of_the_peer_and_goes_on_where_it_was_given_up(held):
    link = link_over(held)
    put(link, 0)
    held.network.advance()
    go_on(link)
    assert not link._busy
    link.notify(0, 5)
    link.close_delivery()
    # Asked, and left there: the links that are busy are advanced all the same.
    for _ in range(5):
        assert not link.advance() and link in link._busy and not held.flushed
    while link._busy:
        held.network.advance()
        go_on(link)
    assert held.flushed == [1] and held.words[1, 0] == 5


def test_an_array_that_is_got_is_kept_until_it_is_there(held):
    link = link_over(held)
    link.get(ByteRuns((0,), 8), np.empty(8, np.uint8), keep=True)
    assert not link.advance() and len(link._gets) == 1
    held.network.advance()
    assert link.advance() and not link._gets


def test_a_peer_that_mpi_does_not_reach_has_failed(held):
    def lost(*arguments, **options):
        raise MPI.Exception(MPI.ERR_OTHER)

    link = link_over(held)
    put(link, 0)
    held.Rput = held.Rget = held.Rget_accumulate = lost
    link.notify(0, 1)
    for act in (
        lambda: put(link, 1),
        lambda: link.get(ByteRuns((0,), 8), np.empty(8, np.uint8)),
        lambda: link.notify(1, 1, ordered=False),
        # A notification behind a put asks first whether that has arrived.
        lambda: [(held.network.advance(), link.advance()) for _ in range(100)],
    ):
        with pytest.raises(PeerFailedError, match=r"rank 1: MPI does not reach it any more: \w") as found:
            act()
        assert found.value.rank == 1
