"""Losses over classes."""

import pytest
import torch

from distdl_rma.layers import DistributedCrossEntropyLoss, DistributedMSELoss
from tests.layers.loss.same_words import refused
from tests.layers.sequential import shard

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("grid", ["batch", "classes"])
def test_mean_over_nothing_is_not_a_number_and_has_no_gradient(P_world, comm, grid):
    shape = (comm.size, 1, 1) if grid == "batch" else (1, comm.size, 1)
    P_x = P_world.create_cartesian_topology_partition(shape)
    x = shard(P_x, torch.randn(2, 5, 3)).requires_grad_()
    target = torch.full((x.shape[0], x.shape[2]), 255)
    loss = DistributedCrossEntropyLoss(P_x, ignore_index=255)(x, target)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert DistributedMSELoss(P_x)(x[:0], x[:0]).isnan()
    assert DistributedMSELoss(P_x, "sum")(x[:0], x[:0]) == 0


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree_on_the_classes_are_refused(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    loss = DistributedCrossEntropyLoss(P_x)
    target = torch.zeros(2, dtype=torch.int64)
    refused(comm, loss, torch.zeros(2, 3 + (comm.rank == 1)), target, "rank 0 .* 3 classes but rank 1 .* 4")
    either = torch.zeros(2, 3) if comm.rank else target
    refused(comm, loss, torch.zeros(2, 3), either, "torch.int64 .* but rank 1 torch.float32 and torch.float")


def test_representation_tells_the_arguments(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    loss = DistributedCrossEntropyLoss(P_x, torch.ones(4), ignore_index=3)
    assert repr(loss) == (
        "DistributedCrossEntropyLoss(reduction=mean, ignore_index=3, label_smoothing=0.0, weight=(4,),"
        f" P_x=({comm.size}, 1))"
    )
