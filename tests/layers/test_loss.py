"""Losses with a global mean."""

import pytest
import torch
from torch import nn

from distdl_rma import ShapeError, zero_volume_tensor
from distdl_rma.layers import DistributedMSELoss
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("width", [1, 7, 12])
def test_value_and_gradients_equal_the_sequential_ones_on_uneven_shards(P_world, comm, reduction, width):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    x = torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 3, width, dtype=torch.float64)
    expected = nn.MSELoss(reduction=reduction)(x, target)
    (3 * expected).backward()
    local = shard(P_x, x).requires_grad_()
    loss = DistributedMSELoss(P_x, reduction=reduction)(local, shard(P_x, target))
    (3 * loss).backward()
    agree(loss, expected, "value, on every rank")
    agree(local.grad, shard(P_x, x.grad), "gradient")


def test_target_may_need_a_gradient_too(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x, target = torch.randn(2, 5, 2, dtype=torch.float64).requires_grad_().unbind()
    local = shard(P_x, target).requires_grad_()
    DistributedMSELoss(P_x)(shard(P_x, x), local).backward()
    expected = torch.autograd.grad(nn.MSELoss()(x, target), target)[0]
    agree(local.grad, shard(P_x, expected), "gradient of the target")


@pytest.mark.mpi(min_size=2)
def test_idle_rank_gets_zero_and_can_call_backward(P_world, comm):
    P_x = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1))
    x = (torch.ones(2, 2) if P_x.active else zero_volume_tensor()).requires_grad_()
    loss = DistributedMSELoss(P_x)(x, torch.zeros_like(x))
    loss.backward()
    assert loss.item() == (1.0 if P_x.active else 0.0)


def test_misfit_on_one_rank_raises_on_all(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    loss = DistributedMSELoss(P_x, name="fidelity")
    x = torch.randn(2, 3)
    with pytest.raises(ShapeError, match=r"'fidelity': input and target differ on 1 rank"):
        loss(x, torch.randn(2, 1) if comm.rank == comm.size - 1 else x)
    assert loss(x, x).item() == 0.0


def test_unknown_reduction_is_refused(P_world):
    with pytest.raises(ShapeError, match="reduction is one of"):
        DistributedMSELoss(P_world, reduction="none")
