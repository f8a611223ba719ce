"""A peer's buffer: which bytes are meant, near and far; puts and gets, in lists too, and what buffers say."""

import numpy as np
import pytest

from distdl_rma import ClosedError, ExchangeTimeout, Machine

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("nbytes", [0, 1, 7, 64, 4097, 1 << 20, 5 << 20])
def test_what_is_put_is_there_after_the_notification_and_nothing_around_it(meet, comm, nbytes):
    buffer, remotes = meet(nbytes + 16, 1)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer.array[:] = 255
    comm.Barrier()
    data = np.random.default_rng(comm.rank).integers(0, 255, nbytes).astype(np.uint8)
    remotes[after].put_notify(data, 0, 9, offset=8)
    data[:] = 0
    assert buffer.notify_wait(0) == 9
    wanted = np.random.default_rng(before).integers(0, 255, nbytes).astype(np.uint8)
    assert (buffer.array[8 : 8 + nbytes] == wanted).all()
    assert (buffer.array[:8] == 255).all() and (buffer.array[8 + nbytes :] == 255).all()


@pytest.mark.parametrize("shift", [-(1 << 10), 1 << 10, 8])
@pytest.mark.parametrize("nbytes", [800, 2 << 20])
def test_a_buffer_may_be_moved_within_itself(meet, comm, nbytes, shift):
    buffer, remotes = meet(3 << 20)
    values = np.random.default_rng(comm.rank).integers(0, 255, nbytes).astype(np.uint8)
    before, behind = (buffer.view(np.uint8, values.shape, (1 << 19) + at) for at in (0, shift))
    before[...] = values
    for me in (buffer.here, remotes[comm.rank]):
        me.put(before, offset=(1 << 19) + shift)
        me.flush()
        assert (behind == values).all()
        me.get(before, offset=(1 << 19) + shift)
        assert (before == values).all()


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
        assert repr(buffer.here) == f"RemoteBuffer(of rank {comm.rank}, 100 bytes, 3 notifications)"
        assert repr(segments.queue("q")) == "Queue('q', 0 posted)"
        assert segments.stats().used > before
    assert segments.stats().used == before
    assert repr(buffer) == "SegmentBuffer('mine', 100 bytes, 3 notifications, gone)"
    with pytest.raises(ClosedError, match="already freed"), buffer:
        pass
    with pytest.raises(KeyError), segments.get_segment_buffer(8):
        raise KeyError
    assert segments.stats().used == before
