"""Communicators between the nodes of a collective."""

import pytest

from distdl_rma.segments.collectives.engine.between_nodes import BetweenNodes

pytestmark = pytest.mark.mpi


def test_ranks_have_a_communicator_in_their_order_and_the_next_user_has_the_same(segments, comm):
    ranks = segments.ranks[::-1]
    if len(ranks) == 1:
        alone = BetweenNodes(segments, ranks, "alone", "")
        alone.connect(None)
        assert alone.ranks == ()
        with pytest.raises(RuntimeError, match="'alone': no communicator between nodes"):
            _ = alone.comm
        return
    made = []
    for name in ("first", "second"):
        between = BetweenNodes(segments, ranks, name, "")
        between.connect(None)
        between.connect(None)
        assert between.comm.allgather(comm.rank) == list(ranks)
        made.append(between.comm)
        between.free()
        between.free()
    assert made[0] == made[1]


@pytest.mark.mpi(min_size=2)
def test_users_at_one_time_have_communicators_of_their_own(segments, comm):
    first, second = (BetweenNodes(segments, segments.ranks, name, "") for name in ("one", "other"))
    first.connect(None)
    second.connect(None)
    assert first.comm != second.comm
    # Nobody gives back before all have both.
    comm.Barrier()
    first.free()
    second.free()
