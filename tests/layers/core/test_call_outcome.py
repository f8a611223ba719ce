"""What ranks outside of a call hear of it."""

import pytest

from distdl_rma import Machine, PartitionError, ShapeError
from distdl_rma.layers.core.call_outcome import CallOutcome

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
def test_those_outside_raise_what_those_inside_refuse(P_world, comm):
    machine, (teller, *outside) = Machine.of(P_world), P_world.ranks
    outcome = CallOutcome.among(machine, [teller], P_world.ranks, "it")
    outcome.connect()
    for error in (None, ShapeError("'it': two\n  lines"), None, PartitionError("no grid")):
        if machine.rank not in outside:
            outcome.tell(error)
        elif error is None:
            outcome.hear()
        else:
            with pytest.raises(type(error)) as caught:
                outcome.hear()
            assert str(caught.value) == str(error)


def test_nobody_is_told_where_all_take_part(P_world):
    assert CallOutcome.among(Machine.of(P_world), P_world.ranks, P_world.ranks, "it") is None


@pytest.mark.mpi(min_size=3)
def test_only_the_first_rank_inside_tells(P_world, comm):
    machine, (first, second, *_) = Machine.of(P_world), P_world.ranks
    outcome = CallOutcome.among(machine, [first, second], P_world.ranks, "it")
    assert (outcome is None) == (machine.rank == second)


@pytest.mark.mpi(min_size=4)
def test_copies_for_a_layer_of_other_ranks_are_not_in_its_audience(P_world):
    machine, ranks = Machine.of(P_world), P_world.ranks
    inside = ranks[:2] if machine.rank in ranks[:2] else ranks[2:]
    assert CallOutcome.among(machine, inside, ranks, "it") is None
