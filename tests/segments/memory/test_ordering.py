"""What is ordered after what, a test for each line of the table.

For operations from one rank to one peer, on both transports, with and without a progress thread:

(a) Data that was put before a notification is there when the notification is seen, whatever queue the put
    was posted to: ``test_a_notification_is_seen_after_the_puts_before_it``.
(b) Notifications of one index become visible in the order in which they were given:
    ``test_notifications_of_one_index_become_visible_in_order``; one that is given as the last after all
    before it: ``test_a_last_notification_becomes_visible_after_all_before_it``.
    Those given together share their flushes, and are under way together:
    ``test_notifications_given_together_share_their_flushes``. That of a get comes after all that was got:
    ``test_who_sees_the_notification_of_a_get_has_what_was_there_when_it_began``.
(c) Atomic operations on one word have one order, in which those of each rank are as in its program:
    ``test_atomics_on_a_word_have_one_order``.
(d) What a rank read before it gave a notification cannot be changed by who waits for that notification
    before it writes: ``test_a_slot_is_rewritten_only_after_its_reader_said_so``.

What holds after a flush, after the wait of a queue, and of lists, is checked in ``test_random_programs.py``.

Not ordered, and nothing here relies on it: two puts to the same bytes, or a put and a get of them, without a
flush in between; a put and an atomic operation on the same word without a flush in between; the operations
of different ranks, and those of one rank to different peers. On a node some of these happen to be ordered.
"""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from distdl_rma import Machine

# From one rank to one peer; with itself, another, and two others.
pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3)]

TINY, LARGE = 1, 40_000
WAYS = [("auto", "none"), ("auto", "thread"), ("remote", "none"), ("remote", "thread")]


@pytest.fixture(scope="module", params=WAYS, ids=["-".join(way) for way in WAYS])
def machine(request, comm):
    """Machine of all ranks, on either transport, with a progress thread and without."""
    transport, progress = request.param
    with Machine(comm, segment_size="64MiB", timeout=15, transport=transport, progress=progress) as machine:
        yield machine


@pytest.fixture
def chance(comm):
    return random.Random(comm.rank)


@pytest.fixture
def ring(meet, comm):
    """Function that makes buffers; returns this rank's, the next rank's and the previous rank's."""

    def make(nbytes, notifications):
        buffer, remotes = meet(nbytes, notifications)
        return buffer, remotes[(comm.rank + 1) % comm.size], remotes[(comm.rank - 1) % comm.size]

    return make


def pause(chance):
    if chance.random() < 0.1:
        time.sleep(chance.random() * 1e-3)


def flush(*remotes):
    """Without a progress thread nothing is sent on once a rank has left for something else."""
    for remote in remotes:
        remote.flush()


def test_a_notification_is_seen_after_the_puts_before_it(ring, machine, chance):
    data, go = 0, 1
    buffer, after, before = ring(8 * 3 * LARGE, 2)
    queues = [None, machine.segments.queue("a"), machine.segments.queue("b")]
    sources = [np.empty(LARGE, np.int64) for _ in queues]
    for epoch in range(1, 40):
        sizes = [chance.choice((TINY, LARGE)) for _ in queues]
        shuffled = chance.sample(range(3), 3)
        for i in shuffled:
            sources[i][:] = epoch
            pause(chance)
            after.put(sources[i][: sizes[i]], 8 * i * LARGE, queues[i])
        after.view(np.int64, (3, LARGE))[:, LARGE - 2 :: -5000] = epoch
        # The sizes travel as the value of the notification.
        after.notify(data, 1 + sum((size == LARGE) << i for i, size in enumerate(sizes)))
        value = buffer.notify_wait(data) - 1
        there = buffer.view(np.int64, (3, LARGE))
        assert (there[:, LARGE - 2 :: -5000] == epoch).all()
        for i in range(3):
            assert (there[i, : LARGE if value >> i & 1 else TINY] == epoch).all()
        pause(chance)
        before.notify(go)
        buffer.notify_wait(go)
        for queue in queues[1:]:
            queue.wait()
    flush(after, before)


def test_notifications_of_one_index_become_visible_in_order(ring, chance):
    stream, other, go, number = 0, 1, 2, 60
    buffer, after, before = ring(8 * LARGE, 3)
    there = buffer.view(np.int64, (LARGE,))
    for _ in range(6):
        there[:number] = 0
        before.notify(go)
        buffer.notify_wait(go)
        seen = 0
        for value in range(1, number + 1):
            # Every put has a place of its own, so that what was there stays.
            after.put(np.array([value]), 8 * (value - 1))
            if chance.random() < 0.2:
                after.put(np.zeros(LARGE - number, np.int64), 8 * number)
            pause(chance)
            after.notify(stream, value)
            after.notify(other, value)
            seen, last = buffer.notification(stream), seen
            assert seen >= last and there[:seen].all()
        last = 0
        while last < number:
            seen, last = last, buffer.notify_wait(stream)
            assert seen < last and there[:last].all()
        while buffer.notify_wait(other) < number:
            pass
    flush(after, before)


def test_a_last_notification_becomes_visible_after_all_before_it(ring, chance):
    number, go = 30, 30
    buffer, after, before = ring(8 * LARGE, number + 1)
    for _ in range(15):
        lasts = [index for index in range(number) if chance.random() < 0.3 or index == number - 1]
        for index in range(number):
            if chance.random() < 0.1:
                after.put(np.zeros(chance.choice((TINY, LARGE))), 0)
            pause(chance)
            # Which ones are the last of those before them travels along.
            after.notify(index, 1 + (index in lasts), last=index in lasts)
            visible = [buffer.notification(i) for i in reversed(range(number))][::-1]
            assert all(all(visible[:i]) for i in range(number) if visible[i] == 2)
        buffer.notify_waitsome(number - 1, 1)
        assert all(buffer.notify_reset(i) for i in range(number))
        before.notify(go)
        buffer.notify_wait(go)
    flush(after, before)


def test_notifications_given_together_share_their_flushes(ring, machine):
    number = go = 40
    buffer, after, before = ring(8 * number, number + 1)
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
    flush(after, before)


def test_who_sees_the_notification_of_a_get_has_what_was_there_when_it_began(ring, machine, comm, chance):
    source, mine, slots = (comm.rank + 1) % comm.size, 0, 4
    buffer, after, before = ring(8 * LARGE, 1)
    there = buffer.view(np.int64, (LARGE,))
    with machine.segments.get_segment_buffer(0, slots, "arrivals") as inbox:
        outs = np.zeros((slots, LARGE), np.int64)
        for epoch in range(1, 12):
            there[:] = 100 * epoch + comm.rank
            comm.Barrier()
            sizes = [chance.choice((TINY, 1000, LARGE)) for _ in range(slots)]
            for slot in chance.sample(range(slots), slots):
                pause(chance)
                after.get_notify(outs[slot, : sizes[slot]], inbox, slot, epoch)
            for _ in range(slots):
                slot = inbox.notify_waitsome()
                assert inbox.notify_reset(slot) == epoch
                assert (outs[slot, : sizes[slot]] == 100 * epoch + source).all()
            # All that was read is here: the owner may change it.
            comm.Barrier()
    assert buffer.notification(mine) == 0
    flush(after, before)


def test_atomics_on_a_word_have_one_order(meet, comm, chance):
    _, remotes = meet(16)
    word, rounds = 8, 40
    seen = []
    for i in range(rounds):
        pause(chance)
        if chance.random() < 0.5:
            seen.append((remotes[0].fetch_add(word, 1), True))
        else:
            # Guess what is there; a guess that is right counts as one more.
            guess = seen[-1][0] + 1 if i else 0
            was = remotes[0].compare_swap(word, guess, guess + 1)
            seen.append((was, was == guess))
    values = [was for was, _ in seen]
    assert values == sorted(values)
    # After its own addition a rank never sees less than that.
    assert all(b >= a + added for (a, added), (b, _) in itertools.pairwise(seen))
    added = sorted(was for theirs in comm.allgather(seen) for was, changed in theirs if changed)
    assert added == list(range(len(added))) and remotes[0].fetch_add(word, 0) == len(added)


def test_a_slot_is_rewritten_only_after_its_reader_said_so(ring, chance):
    full, empty = 0, 1
    buffer, after, before = ring(8 * LARGE, 2)
    slot = buffer.view(np.int64, (LARGE,))
    sent = seen = 0
    # Each rank sends as soon as it may, and reads when it likes.
    while seen < 60 or sent < 60:
        if sent < 60 and (not sent or buffer.notify_reset(empty)):
            sent += 1
            after.put_notify(np.full(LARGE, sent), full, sent)
        if chance.random() < 0.5 and buffer.notify_test(full, 1) is not None:
            seen += 1
            assert buffer.notification(full) == seen
            first = slot.copy()
            pause(chance)
            assert (first == seen).all() and (slot == seen).all()
            assert buffer.notify_reset(full) == seen
            before.notify(empty)
        buffer.notify_test()
    flush(after, before)
