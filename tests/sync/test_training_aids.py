"""GradientSync beside what training loops use: scalers, several optimizers, foreach, unused parameters."""

import math

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync
from distdl_rma.layers import DistributedConv2d, DistributedMSELoss
from tests.layers.sequential import agree, shard
from tests.sync.training import distributed, inputs, network, target

pytestmark = pytest.mark.mpi

DTYPE = torch.float64


def nets(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    return P_x, distributed(P_x), network(nn.Conv2d, nn.InstanceNorm2d)


def losses(P_x, ours, twin):
    x, wanted = inputs()[0], target()
    yield lambda: DistributedMSELoss(P_x)(ours(shard(P_x, x)), shard(P_x, wanted))
    yield lambda: nn.MSELoss()(twin(x), wanted)


def test_two_optimizers_see_the_same_gradients_as_on_one_machine(P_world, comm):
    P_x, ours, twin = nets(P_world, comm)
    with GradientSync(ours, P_world):
        for net, loss in zip((ours, twin), losses(P_x, ours, twin), strict=True):
            optimizers = [
                torch.optim.SGD(net[0].parameters(), lr=0.1, foreach=True),
                torch.optim.AdamW(net[1:].parameters(), foreach=False),
            ]
            for _ in range(4):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss().backward()
                for optimizer in optimizers:
                    optimizer.step()
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("overflow", [False, True])
def test_torchs_scaler_works_on_copies(P_world, comm, overflow):
    P_x, ours, twin = nets(P_world, comm)
    with GradientSync(ours, P_world) as sync:
        scales = []
        for net, loss in zip((ours, twin), losses(P_x, ours, twin), strict=True):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(3):
                optimizer.zero_grad()
                # An overflow on one rank alone.
                spoilt = overflow and step == 1 and (net is twin or comm.rank == comm.size - 1)
                (scaler.scale(loss()) * (math.inf if spoilt else 1.0)).backward()
                scaler.unscale_(optimizer)
                if not spoilt and not (overflow and step == 1):
                    _ = (
                        sync.clip_grad_norm_(0.5)
                        if net is ours
                        else nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                    )
                scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == (512.0 if overflow else 1024.0)
    assert len(set(comm.allgather(scales[0]))) == 1
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        agree(a, b)


@pytest.mark.mpi(min_size=2)
def test_mean_reaches_weights_that_one_rank_keeps(P_world, comm):
    # Every rank's loss counts the same, wherever a weight is kept.
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    gradients = {}
    for weights in ("replicated", "root"):
        torch.manual_seed(1)
        layer = DistributedConv2d(P_x, 1, 2, 3, padding=1, dtype=DTYPE, weights=weights)
        with GradientSync(layer, P_world, reduction="mean"):
            for _ in range(2):  # adds up
                layer(shard(P_x, torch.ones(1, 1, 8, 5, dtype=DTYPE))).sum().backward()
        gradients[weights] = layer.weight.grad
    if comm.rank == 0:
        agree(gradients["root"], gradients["replicated"])
