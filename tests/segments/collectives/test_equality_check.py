"""Votes: whether a few words are alike on all ranks, and between which numbers they are if not."""

import time
from random import Random

import pytest

from benchmarks.traffic import vote_traffic
from distdl_rma import ClosedError, ExchangeTimeout, Machine, MismatchError, ProtocolError
from distdl_rma.segments.collectives.equality_check import EqualityCheck, turns_between_leaders
from distdl_rma.segments.collectives.node_layout import NodeLayout
from tests.segments.collectives.test_node_layout import machine_nodes


@pytest.mark.mpi
def test_alike_is_what_all_ranks_say(segments, closing, comm):
    vote, same, mine = (
        closing(EqualityCheck(segments, segments.ranks[::-1], "it")),
        Random(3),
        Random(comm.rank),
    )
    for epoch in range(300):
        odd, position = same.random() < 0.3, same.randrange(4)
        words = [[same.choice([-1, 1]) * same.randrange(1 << 63) for _ in range(4)]] * comm.size
        if odd:
            words = [list(each) for each in words]
            words[same.randrange(comm.size)][position] = same.randrange(1 << 63)
        vote.start(f"turn {epoch}", *words[comm.rank])
        if mine.random() < 0.05:
            time.sleep(1e-3)
        columns = list(zip(*words, strict=True))
        assert vote.wait() == all(len(set(column)) == 1 for column in columns)
        assert vote.smallest == tuple(map(min, columns)) and vote.largest == tuple(map(max, columns))


@pytest.fixture
def vote(segments, closing):
    made = closing(EqualityCheck(segments, segments.ranks, "it"))
    made.connect()
    return made


@pytest.mark.mpi
def test_one_that_nobody_waited_for_is_over_before_the_next(vote, comm):
    for epoch in range(20):
        vote.start("first", comm.rank, 0, 0, 0)
        vote.start("second", epoch, 0, 0, 0)
        assert vote.wait()
    vote.close()
    vote.close()
    with pytest.raises(ClosedError, match="equality check 'it': already closed"):
        vote.start("late", 0, 0, 0, 0)


@pytest.mark.mpi(min_size=2)
def test_who_is_waited_for_is_named_with_what_for(vote, segments, comm):
    last = comm.size - 1
    if comm.rank != last:
        vote.start("enc1", 1, 2, 3, 4)
        with pytest.raises(ExchangeTimeout, match=r"to send in 'enc1' \(epoch 1, last seen 0\)") as caught:
            vote.wait(0.05)
        # Its node's first rank may be the one that is known to be missing, and says who that waits for.
        assert f"rank {last}" in str(caught.value) or len(segments.segment.direct_nodes) > 1
    comm.Barrier()
    if comm.rank == last:
        vote.start("enc1", 1, 2, 3, 4)
    assert vote.wait()


@pytest.mark.mpi(min_size=2)
def test_other_ranks_are_another_vote(segments, comm):
    if comm.rank < 2:
        vote = EqualityCheck(segments, (0, 1) if comm.rank else (1, 0), "ranks")
        with pytest.raises(MismatchError, match="ranks is "):
            vote.start("it", 0, 0, 0, 0)
    comm.Barrier()
    if comm.rank < 2:
        vote.close()


@pytest.mark.mpi
def test_the_counters_are_what_was_counted_beforehand(vote, segments, comm):
    expected = vote_traffic(NodeLayout(segments.ranks, segments.segment.direct_nodes, comm.rank))
    names = "puts", "bytes_put", "gets", "bytes_got"
    for same in (True, False):
        before = [getattr(segments.counters, name) for name in names]
        vote.start("it", 0 if same else comm.rank, 0, 0, 0)
        vote.wait()
        moved = {
            name: getattr(segments.counters, name) - was for name, was in zip(names, before, strict=True)
        }
        assert moved == {name: getattr(expected, name) for name in names}


@pytest.mark.parametrize(
    ("size", "per_node"), [(8, 4), (64, 16), (100, 1), (1024, 4), (1024, 64), (4096, 64)]
)
def test_a_rank_sends_no_more_than_a_logarithm_of_the_nodes(size, per_node):
    nodes = machine_nodes(size, per_node)
    for me in range(0, size, max(1, size // 64)):
        traffic = vote_traffic(NodeLayout(tuple(range(size)), nodes, me))
        assert traffic.messages <= 3 + 1.5 * len(nodes).bit_length()
        # What is read of the board is that of a node.
        assert traffic.bytes_put + traffic.bytes_got <= 64 * (traffic.messages + per_node)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65])
def test_slots_of_targets_are_those_of_the_sources_there(nodes):
    layouts = [NodeLayout(tuple(range(nodes)), machine_nodes(nodes, 1), me) for me in range(nodes)]
    turns = [turns_between_leaders(layout) for layout in layouts]
    knows = [{me} for me in range(nodes)]
    for number in range(len(turns[0])):
        sent = {(me, to, slot) for me in range(nodes) for to, slot in turns[me][number].targets}
        assert sent == {(of, me, slot) for me in range(nodes) for of, slot in turns[me][number].sources}
        knows = [
            set().union(knows[me], *(knows[of] for of, _ in turns[me][number].sources)) for me in range(nodes)
        ]
    assert all(len(known) == nodes for known in knows)
    slots = [slot for turn in turns[0] for _, slot in turn.sources]
    assert slots == list(range(len(slots)))


@pytest.mark.mpi(min_size=2)
def test_the_board_stays_until_all_ranks_of_the_node_have_read_it(segments, comm):
    vote = EqualityCheck(segments, segments.ranks, "left early")
    vote.start("it", 1, 2, 3, 4)
    nbytes = vote._memory.nbytes
    if vote._leads:
        assert vote.wait()
        vote.close()
        # Whoever gets the memory writes to it.
        others = [segments.get_segment_buffer(nbytes) for _ in range(8)]
        for buffer in others:
            buffer.array[:] = 0x55
        kept = any(memory is vote._memory for memory, _ in segments._retired)
        assert kept or vote._number == 1
    comm.Barrier()
    if not vote._leads:
        assert vote.wait()
        vote.close()
    comm.Barrier()
    segments.get_segment_buffer(0).free()
    assert all(memory is not vote._memory for memory, _ in segments._retired)
    if vote._leads:
        for buffer in others:
            buffer.free()


@pytest.mark.mpi
def test_whoever_was_overtaken_does_not_take_what_is_said_later(vote, comm):
    first = vote.start("first", 1, 0, 0, 0)
    second = vote.start("second", comm.rank, 0, 0, 0)
    assert (first, second) == (1, 2)
    with pytest.raises(ProtocolError, match=r"'it': epoch 1 was overtaken, by 'second'"):
        vote.wait(epoch=first)
    assert vote.wait(epoch=second) == (comm.size == 1)


@pytest.mark.mpi(min_size=2)
def test_what_is_said_again_after_a_timeout_is_the_same_epoch(vote, comm):
    for epoch in range(1, 4):
        late = epoch % comm.size
        if comm.rank != late:
            for _ in range(2):
                assert vote.start("it", epoch, 0, 0, 0) == epoch
                with pytest.raises(ExchangeTimeout):
                    vote.wait(0.01)
        comm.Barrier()
        assert vote.start("it", epoch, 0, 0, 0) == epoch
        assert vote.wait()
        comm.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("given_up", [False, True], ids=["waited for again", "given up"])
def test_a_timeout_of_long_ago_makes_no_call_a_repeated_one(vote, comm, given_up):
    if comm.rank == 0:
        vote.start("first", 1, 0, 0, 0)
        with pytest.raises(ExchangeTimeout):
            vote.wait(0.01)
    comm.Barrier()
    if comm.rank != 0:
        vote.start("first", 1, 0, 0, 0)
    comm.Barrier()
    if not given_up:
        assert vote.wait()
    # All ranks refuse the first of them.
    assert [vote.start("second", 2, 0, 0, 0) for _ in range(2)] == [2, 3]
    assert vote.wait()


@pytest.mark.mpi(min_size=2)
def test_a_timeout_before_a_call_begins_makes_it_not_the_one_before(vote, segments, comm, monkeypatch):
    if comm.rank == 0:
        # Refused after that, and called again before the others have come.
        assert vote.start("it", 1, 0, 0, 0) == 1
        monkeypatch.setattr(segments.waiter, "timeout", 0.01)
        with pytest.raises(ExchangeTimeout):
            vote.start("it", 1, 0, 0, 0)
        monkeypatch.undo()
    comm.Barrier()
    if comm.rank != 0:
        assert vote.start("it", 1, 0, 0, 0) == 1
    assert vote.start("it", 1, 0, 0, 0) == 2
    assert vote.wait()


@pytest.mark.mpi(min_size=3)
def test_the_board_is_not_used_again_where_only_some_ranks_are_connected(comm):
    with Machine(comm, segment_size="1MiB") as machine:
        segments = machine.segments
        vote = EqualityCheck(segments, segments.ranks, "not all")
        nbytes, others = vote._memory.nbytes, []
        comm.Barrier()
        if comm.rank == 0:
            with pytest.raises(ExchangeTimeout):
                vote.connect(0.05)
            vote.close()
            others = [segments.get_segment_buffer(nbytes) for _ in range(8)]
            for buffer in others:
                buffer.array[:] = 0
        elif comm.rank == 1:
            vote.connect()
        comm.Barrier()
        if comm.rank == 1:
            vote.start("it", 1, 2, 3, 4)
        comm.Barrier()
        assert not any(buffer.array.any() for buffer in others)
        if comm.rank > 1:
            vote.connect()
        comm.Barrier()


@pytest.mark.mpi
def test_all_learn_the_largest_number_at_a_barrier(segments, closing, comm):
    barrier, draw = closing(EqualityCheck(segments, segments.ranks[::-1], "largest")), Random(3)
    for _ in range(100):
        numbers = [draw.randrange(1 << 32) for _ in segments.ranks]
        assert barrier.meet(number=numbers[comm.rank]) == max(numbers)


@pytest.mark.mpi(min_size=2)
def test_the_number_of_a_barrier_that_timed_out_counts(vote, comm):
    comm.Barrier()
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout, match=r"to reach 'it' \(epoch 1\)"):
            vote.meet(timeout=0.02, number=7)
    comm.Barrier()
    assert vote.meet(number=5 if comm.rank else 9) == 7


@pytest.mark.mpi(min_size=2)
@pytest.mark.processes
def test_a_rank_that_goes_on_in_a_call_of_mpi_leaves_nobody_waiting(vote, comm):
    # MPI lets no progress thread in, in some of its blocking calls.
    for epoch in range(20):
        time.sleep(0.01 * (comm.rank == 1))
        vote.start("it", epoch, 0, 0, 0)
        assert vote.wait() and comm.allreduce(1) == comm.size
