"""Distributed linear layers against the sequential one."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distdl_rma import (
    ArgumentError,
    GradientSync,
    PartitionError,
    ShapeError,
    UnsupportedError,
    zero_volume_tensor,
)
from distdl_rma.layers import (
    DistributedLinear,
    DistributedLinearAllGather,
    DistributedLinearAllGatherZero,
    DistributedLinearReduceScatter,
    DistributedLinearReduceScatterZero,
)
from distdl_rma.state import gather_state_dict, load_global_state_dict
from tests.fuzz.linear import check
from tests.layers.sequential import agree, shard
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi
AG, RS = DistributedLinearAllGather, DistributedLinearReduceScatter
ZERO = [DistributedLinearAllGatherZero, DistributedLinearReduceScatterZero]
KINDS = [AG, RS, *ZERO]


@over_seeds(96, each=12)
def test_any_linear_layer_equals_the_sequential_one(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


def grid_of(P_world, dims=2):
    """Data-parallel blocks where the number of ranks allows, model-parallel workers the rest."""
    blocks = 2 if P_world.size in (2, 4) else P_world.size
    return P_world.create_cartesian_topology_partition((blocks, *[1] * (dims - 2), P_world.size // blocks))


def twins(kind, P, in_features=6, out_features=5, dtype=torch.float64, **options):
    """Distributed and sequential layer with the same weights."""
    sequential = nn.Linear(in_features, out_features, dtype=dtype)
    layer = kind(P, in_features, out_features, dtype=dtype, **options)
    load_global_state_dict(layer, sequential.state_dict())
    return layer, sequential


def check_gradients(layer, sequential):
    for key, parameter in sequential.named_parameters():
        store = layer.layouts[key]
        if store.partition.active:
            agree(getattr(layer, key).grad, parameter.grad[store.slices()], key)


def check_step(P, layer, sequential, x):
    x = x.detach().requires_grad_()
    y = sequential(x)
    gradient = torch.randn(y.shape, dtype=y.dtype)
    local = shard(P, x).requires_grad_()
    out = layer(local)
    for net in (layer, sequential):
        net.zero_grad()
    y.backward(gradient)
    out.backward(shard(P, gradient))
    agree(out, shard(P, y), "output")
    agree(local.grad, shard(P, x.grad), "input gradient")
    check_gradients(layer, sequential)


@pytest.mark.parametrize("kind", KINDS)
def test_input_and_output_may_be_cut_in_different_dimensions(P_world, comm, kind):
    # Both readings of the printed examples: the partitions of input and output exchanged.
    features = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    rows = P_world.create_cartesian_topology_partition((1, comm.size, 1))
    gathers = kind in (AG, DistributedLinearAllGatherZero)
    sequential = nn.Linear(16, 12, dtype=torch.float64)
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    for P_x, P_y in ((features, rows), (rows, features), (rows, rows)):
        first, options = (P_y, {"P_x": P_x}) if gathers else (P_x, {"P_y": P_y})
        layer = kind(first, 16, 12, dtype=torch.float64, **options)
        load_global_state_dict(layer, sequential.state_dict())
        agree(layer(shard(P_x, x)), shard(P_y, sequential(x)), "output")


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_that_of_the_sequential_layer(P_world, comm, kind):
    layer, sequential = twins(kind, grid_of(P_world))
    whole = gather_state_dict(layer)
    assert whole.keys() == sequential.state_dict().keys()
    for key, value in sequential.state_dict().items():
        assert torch.equal(whole[key], value)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_torchs_by_isinstance_and_are_reset_as_torchs_are(P_world, comm, kind):
    layer, sequential = twins(kind, grid_of(P_world))
    assert isinstance(layer, nn.Linear)
    for net in (layer, sequential):
        torch.manual_seed(2)
        net.reset_parameters()
    for key, value in gather_state_dict(layer).items():
        assert torch.equal(value, sequential.state_dict()[key])


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_may_change_from_call_to_call(P_world, comm, kind):
    P = grid_of(P_world, 3)
    layer, sequential = twins(kind, P)
    for batch, length in ((4, 3), (3, 3), (1, 5), (0, 2), (7, 1)):
        x = torch.randn(batch, length, 6, dtype=torch.float64)
        with torch.no_grad():
            agree(layer(shard(P, x)), shard(P, sequential(x)), "inference")
        check_step(P, layer, sequential, x)


@pytest.mark.parametrize("weights", ["replicated", "root"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_autograd(P_world, comm, kind, weights):
    P = grid_of(P_world)
    options = {} if kind in ZERO else {"weights": weights}
    layer, sequential = twins(kind, P, 6, 6, **options)
    inputs = torch.randn(2, 5, 6, dtype=torch.float64)
    for net, (a, b) in (
        (layer, [shard(P, x).requires_grad_() for x in inputs]),
        (sequential, [x.clone().requires_grad_() for x in inputs]),
    ):
        twice = nn.Sequential(net, nn.ReLU(inplace=True), net, nn.ReLU(inplace=True))
        first, second = twice(a), checkpoint(twice, b, use_reentrant=False)
        loss = first.square().sum() + second.square().sum()
        loss.backward(retain_graph=True)
        first.sum().backward()
    check_gradients(layer, sequential)


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_any_dimensions_may_be_changed_in_place(P_world, comm, kind, dims):
    # Blocks of the batch: what a rank computes is what it returns.
    P = P_world.create_cartesian_topology_partition([comm.size, 1, 1, 1][:dims])
    layer, sequential = twins(kind, P)
    x = torch.randn([5, 2, 3, 6][4 - dims :], dtype=torch.float64, requires_grad=True)
    local = shard(P, x).requires_grad_()
    for net, a in ((layer, local), (sequential, x)):
        nn.ReLU(inplace=True)(net(a).mul_(2)).square().sum().backward()
    agree(local.grad, shard(P, x.grad), "input gradient")
    check_gradients(layer, sequential)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused_where_ranks_communicate(P_world, comm, kind):
    grid = (comm.size, 1) if kind in ZERO else (1, comm.size)
    layer = kind(P_world.create_cartesian_topology_partition(grid), comm.size, 5)
    x = torch.randn(1, comm.size if kind in ZERO else 1, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_types_are_as_exact_as_those_of_torch(P_world, comm, kind, dtype):
    P = grid_of(P_world)
    layer, sequential = twins(kind, P, 33, 21, dtype)
    x = torch.randn(9, 33).to(dtype).requires_grad_()
    local = shard(P, x).requires_grad_()
    y, out = sequential(x), layer(local)
    assert out.dtype == dtype
    y.float().square().sum().backward()
    out.float().square().sum().backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-1}
    torch.testing.assert_close(out, shard(P, y), **tolerance)
    torch.testing.assert_close(local.grad, shard(P, x.grad), **tolerance)
    kept = layer.layouts["weight"].slices()
    torch.testing.assert_close(layer.weight.grad, sequential.weight.grad[kept], **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_the_short_type(P_world, comm, kind):
    P = grid_of(P_world)
    layer, sequential = twins(kind, P, dtype=torch.float32)
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        out, y = layer(shard(P, x)), sequential(x)
        out.sum().backward()
    y.sum().backward()
    assert out.dtype == y.dtype == torch.bfloat16
    torch.testing.assert_close(out, shard(P, y), rtol=2e-2, atol=2e-2)
    assert layer.weight.grad.dtype == torch.float32
    kept = layer.layouts["weight"].slices()
    torch.testing.assert_close(layer.weight.grad, sequential.weight.grad[kept], rtol=2e-2, atol=5e-2)


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("synchronised", [True, False])
def test_training_equals_the_sequential_run(P_world, comm, synchronised, bucket_nbytes):
    line = P_world.create_cartesian_topology_partition((comm.size, 1))
    pair = grid_of(P_world)
    some = P_world.create_partition_inclusive(range(max(1, comm.size - 1)))
    few = some.create_cartesian_topology_partition((some.size, 1))
    # Replicas on all ranks, on pairs and on some ranks, in turn, and shards between them.
    kinds = [
        (AG, line, line),
        (RS, line, pair),
        (ZERO[0], pair, line),
        (RS, line, few),
        (AG, few, line),
        (ZERO[1], line, pair),
        (RS, pair, line),
    ]
    layers, twin = nn.Sequential(), nn.Sequential()
    for kind, P_x, P_y in kinds:
        first, other = (P_y, {"P_x": P_x}) if kind in (AG, ZERO[0]) else (P_x, {"P_y": P_y})
        layer, sequential = twins(kind, first, 6, 6, **other)
        layers.append(layer)
        twin.append(sequential)
    sync = GradientSync(layers, P_world, bucket_nbytes=bucket_nbytes) if synchronised else None
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (layers, twin)]
    for _ in range(3):
        x = torch.randn(7, 6, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        layers(shard(line, x)).square().sum().backward()
        twin(x).square().sum().backward()
        for layer, sequential in zip(layers, twin, strict=True):
            check_gradients(layer, sequential)
        for optimizer in optimizers:
            optimizer.step()
    if sync is not None:
        sync.close()
    for layer, sequential in zip(layers, twin, strict=True):
        for key, value in gather_state_dict(layer).items():
            torch.testing.assert_close(value, sequential.state_dict()[key], rtol=1e-10, atol=1e-10)


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_get_what_is_empty(P_world, comm):
    some = P_world.create_partition_inclusive([1]).create_cartesian_topology_partition((1, 1))
    layer = DistributedLinear(some, some, some, 3, 4)
    y = layer(torch.ones(2, 3) if comm.rank == 1 else zero_volume_tensor(2))
    assert y.shape == ((2, 4) if comm.rank == 1 else (2, 0))
    assert layer.weight.numel() == (12 if comm.rank == 1 else 0)
    y.sum().backward()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_input_on_one_rank_raises_the_same_error_on_all(P_world, comm, kind):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer = kind(P, 6, 5, name="head")
    good = torch.randn(2, 6)
    before = layer(good)
    for wrong, message in (
        (torch.zeros(2, 7), "must agree in dimension 1"),
        (torch.zeros(2, 1, 6), "tensor of 3 dimensions"),
        (torch.zeros(2, 6, dtype=torch.float64), "rank 0 passes torch.float32 but rank 1 torch.float64"),
    ):
        with pytest.raises(ShapeError, match=f"'head': .*{message}") as caught:
            layer(wrong if comm.rank == 1 else good)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert torch.equal(layer(good), before), "the layer can be used again"
    with pytest.raises(ShapeError, match=r"global input \(\d, 7\) has 7 features, the layer takes 6"):
        layer(torch.zeros(1, 7))
    with pytest.raises(ShapeError, match=r"input is torch.float64, the weights of rank 0 are torch.float32"):
        layer(torch.zeros(1, 6, dtype=torch.float64))


def test_rules_are_checked_at_construction(P_world, comm):
    flat = P_world.create_cartesian_topology_partition((comm.size,))
    plane = P_world.create_cartesian_topology_partition((1, comm.size))
    space = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    with pytest.raises(PartitionError, match=r"DistributedLinear: P_x .* and P_y .* as many dimensions"):
        DistributedLinear(plane, space, plane, 3, 4)
    with pytest.raises(PartitionError, match=r"P_W is a grid of \(rows, columns\)"):
        DistributedLinear(plane, plane, flat, 3, 4)
    with pytest.raises(PartitionError, match="AllGather: the first argument is a partition, got 3"):
        AG(3, 4, plane)
    with pytest.raises(ArgumentError, match="in_features is a number of features, at least 0, got -1"):
        RS(plane, -1, 4)
    with pytest.raises(ArgumentError, match="out_features is a number of features"):
        ZERO[0](plane, 3, plane)
    with pytest.raises(ArgumentError, match=r"placement is one of \('replicated', 'root'\), got 'sharded'"):
        AG(plane, 3, 4, weights="sharded")
    with pytest.raises(ArgumentError, match="placement='root' and weights='replicated' mean the same"):
        AG(plane, 3, 4, placement="root", weights="replicated")
    assert ZERO[0](plane, 3, 4).placement == "cut" and AG(plane, 3, 4, weights="root").placement == "root"
    with pytest.raises(UnsupportedError, match="tensors live on the CPU, got device 'meta'"):
        RS(plane, 3, 4, device="meta")
    with pytest.raises(UnsupportedError, match=r"dtype is one of .*, got torch.int32"):
        ZERO[1](plane, 3, 4, dtype=torch.int32)
    if comm.size > 1:
        with pytest.raises(PartitionError, match="data-parallel blocks, but P_x"):
            DistributedLinear(flat, flat, space, 3, 4)
    assert "in_features=3, out_features=4, bias=True, P_x=" in repr(ZERO[0](plane, 3, 4))
    assert "bias=True, placement='root', P_x=" in repr(AG(plane, 3, 4, placement="root"))
