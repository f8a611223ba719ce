"""Movements in stages over nodes: what one exchange gives, and its gradients, with one rounding of sums."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import nn

from distdl_rma import Machine, gather_state_dict, shard
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers import AllGather, DistributedConv2d, DistributedLinear, ReduceScatter
from distdl_rma.ops.core.movement import CallSite, Movement
from distdl_rma.ops.core.staged import StagedMovement, movement_between, movement_or_none
from tests.matrix import over_seeds

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.sizes(3, 4)]


@contextlib.contextmanager
def pairs(P_world):
    """Two ranks on each node, as far as movements look; the last one may be alone."""
    segment = Machine.of(P_world).segments.segment
    true, ranks = segment.nodes, P_world.ranks
    segment.nodes = tuple(ranks[at : at + 2] for at in range(0, len(ranks), 2))
    try:
        yield
    finally:
        segment.nodes = true


def ends_of(rng, P_world, shape):
    """A tensor on a line or a grid of all ranks, cut or copied, or all of it on one rank."""
    n = P_world.size
    if rng.random() < 0.25:
        root = P_world.create_partition_inclusive([rng.randrange(n)])
        return Decomposition.replicated(root, shape)
    order = rng.sample(range(n), n)
    grid = rng.choice([(n, 1), (1, n), *([(2, 2)] if n == 4 else [])])
    P = P_world.create_partition_inclusive(order).create_cartesian_topology_partition(grid)
    copied = rng.choice([(), (0,), (1,), (0, 1)])
    axes = tuple(None if d in copied else d for d in range(2))
    return Decomposition(
        P, tuple(Balanced(e, 1 if d in copied else grid[d]) for d, e in enumerate(shape)), axes
    )


@over_seeds(24, each=8)
def test_stages_give_what_one_exchange_gives(P_world, seeds):
    machine, staged = Machine.of(P_world), 0
    for seed in seeds:
        rng = random.Random(seed)
        shape = rng.choice([(7, 5), (1, 6), (4, 4), (0, 3), (80, 70)])
        source, target = (ends_of(rng, P_world, shape) for _ in range(2))
        site = CallSite(machine, f"case {seed}")
        with pairs(P_world):
            movement = movement_between(site, source, target, torch.float64, "in stages")
        exchange = Exchange(machine.rank, source, target)
        at_once = Movement(machine, exchange, torch.float64, f"{site.name} at once")
        staged += isinstance(movement, StagedMovement)
        torch.manual_seed(seed + machine.rank)
        for _ in range(3):
            x = torch.randint(-9, 10, exchange.own.shape).double()
            g = torch.randint(-9, 10, exchange.need.shape).double()
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            split = rng.random() < 0.5
            y = movement.wait(movement.start(inputs[0], True)) if split else movement(inputs[0], True)
            expected = at_once(inputs[1], True)
            assert torch.equal(y, expected)
            y.backward(g)
            expected.backward(g)
            assert torch.equal(inputs[0].grad, inputs[1].grad)
        movement.close()
        at_once.close()
    assert staged or len(seeds) < 8


def test_a_rank_that_is_late_or_ahead_changes_nothing(P_world, comm):
    site = CallSite(Machine.of(P_world), "late")
    P = P_world.create_cartesian_topology_partition((comm.size,))
    source, target = Decomposition.balanced(P, (9,)), Decomposition.replicated(P, (9,))
    with pairs(P_world):
        movement = movement_between(site, source, target, torch.float64)
    movement.connect()
    for epoch in range(60):
        if random.Random(epoch).randrange(comm.size) == comm.rank:
            torch.randn(200, 200).mm(torch.randn(200, 200))
        x = torch.arange(9.0, dtype=torch.float64) + epoch
        assert torch.equal(movement(x[source.slices()]), x)


def test_sums_of_short_types_are_rounded_once(P_world, comm):
    # 256 + 1 is no bfloat16; all terms in float32 and one rounding are.
    terms = [256.0, 1.0, 1.0, 2.0][: comm.size]
    P = P_world.create_cartesian_topology_partition((comm.size,))
    with pairs(P_world):
        x = torch.full((comm.size,), terms[comm.rank], dtype=torch.bfloat16)
        y = ReduceScatter(P, 0)(x)
        own = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        AllGather(P, 0)(own).backward(x)
    assert torch.equal(y, torch.tensor([sum(terms)]).bfloat16())
    assert torch.equal(own.grad, y)


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_gather_and_scatter_as_on_one_node(P_world, comm, axis):
    shape = (comm.size, 1) if axis == 0 else (1, comm.size)
    P = P_world.create_cartesian_topology_partition(shape)
    whole = torch.arange(35.0, dtype=torch.float64).reshape(5, 7)
    x = shard(P, whole).to_local().clone().requires_grad_()
    with pairs(P_world):
        y = AllGather(P, axis)(x)
        back = ReduceScatter(P, axis)(y)
    assert torch.equal(y, whole)
    assert torch.equal(back, comm.size * x)
    back.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, comm.size))


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_weights_of_a_root_come_to_all_nodes_and_their_gradients_back(P_world, comm, kind):
    n = comm.size
    torch.manual_seed(1)
    if kind == "linear":
        twin, x = nn.Linear(6, 5).double(), torch.randn(2 * n, 6, dtype=torch.float64)
        P = P_world.create_cartesian_topology_partition((n, 1))
    else:
        twin, x = nn.Conv2d(2, 3, 3, padding=1).double(), torch.randn(1, 2, 3 * n, 5, dtype=torch.float64)
        P = P_world.create_cartesian_topology_partition((1, 1, n, 1))
    torch.manual_seed(2)
    with pairs(P_world):
        if kind == "linear":
            P_W = P_world.create_cartesian_topology_partition((n, 1, 1))
            layer = DistributedLinear(P, P, P_W, 6, 5, dtype=torch.float64, placement="root")
        else:
            layer = DistributedConv2d(P, 2, 3, 3, padding=1, dtype=torch.float64, placement="root")
        mine = shard(P, x).to_local().clone().requires_grad_()
        y = layer(mine)
        whole = gather_state_dict(layer)
        twin.load_state_dict(whole)
        expected = twin(x)
        y.sum().backward()
    torch.testing.assert_close(y, shard(P, expected.detach()).to_local())
    expected.sum().backward()
    if comm.rank == 0:
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad)
        torch.testing.assert_close(layer.bias.grad, twin.bias.grad)


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_linear_layers_with_split_features(P_world, comm, form):
    n = comm.size
    P = P_world.create_cartesian_topology_partition((1, n))
    P_W = P_world.create_cartesian_topology_partition((n, 1) if form == "rows" else (1, n))
    torch.manual_seed(1)
    with pairs(P_world):
        layer = DistributedLinear(P, P, P_W, 7, 9, dtype=torch.float64)
        torch.manual_seed(1)
        twin = nn.Linear(7, 9, dtype=torch.float64)
        x = torch.randn(3, 7, dtype=torch.float64)
        mine, whole = shard(P, x).to_local().clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = layer(mine), twin(whole)
        g = torch.randn(3, 9, dtype=torch.float64)
        y.backward(shard(P, g).to_local())
        expected.backward(g)
    torch.testing.assert_close(y, shard(P, expected.detach()).to_local())
    torch.testing.assert_close(mine.grad, shard(P, whole.grad).to_local())


def test_nothing_is_staged_among_ranks_that_are_alone_or_all_together(P_world, comm):
    site = CallSite(Machine.of(P_world), "few")
    P = P_world.create_cartesian_topology_partition((comm.size,))
    source, target = Decomposition.balanced(P, (9,)), Decomposition.replicated(P, (9,))
    movement = movement_or_none(site, source, target, torch.float64, "at once")
    if len(site.machine.segments.segment.nodes) in (1, comm.size):
        assert isinstance(movement, Movement)
    assert movement_or_none(site, source, source, torch.float64, "nothing") is None
