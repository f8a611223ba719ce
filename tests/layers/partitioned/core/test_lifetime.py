"""A layer that is dropped is freed at once, and its memory in the segment with it."""

import copy
import gc
import re
import weakref

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, Machine, SegmentError, ShapeError
from distdl_rma.layers import (
    DistributedBatchNorm2d,
    DistributedConv2d,
    DistributedLinearAllGather,
    Repartition,
)
from tests.layers.partitioned.every_layer import EVERY_LAYER, line, local, rows

pytestmark = pytest.mark.mpi


@pytest.fixture
def without_collector():
    """Nothing but reference counts frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def used(P_world, comm):
    """Bytes of the segment in use, once all ranks have acknowledged what they got.

    But for what all layers on some ranks have in common: the agreement, and the rules that losses call.
    """
    comm.Barrier()
    owners = Machine.of(P_world).segments.stats().owners
    return sum(
        nbytes for name, (_, nbytes) in owners.items() if not re.match(r"agreement|.*\(base\.py:", name)
    )


def step(layer, inputs):
    """Forward and backward, in training and in evaluation."""
    inputs[0].requires_grad_(inputs[0].is_floating_point())
    for mode in (True, False):
        layer.train(mode)
        y = layer(*inputs)
        if y.requires_grad:
            y.sum().backward()


def test_every_layer_is_freed_when_it_is_dropped(P_world, comm, without_collector):
    late = []
    for name, make in EVERY_LAYER.items():
        before = used(P_world, comm)
        layer, inputs = make(P_world)
        step(layer, inputs)
        seen = weakref.ref(layer)
        del layer, inputs
        if seen() is not None:
            late.append(name)
        elif used(P_world, comm) != before:
            late.append(f"{name}: segment")
    assert not late


def network(P_world):
    P_x = rows(P_world)
    model = nn.Sequential(
        DistributedConv2d(P_x, 4, 4, 3, padding=1),
        nn.PReLU(),
        DistributedBatchNorm2d(P_x, 4),
        DistributedConv2d(P_x, 4, 4, 3, padding=1, weights="root"),
    )
    return model, [weakref.ref(part) for part in model]


def alive(parts):
    return [part() for part in parts if part() is not None]


@pytest.mark.parametrize("synchronised", [False, True])
def test_copies_and_their_model_are_freed_one_by_one(P_world, comm, without_collector, synchronised):
    before = used(P_world, comm)
    model, parts = network(P_world)
    sync = GradientSync(model, P_world) if synchronised else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(local()).sum().backward()
        if sync is not None:
            sync.clip_grad_norm_(1.0)
        optimizer.step()
        alone = used(P_world, comm)
        twin = copy.deepcopy(model)
        copies = [weakref.ref(part) for part in twin]
        twin(local()).sum().backward()
        del twin
        assert not alive(copies)
        assert used(P_world, comm) == alone
    if sync is not None:
        sync.close()
    model(local()).sum().backward()
    del model, sync, optimizer
    assert not alive(parts)
    assert used(P_world, comm) == before


def test_refused_calls_hold_no_layer(P_world, comm, without_collector):
    before = used(P_world, comm)
    layer = DistributedLinearAllGather(line(P_world), 3 * comm.size, 8)
    for _ in range(2):
        with pytest.raises(ShapeError, match="features"):
            layer(torch.rand(5, 7))
        layer(torch.rand(5, 3)).sum().backward()
    seen = weakref.ref(layer)
    del layer
    assert seen() is None
    assert used(P_world, comm) == before


def test_a_graph_outlives_its_layers(P_world, comm, without_collector):
    before = used(P_world, comm)
    model, parts = network(P_world)
    x = local().requires_grad_()
    y, parameters = model(x), list(model.parameters())
    del model
    # Copies are still summed over the ranks, on all of them.
    y.sum().backward()
    weight = parameters[0].grad
    assert torch.equal(weight, torch.from_numpy(comm.bcast(weight.numpy())))
    assert bool(weight.any()) and bool(x.grad.any())
    del y, parameters, x, weight
    assert not alive(parts)
    assert used(P_world, comm) == before


def test_flights_and_plans_of_many_shapes_end_with_their_layer(P_world, comm, without_collector):
    before = used(P_world, comm)
    layer = Repartition(line(P_world), P_world.create_cartesian_topology_partition((comm.size, 1)))
    for n in range(1, 20):
        layer(torch.rand(n, 2, requires_grad=True)).sum().backward()
    del layer
    assert used(P_world, comm) == before


def test_an_exhausted_segment_first_frees_what_only_cycles_hold(comm, without_collector):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:

        class Holder:
            pass

        for _ in range(4):
            holder = Holder()
            holder.itself = holder
            holder.buffer = machine.segments.get_segment_buffer(1 << 21)
            weakref.finalize(holder, holder.buffer.free)
            del holder
        with pytest.raises(SegmentError, match="exhausted"):
            machine.segments.get_segment_buffer(1 << 22)
