"""Losses with a term per element."""

import pytest
import torch

from distdl_rma.layers import DistributedBCEWithLogitsLoss, DistributedL1Loss
from tests.layers.partitioned.same_error import refused
from tests.layers.partitioned.sequential import shard

pytestmark = pytest.mark.mpi


def test_sum_of_many_is_not_rounded_to_sixteen_bits_on_the_way(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    x = torch.ones(70_001, dtype=torch.float16)
    assert DistributedL1Loss(P_x)(x, torch.zeros_like(x)) == 1.0
    with torch.autocast("cpu"):
        loss = DistributedL1Loss(P_x, "sum")(x, torch.zeros(70_001))
    assert loss.item() == 70_001 * comm.size


def test_weights_are_global_and_in_the_state(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    x, weight = torch.rand(2, 2, 7, dtype=torch.float64)
    loss = DistributedBCEWithLogitsLoss(P_x, weight, pos_weight=weight[:1])
    assert loss.state_dict().keys() == {"weight", "pos_weight"}
    if comm.size > 1:
        part = shard(P_x, x)[:, 1:] if comm.rank == 0 else shard(P_x, x)
        refused(comm, loss, part, part, r"size of tensor a \(7\) must match the size of tensor b \(6\)")
