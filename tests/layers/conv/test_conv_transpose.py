"""Transposed convolutions against the sequential layer."""

import pytest
import torch
from torch import nn

from distdl_rma import ShapeError
from distdl_rma.layers import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi
PAIRS = {
    1: (DistributedConvTranspose1d, nn.ConvTranspose1d),
    2: (DistributedConvTranspose2d, nn.ConvTranspose2d),
    3: (DistributedConvTranspose3d, nn.ConvTranspose3d),
}


def twins(P_x, dims, *arguments, **options):
    distributed, sequential = PAIRS[dims]
    torch.manual_seed(3)
    layer = distributed(P_x, *arguments, **options, dtype=torch.float64)
    torch.manual_seed(3)
    return layer, sequential(*arguments, **options, dtype=torch.float64)


def compare(P_x, layer, sequential, x, output_size=None):
    x = x.clone().requires_grad_()
    local = shard(P_x, x).requires_grad_()
    layer.zero_grad()
    sequential.zero_grad()
    y, out = sequential(x, output_size), layer(local, output_size)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    out.backward(shard(P_x, gradient))
    agree(out, shard(P_x, y), "output")
    agree(local.grad, shard(P_x, x.grad), "input gradient")
    for key, parameter in sequential.named_parameters():
        agree(getattr(layer, key).grad, parameter.grad, key)


def test_output_size_may_be_asked_for(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer, sequential = twins(P_x, 2, 2, 3, 3, (2, 3), 1)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    for size in ((9, 10), (10, 12), [1, 3, 10, 11], torch.Size((9, 11)), None):
        compare(P_x, layer, sequential, x, size)


@pytest.mark.parametrize("size", [(9, 13), (8, 10), (9,), (1, 9, 10)])
def test_impossible_output_size_is_refused_as_torch_does(P_world, comm, size):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer, sequential = twins(P_x, 2, 2, 3, 3, (2, 3), 1)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="output"):
        sequential(x, size)
    with pytest.raises(ShapeError, match=f"{layer.name}.*output_size"):
        layer(shard(P_x, x), size)
    compare(P_x, layer, sequential, x)


@pytest.mark.mpi(min_size=2)
def test_output_size_that_differs_between_ranks_is_told_to_all(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, 2, 3, 3, 2)
    x = torch.randn(1, 2, 5, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"alike on all ranks: rank 0 has None but rank 1 \(12,\)"):
        layer(shard(P_x, x), (12,) if comm.rank == 1 else None)
    compare(P_x, layer, sequential, x, (12,))


def test_output_too_small_is_refused_as_torch_does(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, 1, 1, 3, 1, 2)
    x = torch.zeros(1, 1, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="too small"):
        sequential(x)
    with pytest.raises(ShapeError, match=r"global input \(2,\) is too small: the output would be \(0,\)"):
        layer(shard(P_x, x))
