"""Distributed convolutions against the sequential layer."""

import random
import time

import pytest
import torch

from distdl_rma import (
    MismatchError,
    PartitionError,
    gather_state_dict,
    zero_volume_tensor,
)
from distdl_rma.layers import DistributedConv1d, DistributedConv2d, DistributedConv3d
from tests.layers.sequential import CONV, agree, shard

pytestmark = pytest.mark.mpi
DISTRIBUTED = {1: DistributedConv1d, 2: DistributedConv2d, 3: DistributedConv3d}


def twins(P_x, dims, weights="replicated", **arguments):
    """Distributed layer and sequential layer from the same seed."""
    torch.manual_seed(5)
    layer = DISTRIBUTED[dims](P_x, **arguments, weights=weights)
    torch.manual_seed(5)
    return layer, CONV[dims](**arguments)


def compare(P_x, layer, sequential, x, weights="replicated"):
    """One training step of both on a global input; everything must agree."""
    x = x.detach().clone().requires_grad_()
    y = sequential(x)
    gradient = torch.randn_like(y)
    sequential.zero_grad()
    y.backward(gradient)
    local = shard(P_x, x).requires_grad_()
    layer.zero_grad()
    out = layer(local)
    out.backward(shard(P_x, gradient))
    if P_x.active:
        agree(out, shard(P_x, y), "output")
        agree(local.grad, shard(P_x, x.grad), "input gradient")
    if weights == "replicated" or layer.machine.rank == P_x.ranks[0]:
        for name, parameter in sequential.named_parameters():
            agree(dict(layer.named_parameters())[name].grad, parameter.grad, name)


def test_shapes_may_change_from_call_to_call_on_some_ranks_only(P_world, comm):
    # A smaller last batch, another image size: some ranks see their own shard unchanged.
    P_x = P_world.create_cartesian_topology_partition((1, 1, 1, comm.size))
    arguments = {"in_channels": 2, "out_channels": 3, "kernel_size": 5, "stride": 2, "padding": 2}
    layer, sequential = twins(P_x, 2, dtype=torch.float64, **arguments)
    rng, mine = random.Random(3), random.Random(comm.rank)
    for step in range(60):
        torch.manual_seed(step)
        shape = (rng.choice([1, 2]), 2, 7, rng.choice([13, 14, 15, 16, 17, 9, 8, 3]))
        if mine.random() < 0.1:
            time.sleep(mine.random() * 5e-3)
        x = torch.randn(shape, dtype=torch.float64)
        if rng.random() < 0.3:
            with torch.no_grad():
                agree(layer(shard(P_x, x)), shard(P_x, sequential(x)), "inference")
        else:
            compare(P_x, layer, sequential, x)


def test_more_shapes_in_one_graph_than_plans_are_kept(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, in_channels=1, out_channels=1, kernel_size=3, padding=1)
    inputs = [torch.randn(1, 1, width) for width in range(6, 30)]
    sum(layer(shard(P_x, x)).sum() for x in inputs).backward()
    sum(sequential(x).sum() for x in inputs).backward()
    torch.testing.assert_close(layer.weight.grad, sequential.weight.grad)


def test_nothing_needs_a_gradient(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 3).requires_grad_(False)
    assert not layer(torch.randn(1, 1, 4)).requires_grad
    with torch.no_grad():
        assert not DistributedConv1d(P_x, 1, 1, 3)(torch.randn(1, 1, 4)).requires_grad


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_idle_ranks_pass_empty_tensors_and_know_the_weights(P_world, comm, weights):
    some = P_world.create_partition_inclusive(range(1, comm.size))
    P_x = some.create_cartesian_topology_partition((1, 1, comm.size - 1))
    arguments = {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 1, "dtype": torch.float64}
    layer, sequential = twins(P_x, 1, weights, **arguments)
    x = torch.randn(2, 2, 9, dtype=torch.float64)
    y = sequential(x)
    y.square().sum().backward()
    local = shard(P_x, x) if P_x.active else zero_volume_tensor(2, torch.float64)
    out = layer(local)
    out.square().sum().backward()
    if P_x.active:
        agree(out, shard(P_x, y), "output")
    else:
        assert out.shape == (2, 0)
        assert out.data_ptr() != local.data_ptr() or out.numel() == 0
    if weights == "replicated":
        assert layer.get_ranks_synch_weights() == list(range(comm.size))
        agree(layer.weight, sequential.weight, "the first rank's initial weights")
        agree(layer.weight.grad, sequential.weight.grad, "weight gradient")
    else:
        assert layer.get_ranks_synch_weights() == []
        assert layer.weight.shape == (sequential.weight.shape if comm.rank == 1 else (0,))
    assert layer.get_sizeof_gradients() == sum(8 * p.numel() for p in layer.parameters())


@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_state_may_be_gathered_on_one_rank_alone(P_world, comm, weights):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 2, 3, 3, weights=weights)
    last = comm.size - 1
    state = gather_state_dict(layer, rank=last)
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    assert shapes == ({"weight": (3, 2, 3), "bias": (3,)} if comm.rank == last else {})
    with pytest.raises(PartitionError, match="rank 99 is none of the ranks"):
        gather_state_dict(layer, rank=99)


@pytest.mark.mpi(min_size=2)
def test_first_ranks_initial_weights_count(P_world, comm):
    torch.manual_seed(comm.rank)
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 3, 3, 3)
    assert torch.equal(layer.weight, torch.from_numpy(comm.bcast(layer.weight.detach().numpy())))


def test_output_is_memory_of_its_own(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 3, padding=1)
    x = torch.randn(1, 1, 6)
    with torch.no_grad():
        first = layer(x)
        kept = first.clone()
        for _ in range(4):
            layer(torch.randn(1, 1, 6))
    assert torch.equal(first, kept)


@pytest.mark.mpi(min_size=2)
def test_weights_on_one_rank_may_change_their_dtype(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, "root", in_channels=2, out_channels=2, kernel_size=3, padding=1)
    x = torch.randn(1, 2, 9)
    layer(shard(P_x, x))
    compare(P_x, layer.double(), sequential.double(), x.double(), "root")


@pytest.mark.mpi(min_size=2)
def test_layers_built_differently_on_one_rank_are_named(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 1, stride=2 if comm.rank == 0 else 1, name="uneven")
    if comm.size == 2:
        with pytest.raises(MismatchError, match="'uneven \\(shapes"):
            layer(torch.randn(1, 1, 4))
