"""Requests of MPI, pieces of large vectors; messages, collectives and communicators of some ranks."""

import time
import weakref

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout, Machine, ProtocolError
from distdl_rma.segments import Allreduce
from distdl_rma.segments.collectives.between_nodes import Messages, in_pieces, looks, number_of_pieces, slices
from distdl_rma.segments.waiting.header import WaitReason

LONG = 30_000


def test_pieces_are_few_and_of_small_vectors_there_is_one():
    assert {number_of_pieces(1 << 40, 1), number_of_pieces(0, 2), number_of_pieces(1 << 20, 2)} == {1}
    assert number_of_pieces(16 << 20, 2) == 2
    found = [number_of_pieces(1 << 28, nodes) for nodes in (2, 64, 1024, 4096, 1 << 20)]
    assert found[0] == 4 and found == sorted(found, reverse=True) and found[-1] == 1


def test_slices_are_all_of_it_in_order():
    for count in (0, 1, 3, 8, 101):
        assert [i for at in slices(count, 5) for i in range(count)[at]] == list(range(count))


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_a_stage_begins_on_a_piece_before_the_next_goes_on_with_the_last(number):
    said, under_way = [], set()

    def plan(piece):
        for at in range(3):
            # What a stage began is waited for before the next.
            assert (at - 1, piece) not in under_way
            said.append((at, piece))
            under_way.add((at, piece))
            assert sum(which == at for which, _ in under_way) <= 2
            yield rest(at, piece)

    def rest(at, piece):
        yield from [None] * piece
        under_way.remove((at, piece))

    waits = list(in_pieces(map(plan, range(number))))
    assert not under_way and len(waits) == 3 * sum(range(number))
    assert len(said) == 3 * number and all(said.index((0, k)) < said.index((1, k)) for k in range(number))
    assert all(said.index((0, k + 1)) < said.index((1, k)) for k in range(number - 1))
    assert all(said.index((1, k + 1)) < said.index((2, k)) for k in range(number - 1))


class Fragments:
    """A request that each test takes a fragment further."""

    def __init__(self, number):
        self.left = number

    def Test(self):  # noqa: N802
        self.left -= 1
        return self.left <= 0


@pytest.mark.mpi(min_size=2)
def test_buffers_are_held_until_mpi_has_done_with_them(segments, closing, comm):
    job = closing(Allreduce(segments, segments.ranks, LONG, np.float32, name="held"))
    job.connect()
    buffer = np.ones(3)
    held = weakref.ref(buffer)
    waiting = job._algorithm.between.begun(Fragments(2), 24, buffer)
    del buffer
    next(waiting)
    assert held() is not None
    assert not [*waiting]
    del waiting
    assert held() is None
    comm.Barrier()


@pytest.mark.mpi
def test_what_is_interrupted_between_pieces_is_broken(segments, closing, comm, tiny):
    job = Allreduce(segments, segments.ranks, LONG, np.float32, name="interrupted")
    job.connect()
    algorithm, nodes = job._algorithm, len(segments.segment.direct_nodes)
    comm.Barrier()
    # All ranks are interrupted, if each has a share.
    if nodes > 1 and nodes * algorithm.layout.shares == comm.size:
        begun = algorithm._combine

        def interrupted(cut, piece):
            if piece == 2:
                raise KeyboardInterrupt("by hand")
            return begun(cut, piece)

        algorithm._combine = interrupted
        job.active[:] = 1
        # Else a thread that takes steps might be interrupted.
        with segments.segment.lock, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            job.start()
            job.wait()
        with pytest.raises(ProtocolError, match="step 1 was interrupted by KeyboardInterrupt"):
            job.wait()
        # MPI may still write to what was begun: it is kept.
        kept = algorithm.between._under_way.values()
        assert kept and all(buffers for _, buffers in kept)
    comm.Barrier()
    job.close()
    again = closing(Allreduce(segments, segments.ranks, LONG, np.float32, name="interrupted"))
    assert (again(np.ones(LONG)) == comm.size).all()


def test_a_look_takes_as_many_tests_as_there_may_be_fragments():
    assert [len(looks(nbytes)) for nbytes in (0, 8, 64 << 10, 1 << 20, 1 << 40)] == [1, 1, 2, 17, 128]


def test_a_look_ends_with_the_last_fragment_and_another_goes_on():
    request, kept = Fragments(20), np.zeros(1)
    script = Messages(None, [0], "some").begun(request, 1 << 20, kept)
    next(script)
    assert request.left == 3
    assert list(script) == []
    assert request.left == 0


def over(machine, *scripts):
    reason = WaitReason((), "to take part")
    for script in scripts:
        machine.segments.waiter.until(lambda script=script: not any(True for _ in script), lambda: reason, 15)


@pytest.mark.mpi
def test_messages_and_collectives_are_over_when_their_scripts_are(machine, closing, comm):
    ranks = list(reversed(machine.ranks))
    messages = closing(Messages(machine.segments, ranks, "some"))
    messages.connect()
    me, size = ranks.index(comm.rank), len(ranks)
    after, before = (me + 1) % size, (me - 1) % size
    out = np.empty(3, np.int64)
    over(machine, messages.receive(out, before, 5), messages.send(np.full(3, me), after, 5))
    assert out.tolist() == [before] * 3
    counts = [8 * at for at in range(size)]
    everyone = np.empty(sum(range(size)), np.int64)
    over(machine, messages.gather_all(np.full(me, me), everyone, counts))
    assert everyone.tolist() == [at for at in range(size) for _ in range(at)]
    sent, taken = np.arange(size) + 10 * me, np.empty(size, np.int64)
    over(machine, messages.exchange(sent, [8] * size, taken, [8] * size))
    assert taken.tolist() == [10 * at + me for at in range(size)]
    given = np.arange(5) * (me + 1)
    over(machine, messages.broadcast(given, size - 1))
    assert given.tolist() == [size * each for each in range(5)]
    assert messages.probe(6) is None
    assert messages.largest_tag() >= 32767


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "remote"])
def test_no_rank_makes_a_communicator_with_one_that_gave_up_waiting(comm, transport):
    # Every later wait of a machine passes on the notifications of a barrier that was given up.
    with Machine(comm, segment_size="8MiB", timeout=15, transport=transport) as machine:
        if comm.rank < 2:
            give_up_and_come(machine, comm)


def give_up_and_come(machine, comm):
    # Making a communicator cannot be interrupted.
    messages, deadline, said = Messages(machine.segments, (0, 1), "left"), time.monotonic() + 30, ""
    while comm.rank == 0 and "to reach 'left (connect)'" not in said:
        assert time.monotonic() < deadline, said
        with pytest.raises(ExchangeTimeout) as caught:
            messages.connect(0.1)
        said = str(caught.value)
    while comm.rank == 1:
        try:
            messages.announce()
            break
        except ExchangeTimeout:
            assert time.monotonic() < deadline
    if comm.rank == 0:
        comm.send("gave up", 1)
    else:
        comm.recv(source=0)
        with pytest.raises(ExchangeTimeout, match=r"for rank 0 to reach 'left \(connect\)' \(epoch 2\)"):
            messages.connect(0.5)
    messages.close()


@pytest.mark.mpi(min_size=2)
def test_uses_that_overlap_without_end_take_turns_with_few_communicators(segments, comm):
    under_way = [Messages(segments, segments.ranks, "use 0")]
    under_way[0].connect()
    before = len(segments.communicators._made[segments.ranks])
    for use in range(1, 12):
        under_way.append(Messages(segments, segments.ranks, f"use {use}"))
        under_way[-1].connect()
        assert under_way[0].comm != under_way[1].comm
        # Not all ranks have given the older one back when the next one begins.
        if comm.rank == use % comm.size:
            comm.Barrier()
        under_way.pop(0).close()
        if comm.rank != use % comm.size:
            comm.Barrier()
    assert len(segments.communicators._made[segments.ranks]) <= before + 3
    under_way.pop().close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_gave_up_waiting_and_connect_in_another_order_agree(segments, comm):
    uses = [Messages(segments, segments.ranks, name) for name in ("gave up", "came between")]
    for use in uses:
        use._meeting().connect()
    if comm.rank == 0:
        with pytest.raises(ExchangeTimeout):
            uses[0].connect(0.05)
    comm.Barrier()
    # The first rank's first use is pending while all connect the second one.
    for use in reversed(uses):
        use.connect()
    assert uses[0].comm != uses[1].comm
    assert uses[0]._number == comm.bcast(uses[0]._number) and uses[1]._number == comm.bcast(uses[1]._number)
    for use in uses:
        assert use.comm.allreduce(1) == comm.size
        use.close()
    comm.Barrier()
