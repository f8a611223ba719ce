"""Losses of tensors that are known to be parts of one, without a layer."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, MismatchError, ShapeError, UnsupportedError
from distdl_rma.dtypes import sum_dtype
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Listed
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.loss.global_loss import (
    GlobalLoss,
    LossOptions,
    LossSums,
    Totals,
    autocast_dtype,
    result_dtype,
)
from tests.layers.sequential import agree, shard

NEEDS = GradientNeeds(True, False, (False,))


def refuse(problem, alike):
    return ShapeError(f"{problem or 'none'}, {alike}")


def sums_of(P_x, name, built_with=""):
    return LossSums(CallSite(Machine.of(P_x), name), P_x, built_with, refuse)


def loss_of(source, function, name, reduction="mean", **arguments):
    P_x = source.partition if isinstance(source, Decomposition) else source
    sums, site = sums_of(P_x, name), CallSite(Machine.of(P_x), name)
    return GlobalLoss(site, source, LossOptions(function, reduction, arguments), sums)


def test_short_types_are_summed_in_longer_ones_and_autocast_is_torchs():
    half, single, plane = (torch.zeros(1, dtype=t) for t in (torch.float16, torch.float32, torch.complex64))
    assert sum_dtype(half.dtype) == sum_dtype(single.dtype) == torch.float32
    assert (autocast_dtype(half), result_dtype(plane)) == (torch.float16, torch.float32)
    with torch.autocast("cpu"):
        assert autocast_dtype(half) == result_dtype(half) == torch.float32


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
@pytest.mark.parametrize("known", [False, True])
def test_value_and_gradient_are_those_of_the_whole(P_world, comm, reduction, known):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x, target = torch.randn(2, 5, 3, dtype=torch.float64).log_softmax(2)
    source = Decomposition.balanced(P_x, x.shape) if known else P_x
    loss = loss_of(source, F.kl_div, "prior", reduction, log_target=True)
    whole, local = x.clone().requires_grad_(), shard(P_x, x).requires_grad_()
    expected = F.kl_div(whole, target, reduction=reduction if reduction != "mean" else "sum", log_target=True)
    expected = expected / x.numel() if reduction == "mean" else expected
    value = loss(NEEDS, local, shard(P_x, target))
    if reduction != "none":
        assert loss.output.box(comm.rank).shape == value.shape
    else:
        assert loss.output is (source if known else None)
    agree(value, shard(P_x, expected) if reduction == "none" else expected, "value")
    expected.sum().backward()
    value.sum().backward()
    agree(local.grad, shard(P_x, whole.grad), "gradient")


@pytest.mark.mpi
def test_shards_that_form_no_grid_are_taken(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x = torch.ones(comm.rank, 2 + comm.rank)
    count = sum(rank * (2 + rank) for rank in range(comm.size))
    assert loss_of(P_x, F.mse_loss, "ragged", "sum")(NEEDS, x, torch.zeros_like(x)) == count


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ["mean", "batchmean"])
def test_elements_that_several_ranks_hold_count_once(P_world, comm, reduction):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    x, target = torch.rand(2, 4, 3, dtype=torch.complex128 if reduction == "mean" else torch.float64)
    function = F.l1_loss if reduction == "mean" else F.kl_div
    loss = loss_of(Decomposition.replicated(P_x, x.shape), function, "copies", reduction)
    whole, local = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = function(whole, target, reduction=reduction)
    expected.backward()
    value = loss(NEEDS, local, target)
    value.backward()
    agree(value, expected, "value")
    agree(local.grad, whole.grad if comm.rank == 0 else torch.zeros_like(x), "gradient")


@pytest.mark.mpi
def test_weights_are_cut_as_the_input_is_known_to_be(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    columns = Listed((3, *[1] * (comm.size - 1)))
    source = Decomposition.balanced(P_x, (2, comm.size + 2)).with_splits({1: columns})
    x, target, weight = torch.rand(3, 2, comm.size + 2, dtype=torch.float64)
    loss, part = loss_of(source, F.binary_cross_entropy, "weighted"), source.slices()
    value = loss(NEEDS, x[part], target[part], weight=weight[:1])
    agree(value, F.binary_cross_entropy(x, target, weight[:1]))


@pytest.mark.mpi
def test_what_is_wrong_on_one_rank_is_refused_on_all(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    loss, x = loss_of(P_x, F.mse_loss, "fidelity"), torch.ones(3)
    bad = x[:, None] if comm.rank == comm.size - 1 else x
    here = "2 dimensions but P_x" if bad is not x else "none"
    with pytest.raises(ShapeError, match=here):
        loss(NEEDS, bad, x)
    assert loss(NEEDS, x, x) == 0


@pytest.mark.mpi
def test_functions_of_the_loss_have_no_second_derivative(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    x = torch.ones(3, requires_grad=True)
    value = loss_of(P_x, F.mse_loss, "fidelity")(NEEDS, x, torch.zeros(3))
    with pytest.raises(UnsupportedError, match="'fidelity': second derivatives"):
        torch.autograd.grad(value.square(), x, create_graph=True)


@pytest.mark.mpi
def test_terms_counts_and_the_numbers_of_groups_are_added(P_world, comm):
    sums, everyone = sums_of(P_world, "sums"), P_world.ranks
    groups = everyone[:2], everyone[2:]
    mine = next(group for group in groups if comm.rank in group)
    for epoch in range(3):
        totals = sums.of_all(1.5 * comm.rank, 2.0, "", "float32", mine[0] + epoch, mine)
        numbers = sum(group[0] + epoch for group in groups if group)
        assert totals == Totals(1.5 * sum(everyone), 2.0 * comm.size, numbers)


@pytest.mark.mpi(min_size=2)
def test_numbers_that_differ_within_a_group_are_told_to_all(P_world, comm):
    sums, everyone = sums_of(P_world, "numbers"), P_world.ranks
    mine = everyone[:2] if comm.rank in everyone[:2] else everyone[2:]
    assert sums.of_all(0.0, 0.0, "", "", comm.rank, mine).told == {rank: rank for rank in everyone}
    # Of a rank that cannot say a number the others hear what keeps it from that.
    problem = "it is broken" if comm.rank == 1 else ""
    with pytest.raises(ShapeError, match=problem or "none"):
        sums.of_all(0.0, 0.0, problem, "", 0 if problem else 3, mine)
    assert not sums.of_all(0.0, 0.0, "", "", 3, mine).told


@pytest.mark.mpi
def test_a_problem_of_one_rank_is_heard_by_all(P_world, comm):
    sums = sums_of(P_world, "problems")
    with pytest.raises(ShapeError, match="it is broken" if comm.rank == 0 else "none"):
        sums.of_all(1.0, 1.0, "it is broken" if comm.rank == 0 else "", "")
    assert sums.of_all(1.0, 1.0, "", "") == Totals(comm.size, comm.size)


@pytest.mark.mpi(min_size=2)
def test_what_must_be_alike_is_compared(P_world, comm):
    sums = sums_of(P_world, "alike")
    for one in range(comm.size):
        said = "float32" if comm.rank == one else "float64"
        with pytest.raises(ShapeError, match=f"none, {said}"):
            sums.of_all(1.0, 1.0, "", said)
    assert sums.of_all(1.0, 1.0, "", "float32") == Totals(comm.size, comm.size)


@pytest.mark.mpi(min_size=2)
def test_other_arguments_are_told_in_the_first_call(P_world, comm):
    sums = sums_of(P_world, "arguments", built_with=f"beta={comm.rank}")
    with pytest.raises(MismatchError, match="arguments"):
        sums.of_all(1.0, 1.0, "", "")


@pytest.mark.mpi
def test_each_batch_block_counts_once(P_world, comm):
    def count(grid, rows):
        P_x = P_world.create_cartesian_topology_partition(grid)
        x = torch.ones(rows, 1, dtype=torch.float64)
        # A term is 1 * (log 1 - 1) = -1: their sum over the number of rows.
        value = loss_of(P_x, F.kl_div, "columns", "batchmean")(NEEDS, x, x)
        return -comm.allreduce(rows) / float(value)

    assert count((comm.size, 1), 1 + comm.rank) == sum(range(1, 1 + comm.size))
    assert count((1, comm.size), 3) == 3.0
    if comm.size > 1:
        with pytest.raises(
            ShapeError, match=r"'columns': ranks 0 and 1 share a batch block .* sizes 3 and 4"
        ):
            count((1, comm.size), 3 if comm.rank == 0 else 4)
