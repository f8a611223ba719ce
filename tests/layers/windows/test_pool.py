"""Pooling of split tensors, to a factor or to a given size, equals pooling of the whole."""

import pytest
import torch
from torch import nn

from distdl_rma import ShapeError, UnsupportedError, layers, zero_volume_tensor
from tests.layers.sequential import agree, shard
from tests.layers.windows.kinds_of_pooling import POOLS, image, layer_of, rows, sequential

pytestmark = pytest.mark.mpi


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
def test_global_average_moves_one_vector_per_rank(P_world, comm):
    P_x = rows(P_world)
    layer = layers.DistributedAdaptiveAvgPool2d(P_x, 1)
    layer(shard(P_x, image(shape=(2, 3, 40, 40))))
    operation = layer.agreement.last
    assert operation.gather is None
    exchange = operation.scatter.forward.exchange
    assert sum(piece.box.volume for piece in exchange.sends) == (2 * 3 if comm.rank else 0)


def test_averages_are_of_floating_point_numbers(P_world):
    layer = layers.DistributedAvgPool2d(rows(P_world), 2)
    with pytest.raises(UnsupportedError, match=r"the input is torch\.int64; only floating point"):
        layer(shard(layer.P_x, image(torch.int64)))


def test_a_size_may_be_zero(P_world):
    layer = layers.DistributedAdaptiveAvgPool2d(rows(P_world), (None, 0))
    assert layer(shard(layer.P_x, image())).shape[3] == 0
