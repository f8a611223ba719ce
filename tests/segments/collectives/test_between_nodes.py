"""Looks at requests of MPI; messages and collectives by MPI of some ranks of a machine."""

import time

import numpy as np
import pytest

from distdl_rma import ExchangeTimeout, Machine
from distdl_rma.segments.collectives.between_nodes import Messages, looks
from distdl_rma.segments.waiting.header import WaitReason


class Fragments:
    """A request that each test takes a fragment further."""

    def __init__(self, number):
        self.left = number

    def Test(self):  # noqa: N802
        self.left -= 1
        return self.left <= 0


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
def test_messages_and_collectives_are_over_when_their_scripts_are(machine, comm):
    ranks = list(reversed(machine.ranks))
    messages = Messages(machine.segments, ranks, "some")
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
    messages.close()


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
