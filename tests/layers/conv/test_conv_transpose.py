"""Transposed convolutions against the sequential layer."""

import pytest
import torch
from torch import nn

from distdl_rma import ArgumentError, PartitionError, ShapeError, UnsupportedError
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


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_arguments_come_in_torchs_order(P_world, comm, dims):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, *(1,) * (dims - 1)))
    # In, out, kernel, stride, padding, output_padding, groups, bias, dilation.
    layer, sequential = twins(P_x, dims, 4, 6, 3, 2, 1, 1, 2, True, 2)
    compare(P_x, layer, sequential, torch.randn(2, 4, *(5,) * dims, dtype=torch.float64))


def test_blocks_whose_outputs_do_not_touch(P_world, comm):
    # A stride wider than the kernel leaves outputs that hold the bias only, between ranks too.
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, 2, 3, 1, 5, 0, 3)
    for width in (1, 2, 7):
        compare(P_x, layer, sequential, torch.randn(1, 2, width, dtype=torch.float64))


def test_padding_that_crops_whole_blocks_away(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, 2, 3, 2, 1, 3)
    compare(P_x, layer, sequential, torch.randn(1, 2, 8, dtype=torch.float64))


def test_outputs_that_several_ranks_add_to(P_world, comm):
    # Every output overlaps the windows of all ranks.
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, 2, 3, 9)
    compare(P_x, layer, sequential, torch.randn(2, 2, 4, dtype=torch.float64))


def test_batch_is_split_too(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    layer, sequential = twins(P_x, 1, 2, 3, 3, 2)
    for batch in (1, comm.size, 5):
        compare(P_x, layer, sequential, torch.randn(batch, 2, 4, dtype=torch.float64))


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


def test_rules_are_checked_at_construction(P_world, comm):
    line = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    with pytest.raises(PartitionError, match="DistributedConvTranspose2d: P_x has 3 dimensions"):
        DistributedConvTranspose2d(line, 1, 1, 3)
    with pytest.raises(ArgumentError, match="DistributedConvTranspose1d: output_padding"):
        DistributedConvTranspose1d(line, 1, 1, 3, 2, output_padding=2)
    with pytest.raises(ArgumentError, match=r"DistributedConvTranspose1d: .*padding"):
        DistributedConvTranspose1d(line, 1, 1, 3, padding=-1)
    with pytest.raises(ArgumentError, match='Only "zeros" padding mode'):
        DistributedConvTranspose1d(line, 1, 1, 3, padding_mode="circular")
    with pytest.raises(UnsupportedError, match="dtype"):
        DistributedConvTranspose1d(line, 1, 1, 3, dtype=torch.complex64)


def test_state_dict_is_the_sequential_one(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer, sequential = twins(P_x, 2, 4, 6, 3)
    for key, value in sequential.state_dict().items():
        assert torch.equal(layer.state_dict()[key], value)
    assert layer.get_ranks_synch_weights() == (list(range(comm.size)) if comm.size > 1 else [])
    assert layer.get_sizeof_gradients() == sum(8 * p.numel() for p in sequential.parameters())
