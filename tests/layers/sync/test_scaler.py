"""Ranks that hold different parts of the weights skip the same steps."""

import math

import pytest
import torch
from torch import nn

from distdl_rma import DistributedGradScaler, GradientSync, MismatchError
from distdl_rma.layers import DistributedLinear
from tests.layers.partitioned.sequential import agree, shard
from tests.layers.sync.training import Spectral, alone, make

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
def test_blocks_of_weights_need_the_scaler_of_all_ranks(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, comm.size))
    P_w = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer = DistributedLinear(P_x, P_x, P_w, 4, 2 * comm.size, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = DistributedGradScaler(P_world, init_scale=64.0)
    sync = GradientSync(layer, P_world)
    for step in range(2):
        optimizer.zero_grad()
        y = layer(shard(P_x, torch.ones(1, 4)))
        # Only the block of rank 0 overflows.
        scaler.scale(y.sum() * (math.inf if step == 0 and comm.rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert torch.equal(layer.weight, before), "skipped on all ranks"
            assert scaler.get_scale() == 32.0
    torch.testing.assert_close(layer.weight.detach(), before - 1.0)
    sync.close()


@pytest.mark.mpi(min_size=2)
def test_another_scale_on_one_rank_is_refused_on_all(P_world, comm):
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = DistributedGradScaler(P_world, init_scale=4.0 if comm.rank == 0 else 8.0)
    scaler.scale(plain(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(MismatchError, match=r"the scale is 8\.0 on one rank and 4\.0 on another"):
        scaler.step(optimizer)


def test_a_scaler_under_another_default_type(P_world):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        plain = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        scaler = DistributedGradScaler(P_world, init_scale=4.0)
        with GradientSync(plain, P_world):
            scaler.scale(plain(torch.full((1, 2), math.inf)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("overflow", [False, True])
def test_torchs_scaler_works_on_copies(P_world, comm, overflow):
    ours, sync, loss_of = make(P_world, comm)
    twin, loss_alone = alone()
    scales = []
    for net, loss_of_net in ((ours, loss_of), (twin, loss_alone)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            # An overflow on one rank alone.
            spoilt = overflow and step == 1
            here = spoilt and (net is twin or comm.rank == comm.size - 1)
            (scaler.scale(loss_of_net()) * (math.inf if here else 1.0)).backward()
            scaler.unscale_(optimizer)
            if not spoilt and net is ours:
                sync.clip_grad_norm_(0.5)
            elif not spoilt:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [512.0 if overflow else 1024.0] * 2
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        agree(a, b)
    sync.close()


def test_the_gradients_of_complex_parameters_are_unscaled(P_world, comm):
    model, x = Spectral(torch.complex64), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = DistributedGradScaler(P_world, init_scale=8.0)
    with GradientSync(model, P_world):
        model(x).pow(3).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        for bad in (1.0, math.nan):
            optimizer.zero_grad()
            scaler.scale(model(x).pow(3).sum() * (bad if comm.rank == comm.size - 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            if bad == 1.0:
                torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
