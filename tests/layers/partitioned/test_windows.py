"""Pooling, padding and up-sampling of split tensors equal those of the whole."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from distdl_rma import ShapeError, UnsupportedError, layers, zero_volume_tensor
from tests.layers.partitioned.every_layer import first
from tests.layers.partitioned.sequential import agree, shard

pytestmark = pytest.mark.mpi
POOLS = {
    "AvgPool2d": {"kernel_size": 3, "stride": 2, "padding": 1},
    "MaxPool2d": {"kernel_size": 3, "stride": 2, "padding": 1},
    "AdaptiveAvgPool2d": {"output_size": (3, 2)},
    "AdaptiveMaxPool2d": {"output_size": (3, 2)},
}
PADS = {"Zero": (), "Constant": (2.5,), "Reflection": (), "Replication": (), "Circular": ()}


@pytest.fixture
def P_x(P_world):  # noqa: N802
    """All ranks, one after the other along the height."""
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


def twins(kind, P_x, *arguments, **options):
    """A layer and torch's."""
    layer = getattr(layers, f"Distributed{kind}")(P_x, *arguments, **options)
    return layer, getattr(nn, kind)(*arguments, **options)


def test_a_divisor_of_ones_own_works_in_one_dimension_too(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    layer = layers.DistributedAvgPool1d(P_x, 2, divisor_override=5)
    agree(layer(shard(P_x, x)), shard(P_x, nn.AvgPool1d(2)(x) * 2 / 5))


def test_padding_may_name_the_last_dimension_alone(P_x):
    x = torch.randn(1, 2, 5, 6)
    for kind in ("Zero", "Constant"):
        layer, module = twins(f"{kind}Pad2d", P_x, (1, -2), *PADS[kind])
        assert torch.equal(layer(shard(P_x, x)), shard(P_x, module(x)))


@pytest.mark.sizes(1, 2)
def test_numbers_are_those_of_numpy_too_and_tensors_without_dimensions(P_x):
    x = torch.randn(1, 2, 6, 8)
    for number in (np.int64(2), torch.tensor(2), (torch.tensor(2), np.int64(2))):
        for kind in ("MaxPool2d", "AvgPool2d", "Upsample"):
            layer, module = twins(kind, P_x, number)
            agree(layer(shard(P_x, x)), shard(P_x, module(x)))
        layer, module = twins("MaxPool2d", P_x, 4, number, number)
        assert torch.equal(layer(shard(P_x, x)), shard(P_x, module(x)))


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_are_rounded_once(P_x, kind, dtype):
    layer, module = twins(kind, P_x, **POOLS[kind])
    x = torch.randn(2, 3, 11, 7, dtype=torch.float64).to(dtype)
    y, exact = layer(shard(P_x, x)), shard(P_x, module(x.double()))
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()


def test_a_subclass_has_the_dimensions_of_its_base(P_x):
    class Mine(layers.DistributedCircularPad2d):
        pass

    layer = Mine(P_x, 1)
    assert repr(layer) == f"Mine(padding=(1, 1, 1, 1), P_x={P_x.shape}, P_y={P_x.shape})"
    assert layer.options.mode == "circular"


@pytest.mark.parametrize("kind", PADS)
@pytest.mark.parametrize("name", ["float", "bfloat16", "half", "cfloat", "long", "uint8", "bool", "uint16"])
def test_padded_elements_of_any_type_keep_their_bits(P_x, kind, name):
    layer, module = twins(f"{kind}Pad2d", P_x, 3, *PADS[kind])
    plain, dtype = name in ("bool", "uint16"), getattr(torch, name)
    x = (torch.randn(1, 2, 5, 6) * 4).abs_().to(dtype)
    # Those types torch does not pad in every mode.
    copies = (lambda x: module(x.to(torch.int32)).to(dtype)) if plain else module
    assert torch.equal(layer(shard(P_x, x)), shard(P_x, copies(x)))


def test_a_result_is_memory_of_its_own(P_x):
    x = shard(P_x, torch.randn(1, 1, 4, 4))
    y = layers.DistributedZeroPad2d(P_x, 0)(x)
    assert torch.equal(x, y)
    assert x.numel() == 0 or x.data_ptr() != y.data_ptr()


# Torch refuses to crop more than there is: some kinds crop before they pad, some need an element afterwards.
TOO_MUCH = {
    "Zero": [(0, 0, -3, -3), (-5, 5, 0, 0), (0, 0, 5, -5)],
    "Constant": [(0, 0, -5, 5)],
    "Reflection": [(-3, -3, 0, 0), (-2, -2, -2, -2), (0, 0, 4, 0), (0, 0, 0, 4)],
    "Replication": [(0, 0, -3, -3), (-2, -2, -2, -2)],
    "Circular": [(-3, -3, 0, 0)],
}
ALL_OF_IT = {
    "Zero": [(-2, -2, -2, -2)],
    "Constant": [(-1, -3, -4, 0)],
    "Reflection": [(0, 0, -2, -2)],
    "Replication": [(-2, -2, 0, 0), (-5, 5, 0, 0)],
    "Circular": [(-2, -2, -2, -2)],
}


@pytest.mark.parametrize("kind", PADS)
def test_more_than_there_is_cannot_be_cropped_nor_mirrored(P_x, kind):
    x = torch.randn(1, 1, 4, 4)
    for padding in TOO_MUCH[kind]:
        layer, module = twins(f"{kind}Pad2d", P_x, padding, *PADS[kind])
        with pytest.raises(RuntimeError):
            module(x)
        crops = rf"padding {re.escape(str(padding))} leaves .* of the global input \(4, 4\)"
        said = "padding mode 'reflect' needs padding smaller than" if max(padding) == 4 else crops
        with pytest.raises(ShapeError, match=said):
            layer(shard(P_x, x))
    for padding in ALL_OF_IT[kind]:
        layer, module = twins(f"{kind}Pad2d", P_x, padding, *PADS[kind])
        assert torch.equal(layer(shard(P_x, x)), shard(P_x, module(x))), padding


def test_images_of_one_rank_that_lie_on_each_other_are_summed(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size))
    P_y = first(P_world, 4)
    # Half of the rows twice: as many elements as there are, all from one rank.
    padding = (0, P_world.size, -1, -1)
    x = torch.randn(3, 4, 4, P_world.size, dtype=torch.float64, requires_grad=True)
    expected = nn.CircularPad2d(padding)(x)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    local = shard(P_x, x).requires_grad_()
    y = layers.DistributedCircularPad2d(P_x, padding, P_y=P_y)(local)
    if P_y.active:
        agree(y, expected)
    y.backward(gradient if P_y.active else torch.zeros_like(y))
    agree(local.grad, shard(P_x, x.grad), "gradient")


def test_averages_keep_infinities_in_their_windows(P_x):
    x = torch.randn(1, 1, 9, 9, dtype=torch.float64)
    x[0, 0, 4, 4] = float("inf")
    for kind in ("AvgPool2d", "AdaptiveAvgPool2d"):
        layer, module = twins(kind, P_x, **POOLS[kind])
        agree(layer(shard(P_x, x)), shard(P_x, module(x)), kind)


@pytest.mark.parametrize("kind", ["MaxPool2d", "AdaptiveMaxPool2d"])
def test_indices_are_those_of_torch_with_ties_nan_and_infinities(P_x, kind):
    layer, module = twins(kind, P_x, **POOLS[kind], return_indices=True)
    x = torch.randint(0, 2, (2, 2, 12, 9)).double()
    x[0, 0, 3, 3:6] = float("nan")
    x[1, :, :, :5] = float("-inf")
    x[1, 1] = float("-inf")
    expected, index = module(x)
    y, places = layer(shard(P_x, x))
    torch.testing.assert_close(y, shard(P_x, expected), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, shard(P_x, index))


@pytest.mark.mpi(min_size=2)
def test_idle_ranks_get_indices_without_elements(P_world):
    P_x = first(P_world, 3)
    layer = layers.DistributedMaxPool1d(P_x, 2, return_indices=True)
    y, index = layer(torch.randn(2, 3, 8) if P_x.active else zero_volume_tensor(2))
    assert y.shape == index.shape == ((2, 3, 4) if P_x.active else (2, 0))
    assert index.dtype == torch.int64
    if not P_x.active:
        with pytest.raises(ShapeError, match=f"'{layer.name}': rank {P_world.me}: "):
            layer(None)


def test_a_window_that_reads_only_padding_is_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    layer = layers.DistributedMaxPool1d(P_x, 2, 1, 1, 2)
    with pytest.raises(ShapeError, match="output 0 of 1 reads nothing but padding of the global input"):
        layer(shard(P_x, torch.ones(1, 1, 1)))
    assert layer(shard(P_x, torch.ones(1, 1, 8))).numel() >= 0


@pytest.mark.mpi(min_size=2)
def test_a_global_average_moves_one_vector_per_rank(P_x, comm):
    layer = layers.DistributedAdaptiveAvgPool2d(P_x, 1)
    layer(shard(P_x, torch.randn(2, 3, 40, 40)))
    operation = layer.agreement.last
    assert operation.gather is None
    exchange = operation.scatter.forward.exchange
    assert sum(piece.box.volume for piece in exchange.sends) == (2 * 3 if comm.rank else 0)


def test_averages_are_of_floating_point_numbers_and_may_have_no_elements_but_their_inputs_must(P_x):
    x = shard(P_x, torch.ones(2, 3, 11, 7))
    with pytest.raises(UnsupportedError, match=r"the input is torch\.int64; only floating point"):
        layers.DistributedAvgPool2d(P_x, 2)(x.long())
    assert layers.DistributedAdaptiveAvgPool2d(P_x, (None, 0))(x).shape[3] == 0
    assert len(layers.DistributedAvgPool2d(P_x, 2)(x[:0])) == 0
    with pytest.raises(ShapeError, match=r"the global input \(2, 3, 11, 0\) has no elements to pool"):
        layers.DistributedAvgPool2d(P_x, 2)(x[..., :0])
