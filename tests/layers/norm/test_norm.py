"""Distributed instance normalisation against the sequential layer."""

import copy

import pytest
import torch

from distdl_rma import PartitionError, ShapeError, UnsupportedError, zero_volume_tensor
from distdl_rma.layers import (
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)
from tests.layers.sequential import NORM, agree, grids, shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]
DISTRIBUTED = {1: DistributedInstanceNorm1d, 2: DistributedInstanceNorm2d, 3: DistributedInstanceNorm3d}
SHAPES = {1: (3, 4, 19), 2: (3, 4, 9, 7), 3: (2, 4, 5, 3, 4)}


def twins(P_x, dims, **arguments):
    layer = DISTRIBUTED[dims](P_x, 4, **arguments, dtype=torch.float64)
    sequential = NORM[dims](4, **arguments, dtype=torch.float64)
    for parameter, twin in zip(layer.parameters(), sequential.parameters(), strict=True):
        torch.manual_seed(parameter.numel())
        parameter.data = torch.rand_like(parameter) + 0.5
        twin.data = parameter.data.clone()
    return layer, sequential


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("affine", [False, True])
def test_training_step_equals_the_sequential_one_on_every_grid(P_world, comm, dims, affine):
    for grid in grids(comm.size, dims):
        P_x = P_world.create_cartesian_topology_partition(grid)
        layer, sequential = twins(P_x, dims, affine=affine)
        x = torch.randn(SHAPES[dims], dtype=torch.float64, requires_grad=True)
        y = sequential(x)
        gradient = torch.randn_like(y)
        y.backward(gradient)
        local = shard(P_x, x).requires_grad_()
        out = layer(local)
        out.backward(shard(P_x, gradient))
        agree(out, shard(P_x, y), "output")
        agree(local.grad, shard(P_x, x.grad), "input gradient")
        if affine:
            agree(layer.weight.grad, sequential.weight.grad, "weight")
            agree(layer.bias.grad, sequential.bias.grad, "bias")


def test_running_statistics_equal_torchs_and_serve_in_eval(P_world, comm):
    for grid in grids(comm.size, 2):
        P_x = P_world.create_cartesian_topology_partition(grid)
        layer, sequential = twins(P_x, 2, affine=True, track_running_stats=True, momentum=0.3)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(3, 4, 9, 7, dtype=torch.float64) * 2 + 1
            layer(shard(P_x, x))
            sequential(x)
        assert layer.state_dict().keys() == sequential.state_dict().keys()
        for key, value in sequential.state_dict().items():
            agree(layer.state_dict()[key], value, key)
        agree(layer.eval()(shard(P_x, x)), shard(P_x, sequential.eval()(x)), "eval")


def test_large_mean_does_not_swallow_the_variance(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    torch.manual_seed(0)
    x = torch.randn(2, 4, 64, 33) + 1e4
    exact = torch.nn.InstanceNorm2d(4)(x.double())
    y = DistributedInstanceNorm2d(P_x, 4)(shard(P_x, x))
    assert (y.double() - shard(P_x, exact)).abs().max() < 1e-3 * exact.abs().max()


def test_empty_shards_take_part(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, affine=True)
    x = torch.randn(2, 4, 2, dtype=torch.float64, requires_grad=True)
    sequential(x).square().sum().backward()
    local = shard(P_x, x).requires_grad_()
    layer(local).square().sum().backward()
    agree(local.grad, shard(P_x, x.grad), "input gradient")
    agree(layer.weight.grad, sequential.weight.grad, "weight")


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


@pytest.mark.mpi(min_size=2)
def test_idle_rank_keeps_weights_and_statistics_equal(P_world, comm):
    some = P_world.create_partition_inclusive(range(comm.size - 1))
    P_x = some.create_cartesian_topology_partition((1, 1, comm.size - 1))
    layer, sequential = twins(P_x, 1, affine=True, track_running_stats=True)
    x = torch.randn(2, 4, 9, dtype=torch.float64)
    sequential(x).square().sum().backward()
    layer(shard(P_x, x) if P_x.active else zero_volume_tensor(2, torch.float64)).square().sum().backward()
    agree(layer.weight.grad, sequential.weight.grad, "weight")
    agree(layer.running_var, sequential.running_var, "running_var")


@pytest.mark.mpi(min_size=2)
def test_wrong_input_on_one_rank_raises_the_same_error_on_all(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedInstanceNorm1d(P_x, 4, name="enc1.norm")
    with pytest.raises(ShapeError, match=r"'enc1.norm': .*must agree in dimension 1") as caught:
        layer(torch.randn(1, 5 if comm.rank == 1 else 4, 3))
    assert len(set(comm.allgather(str(caught.value)))) == 1


def test_rules_are_checked(P_world, comm):
    line = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    with pytest.raises(PartitionError, match="the tensor has 4"):
        DistributedInstanceNorm3d(line, 4)
    with pytest.raises(ShapeError, match=r"the layer takes \(4,\)"):
        DistributedInstanceNorm1d(line, 4)(torch.randn(1, 3, 5))
    x = torch.randn(1, 4, 5, requires_grad=True)
    y = DistributedInstanceNorm1d(line, 4)(x)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    if comm.size == 1:
        with pytest.raises(ShapeError, match="more than 1 spatial element"):
            DistributedInstanceNorm1d(line, 4)(torch.randn(2, 4, 1))


def test_state_loads_from_the_sequential_layer(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, affine=True, track_running_stats=True)
    state = {key: torch.full_like(value, 3) for key, value in sequential.state_dict().items()}
    layer.load_state_dict(copy.deepcopy(state))
    assert layer.state_dict().keys() == state.keys()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, state[key]), key
