"""Layers that are connected before their first call."""

import pytest
import torch

from distdl_rma import Machine, ProtocolError, ShapeError, zero_volume_tensor
from distdl_rma import layers as distributed
from distdl_rma.segments.memory.buffer import SegmentBuffer
from tests.layers.partitioned.sequential import shard
from tests.layers.partitioned.twins import FLOATING, FORMS, IMAGE, Twins

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]

# Layers of images whose shapes say all: torch's twins.
LAYERS = [form for form in FLOATING if FORMS[form].shape == IMAGE]


@pytest.mark.in_turn(3, 4)
@pytest.mark.parametrize("form", LAYERS)
def test_the_first_forward_of_a_connected_layer_shakes_no_hands(P_world, comm, monkeypatch, form):
    for count in {comm.size, max(1, comm.size - 1)}:
        for empty in ((), (4,)):
            twins = Twins(P_world, form, ranks=range(count))
            twins.layer.connect(IMAGE, torch.float64)
            x = twins.draw()
            with monkeypatch.context() as patched:
                calls = record(patched)
                twins.layer(twins.into(x) if twins.P_x.active else zero_volume_tensor(*empty))
                assert not calls


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


def test_an_embedding_is_connected_for_any_contents_of_free_memory(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((comm.size,))
    for _ in range(8):
        free = [torch.full((1,), -1) for _ in range(64)]
        layer = distributed.DistributedEmbedding(P_x, 5, 2)
        del free
        layer.connect((7,), torch.int64)


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
