"""Losses of tensors that are known to be parts of one, without a layer."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError, UnsupportedError
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.loss.global_loss import GlobalLoss, LossArguments, autocast_dtype, result_dtype, wide
from distdl_rma.ops.loss.loss_sums import LossSums
from tests.layers.sequential import agree, shard


def loss_of(P_x, function, name, batches=False):
    sums = LossSums(CallSite(Machine.of(P_x), name), P_x, "", batches)
    return GlobalLoss(P_x, function, sums, lambda problem, alike: ShapeError(f"{problem or 'none'}, {alike}"))


def test_short_types_are_summed_in_longer_ones_and_autocast_is_torchs():
    half, single, plane = (torch.zeros(1, dtype=t) for t in (torch.float16, torch.float32, torch.complex64))
    assert wide(half).dtype == torch.float32
    assert wide(single) is single
    assert (autocast_dtype(half), result_dtype(plane)) == (torch.float16, torch.float32)
    with torch.autocast("cpu"):
        assert autocast_dtype(half) == result_dtype(half) == torch.float32


@pytest.mark.mpi
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
def test_value_and_gradient_are_those_of_the_whole(P_world, comm, reduction):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x, target = torch.randn(2, 5, 3, dtype=torch.float64).log_softmax(2)
    loss = loss_of(P_x, F.kl_div, "prior", reduction == "batchmean")
    given = LossArguments(reduction, {"log_target": True}, {})
    whole, local = x.clone().requires_grad_(), shard(P_x, x).requires_grad_()
    expected = F.kl_div(whole, target, reduction=reduction if reduction != "mean" else "sum", log_target=True)
    expected = expected / x.numel() if reduction == "mean" else expected
    value = loss(local, shard(P_x, target), given)
    agree(value, shard(P_x, expected) if reduction == "none" else expected, "value")
    expected.sum().backward()
    value.sum().backward()
    agree(local.grad, shard(P_x, whole.grad), "gradient")


@pytest.mark.mpi
def test_shards_that_form_no_grid_are_taken(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x = torch.ones(comm.rank, 2 + comm.rank)
    count = sum(rank * (2 + rank) for rank in range(comm.size))
    given = LossArguments("sum", {}, {})
    assert loss_of(P_x, F.mse_loss, "ragged")(x, torch.zeros_like(x), given) == count


@pytest.mark.mpi
def test_what_is_wrong_on_one_rank_is_refused_on_all(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    loss, given, x = loss_of(P_x, F.mse_loss, "fidelity"), LossArguments("mean", {}, {}), torch.ones(3)
    bad = x[:, None] if comm.rank == comm.size - 1 else x
    here = "2 dimensions but P_x" if bad is not x else "none"
    with pytest.raises(ShapeError, match=here):
        loss(bad, x, given)
    assert loss(x, x, given) == 0


@pytest.mark.mpi
def test_functions_of_the_loss_have_no_second_derivative(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    x = torch.ones(3, requires_grad=True)
    value = loss_of(P_x, F.mse_loss, "fidelity")(x, torch.zeros(3), LossArguments("mean", {}, {}))
    with pytest.raises(UnsupportedError, match="'fidelity': second derivatives"):
        torch.autograd.grad(value.square(), x, create_graph=True)
