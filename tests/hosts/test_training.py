"""A training step over two hosts equals the sequential one; ``make test-hosts`` runs these."""

import os

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync
from distdl_rma.layers import DistributedConv2d, DistributedInstanceNorm2d, DistributedMSELoss
from tests.layers.sequential import grids, shard
from tests.two_hosts import RANKS_VARIABLE

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.processes,
    pytest.mark.skipif(RANKS_VARIABLE not in os.environ, reason="needs two hosts: make test-hosts"),
]
WIDTH, STEPS = 24, 3


def network(conv, norm):
    torch.manual_seed(5)
    return nn.Sequential(
        conv(2, WIDTH, 5, padding=2, dtype=torch.float64),
        norm(WIDTH, affine=True, dtype=torch.float64),
        nn.ReLU(inplace=True),
        conv(WIDTH, WIDTH, 3, stride=2, padding=1, dtype=torch.float64),
        nn.ReLU(inplace=True),
        conv(WIDTH, 2, 3, padding=1, dtype=torch.float64),
    )


def train(model, criterion, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches():
    torch.manual_seed(6)
    double = {"dtype": torch.float64}
    return [(torch.randn(2, 2, 31, 45, **double), torch.randn(2, 2, 16, 23, **double)) for _ in range(STEPS)]


def test_ranks_of_a_host_share_memory_and_others_do_not(comm):
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first, second = (int(ranks) for ranks in os.environ[RANKS_VARIABLE].split(","))
    assert node.allgather(comm.rank) in (list(range(first)), list(range(first, first + second)))
    node.Free()


def test_training_step_over_two_hosts_equals_the_sequential_one(P_world, comm):
    sequential = network(nn.Conv2d, nn.InstanceNorm2d)
    expected = train(sequential, nn.MSELoss(), batches())
    for grid in grids(comm.size, 2):
        P_x = P_world.create_cartesian_topology_partition(grid)
        model = network(
            lambda *sizes, P_x=P_x, **options: DistributedConv2d(P_x, *sizes, **options),
            lambda *sizes, P_x=P_x, **options: DistributedInstanceNorm2d(P_x, *sizes, **options),
        )
        with_sync = GradientSync(model, P_world)
        mine = [(shard(P_x, x), shard(P_x, target)) for x, target in batches()]
        assert train(model, DistributedMSELoss(P_x), mine) == pytest.approx(expected, rel=1e-12)
        for actual, twin in zip(model.parameters(), sequential.parameters(), strict=True):
            torch.testing.assert_close(actual, twin, rtol=1e-10, atol=1e-12)
        with_sync.close()
