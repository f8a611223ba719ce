"""Distributed convolutions against the sequential layer."""

import copy
import random
import time

import pytest
import torch
from torch import nn

from distdl_rma import (
    Machine,
    MismatchError,
    PartitionError,
    UnsupportedError,
    gather_state_dict,
    zero_volume_tensor,
)
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import DistributedConv1d, DistributedConv2d, DistributedConv3d
from tests.layers.sequential import CONV, agree, grids, random_convolution, shard
from tests.matrix import over_seeds

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


@over_seeds(60)
def test_random_convolution_equals_the_sequential_one(P_world, comm, seed):
    rng = random.Random(seed)
    dims, arguments, shape = random_convolution(rng)
    P_x = P_world.create_cartesian_topology_partition(rng.choice(list(grids(comm.size, dims))))
    weights = rng.choice(["replicated", "root"])
    layer, sequential = twins(P_x, dims, weights, **arguments)
    for _ in range(2):
        compare(P_x, layer, sequential, torch.randn(shape, dtype=torch.float64), weights)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [4, 5])
def test_padding_may_be_named(P_world, comm, padding, kernel):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    arguments = {"in_channels": 2, "out_channels": 3, "kernel_size": (kernel, 3), "padding": padding}
    layer, sequential = twins(P_x, 2, dtype=torch.float64, **arguments)
    compare(P_x, layer, sequential, torch.randn(2, 2, 13, 9, dtype=torch.float64))


def test_unbalanced_input_gives_a_balanced_output(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, in_channels=2, out_channels=2, kernel_size=5, padding=2)
    lengths = [0, 7, 1, 4][: comm.size] if comm.size > 1 else [9]
    x = torch.randn(1, 2, sum(lengths), requires_grad=True)
    y = sequential(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    blocks = Decomposition.from_local_shapes(P_x, {r: (1, 2, n) for r, n in enumerate(lengths)})
    local = x[blocks.slices()].detach().clone().requires_grad_()
    out = layer(local)
    out.backward(shard(P_x, gradient))
    torch.testing.assert_close(out, shard(P_x, y))
    torch.testing.assert_close(local.grad, x.grad[blocks.slices()])


def test_fewer_rows_than_ranks(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    arguments = {"in_channels": 1, "out_channels": 2, "kernel_size": 3, "padding": 4, "dtype": torch.float64}
    layer, sequential = twins(P_x, 1, **arguments)
    for width in (1, 2, 3):
        compare(P_x, layer, sequential, torch.randn(2, 1, width, dtype=torch.float64))


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


@pytest.mark.mpi(min_size=2)
def test_smaller_last_batch_of_a_split_batch(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    arguments = {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "dtype": torch.float64}
    layer, sequential = twins(P_x, 1, **arguments)
    for batch in (comm.size + 1, comm.size, 1, 2 * comm.size):
        compare(P_x, layer, sequential, torch.randn(batch, 2, 8, dtype=torch.float64))


def test_more_shapes_in_one_graph_than_plans_are_kept(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer, sequential = twins(P_x, 1, in_channels=1, out_channels=1, kernel_size=3, padding=1)
    inputs = [torch.randn(1, 1, width) for width in range(6, 30)]
    sum(layer(shard(P_x, x)).sum() for x in inputs).backward()
    sum(sequential(x).sum() for x in inputs).backward()
    torch.testing.assert_close(layer.weight.grad, sequential.weight.grad)


def test_layer_used_twice_and_two_forwards_before_a_backward(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    arguments = {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": 1, "dtype": torch.float64}
    layer, sequential = twins(P_x, 2, **arguments)
    a, b = torch.randn(2, 1, 2, 9, 5, dtype=torch.float64)
    for net, cut in ((layer, lambda t: shard(P_x, t)), (sequential, lambda t: t)):
        first, second = net(net(cut(a))), net(cut(b))
        (first.square().sum() + (second * first).sum()).backward()
    agree(layer.weight.grad, sequential.weight.grad, "weight")
    agree(layer.bias.grad, sequential.bias.grad, "bias")


def test_gradients_accumulate_and_graphs_are_retained(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    arguments = {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": 1, "dtype": torch.float64}
    layer, sequential = twins(P_x, 2, **arguments)
    x = torch.randn(1, 2, 9, 5, dtype=torch.float64)
    for net, local in ((layer, shard(P_x, x)), (sequential, x)):
        loss = net(local).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    agree(layer.weight.grad, sequential.weight.grad, "weight")


def test_in_place_activations_before_and_after(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    arguments = {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": 1, "dtype": torch.float64}
    layer, sequential = twins(P_x, 2, **arguments)
    nets = [
        nn.Sequential(copied, nn.ReLU(inplace=True), copied, nn.ReLU(inplace=True))
        for copied in (layer, sequential)
    ]
    x = torch.randn(1, 2, 9, 5, dtype=torch.float64)
    for net, local in zip(nets, (shard(P_x, x), x), strict=True):
        net(local).square().sum().backward()
    agree(layer.weight.grad, sequential.weight.grad, "weight")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("frozen", [False, True])
def test_input_gradient_needed_on_some_ranks_only(P_world, comm, frozen):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    arguments = {"in_channels": 2, "out_channels": 2, "kernel_size": 5, "padding": 2, "dtype": torch.float64}
    layer, sequential = twins(P_x, 1, **arguments)
    layer.requires_grad_(not frozen)
    for needing in range(comm.size):
        x = torch.randn(1, 2, 7, dtype=torch.float64, requires_grad=True)
        y = sequential(x)
        y.square().sum().backward()
        local = shard(P_x, x).requires_grad_(comm.rank == needing)
        out = layer(local)
        assert out.requires_grad
        out.square().sum().backward()
        if comm.rank == needing:
            agree(local.grad, shard(P_x, x.grad), "input gradient")
        else:
            assert local.grad is None


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


def test_replicated_state_dict_is_the_sequential_one(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer, sequential = twins(P_x, 2, in_channels=4, out_channels=6, kernel_size=3, groups=2)
    assert layer.state_dict().keys() == sequential.state_dict().keys()
    for key, value in sequential.state_dict().items():
        assert torch.equal(layer.state_dict()[key], value)
    sequential.load_state_dict(copy.deepcopy(layer.state_dict()))


@pytest.mark.mpi(min_size=2)
def test_first_ranks_initial_weights_count(P_world, comm):
    torch.manual_seed(comm.rank)
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 3, 3, 3)
    assert torch.equal(layer.weight, torch.from_numpy(comm.bcast(layer.weight.detach().numpy())))


def test_float32_is_exact_to_rounding(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer, sequential = twins(P_x, 2, in_channels=8, out_channels=8, kernel_size=3, padding=1)
    x = torch.randn(1, 8, 33, 31)
    y = sequential(x)
    torch.testing.assert_close(layer(shard(P_x, x)), shard(P_x, y), rtol=1e-5, atol=1e-5)


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


def test_second_derivatives_are_refused(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedConv1d(P_x, 1, 1, 3, padding=1)
    x = torch.randn(1, 1, 6, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_long_run_leaks_no_segment(P_world, comm):
    import gc

    heap = Machine.of(P_world).segments.heap
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    used = []
    for _ in range(6):
        layer = DistributedConv1d(P_x, 2, 2, 3, padding=1)
        layer(torch.randn(1, 2, 5)).sum().backward()
        del layer
        gc.collect()
        comm.Barrier()
        Machine.of(P_world).segments.get_segment_buffer(0).free()
        comm.Barrier()
        used.append(heap.used)
    assert used[-1] <= used[1]


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
