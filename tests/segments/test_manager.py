"""Memory that a manager gives and takes back, its options, its end, and communicators that are used again."""

import sys
import threading
import time

import numpy as np
import pytest

from distdl_rma import ConfigurationError, ExchangeTimeout, Machine
from distdl_rma.segments import Channel
from distdl_rma.segments.collectives.all_push import AllPush
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.manager import Communicators, SegmentManager
from distdl_rma.segments.transport import node_memory
from distdl_rma.segments.transport.node_memory import NodeMemory
from tests.segments.exchanges import movements, values

pytestmark = pytest.mark.mpi


def test_the_next_user_of_the_same_ranks_has_the_same_communicator(comm):
    own = comm.Dup()
    shared, ranks = Communicators(own, tuple(range(comm.size))), tuple(range(comm.size))[::-1]
    assert shared.reserve(ranks, 0) == 0
    first = shared.take(ranks, 0)
    assert first.rank == ranks.index(comm.rank)
    assert shared.reserve(ranks, 0) == 1
    second = shared.take(ranks, 1)
    assert second != first
    shared.give_back(ranks, 0)
    assert shared.reserve(ranks, 0) == 0 and shared.reserve(ranks, 0) == 2 and shared.reserve(ranks, 7) == 7
    assert shared.take(ranks, 0) == first
    shared.close()
    own.Free()


def test_stats_tell_bytes_and_owners(machine):
    manager = machine.segments
    before = manager.stats()
    first = manager.get_segment_buffer(1000, 3, "first")
    again = manager.get_segment_buffer(1, 0, "first")
    second = manager.get_segment_buffer(0, 1, "second")
    during = manager.stats()
    # Data in whole cache lines, then the words of the notifications, in whole cache lines together.
    assert during.owners["first"] == (2, 1024 + 64 + 64) and during.owners["second"] == (1, 64)
    assert during.used == before.used + 1024 + 64 + 64 + 64 and during.peak >= during.used
    assert during.reserved == 64 << 20 and during.largest_free <= during.reserved - during.used
    assert sum(nbytes for _, nbytes in during.owners.values()) == during.used
    for buffer in (first, again, second):
        buffer.free()
    after = manager.stats()
    assert (after.used, after.owners, after.largest_free) == (before.used, before.owners, before.largest_free)
    assert after.peak >= during.used


@pytest.mark.parametrize(
    ("argument", "environment", "nbytes"),
    [
        ("3MiB", None, 3 << 20),
        (np.int64(1 << 20), "7MiB", 1 << 20),
        (None, "2 MiB", 2 << 20),
        (100_001, None, 100_032),
    ],
)
def test_the_segment_has_the_size_of_the_argument_else_of_the_environment(
    comm, monkeypatch, argument, environment, nbytes
):
    monkeypatch.delenv("DISTDL_RMA_SEGMENT_SIZE", raising=False)
    if environment is not None:
        monkeypatch.setenv("DISTDL_RMA_SEGMENT_SIZE", environment)
    with Machine(comm, segment_size=argument) as machine:
        assert machine.segments.stats().reserved == machine.describe()["segment bytes"] == nbytes
        whole = machine.segments.get_segment_buffer(machine.segments.stats().largest_free)
        whole.array[:] = 1
        assert machine.segments.stats().largest_free == 0


def test_a_size_that_is_too_small_is_named(comm, monkeypatch):
    monkeypatch.setenv("DISTDL_RMA_SEGMENT_SIZE", "100")
    with pytest.raises(ConfigurationError, match="a segment has at least 4096 bytes, got 100"):
        Machine(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("options", "registers", "grows"), [({}, (), True), ({"node_size": 1}, (), True), ({}, (1,), False)]
)
def test_without_a_size_there_is_room_to_grow_where_pages_are_taken_when_touched(
    comm, monkeypatch, options, registers, grows
):
    over = NodeMemory.window_over

    def window_over(node_memory, memory):
        if comm.rank in registers:
            # As a network does that pins the memory of its windows.
            memory[-1] = 0
        return over(node_memory, memory)

    monkeypatch.delenv("DISTDL_RMA_SEGMENT_SIZE", raising=False)
    monkeypatch.setattr(node_memory, "_LARGEST_DEFAULT", 32 << 20)
    monkeypatch.setattr(NodeMemory, "_room", lambda memory: (memory.node.size * (128 << 20), "free"))
    monkeypatch.setattr(NodeMemory, "window_over", window_over)
    own = comm.Dup()
    manager = SegmentManager(own, None, None, 15, **options)
    assert manager.stats().reserved == (64 << 20 if grows else 32 << 20)
    manager.close()
    own.Free()


def test_the_default_size_is_within_the_memory_of_the_control_group(comm, monkeypatch, tmp_path):
    monkeypatch.delenv("DISTDL_RMA_SEGMENT_SIZE", raising=False)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "limit_in_bytes").write_text(f"{comm.size << 28}\n")
    limits = str(tmp_path / "memory.max"), str(tmp_path / "limit_in_bytes"), str(tmp_path / "none")
    monkeypatch.setattr(node_memory, "_GROUP_LIMITS", limits)
    with Machine(comm) as machine:
        # Half of the limit, for the ranks of the largest node.
        most = max(len(node) for node in machine.describe()["nodes"])
        assert machine.segments.stats().reserved == (comm.size << 27) // most


@pytest.mark.mpi(min_size=2)
def test_different_sizes_on_different_ranks_give_the_smallest(comm):
    with Machine(comm, segment_size=(1 + comm.rank) << 20) as machine:
        assert machine.segments.stats().reserved == 1 << 20


@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "remote"}, {"transport": "remote", "progress": "none"}, {"progress": "thread"}],
)
def test_describe_tells_ranks_transport_and_progress(comm, options):
    ranks = tuple(reversed(range(comm.size)))
    with Machine(comm, ranks, segment_size="1MiB", timeout=12, **options) as machine:
        told = machine.describe()
    assert told["rank"] == comm.rank and told["ranks"] == ranks
    node = next(node for node in told["nodes"] if comm.rank in node)
    near = {rank: rank in node and "transport" not in options for rank in ranks} | {comm.rank: True}
    assert told["transport"] == {rank: "shared" if near[rank] else "remote" for rank in ranks}
    assert sorted(sum(told["nodes"], ())) == sorted(ranks)
    assert told["progress"] == options.get("progress", "none" if all(near.values()) else "thread")
    assert told["timeout seconds"] == 12 and told["memory model"] == "unified"
    assert told["MPI"] and told["MPI standard"] and told["thread level"] == "multiple"
    assert told["more ranks than cores"] in (False, True)


def test_a_buffer_that_cannot_be_looked_at_keeps_none_of_the_others(machine):
    manager = machine.segments
    before = manager.stats()
    first, second = (manager.get_segment_buffer(8, 0, "retired") for _ in range(2))
    looks = []

    def idle():
        looks.append(None)
        if len(looks) == 1:
            raise RuntimeError("no answer")
        return True

    manager.retire(first, idle)
    manager.retire(second, lambda: True)
    with pytest.raises(RuntimeError, match="no answer"):
        manager.stats()
    assert manager.stats().owners == before.owners


def start_channel(machine):
    exchange = movements(machine)["all_gather"]
    channel = Channel(machine.segments, exchange, np.int64, "late")
    return channel, lambda: channel.start(channel.cut(values(exchange, machine.rank, 1)))


def start_all_push(machine):
    vectors = AllPush(machine.segments, machine.ranks, 4, np.int64, "late")
    return vectors, lambda: vectors.start(np.full(4, 5))


def start_barrier(machine):
    barrier = EqualityCheck(machine.segments, machine.ranks, "late")
    return barrier, lambda: barrier.meet(timeout=0.5)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [start_channel, start_all_push, start_barrier])
@pytest.mark.parametrize("transport", ["auto", "remote"])
def test_memory_is_not_used_again_whose_address_peers_have_by_a_connect_that_was_given_up(
    comm, make, transport
):
    # Every later wait of a machine passes on the notifications of a barrier that was given up.
    machine = Machine(comm, segment_size="8MiB", timeout=15, transport=transport)
    made, start = make(machine)
    segments = machine.segments
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout, match="to connect 'late'"):
            made.connect(0.01)
        made.close()
        assert segments.stats().owners["late"][0] >= 1
        room = segments.get_segment_buffer(1 << 20, 8, "room")
        room.array[:] = 7
    comm.Barrier()
    if comm.rank:
        try:
            start()
        except ExchangeTimeout:
            # Rank 0 does not come, but has its notification.
            assert make is start_barrier or comm.size > 2
        made.close()
    comm.Barrier()
    if comm.rank == 0:
        assert (room.array == 7).all() and not room.flags.tolist().count(1)
        room.free()
    # A settled error: all drop what they have connected.
    segments.handshakes.difference_update(
        segments.forget_handshakes([r for r in machine.ranks if r != comm.rank])
    )
    comm.Barrier()
    segments.progress()
    comm.Barrier()
    assert comm.rank or "late" not in segments.stats().owners
    machine.close()


@pytest.mark.mpi(min_size=2)
def test_rank_whose_close_timed_out_has_not_left(comm):
    manager = SegmentManager(comm, None, "8MiB", 15)
    others = {rank: () for rank in manager.ranks if rank != comm.rank}
    buffer = manager.get_segment_buffer(0, 1, "letters")
    peers = buffer.exchange(others, "letters")
    comm.Barrier()
    if comm.rank == 1:
        # Twice: what was taken back once can be said again, and taken back again.
        for _ in range(2):
            with pytest.raises(ExchangeTimeout, match=r"for ranks? 0.* to close the machine"):
                manager.close(timeout=0.1)
        # Longer than it takes until who has left is believed to have left.
        time.sleep(1.5)
        peers[0].notify(0)
    elif comm.rank == 0:
        buffer.notify_wait(0)
    comm.Barrier()
    manager.close()


@pytest.mark.sizes(1)
@pytest.mark.processes
def test_threads_make_and_retire_buffers_at_the_same_time(comm):
    errors, interval = [], sys.getswitchinterval()

    def work():
        try:
            for _ in range(3000):
                segments.retire(segments.get_segment_buffer(64, 1, "of a thread"), lambda: True)
        except Exception as error:
            errors.append(error)

    with Machine(comm, segment_size="8MiB") as machine:
        segments = machine.segments
        threads = [threading.Thread(target=work) for _ in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert not errors
        assert "of a thread" not in segments.stats().owners
