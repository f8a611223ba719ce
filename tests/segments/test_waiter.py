"""A wait advances what is under way, looks at the others when it takes long, and gives up at its deadline."""

import time

import pytest

from distdl_rma.errors import ConfigurationError, ExchangeTimeout, PeerFailedError
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.waiter import DEFAULT_TIMEOUT, Waiter, check_timeout, chosen_timeout
from distdl_rma.segments.waiting.wait_reason import WaitReason

REASON = WaitReason((1,), "to send in 'enc1'")


class Others:
    """Work and watch of a waiter, which note what is asked of them."""

    def __init__(self):
        self.turns, self.looks, self.over = 0, 0, 0
        self.notices, self.failure = self, None
        self.defer = self.withdraw = None

    def advance(self):
        self.turns += 1

    def check(self, reason=None):
        if self.failure and self.turns >= self.failure:
            raise PeerFailedError(f"rank 1 failed: for {reason()}", 1, "")

    def look(self, reason):
        self.looks += 1

    def done(self):
        self.over += 1

    def timeout_message(self, reason, seconds):
        return f"waited {seconds:g} s {reason}"


@pytest.fixture
def others():
    return Others()


def waiter(others, spins=0, timeout=15.0):
    return Waiter(timeout, spins, others, others, Counters())


def test_what_is_there_is_not_waited_for(others):
    one = waiter(others)
    one.until(lambda: True, lambda: REASON)
    assert not others.turns and not one._counters.waits


def test_what_comes_while_the_wait_spins_needs_no_turn(others):
    asked = []
    one = waiter(others, spins=10)
    one.until(lambda: len(asked) == 5 or asked.append(1), lambda: REASON)
    assert not others.turns and one._counters.waits == 1 and one._counters.seconds_waited > 0


def test_every_turn_takes_the_steps_under_way(others):
    waiter(others).until(lambda: others.turns == 3, lambda: REASON)
    assert others.turns == 3


def test_a_long_wait_looks_at_the_others_and_says_when_it_is_over(others):
    begin = time.perf_counter()
    waiter(others).until(lambda: time.perf_counter() - begin > 0.25, lambda: REASON)
    assert 1 <= others.looks <= 4 and others.over == 1


@pytest.mark.parametrize("spins", [0, 10])
def test_a_wait_gives_up_at_its_deadline_or_after_one_look(others, spins):
    one = waiter(others, spins, 0.05)
    with pytest.raises(ExchangeTimeout, match=r"waited 0.05 s for rank 1 to send in 'enc1'"):
        one.until(lambda: False, lambda: REASON)
    others.turns = 0
    with pytest.raises(ExchangeTimeout, match="waited 0 s"):
        one.until(lambda: False, lambda: REASON, 0)
    assert others.turns == 1


def test_a_failure_ends_the_wait_in_the_turn_that_hears_of_it(others):
    others.failure = 2
    with pytest.raises(PeerFailedError, match="for rank 1 to send"):
        waiter(others).until(lambda: False, lambda: REASON)
    assert others.turns == 2


def test_progress_takes_one_turn_and_raises_what_failed(others):
    one = waiter(others)
    one.progress()
    assert others.turns == 1
    others.failure, others.notices.check = 1, lambda reason=None: (_ for _ in ()).throw(KeyError)
    with pytest.raises(KeyError):
        one.progress()


@pytest.mark.parametrize("seconds", [-1, "soon", float("nan"), [1]])
def test_a_timeout_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigurationError, match="a timeout is a number of seconds"):
        check_timeout(seconds)


def test_a_timeout_comes_from_the_argument_else_the_environment_else_it_is_the_default(monkeypatch):
    monkeypatch.delenv("DISTDL_RMA_TIMEOUT", raising=False)
    assert (
        chosen_timeout(None) == DEFAULT_TIMEOUT
        and chosen_timeout(2) == 2.0
        and check_timeout(None, 3.0) == 3.0
    )
    monkeypatch.setenv("DISTDL_RMA_TIMEOUT", "7.5")
    assert chosen_timeout(None) == 7.5 and chosen_timeout(2) == 2.0
    monkeypatch.setenv("DISTDL_RMA_TIMEOUT", "-7")
    with pytest.raises(ConfigurationError, match="DISTDL_RMA_TIMEOUT is a number of seconds"):
        chosen_timeout(None)
