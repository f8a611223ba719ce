"""Layers that are connected before their first call."""

import pytest
import torch

from distdl_rma import Machine, ProtocolError, ShapeError, zero_volume_tensor
from distdl_rma import layers as distributed
from distdl_rma.segments.memory.buffer import SegmentBuffer
from tests.layers.sequential import shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]

DOUBLE = {"dtype": torch.float64}
IMAGE = (4, 4, 8, 6)
# What makes a layer from two partitions, and the global shape of its input.
LAYERS = {
    "conv": (lambda P, Q: distributed.DistributedConv2d(P, 4, 2, 3, padding=1, **DOUBLE), IMAGE),
    "conv to Q": (lambda P, Q: distributed.DistributedConv2d(P, Q, 4, 2, 3, padding=1, **DOUBLE), IMAGE),
    "root": (lambda P, Q: distributed.DistributedConv2d(P, 4, 2, 3, weights="root", **DOUBLE), IMAGE),
    "root to Q": (lambda P, Q: distributed.DistributedConv2d(P, Q, 4, 2, 3, weights="root", **DOUBLE), IMAGE),
    "transposed": (lambda P, Q: distributed.DistributedConvTranspose2d(P, 4, 2, 3, **DOUBLE), IMAGE),
    "pooling": (lambda P, Q: distributed.DistributedMaxPool2d(P, 3, 1, P_y=Q), IMAGE),
    "adaptive": (lambda P, Q: distributed.DistributedAdaptiveAvgPool2d(P, 3), IMAGE),
    "upsampling": (lambda P, Q: distributed.DistributedUpsample(P, scale_factor=2, mode="bilinear"), IMAGE),
    "padding": (lambda P, Q: distributed.DistributedCircularPad2d(P, 1), IMAGE),
    "batch norm": (lambda P, Q: distributed.DistributedBatchNorm2d(P, 4, **DOUBLE), IMAGE),
    "instance norm": (lambda P, Q: distributed.DistributedInstanceNorm2d(P, 4, affine=True, **DOUBLE), IMAGE),
    "group norm": (lambda P, Q: distributed.DistributedGroupNorm(P, 2, 4, **DOUBLE), IMAGE),
    "layer norm": (lambda P, Q: distributed.DistributedLayerNorm(P, (8, 6), **DOUBLE), IMAGE),
}


def grids(P_world):
    """Rows on all ranks, columns on all but the last."""
    n = P_world.size
    few = P_world.create_partition_inclusive(range(max(1, n - 1)))
    yield P_world.create_cartesian_topology_partition((1, 1, n, 1)), few
    yield few.create_cartesian_topology_partition((1, 1, few.size, 1)), few


@pytest.mark.in_turn(3, 4)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("empty", [(), (4,)], ids=["(0,)", "(b, 0)"])
def test_the_first_forward_of_a_connected_layer_shakes_no_hands(P_world, comm, monkeypatch, kind, empty):
    make, shape = LAYERS[kind]
    for P_x, few in grids(P_world):
        P_y = few.create_cartesian_topology_partition((1, 1, 1, few.size))
        layer = make(P_x, P_y)
        layer.connect(shape, torch.float64)
        with monkeypatch.context() as patched:
            calls = record(patched)
            x = torch.randn(shape, dtype=torch.float64)
            y = layer(shard(P_x, x) if P_x.active else zero_volume_tensor(*empty))
            assert not calls
        if not P_x.active and not P_y.active:
            assert y.numel() == 0


def record(patched):
    calls, exchange = [], SegmentBuffer.exchange

    def counted(*arguments, **named):
        calls.append(arguments)
        return exchange(*arguments, **named)

    patched.setattr(SegmentBuffer, "exchange", counted)
    return calls


@pytest.mark.mpi(min_size=2)
def test_otherwise_the_first_forward_shakes_hands_and_no_later_one(P_world, comm, monkeypatch):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer = distributed.DistributedConv2d(P_x, 4, 2, 3, padding=1)
    calls, x = record(monkeypatch), shard(P_x, torch.randn(IMAGE)).requires_grad_()
    layer(x).sum().backward()
    assert calls
    calls.clear()
    layer(x).sum().backward()
    layer.connect(IMAGE)
    assert not calls


def test_connecting_takes_no_memory_for_the_input(comm):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        P_x = machine.partition((1, 1, comm.size, 1))
        layer = distributed.DistributedConv2d(P_x, 1, 1, 1)
        # An image of many terabytes.
        layer.connect((1, 1, 1 << 22, 1 << 22))
        assert machine.segments.heap.used < 1 << 20


def test_a_shape_that_is_missing_or_wrong_is_refused_and_the_layer_goes_on(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    for layer in (distributed.DistributedConv2d(P_x, 4, 2, 3), distributed.DistributedInstanceNorm2d(P_x, 4)):
        with pytest.raises(ProtocolError, match=r"connect\(shape\) with the global one"):
            layer.connect()
        with pytest.raises(ShapeError, match=r"channels|extents"):
            layer.connect((4, 5, 8, 6))
        layer.connect(IMAGE)
        layer(shard(P_x, torch.randn(IMAGE)))
    with pytest.raises(ProtocolError, match=r"connect\(shape\)"):
        distributed.DistributedConcat([P_x, P_x]).connect()
