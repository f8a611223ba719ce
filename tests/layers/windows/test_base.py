"""What holds for all layers of windows: their outputs equal those of the whole, and errors are everywhere."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distdl_rma import (
    ShapeError,
    UnsupportedError,
    layers,
    zero_volume_tensor,
)
from tests.fuzz.pooling import check
from tests.layers.random_shards import cut_balanced
from tests.layers.sequential import agree, shard
from tests.layers.windows.kinds_of_pooling import image, kinds, layer_of, rows, sequential
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi
PADS = ("Zero", "Constant", "Reflection", "Replication", "Circular")


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


@over_seeds(80, each=10)
def test_random_layers_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


POOLINGS = ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
TWINS = [f"{kind}{d}d" for kind in (*POOLINGS, *(f"{mode}Pad" for mode in PADS)) for d in (1, 2, 3)]


@pytest.mark.parametrize("kind", [*TWINS, "Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d"])
def test_a_layer_is_found_as_torchs(kind):
    assert issubclass(getattr(layers, f"Distributed{kind}"), getattr(nn, kind))


def test_a_subclass_has_the_dimensions_of_its_base(P_world):
    class Mine(layers.DistributedCircularPad2d):
        pass

    layer = Mine(rows(P_world), 1)
    assert repr(layer) == f"Mine(padding=(1, 1, 1, 1), P_x={layer.P_x.shape}, P_y={layer.P_x.shape})"
    assert layer.options.mode == "circular"
