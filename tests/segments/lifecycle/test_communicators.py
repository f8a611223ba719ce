"""Communicators that are used again."""

import pytest

from distdl_rma.segments.lifecycle.communicators import Communicators


@pytest.mark.mpi
def test_the_next_user_of_the_same_ranks_has_the_same_communicator(comm):
    own = comm.Dup()
    shared, ranks = Communicators(own, tuple(range(comm.size))), tuple(range(comm.size))[::-1]
    assert shared.proposal(ranks) == 0
    first = shared.take(ranks, 0)
    assert first.rank == ranks.index(comm.rank) and shared.proposal(ranks) == 1
    second = shared.take(ranks, 1)
    assert second != first
    shared.give_back(ranks, 0)
    # Below what is in use nothing is proposed: another rank may still use it.
    assert shared.proposal(ranks) == 2
    shared.give_back(ranks, 1)
    assert shared.proposal(ranks) == 0 and shared.take(ranks, 0) == first
    shared.close()
    own.Free()


@pytest.mark.mpi
def test_a_number_that_others_propose_makes_all_below_it(comm):
    own = comm.Dup()
    shared, ranks = Communicators(own, tuple(range(comm.size))), tuple(range(comm.size))
    taken = shared.take(ranks, 2)
    assert len(shared._made[ranks]) == 3 and shared._made[ranks][2] == taken
    assert shared.proposal(ranks) == 3
    shared.close()
    own.Free()
