"""Notifications of a buffer: set, found, waited for, taken back."""

import random
import time

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout

pytestmark = pytest.mark.mpi


@pytest.fixture
def own(meet, comm):
    """Buffer with eight notifications, and itself as a peer sees it."""
    buffer, remotes = meet(64, 8)
    return buffer, remotes[comm.rank]


def test_waitsome_finds_the_lowest_of_its_range_and_leaves_it_set(own):
    buffer, me = own
    for index in (6, 2, 4):
        me.notify(index, index)
    assert buffer.notify_waitsome() == 2 == buffer.notify_waitsome()
    assert buffer.notify_waitsome(3) == 4 and buffer.notify_waitsome(5, 3) == 6
    assert buffer.notify_waitsome(np.int8(6), np.uint8(1)) == 6
    assert all(buffer.notify_test(*given) is None for given in ((0, 2), (7,), (8,)))
    with pytest.raises(ExchangeTimeout, match="one of notifications 0 to 1 of buffer 'test'"):
        buffer.notify_waitsome(0, 2, timeout=0.01)
    with pytest.raises(ExchangeTimeout, match="notification 7 of buffer 'test'"):
        buffer.notify_waitsome(7, timeout=0)


def test_a_wait_in_a_buffer_whose_address_nobody_has_says_so(machine):
    with (
        machine.segments.get_segment_buffer(8, 1) as buffer,
        pytest.raises(
            ExchangeTimeout,
            match=r"for the other ranks to set notification 0 .*; no rank has its address yet",
        ),
    ):
        buffer.notify_wait(timeout=0)


@pytest.mark.parametrize("seconds", [0, 0.03])
def test_a_wait_gives_up_at_its_deadline_and_can_be_repeated(own, seconds):
    buffer, me = own
    for wait in (lambda t: buffer.notify_wait(5, t), lambda t: buffer.notify_waitsome(5, 1, t)):
        begin = time.monotonic()
        with pytest.raises(ExchangeTimeout, match=f"waited {seconds:g} s.*to set notification 5"):
            wait(seconds)
        assert seconds <= time.monotonic() - begin < seconds + 14
    me.notify(5, 3)
    assert buffer.notify_waitsome(timeout=0) == 5 and buffer.notify_wait(5, timeout=0) == 3


def test_every_notification_of_every_rank_is_found_once(meet, comm):
    rounds, size = 40, comm.size
    buffer, remotes = meet(0, 2 * size)
    chance = random.Random(comm.rank)
    found = dict.fromkeys(range(size), 0)
    sent = dict.fromkeys(range(size), 0)
    # Each rank sends the next one to a peer only after that peer took the last one back.
    while min(found.values()) < rounds or min(sent.values()) < rounds:
        for peer in chance.sample(range(size), size):
            if sent[peer] < rounds and (not sent[peer] or buffer.notify_reset(size + peer)):
                sent[peer] += 1
                remotes[peer].notify(comm.rank, sent[peer])
        index = buffer.notify_test(0, size)
        if index is None and min(found.values()) < rounds and chance.random() < 0.1:
            time.sleep(1e-4)
        if index is not None:
            found[index] += 1
            assert buffer.notify_reset(index) == found[index]
            remotes[index].notify(size + comm.rank)
    assert set(found.values()) == set(sent.values()) == {rounds}


def test_one_that_arrives_during_a_reset_is_not_lost(meet, comm):
    buffer, remotes = meet(8, 1)
    last = 3000
    after = remotes[(comm.rank + 1) % comm.size]
    if comm.size == 1:
        for value in range(1, last + 1):
            after.notify(0, value)
    seen = 0
    for value in range(1, last + 1):
        # Not acknowledged: values are overwritten, and resets hit the moment of arrival.
        if comm.size > 1:
            after.notify(0, value)
        got = buffer.notify_reset(0)
        assert got == 0 or got > seen
        seen = max(seen, got)
    while seen < last:
        got = buffer.notify_wait(0)
        assert got > seen
        seen = got
    assert buffer.notify_test() is None
    after.flush()


def test_notifications_given_together_share_their_flushes(meet, machine, comm):
    number = go = 40
    buffer, remotes = meet(8 * number, number + 1)
    after, before = remotes[(comm.rank + 1) % comm.size], remotes[(comm.rank - 1) % comm.size]
    for epoch in range(1, 6):
        counters = machine.segments.counters
        flushes, notified = counters.flushes, counters.notifications
        for index in range(number):
            after.put_notify(np.array([epoch]), index, epoch, 8 * index)
        for index in reversed(range(number)):
            assert buffer.notify_wait(index) == epoch and buffer.view(np.int64, (number,))[index] == epoch
        after.flush()
        assert counters.notifications - notified == number
        assert counters.flushes - flushes < number / 2
        before.notify(go)
        buffer.notify_wait(go)
