"""The thread that takes steps while its rank computes."""

import gc
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from distdl_rma.errors import ExchangeTimeout, MismatchError, PeerFailedError
from distdl_rma.segments.waiting import waiter as waiting
from distdl_rma.segments.waiting.header import WaitReason
from distdl_rma.segments.waiting.waiter import ProgressEngine, Waiter, advance_other_machines
from distdl_rma.trace import Counters


def test_the_thread_takes_turns_until_it_is_stopped():
    enough, turns = threading.Event(), []

    def turn():
        turns.append(threading.current_thread())
        if len(turns) == 5:
            enough.set()
        return len(turns)

    engine = ProgressEngine(turn, crowded=False)
    assert enough.wait(10) and engine._thread.is_alive()
    engine.stop()
    engine.stop()
    taken = len(turns)
    time.sleep(0.02)
    assert not engine._thread.is_alive() and len(turns) == taken
    assert all(thread.daemon and thread is not threading.current_thread() for thread in turns)


@pytest.mark.parametrize("error", [ValueError("no such step"), KeyboardInterrupt()])
def test_an_error_ends_the_thread_and_is_kept_for_its_rank(error):
    def turn():
        raise error

    engine = ProgressEngine(turn, crowded=True)
    engine._thread.join(10)
    assert not engine._thread.is_alive() and engine.error is error
    engine.stop()


REASON = WaitReason((1,), "to send in 'enc1'")


class Others:
    """Segment, notices and watch of a waiter, which note what is asked of them."""

    def __init__(self):
        self.turns, self.looks, self.over = 0, 0, 0
        self.lock, self.failure, self.failures = threading.RLock(), None, {}
        self.hand_over, self.moves = None, False
        self.has_remote, self.crowded = True, True

    def progress(self):
        self.turns += 1

    def keep_moving(self):
        return self.moves

    def poll(self):
        pass

    def check(self, reason=None):
        if self.failure and self.turns >= self.failure:
            raise PeerFailedError(f"rank 1 failed: for {reason()}", 1, "")

    def look(self, reason):
        self.looks += 1

    def end_wait(self):
        self.over += 1

    def timeout_message(self, reason, seconds):
        return f"waited {seconds:g} s {reason}"


@pytest.fixture
def others():
    return Others()


def waiter(others, spins=0, timeout=15.0):
    return Waiter(others, others, others, Counters(), timeout, spins)


def test_a_wait_takes_no_turn_for_what_is_there_or_comes_while_it_spins(others):
    one, asked = waiter(others), []
    one.until(lambda: True, lambda: REASON)
    assert not others.turns and not one.counters.waits
    one = waiter(others, spins=10)
    one.until(lambda: len(asked) == 5 or asked.append(1), lambda: REASON)
    assert not others.turns and one.counters.waits == 1 and one.counters.seconds_waited > 0
    one = waiter(others)
    one.until(lambda: others.turns == 3, lambda: REASON)
    one.progress()
    assert others.turns == 4


def test_a_long_wait_looks_at_the_others_and_says_when_it_is_over(others):
    begin = time.perf_counter()
    waiter(others).until(lambda: others.looks and time.perf_counter() - begin > 0.25, lambda: REASON)
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


def test_pauses_stay_the_shortest_while_large_transfers_are_under_way_and_only_then(others, monkeypatch):
    pauses = []
    monkeypatch.setattr(waiting.time, "sleep", pauses.append)
    shortest, longest = waiting._SLEEP_SECONDS
    for others.moves in (True, False):
        pauses.clear()
        waiter(others).until(lambda: len(pauses) == 20, lambda: REASON)
        assert pauses[-1] == (shortest if others.moves else longest)


def test_a_rank_with_a_core_of_its_own_does_not_pause_while_transfers_are_under_way(others, monkeypatch):
    monkeypatch.setattr(waiting.time, "sleep", lambda seconds: pytest.fail("paused"))
    monkeypatch.setattr(waiting, "_YIELD_SECONDS", 0)
    others.crowded, others.moves = False, True
    waiter(others).until(lambda: others.turns == 20, lambda: REASON)


def test_while_the_process_is_stopped_no_time_passes(others, monkeypatch):
    monkeypatch.setattr(waiting, "_STOPPED_SECONDS", 0.05)
    turns = []

    def ready():
        turns.append(None)
        if len(turns) == 3:
            time.sleep(0.5)
        return len(turns) == 5

    waiter(others, timeout=0.4).until(ready, lambda: REASON)
    assert len(turns) == 5


def test_a_failure_ends_the_wait_in_the_turn_that_hears_of_it(others):
    others.failure = 2
    with pytest.raises(PeerFailedError, match="for rank 1 to send"):
        waiter(others).until(lambda: False, lambda: REASON)
    assert others.turns == 2
    others.check = lambda reason=None: (_ for _ in ()).throw(KeyError)
    with pytest.raises(KeyError):
        waiter(others).progress()


class Counting(Waiter):
    """Work of a machine that counts its turns."""

    def __init__(self):
        super().__init__(SimpleNamespace(hand_over=None), None, None, Counters(), 1.0, 0)
        self.steps = 0

    def advance_quietly(self):
        self.steps += 1


def test_all_but_the_one_that_waits_go_on(monkeypatch):
    monkeypatch.setattr(waiting, "_waiters", ())
    first, second = Counting(), Counting()
    first.begin("none")
    advance_other_machines(first)
    second.begin("none")
    advance_other_machines(first)
    advance_other_machines(None)
    assert (first.steps, second.steps) == (1, 2)
    second.end()
    second.end()
    advance_other_machines(None)
    assert (first.steps, second.steps) == (2, 2)


def test_to_be_registered_keeps_nothing_alive(monkeypatch):
    monkeypatch.setattr(waiting, "_waiters", ())
    gone = Counting()
    gone.begin("none")
    del gone
    gc.collect()
    advance_other_machines(None)
    kept = Counting()
    kept.begin("none")
    assert len(waiting._waiters) == 1 and waiting._waiters[0]() is kept


@pytest.fixture(scope="module")
def pair(comm):
    """Two segment managers that reach all peers by MPI, where nobody else moves data."""
    from distdl_rma.segments import SegmentManager

    own = comm.Dup()
    two = [SegmentManager(own, None, "8MiB", 15, "remote", "none") for _ in range(2)]
    yield two
    for manager in two:
        manager.close()
    own.Free()


def letters(manager, size=8):
    others = {rank: () for rank in manager.ranks if rank != manager.rank}
    buffer = manager.get_segment_buffer(size, 2, "letters")
    return buffer, buffer.exchange(others, "letters")


@pytest.mark.mpi(min_size=2)
def test_who_waits_in_one_machine_or_for_another_to_be_made_moves_what_was_put_in_a_third(pair, comm):
    from distdl_rma import Machine

    big = 2 << 20
    first, first_peers = letters(pair[0], big)
    second, second_peers = letters(pair[1])
    for step in range(4):
        if comm.rank == 0:
            first_peers[1].put_notify(np.full(big, step, np.uint8), index=0)
        elif comm.rank == 1:
            first.notify_wait(0)
            assert (first.array == step).all()
        if step == 3:
            Machine(comm, segment_size="8MiB", timeout=15).close()
        elif comm.rank == 0:
            second.notify_wait(0)
        elif comm.rank == 1:
            second_peers[0].notify(0)
    comm.Barrier()
    first.free()
    second.free()


@pytest.mark.mpi(min_size=2)
def test_error_in_a_step_of_one_machine_is_raised_there_and_not_in_a_wait_of_another(pair, comm):
    def broken():
        pair[0].withdraw(broken)
        raise MismatchError("the step went wrong")

    second, _ = letters(pair[1])
    if comm.rank == 0:
        pair[0].defer(broken)
        with pytest.raises(ExchangeTimeout, match=r"waited 0\.3 s"):
            second.notify_wait(0, timeout=0.3)
        with pytest.raises(MismatchError, match="the step went wrong"):
            pair[0].progress()
        pair[0].progress()
    comm.Barrier()
    second.free()


@pytest.mark.mpi
def test_interrupt_in_a_step_of_one_machine_ends_the_wait_in_another(pair, comm):
    # What a signal handler raises is for the thread that waits, wherever it was at that moment.
    def interrupted():
        pair[0].withdraw(interrupted)
        raise KeyboardInterrupt

    buffer = pair[1].get_segment_buffer(0, 1, "nobody's")
    pair[0].defer(interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.notify_wait(0, timeout=5)
    pair[0].progress()
    buffer.free()
    comm.Barrier()


def test_machine_that_failed_takes_no_steps_and_ends_no_wait_in_another():
    class Notices:
        failures: ClassVar[dict[int, str]] = {}

        def poll(self):
            self.failures[1] = "disk on fire"

    def advance():
        taken.append(1)
        return False

    taken = []
    segment = SimpleNamespace(lock=threading.RLock(), progress=lambda: True, crowded=False, hand_over=None)
    silent = SimpleNamespace(poll=lambda: None, failures={})
    one, another = (Waiter(segment, each, None, Counters(), 1.0, 0) for each in (Notices(), silent))
    one.begin("none")
    another.begin("none")
    one.defer(advance)
    try:
        # The first turn takes in the notice and the step, the second one neither.
        another.advance()
        another.advance()
        assert taken == [1]
        one.advance()
        assert taken == [1, 1]
    finally:
        one.end()
        another.end()


@pytest.mark.mpi
@pytest.mark.processes
def test_manager_that_is_closed_or_dropped_is_none_of_the_process_any_more(comm):
    from distdl_rma.segments import SegmentManager

    before = waiting._waiters
    manager = SegmentManager(comm, None, "8MiB", 15)
    assert len(waiting._waiters) == len(before) + 1
    manager.close()
    assert waiting._waiters == before
