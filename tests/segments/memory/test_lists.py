"""Lists of puts and gets, gets that notify their own rank, flushes of several peers, and what buffers say."""

import random
from itertools import pairwise

import numpy as np
import pytest

from distdl_rma import ArgumentError, ClosedError, ExchangeTimeout, Machine, ShapeError
from distdl_rma.segments import RemoteBuffer

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("queued", [False, True])
def test_a_list_of_gets_fills_all_its_arrays(meet, machine, comm, queued):
    buffer, remotes = meet(8 * 100, 0)
    buffer.view(np.int64, (100,))[:] = 1000 * comm.rank + np.arange(100)
    comm.Barrier()
    peer = (comm.rank + 1) % comm.size
    outs = [np.zeros(10, np.int64), np.zeros((4, 6), np.int64)[::2, 1::2], np.zeros(0), np.zeros(1, np.int64)]
    queue = machine.segments.queue() if queued else None
    counters = machine.segments.counters
    gets, nbytes = counters.gets, counters.bytes_got
    remotes[peer].get_list(zip(outs, (0, 80, 8, 792), strict=True), queue)
    if queue is not None:
        queue.wait()
    wanted = 1000 * peer + np.arange(100)
    assert (outs[0] == wanted[:10]).all() and (outs[1].reshape(-1) == wanted[10:16]).all()
    assert outs[3][0] == wanted[99]
    assert (counters.gets - gets, counters.bytes_got - nbytes) == (4, 8 * 17)
    comm.Barrier()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lists_of_short_and_long_parts_arrive_and_are_got_again(meet, machine, comm, seed):
    rng = np.random.default_rng([seed, comm.rank])
    buffer, remotes = meet(1 << 17, 1)
    peer = (comm.rank + 1) % comm.size
    wanted = np.zeros(1 << 17, np.uint8)
    cuts = np.sort(rng.choice(1 << 17, 40, replace=False)).tolist()
    # Gaps between them, or none; one is empty, some are longer than what is packed.
    places = [(low, high - int(rng.integers(0, 2)) * (high - low) // 2) for low, high in pairwise(cuts)]
    places += [(5, 5)]
    rng.shuffle(places)
    parts = [(rng.integers(1, 255, high - low).astype(np.uint8), low) for low, high in places]
    for part, low in parts:
        wanted[low : low + len(part)] = part
    queue = machine.segments.queue() if seed == 2 else None
    puts = machine.segments.counters.puts
    remotes[peer].put_list_notify(parts, 0, queue=queue)
    assert machine.segments.counters.puts - puts == len(parts)
    buffer.notify_wait(0)
    got = comm.sendrecv(wanted, peer, source=(comm.rank - 1) % comm.size)
    assert (buffer.array == got).all()
    outs = [(np.empty_like(part), low) for part, low in parts] + [(np.empty(7, np.int8), cuts[0] + 1)]
    remotes[peer].get_list(outs)
    assert all((out.view(np.uint8) == wanted[low : low + out.nbytes]).all() for out, low in outs)
    if queue is not None:
        queue.wait()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_short_parts_of_a_list_to_another_node_travel_together(comm):
    with Machine(comm, transport="remote", segment_size="2MiB") as machine:
        buffer = machine.segments.get_segment_buffer(1 << 16, 1)
        peer = (comm.rank + 1) % comm.size
        remote = buffer.exchange(dict.fromkeys(range(comm.size), ()))[peer]
        wire = machine.segments.segment.link(peer)._rma
        short = [(np.full(8, at, np.uint8), 16 * at) for at in range(100)]

        def begun(move):
            # The engine has nothing to ask meanwhile.
            remote.flush()
            with machine.segments.segment.lock:
                before = wire.begun
                move()
                return wire.begun - before

        buffer.array[:] = 0
        comm.Barrier()
        assert begun(lambda: remote.put_list(short)) == 1
        assert begun(lambda: remote.put_list([*short, (np.full(4096, 7, np.uint8), 8192)])) == 2
        # Parts that overlap are left to themselves.
        assert begun(lambda: remote.put_list([(b"12345678", 2000), (b"12345678", 2004)])) == 2
        queue = machine.segments.queue()
        outs = [(np.zeros(8, np.uint8), 16 * at) for at in range(100)]
        assert begun(lambda: remote.get_list(outs, queue)) == 1
        queue.wait()
        assert all((out == at).all() for at, (out, _) in enumerate(outs))
        remote.flush()
        comm.Barrier()
        assert (buffer.array[8192:12288] == 7).all()
        comm.Barrier()


def test_lists_are_checked_before_anything_moves(meet, machine, comm):
    buffer, remotes = meet(64, 2)
    buffer.array[:] = 5
    comm.Barrier()
    peer = (comm.rank + 1) % comm.size
    good, frozen = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    frozen.flags.writeable = False
    for bad, message in (
        ((np.zeros(8, np.uint8), 57), "8 bytes at offset 57 are not inside rank"),
        ((np.zeros(8, np.uint8), -1), "not inside rank"),
        ((frozen, 0), "get_list: ndarray is read-only"),
        ((good,), "get_list takes pairs"),
        ((good, 0.5), "get_list takes pairs"),
    ):
        with pytest.raises(ShapeError, match=message):
            remotes[peer].get_list([(good, 0), bad])
    with pytest.raises(ArgumentError, match="get_list: a queue is made by"):
        remotes[peer].get_list([(good, 0)], queue=[])
    assert not good.any()
    ones = np.ones(8, np.uint8)
    for call in (
        lambda: remotes[peer].put_list_notify([(ones, 0), (ones, 60)], 0),
        lambda: remotes[peer].put_list_notify([(ones, 0)], 2),
        lambda: remotes[peer].put_list_notify([(ones, 0)], 0, 2**32),
    ):
        with pytest.raises((ShapeError, ArgumentError)):
            call()
    remotes[peer].flush()
    comm.Barrier()
    assert (buffer.array == 5).all() and buffer.notification(0) == 0
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_list_of_gets_that_is_not_answered_names_the_peer_and_all_its_bytes(
    meet, comm, unanswered, monkeypatch
):
    peer = (comm.rank + 1) % comm.size
    there = meet(64)[1][peer]
    unanswered(there)
    monkeypatch.setattr("distdl_rma.segments.memory.context.Queue.test", lambda self: False)
    with pytest.raises(ExchangeTimeout, match=rf"for rank {peer} to answer a get of 32 bytes"):
        there.get_list([(np.zeros(3), 0), (np.zeros(1), 24)], timeout=0)


def test_notified_gets_of_several_peers_are_taken_as_they_come(meet, machine, comm):
    number = 30
    buffer, remotes = meet(8 * number, 0)
    buffer.view(np.int64, (number,))[:] = 100 * comm.rank + np.arange(number)
    comm.Barrier()
    rng = random.Random(comm.rank)
    with machine.segments.get_segment_buffer(0, number, "arrivals") as inbox:
        outs, wanted = np.zeros((number, 1), np.int64), {}
        notified = machine.segments.counters.notifications
        for index in range(number):
            peer, which = rng.randrange(comm.size), rng.randrange(number)
            wanted[index] = 100 * peer + which
            remotes[peer].get_notify(outs[index], inbox, index, 1 + which, 8 * which)
        while wanted:
            index = inbox.notify_waitsome()
            expected = wanted.pop(index)
            assert inbox.notify_reset(index) == 1 + expected % 100
            assert outs[index, 0] == expected
        assert machine.segments.counters.notifications - notified == number
    comm.Barrier()


def test_the_array_of_a_notified_get_is_filled_before_its_notification_is_set(
    meet, machine, comm, monkeypatch
):
    buffer, remotes = meet(8)
    buffer.view(np.int64, (1,))[0] = 1 + comm.rank
    comm.Barrier()
    seen, notify = [], RemoteBuffer.notify

    def watched(self, index, value=1):
        seen.append(int(out[0]))
        notify(self, index, value)

    monkeypatch.setattr(RemoteBuffer, "notify", watched)
    with machine.segments.get_segment_buffer(0, 1, "inbox") as inbox:
        for peer, remote in remotes.items():
            out = np.zeros(1, np.int64)
            remote.get_notify(out, inbox, 0)
            inbox.notify_wait(0)
            assert seen.pop() == 1 + peer and not seen
    comm.Barrier()


def test_a_notified_get_of_nothing_notifies_and_one_into_a_freed_buffer_does_not(meet, machine, comm):
    _, remotes = meet(8)
    remote = remotes[(comm.rank + 1) % comm.size]
    inbox = machine.segments.get_segment_buffer(0, 1, "inbox")
    remote.get_notify(np.empty(0), inbox, 0, 3)
    assert inbox.notify_wait(0) == 3
    out = np.full(1, -1.0)
    remote.get_notify(out, inbox, 0)
    inbox.free()
    # The same words again: what comes late does not touch them.
    again = machine.segments.get_segment_buffer(0, 1, "inbox")
    remote.flush()
    assert out[0] == 0 and again.notification(0) == 0
    again.free()
    comm.Barrier()


def test_a_notified_get_is_checked_before_anything_moves(meet, machine, comm):
    _, remotes = meet(8)
    remote = remotes[(comm.rank + 1) % comm.size]
    out = np.full(1, -1.0)
    with machine.segments.get_segment_buffer(0, 1, "inbox") as inbox:
        for call, error, message in (
            (
                lambda: remote.get_notify(out, inbox, 1),
                ArgumentError,
                "notification 1 of a buffer that has 1",
            ),
            (lambda: remote.get_notify(out, inbox, 0, 0), ArgumentError, "value is from 1"),
            (lambda: remote.get_notify(out, inbox, 0, offset=1), ShapeError, "not inside rank"),
            (
                lambda: remote.get_notify(out, remote, 0),
                ArgumentError,
                "a buffer of this rank, got RemoteBuffer",
            ),
            (lambda: remote.get_notify(b"12345678", inbox, 0), ShapeError, "read-only"),
        ):
            with pytest.raises(error, match=message):
                call()
        with Machine(comm, segment_size="1MiB") as other:
            foreign = other.segments.get_segment_buffer(0, 1, "foreign")
            with pytest.raises(ArgumentError, match="'foreign' is of another machine"):
                remote.get_notify(out, foreign, 0)
    with pytest.raises(ClosedError, match="'inbox': already freed"):
        remote.get_notify(out, inbox, 0)
    remote.flush()
    assert out[0] == -1


@pytest.mark.mpi(min_size=2)
def test_the_wait_for_a_notified_get_names_the_peer(meet, machine, comm, unanswered):
    peer = (comm.rank + 1) % comm.size
    there = meet(8)[1][peer]
    unanswered(there)
    with machine.segments.get_segment_buffer(0, 1, "inbox") as inbox:
        there.get_notify(np.empty(1), inbox, 0)
        with pytest.raises(
            ExchangeTimeout, match=rf"for rank {peer} to set notification 0 of buffer 'inbox'"
        ):
            inbox.notify_wait(0, timeout=0)


def test_a_flush_of_a_group_is_one_of_all_its_ranks(meet, machine, comm):
    buffer, remotes = meet(8 * comm.size, 1)
    everyone = machine.group()
    for epoch in range(1, 10):
        for remote in remotes.values():
            remote.put(np.array([epoch]), 8 * comm.rank)
        everyone.flush()
        comm.Barrier()
        assert (buffer.view(np.int64, (comm.size,)) == epoch).all()
        comm.Barrier()
    everyone.flush(timeout=0)


@pytest.mark.mpi(min_size=2)
def test_a_flush_of_a_group_that_reached_its_deadline_names_who_is_left_and_can_be_repeated(
    meet, machine, comm, monkeypatch
):
    meet(8)
    last, others = comm.size - 1, machine.segments.segment.link((comm.rank + 1) % comm.size)
    with monkeypatch.context() as patch:
        patch.setattr(others, "advance", lambda: False, raising=False)
        with pytest.raises(
            ExchangeTimeout, match=rf"for rank {(comm.rank + 1) % comm.size} to take its puts"
        ):
            machine.group().flush(timeout=0)
    machine.group([comm.rank, *({0, last} - {comm.rank})]).flush()


def test_buffers_say_what_they_are_and_are_freed_at_the_end_of_a_with_statement(machine, comm):
    segments = machine.segments
    before = segments.stats().used
    with segments.get_segment_buffer(100, 3, "mine") as buffer:
        assert repr(buffer) == "SegmentBuffer('mine', 100 bytes, 3 notifications)"
        here = buffer.here
        assert repr(here) == f"RemoteBuffer(of rank {comm.rank}, 100 bytes, 3 notifications)"
        assert repr(here.view("f4", (2, 3))) == f"RemoteArray(of rank {comm.rank}, float32, shape (2, 3))"
        assert repr(segments.queue("q")) == "Queue('q', 0 posted)"
        assert segments.stats().used > before
    assert segments.stats().used == before
    assert repr(buffer) == "SegmentBuffer('mine', 100 bytes, 3 notifications, gone)"
    with pytest.raises(ClosedError, match="already freed"), buffer:
        pass
    with pytest.raises(KeyError), segments.get_segment_buffer(8):
        raise KeyError
    assert segments.stats().used == before
