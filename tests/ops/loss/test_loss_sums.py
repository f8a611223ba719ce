"""What the ranks of a loss learn of each other from one allreduce."""

import pytest

from distdl_rma import Machine, MismatchError, ShapeError
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.loss.loss_sums import LossSums, Totals

pytestmark = pytest.mark.mpi


def sums_of(P_x, name, arguments="", batches=False):
    return LossSums(CallSite(Machine.of(P_x), name), P_x, arguments, batches)


def test_terms_and_counts_are_added_and_batches_are_told(P_world, comm):
    sums = sums_of(P_world, "sums", batches=True)
    for epoch in range(3):
        totals = sums.of_all(1.5 * comm.rank, 2.0, comm.rank + epoch, "", "float32")
        everyone = range(comm.size)
        assert totals == Totals(1.5 * sum(everyone), 2.0 * comm.size, [rank + epoch for rank in everyone])


def test_a_problem_of_one_rank_is_heard_by_all(P_world, comm):
    sums = sums_of(P_world, "problems")
    assert sums.of_all(1.0, 1.0, 0, "it is broken" if comm.rank == 0 else "", "") is None
    assert sums.of_all(1.0, 1.0, 0, "", "") == Totals(comm.size, comm.size, [])


@pytest.mark.mpi(min_size=2)
def test_what_must_be_alike_is_compared(P_world, comm):
    sums = sums_of(P_world, "alike")
    for one in range(comm.size):
        said = "float32" if comm.rank == one else "float64"
        assert sums.of_all(1.0, 1.0, 0, "", said) is None
    assert sums.of_all(1.0, 1.0, 0, "", "float32") is not None


@pytest.mark.mpi(min_size=2)
def test_other_arguments_are_told_in_the_first_call(P_world, comm):
    sums = sums_of(P_world, "arguments", arguments=f"beta={comm.rank}")
    with pytest.raises(MismatchError, match="arguments"):
        sums.of_all(1.0, 1.0, 0, "", "")


def test_each_batch_block_counts_once(P_world, comm):
    rows = sums_of(P_world.create_cartesian_topology_partition((comm.size, 1)), "rows", batches=True)
    assert rows.global_batch([float(rank) for rank in range(comm.size)]) == sum(range(comm.size))
    columns = sums_of(P_world.create_cartesian_topology_partition((1, comm.size)), "columns", batches=True)
    assert columns.global_batch([3.0] * comm.size) == 3.0
    if comm.size > 1:
        with pytest.raises(
            ShapeError, match=r"'columns': ranks 0 and 1 share a batch block .* sizes 3 and 4"
        ):
            columns.global_batch([3.0, *[4.0] * (comm.size - 1)])
