"""Distributed instance normalisation against the sequential layer."""

import pytest
import torch

from distdl_rma import ShapeError, UnsupportedError
from distdl_rma.layers import (
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
)
from tests.layers.sequential import shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def test_large_mean_does_not_swallow_the_variance(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    torch.manual_seed(0)
    x = torch.randn(2, 4, 64, 33) + 1e4
    exact = torch.nn.InstanceNorm2d(4)(x.double())
    y = DistributedInstanceNorm2d(P_x, 4)(shard(P_x, x))
    assert (y.double() - shard(P_x, exact)).abs().max() < 1e-3 * exact.abs().max()


def test_callbacks_state_ranks_and_bytes(P_world, comm):
    split = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedInstanceNorm1d(split, 4, affine=True)
    layer(torch.randn(2, 4, 3))
    several = comm.size > 1
    assert layer.get_ranks_synch_norm() == (list(range(comm.size)) if several else [])
    assert layer.get_ranks_synch_weights() == (list(range(comm.size)) if several else [])
    assert layer.get_sizeof_gradients() == 2 * 4 * 4
    assert layer.get_sizeof_norm() == 2 * 2 * 4 * 8
    batch = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    assert DistributedInstanceNorm1d(batch, 4).get_ranks_synch_norm() == []
    assert DistributedInstanceNorm1d(batch, 4).get_ranks_synch_weights() == []


def test_rules_are_checked(P_world, comm):
    line = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    with pytest.raises(ShapeError, match=r"the layer takes \(4,\)"):
        DistributedInstanceNorm1d(line, 4)(torch.randn(1, 3, 5))
    x = torch.randn(1, 4, 5, requires_grad=True)
    y = DistributedInstanceNorm1d(line, 4)(x)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    if comm.size == 1:
        with pytest.raises(ShapeError, match="more than 1 spatial element"):
            DistributedInstanceNorm1d(line, 4)(torch.randn(2, 4, 1))
