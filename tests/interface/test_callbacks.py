"""The interface document, callbacks and double-buffered allreduces: requirements A9, A10, A13 to A15.

``layers/partitioned/norm/test_base.py`` has A11 and A12, ``segments/collectives`` the two buffers of A15.
"""

import pytest
import torch
from torch import nn

from distdl_rma import ConfigurationError, GradientSync, Machine, ProtocolError, zero_volume_tensor
from distdl_rma.layers import (
    DistributedConv2d,
    DistributedInstanceNorm2d,
    DistributedLinear,
    DistributedMSELoss,
    Repartition,
)
from tests.layers.partitioned.sequential import shard

pytestmark = pytest.mark.mpi


def rows(P_world):
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


def test_a9_ranks_that_hold_copies_of_the_same_weights_are_listed_in_the_order_of_m(comm):
    order = [*range(1, comm.size), 0]
    with Machine(comm, ranks=order, segment_size="8MiB") as machine:
        P_x = rows(machine.partition())
        copies = order if comm.size > 1 else []
        assert DistributedConv2d(P_x, 1, 1, 3).get_ranks_synch_weights() == copies
        assert DistributedInstanceNorm2d(P_x, 2, affine=True).get_ranks_synch_weights() == copies
        # Nothing to synchronise: no weights, or one holder of each.
        assert DistributedInstanceNorm2d(P_x, 2).get_ranks_synch_weights() == []
        assert Repartition(P_x, P_x).get_ranks_synch_weights() == []
        assert DistributedMSELoss(P_x).get_ranks_synch_weights() == []
        root = DistributedConv2d(P_x, 1, 1, 3, weights="root")
        assert root.get_ranks_synch_weights() == []
        # Blocks of a weight are the same on those that share a block only.
        P_b = machine.partition((comm.size, 1))
        block = DistributedLinear(P_b, P_b, machine.partition((comm.size, 1, 1)), 3, 3)
        assert block.get_ranks_synch_weights() == copies
        P_f = machine.partition((1, comm.size))
        assert DistributedLinear(P_f, P_f, P_b, 3, 4).get_ranks_synch_weights() == []


def test_a9_the_callback_may_be_given_and_wins(P_world, comm):
    layer = DistributedConv2d(rows(P_world), 1, 1, 1, get_ranks_synch_weights=lambda: [comm.rank])
    assert layer.get_ranks_synch_weights() == [comm.rank]
    layer(torch.full((1, 1, 2, 3), float(comm.rank))).sum().backward()
    assert layer.weight.grad == 6 * comm.rank
    with pytest.raises(TypeError, match="unexpected keyword argument 'get_ranks_synch_weight'"):
        Repartition(rows(P_world), rows(P_world), get_ranks_synch_weight=list)
    with pytest.raises(ConfigurationError, match="get_sizeof_norm is a function without arguments, got 3"):
        DistributedInstanceNorm2d(rows(P_world), 2, get_sizeof_norm=3)


def test_a10_bytes_of_all_parameter_gradients_of_this_rank(P_world, comm):
    P_x = rows(P_world)
    assert DistributedConv2d(P_x, 2, 3, (3, 5)).get_sizeof_gradients() == 4 * (3 * 2 * 15 + 3)
    assert DistributedInstanceNorm2d(P_x, 5, affine=True, dtype=torch.float64).get_sizeof_gradients() == 80
    assert DistributedInstanceNorm2d(P_x, 5).get_sizeof_gradients() == 0
    assert Repartition(P_x, P_x).get_sizeof_gradients() == 0
    P_b, P_f = (P_world.create_cartesian_topology_partition(g) for g in ((comm.size, 1), (1, comm.size)))
    mine = len(range(7)[comm.rank :: comm.size])
    assert DistributedLinear(P_f, P_f, P_b, 3, 7, bias=False).get_sizeof_gradients() == 4 * 3 * mine


@pytest.mark.mpi(min_size=2)
def test_a14_the_two_allreduces_exist_independently(P_world, comm):
    samples = P_world.create_cartesian_topology_partition((comm.size, 1, 1, 1))
    only_weights = DistributedInstanceNorm2d(samples, 2, affine=True)
    assert only_weights.get_ranks_synch_weights()
    assert not only_weights.get_ranks_synch_norm()
    only_norm = DistributedInstanceNorm2d(rows(P_world), 2)
    assert only_norm.get_ranks_synch_norm()
    assert not only_norm.get_ranks_synch_weights()
    for layer, P_x, buckets in ((only_weights, samples, 1), (only_norm, rows(P_world), 0)):
        with GradientSync(layer, P_world) as sync:
            x = shard(P_x, torch.randn(comm.size, 2, 2 * comm.size, 3)).requires_grad_()
            layer(x).square().sum().backward()
            assert len(sync.describe()) == buckets
            assert x.grad is not None


@pytest.mark.mpi(min_size=2)
def test_a15_gradients_are_written_straight_into_the_segment(P_world, comm):
    # By what computes them: their addresses are those that the sync offers, and it copies none of them.
    P_x = rows(P_world)
    model = nn.Sequential(
        DistributedConv2d(P_x, 2, 4, 3, padding=1),
        DistributedInstanceNorm2d(P_x, 4, affine=True),
        nn.ELU(),
        DistributedConv2d(P_x, 4, 2, 3, padding=1),
    )
    sync = GradientSync(model, P_world, bucket_nbytes=0)
    memory = Machine.of(P_world).segments.segment.memory
    begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    addresses = []
    for _ in range(4):
        model.zero_grad()
        written = {}
        for layer in (model[0], model[1], model[3]):
            for key, (parameter, offer) in list(layer.placed.taken_over.items()):
                layer.placed.take_over(key, parameter, _watched(offer, written, f"{layer.name}.{key}"))
        model(shard(P_x, torch.randn(1, 2, 9, 7))).square().sum().backward()
        for layer in (model[0], model[1], model[3]):
            for key, parameter in layer.named_parameters():
                assert parameter.grad.data_ptr() == written[f"{layer.name}.{key}"]
                assert begin <= parameter.grad.data_ptr() < end
        addresses.append(model[0].weight.grad.data_ptr())
    assert addresses[0] == addresses[2] != addresses[1] == addresses[3], "double buffered"
    assert sum(row["copied_nbytes"] for row in sync.describe()) == 0
    held = sum(layer.get_sizeof_gradients() for layer in (model[0], model[1], model[3]))
    assert sum(row["in_place_nbytes"] for row in sync.describe()) == 4 * held
    sync.close()
    assert not any(begin <= parameter.grad.data_ptr() < end for parameter in model.parameters())


def _watched(offer, written, name):
    def claim():
        place = offer()
        if place is not None:
            written[name] = place.data_ptr()
        return place

    return claim


def test_a15_sizes_and_ranks_are_those_of_the_callbacks(P_world, comm):
    P_x = rows(P_world)
    model = nn.Sequential(DistributedConv2d(P_x, 2, 4, 3), DistributedInstanceNorm2d(P_x, 4, affine=True))
    with GradientSync(model, P_world, bucket_nbytes=0) as sync:
        told = [(row["ranks"], row["nbytes"]) for row in sync.describe()]
        asked = [(tuple(m.get_ranks_synch_weights()), m.get_sizeof_gradients()) for m in reversed(model)]
        assert told == [row for row in asked if row[0]]


def test_a13_sizes_of_local_shards_follow_the_last_call(P_world, comm):
    P_x = rows(P_world)
    layer = DistributedConv2d(P_x, 2, 3, 3, stride=2, padding=1)
    with pytest.raises(ProtocolError, match="not known before the first call"):
        layer.get_sizeof_input_tensor()
    for height in (4 * comm.size, 4 * comm.size + 3):
        x = shard(P_x, torch.randn(1, 2, height, 8))
        y = layer(x)
        assert layer.get_sizeof_input_tensor() == x.numel() * 4
        assert layer.get_sizeof_output_tensor() == y.numel() * 4
    with pytest.raises(ProtocolError, match="ask for get_sizeof_input_tensor"):
        layer.get_sizeof_tensor()
    norm = DistributedInstanceNorm2d(P_x, 2, dtype=torch.float64, affine=True)
    x = shard(P_x, torch.randn(1, 2, 9, 8, dtype=torch.float64))
    norm(x)
    assert norm.get_sizeof_tensor() == x.numel() * 8


@pytest.mark.mpi(min_size=2)
def test_a13_idle_ranks_hold_nothing(P_world, comm):
    P_x = P_world.create_partition_inclusive([1]).create_cartesian_topology_partition((1, 1, 1, 1))
    layer = DistributedConv2d(P_x, 1, 1, 1, bias=False)
    layer(torch.ones(2, 1, 3, 3) if P_x.active else zero_volume_tensor(2))
    expected = 2 * 9 * 4 if comm.rank == 1 else 0
    assert layer.get_sizeof_input_tensor() == layer.get_sizeof_tensor() == expected
    # They know the weights, and that these are copies.
    assert layer.get_ranks_synch_weights() == list(range(comm.size))
    assert layer.get_sizeof_gradients() == 4
