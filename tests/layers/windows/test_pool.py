"""Pooling of split tensors equals pooling of the whole."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distdl_rma import (
    ArgumentError,
    PartitionError,
    ShapeError,
    UnsupportedError,
    layers,
    zero_volume_tensor,
)
from tests.fuzz.pooling import check
from tests.layers.random_shards import cut_balanced
from tests.layers.sequential import agree, shard
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi

POOLS = {
    "AvgPool2d": {"kernel_size": 3, "stride": 2, "padding": 1},
    "MaxPool2d": {"kernel_size": 3, "stride": 2, "padding": 1},
    "AdaptiveAvgPool2d": {"output_size": (3, 2)},
    "AdaptiveMaxPool2d": {"output_size": (3, 2)},
}
kinds = pytest.mark.parametrize("kind", POOLS)


def rows(P_world):
    """All ranks, one after the other along the height."""
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


def layer_of(kind, P_x, **more):
    return getattr(layers, f"Distributed{kind}")(P_x, **POOLS[kind], **more)


def sequential(kind):
    return getattr(nn, kind)(**POOLS[kind])


def image(dtype=torch.float64, shape=(2, 3, 11, 7)):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@over_seeds(80, each=10)
def test_random_layers_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_are_rounded_once(P_world, kind, dtype):
    P_x = rows(P_world)
    x = image(dtype)
    expected = sequential(kind)(x)
    local = shard(P_x, x).requires_grad_()
    y = layer_of(kind, P_x)(local)
    assert y.dtype == dtype
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(y, shard(P_x, expected), rtol=tolerance, atol=tolerance)
    exact = sequential(kind)(x.double())
    assert ((y.double() - shard(P_x, exact)).abs() <= torch.finfo(dtype).eps * shard(P_x, exact).abs()).all()
    y.sum().backward()
    assert local.grad.dtype == dtype


@kinds
def test_other_shapes_from_call_to_call_need_no_action(P_world, kind):
    P_x = rows(P_world)
    layer, module = layer_of(kind, P_x), sequential(kind)
    for shape in [(2, 3, 11, 7), (1, 2, 5, 5), (4, 1, 2, 9), (2, 3, 11, 7)]:
        x = image(shape=shape)
        agree(layer(shard(P_x, x)), shard(P_x, module(x)), f"{shape}")


@kinds
def test_one_wrong_input_raises_on_all_ranks_and_leaves_the_layer_usable(P_world, comm, kind):
    P_x = rows(P_world)
    layer = layer_of(kind, P_x, name="pool")
    x = image()
    wrong = shard(P_x, x)[0] if comm.rank == comm.size - 1 else shard(P_x, x)
    with pytest.raises(ShapeError, match=f"'pool': rank {comm.size - 1} has a tensor of 3 dimensions"):
        layer(wrong)
    if comm.size > 1:
        with pytest.raises(ShapeError, match=r"'pool': rank 0 passes torch\.float64 but rank"):
            layer(shard(P_x, x).to(torch.float32 if comm.rank else torch.float64))
    with pytest.raises(UnsupportedError, match=r"the input is torch\.int64"):
        layer(shard(P_x, x).long())
    agree(layer(shard(P_x, x)), shard(P_x, sequential(kind)(x)))


@kinds
def test_two_forwards_before_one_backward_and_a_layer_used_twice(P_world, kind):
    P_x = P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size))
    layer, module = layer_of(kind, P_x), sequential(kind)
    a, b = image().requires_grad_(), image(shape=(1, 2, 6, 9)).requires_grad_()
    (module(module(a)).sum() + module(b).square().sum()).backward()
    local = [shard(P_x, x).requires_grad_() for x in (a, b)]
    (layer(layer(local[0])).sum() + layer(local[1]).square().sum()).backward()
    for x, own in zip((a, b), local, strict=True):
        agree(own.grad, shard(P_x, x.grad))


@kinds
def test_relu_in_place_checkpointing_and_no_grad(P_world, kind):
    P_x = rows(P_world)
    layer, module, relu = layer_of(kind, P_x), sequential(kind), nn.ReLU(inplace=True)
    x = image().requires_grad_()
    expected = relu(module(relu(x * 1)))
    expected.sum().backward()
    local = shard(P_x, x).requires_grad_()
    y = relu(layer(relu(local * 1)))
    agree(y, shard(P_x, expected))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    agree(local.grad, 2 * shard(P_x, x.grad))
    local.grad = None
    checkpoint(lambda x: relu(layer(relu(x * 1))), local, use_reentrant=False).sum().backward()
    agree(local.grad, shard(P_x, x.grad))
    with torch.no_grad():
        assert not layer(local).requires_grad


@kinds
@pytest.mark.mpi(min_size=2)
def test_output_may_go_to_other_ranks(P_world, comm, kind):
    n = comm.size
    P_x = P_world.create_partition_inclusive(range(n - 1))
    P_x = P_x.create_cartesian_topology_partition((1, 1, n - 1, 1))
    P_y = P_world.create_partition_inclusive([n - 1]).create_cartesian_topology_partition((1,) * 4)
    x = image().requires_grad_()
    expected = sequential(kind)(x)
    expected.sum().backward()
    local = (shard(P_x, x) if P_x.active else zero_volume_tensor(2, x.dtype)).requires_grad_()
    y = layer_of(kind, P_x, P_y=P_y)(local)
    agree(y, cut_balanced(P_y, expected) if P_y.active else y.new_empty((len(local), 0)))
    y.sum().backward()
    if P_x.active:
        agree(local.grad, shard(P_x, x.grad))


@pytest.mark.mpi(min_size=2)
def test_global_average_moves_one_vector_per_rank(P_world, comm):
    P_x = rows(P_world)
    layer = layers.DistributedAdaptiveAvgPool2d(P_x, 1)
    layer(shard(P_x, image(shape=(2, 3, 40, 40))))
    operation = layer.plans.last
    assert operation.gather is None
    exchange = operation.scatter.forward.exchange
    assert sum(piece.box.volume for piece in exchange.sends) == (2 * 3 if comm.rank else 0)


def test_average_keeps_infinities_in_their_windows(P_world):
    P_x = rows(P_world)
    x = image(shape=(1, 1, 9, 9))
    x[0, 0, 4, 4] = float("inf")
    for kind in ("AvgPool2d", "AdaptiveAvgPool2d"):
        agree(layer_of(kind, P_x)(shard(P_x, x)), shard(P_x, sequential(kind)(x)), kind)


@pytest.mark.parametrize("kind", ["MaxPool2d", "AdaptiveMaxPool2d"])
def test_indices_are_those_of_torch_with_ties_nan_and_infinities(P_world, kind):
    P_x = rows(P_world)
    arguments = POOLS[kind] | {"return_indices": True}
    x = torch.randint(0, 2, (2, 2, 12, 9)).double()
    x[0, 0, 3, 3:6] = float("nan")
    x[1, :, :, :5] = float("-inf")
    x[1, 1] = float("-inf")
    expected, index = getattr(nn, kind)(**arguments)(x)
    y, places = getattr(layers, f"Distributed{kind}")(P_x, **arguments)(shard(P_x, x))
    torch.testing.assert_close(y, shard(P_x, expected), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, shard(P_x, index))


@pytest.mark.mpi(min_size=2)
def test_idle_ranks_get_indices_without_elements(P_world):
    P_x = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1, 1))
    layer = layers.DistributedMaxPool1d(P_x, 2, return_indices=True)
    y, index = layer(torch.randn(2, 3, 8) if P_x.active else zero_volume_tensor(2))
    assert y.shape == index.shape == ((2, 3, 4) if P_x.active else (2, 0))
    assert index.dtype == torch.int64


def test_a_window_that_reads_only_padding_is_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    layer = layers.DistributedMaxPool1d(P_x, 2, 1, 1, 2)
    with pytest.raises(ShapeError, match="output 0 of 1 reads nothing but padding of the global input"):
        layer(shard(P_x, torch.ones(1, 1, 1)))
    assert layer(shard(P_x, torch.ones(1, 1, 8))).numel() >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel_size": 0}, "kernel_size is an integer of at least 1, or 2 of them; got 0"),
        ({"kernel_size": (1, 2, 3)}, "kernel_size is an integer"),
        ({"kernel_size": 2, "padding": 2}, "padding 2 is more than half of kernel_size 2"),
        ({"kernel_size": 2, "stride": 0}, "stride is an integer of at least 1"),
        ({"kernel_size": 2, "padding": -1}, "padding is an integer of at least 0"),
    ],
)
def test_impossible_arguments_are_refused(P_world, arguments, message):
    for kind in (layers.DistributedAvgPool2d, layers.DistributedMaxPool2d):
        with pytest.raises(ArgumentError, match=f"{kind.__name__}: {message}"):
            kind(rows(P_world), **arguments)


def test_other_impossible_arguments_are_refused(P_world):
    with pytest.raises(ArgumentError, match="divisor_override must not be zero"):
        layers.DistributedAvgPool2d(rows(P_world), 2, divisor_override=0)
    with pytest.raises(ArgumentError, match="output_size is an integer or None, or 2 of them"):
        layers.DistributedAdaptiveMaxPool2d(rows(P_world), (1, 2, 3))
    with pytest.raises(PartitionError, match="DistributedAvgPool1d: P_x has 4 dimensions"):
        layers.DistributedAvgPool1d(rows(P_world), 2)
    with pytest.raises(PartitionError, match="DistributedMaxPool2d: P_y has 1 dimensions"):
        layers.DistributedMaxPool2d(rows(P_world), 2, P_y=P_world)
