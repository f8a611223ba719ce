"""Ranks that find each other."""

import pytest

from distdl_rma import ExchangeTimeout, PartitionError
from distdl_rma.segments.lifecycle import meeting

pytestmark = pytest.mark.mpi


def test_ranks_that_mean_the_same_get_a_communicator_in_their_order(comm):
    for ranks in (tuple(range(comm.size))[::-1], tuple(range(comm.size))[1:], (comm.rank,)):
        if comm.rank in ranks:
            made = meeting.meet(comm, ranks, 30)
            assert (made.size, made.rank) == (len(ranks), ranks.index(comm.rank))
            made.Free()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_mean_others_learn_which(comm):
    ranks = tuple(range(comm.size))[:: -1 if comm.rank == 0 else 1]
    with pytest.raises(PartitionError, match=r"rank 0 was given M = \(.*\) but rank \d M = \(0, 1"):
        meeting.meet(comm, ranks, 30)
    comm.Barrier()
    meeting.meet(comm, tuple(range(comm.size)), 30).Free()


@pytest.mark.mpi(min_size=2)
def test_a_refusal_reaches_those_that_wait(comm):
    everyone = tuple(range(comm.size))
    if comm.rank == 0:
        meeting.refuse(comm, everyone, "no room")
    else:
        with pytest.raises(PartitionError, match="rank 0: no room"):
            meeting.meet(comm, everyone, 30)
    comm.Barrier()
    meeting.meet(comm, everyone, 30).Free()


@pytest.mark.mpi(min_size=2)
def test_who_does_not_come_is_named(comm):
    late = comm.size - 1
    if comm.rank != late:
        with pytest.raises(ExchangeTimeout, match=rf"rank {comm.rank} waited 0.2 s for rank.* {late}"):
            meeting.meet(comm, tuple(range(comm.size)), 0.2)
    comm.Barrier()
    meeting.meet(comm, tuple(range(comm.size)), 30).Free()
