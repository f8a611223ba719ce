"""Losses with a term per element."""

import pytest
import torch
from torch import nn

from distdl_rma.layers import DistributedBCEWithLogitsLoss, DistributedKLDivLoss, DistributedL1Loss
from tests.layers.partitioned.same_error import refused
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi


def test_sum_of_many_is_not_rounded_to_sixteen_bits_on_the_way(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    x = torch.ones(70_001, dtype=torch.float16)
    assert DistributedL1Loss(P_x)(x, torch.zeros_like(x)) == 1.0
    with torch.autocast("cpu"):
        loss = DistributedL1Loss(P_x, "sum")(x, torch.zeros(70_001))
    assert loss.item() == 70_001 * comm.size


def test_kl_divergence_counts_each_sample_of_a_batch_block_once(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    loss = DistributedKLDivLoss(P_x, "batchmean", name="prior")
    x = torch.randn(3, 5, dtype=torch.float64)
    agree(loss(shard(P_x, x), shard(P_x, x.exp())), nn.KLDivLoss(reduction="batchmean")(x, x.exp()))
    if comm.size > 1:
        x = torch.zeros(3 + (comm.rank == 1), 5)
        refused(comm, loss, x, x, "'prior': input: .* must agree in dimension 0")


def test_weights_are_global_and_each_rank_takes_its_part(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    x, target, weight = torch.rand(3, 2, 7, dtype=torch.float64)
    loss = DistributedBCEWithLogitsLoss(P_x, weight, pos_weight=weight[:1])
    agree(
        loss(shard(P_x, x), shard(P_x, target)),
        nn.BCEWithLogitsLoss(weight, pos_weight=weight[:1])(x, target),
    )
    assert loss.state_dict().keys() == {"weight", "pos_weight"}
    if comm.size > 1:
        part = shard(P_x, x)[:, 1:] if comm.rank == 0 else shard(P_x, x)
        refused(comm, loss, part, part, r"size of tensor a \(7\) must match the size of tensor b \(6\)")
        # Shards need not be balanced.
        cuts = (0, 1, 7) if comm.size == 2 else (0, *range(4, 3 + comm.size), 7)
        uneven = slice(*cuts[comm.rank : comm.rank + 2])
        agree(
            loss(x[:, uneven], target[:, uneven]),
            nn.BCEWithLogitsLoss(weight, pos_weight=weight[:1])(x, target),
        )
