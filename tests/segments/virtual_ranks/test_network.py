"""The network of virtual ranks: what is late, what has an order, and what a flush completes."""

import numpy as np
import pytest
from mpi4py import MPI

from distdl_rma import ProtocolError, rehearse
from distdl_rma.segments import Channel, SegmentManager
from distdl_rma.segments.transport.links import RmaPeer
from distdl_rma.segments.virtual_ranks.network import Network, VirtualWindow
from tests.segments.exchanges import NAMES, expected, movements, values

SEEDS = range(12)


def over_seeds(function, ranks=2, nodes=2):
    """What the ranks return, for several orders of the network."""
    return [rehearse(ranks, function, seed=seed, nodes=nodes) for seed in SEEDS]


def window_of(comm):
    memory = np.zeros(64, np.uint8)
    return memory, VirtualWindow.Create(memory, 1, comm=comm)


def put(window, data, at=0):
    """Put bytes to rank 1."""
    return window.Rput([data, MPI.BYTE], 1, (at, data.size, MPI.BYTE))


def test_events_happen_in_time_and_once():
    network, happened = Network(3, [0, 1, 2]), []
    events = [network.later(lambda at=at: happened.append(at), after=at) for at in range(20)]
    events[7].happen()
    assert events[7].over and happened.count(7) == 1
    for turn in range(1, 60):
        network.advance()
        assert all(event.over for event in events if event.due <= turn)
    assert network.idle and sorted(happened) == list(range(20))
    assert not network.advance()


def test_a_put_arrives_late_and_with_a_flush_at_the_latest():
    def play(comm):
        memory, window = window_of(comm)
        request = put(window, np.full(8, 7, np.uint8), 16) if comm.rank == 0 else None
        early = memory[16:24].tolist()
        comm.Barrier()
        if comm.rank == 0:
            window.Flush(1)
            assert request.Test() and not request
        comm.Barrier()
        assert memory[16:24].tolist() == ([7] * 8 if comm.rank else [0] * 8)
        return early

    early = {tuple(of_rank[1]) for of_rank in over_seeds(play)}
    assert early == {(0,) * 8, (7,) * 8}


def test_the_source_of_a_put_is_read_before_its_request_is_complete_and_not_always_at_once():
    def play(comm):
        _, window = window_of(comm)
        if comm.rank == 0:
            data = np.ones(8, np.uint8)
            complete = put(window, data).Test()
            data[:] = 2
            window.Flush(1)
            return complete, None
        comm.network.advance()
        return None

    def wait_first(comm):
        memory, window = window_of(comm)
        if comm.rank == 0:
            data = np.ones(8, np.uint8)
            put(window, data).Wait()
            data[:] = 2
            window.Flush(1)
        comm.Barrier()
        return int(memory[0])

    assert {of_rank[0][0] for of_rank in over_seeds(play)} == {False, True}
    assert {of_rank[1] for of_rank in over_seeds(wait_first)} == {1}


def test_puts_have_no_order_and_words_that_accumulate_have_one():
    def puts(comm):
        memory, window = window_of(comm)
        if comm.rank == 0:
            for each in [np.full(8, value, np.uint8) for value in (1, 2)]:
                put(window, each)
            window.Flush(1)
        comm.Barrier()
        return int(memory[0])

    def words(comm):
        memory, window = window_of(comm)
        if comm.rank == 0:
            kept = []
            for value in range(1, 9):
                new, old = np.full(1, value, np.int64), np.zeros(1, np.int64)
                kept.append((new, old))
                request = window.Rget_accumulate(new, old, 1, (8, 1, MPI.INT64_T), op=MPI.REPLACE)
            request.Wait()
            assert [int(old[0]) for _, old in kept] == list(range(8))
        comm.Barrier()
        return int(memory[8:16].view(np.int64)[0])

    assert {of_rank[1] for of_rank in over_seeds(puts)} == {1, 2}
    assert {of_rank[1] for of_rank in over_seeds(words)} == {8}


def test_atomic_operations_come_after_accumulations_before_them():
    def play(comm):
        memory, window = window_of(comm)
        found = np.zeros(1, np.int64).data
        if comm.rank == 0:
            new, old, one = np.full(1, 5, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64).data
            window.Rget_accumulate(new, old, 1, (0, 1, MPI.INT64_T), op=MPI.REPLACE)
            window.Fetch_and_op([one, MPI.INT64_T], [found, MPI.INT64_T], 1, 0, MPI.SUM)
            window.Flush(1)
            assert found[0] == 5
            six, nine = np.full(1, 6, np.int64).data, np.full(1, 9, np.int64).data
            window.Compare_and_swap([nine], [one], [found], 1, 0)
            window.Compare_and_swap([nine], [six], [found], 1, 0)
            assert found[0] == 6
        comm.Barrier()
        return int(memory.view(np.int64)[0])

    assert {of_rank[1] for of_rank in over_seeds(play)} == {9}


def test_a_datatype_of_blocks_is_scattered_and_gathered():
    def play(comm):
        memory, window = window_of(comm)
        places = [0, 20, 10]
        kind = MPI.BYTE.Create_hindexed([1, 3, 2], places)
        kind.Commit()
        back = np.zeros(6, np.uint8)
        if comm.rank == 0:
            window.Rput([np.arange(1, 7, dtype=np.uint8), MPI.BYTE], 1, (4, 1, kind))
            window.Flush(1)
            window.Rget([back, MPI.BYTE], 1, (4, 1, kind)).Wait()
        kind.Free()
        window.Unlock_all()
        comm.Barrier()
        return memory.tolist() if comm.rank else back.tolist()

    expected = [0] * 64
    for begin, values_there in {4: [1], 24: [2, 3, 4], 14: [5, 6]}.items():
        expected[begin : begin + len(values_there)] = values_there
    for back, memory in over_seeds(play):
        assert memory == expected and back == list(range(1, len(back) + 1))


def test_a_node_is_what_its_split_says_and_messages_between_nodes_are_late():
    def play(comm):
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        others = node.allgather(comm.rank)
        late = []
        for peer in range(comm.size):
            if comm.rank == 0 and peer:
                late.append(not comm.Isend(np.zeros(1), peer, 3).Test())
            elif comm.rank == peer and peer:
                comm.Irecv(np.ones(1), 0, 3).Wait()
        return others, late

    found = over_seeds(play, 5, (2, 3))
    for of_rank in found:
        assert [others for others, _ in of_rank] == [[0, 1]] * 2 + [[2, 3, 4]] * 3
        assert not of_rank[0][1][0]
    assert any(any(of_rank[0][1]) for of_rank in found)


def test_messages_of_a_rank_and_tag_keep_their_order():
    def play(comm):
        if comm.rank == 0:
            sends = [comm.Issend(np.array([value]), 1, value % 2) for value in range(8)]
            for send in sends:
                send.Wait()
            return None
        status, found = MPI.Status(), []
        while not comm.Iprobe(MPI.ANY_SOURCE, 1, status):
            pass
        assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)) == (0, 1, 8)
        for tag in (1, 0):
            for _ in range(4):
                out = np.zeros(1, np.int64)
                comm.Irecv(out, 0, tag).Wait()
                found.append(int(out[0]))
        return found

    assert {tuple(of_rank[1]) for of_rank in over_seeds(play)} == {(1, 3, 5, 7, 0, 2, 4, 6)}


def test_collectives_that_do_not_block_are_those_of_mpi():
    counts = (3, 0, 2)

    def play(comm):
        rank, size = comm.rank, comm.size
        comm.Ibarrier().Wait()
        told = np.full(4, rank, np.int64)
        comm.Ibcast([told.view(np.uint8), MPI.BYTE], 2).Wait()
        gathered = np.zeros(size, np.int64)
        comm.Iallgather(np.array([rank]), gathered).Wait()
        mine = np.full(counts[rank], rank + 1, np.uint8)
        joined, placed = np.zeros(5, np.uint8), np.zeros(8, np.uint8)
        comm.Iallgatherv([mine, MPI.BYTE], [joined, (counts, None), MPI.BYTE]).Wait()
        comm.Iallgatherv([mine, MPI.BYTE], [placed, (counts, (5, 0, 1)), MPI.BYTE]).Wait()
        parts, taken = np.arange(6, dtype=np.uint8) + 10 * rank, np.zeros(3 * (rank + 1), np.uint8)
        comm.Ialltoallv(
            [parts, ((1, 2, 3), None), MPI.BYTE], [taken, ((rank + 1,) * 3, None), MPI.BYTE]
        ).Wait()
        part, data = np.zeros(counts[rank]), np.arange(5.0) + rank
        comm.Ireduce_scatter(data, part, counts, MPI.SUM).Wait()
        return [each.tolist() for each in (told, gathered, joined, placed, taken, part)]

    sums = [3.0, 6.0, 9.0, 12.0, 15.0]
    sent = ([0, 10, 20], [1, 2, 11, 12, 21, 22], [3, 4, 5, 13, 14, 15, 23, 24, 25])
    for nodes in (1, 2, 3):
        for of_rank in over_seeds(play, 3, nodes):
            for rank, (told, gathered, joined, placed, taken, part) in enumerate(of_rank):
                assert (told, gathered, joined) == ([2] * 4, [0, 1, 2], [1, 1, 1, 3, 3])
                assert placed == [0, 3, 3, 0, 0, 1, 1, 1] and taken == sent[rank]
                assert part == (sums[:3], [], sums[3:])[rank]


def test_an_array_that_changes_before_its_collective_is_complete_is_noticed():
    def play(comm):
        data, total = np.ones(3), np.zeros(3)
        request = comm.Ireduce_scatter(data, total, (3, 0), MPI.SUM)
        data[:] = 100
        request.Wait()
        return total[0]

    assert {of_rank[0] for of_rank in over_seeds(play)} > {2.0}


def test_ranks_in_different_collectives_are_an_error():
    def play(comm):
        if comm.rank:
            comm.Ibarrier().Wait()
        else:
            comm.Ibcast(np.zeros(1), 0).Wait()

    with pytest.raises(ProtocolError, match=r"calls I[a-z]* where another rank has called I[a-z]*; ranks"):
        rehearse(2, play, nodes=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_protocol_that_does_not_wait_for_its_puts_fails_for_some_order(name, monkeypatch):
    def play(comm):
        segments = SegmentManager(comm, None, "1MiB", 15)
        exchange = movements(_Line(segments))[name]
        channel = Channel(segments, exchange, np.int64, name)
        right = True
        for epoch in range(1, 4):
            y = channel.move(values(exchange, comm.rank, epoch))
            right &= bool((y == expected(exchange, epoch)).all())
        segments.close()
        return right

    assert all(all(of_rank) for of_rank in over_seeds(play, 3, 3))
    monkeypatch.setattr(RmaPeer, "arrived", lambda self, begun: True)
    assert not all(all(of_rank) for of_rank in over_seeds(play, 3, 3))


class _Line:
    """What ``movements`` needs of a machine."""

    def __init__(self, segments):
        from distdl_rma.geometry import Partition

        self.rank, self.ranks, self.size = segments.rank, segments.ranks, len(segments.ranks)
        self.partition = lambda shape: Partition(self.ranks, shape, self.rank)
