"""Normalisation over the last dimensions, against torch, on grids that cut them."""

import pytest
import torch
from torch import nn

from distdl_rma.layers import DistributedLayerNorm, DistributedRMSNorm
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("shape", [5, (5,), (6, 5)])
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("kind", [(DistributedLayerNorm, nn.LayerNorm), (DistributedRMSNorm, nn.RMSNorm)])
def test_the_last_dimensions_are_normalised_however_they_are_cut(P_world, comm, shape, cut, kind):
    grid = tuple(comm.size if d == cut else 1 for d in range(3))
    P_x = P_world.create_cartesian_topology_partition(grid)
    layer, twin = kind[0](P_x, shape, dtype=torch.float64), kind[1](shape, dtype=torch.float64)
    assert layer.normalized_shape == twin.normalized_shape
    assert layer.elementwise_affine
    x, gradient = (torch.randn(4, 6, 5, dtype=torch.float64) for _ in range(2))
    whole, local = x.clone().requires_grad_(), shard(P_x, x).requires_grad_()
    y, out = twin(whole), layer(local)
    y.backward(gradient)
    out.backward(shard(P_x, gradient))
    agree(out, shard(P_x, y), "output")
    agree(local.grad, shard(P_x, whole.grad), "input gradient")
    for key, parameter in twin.named_parameters():
        agree(getattr(layer, key).grad, parameter.grad[layer.store.slices()], key)


def test_rms_norm_calls_its_input_as_torch_does(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1))
    x = torch.randn(comm.size, 4)
    assert torch.equal(DistributedRMSNorm(P_x, 4)(x=shard(P_x, x)), DistributedRMSNorm(P_x, 4)(shard(P_x, x)))
