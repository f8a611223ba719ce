"""Movements in stages over nodes: what one exchange gives, and its gradients, with one rounding of sums."""

from __future__ import annotations

import random

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.ops.core.movement import CallSite, Movement
from distdl_rma.layers.ops.core.staged import StagedMovement, movement_between, movement_or_none
from tests.matrix import over_seeds
from tests.pretended import pretended_nodes

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.sizes(3, 4)]


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
        with pretended_nodes(Machine.of(P_world)):
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
    with pretended_nodes(Machine.of(P_world)):
        movement = movement_between(site, source, target, torch.float64)
    movement.connect()
    for epoch in range(60):
        if random.Random(epoch).randrange(comm.size) == comm.rank:
            torch.randn(200, 200).mm(torch.randn(200, 200))
        x = torch.arange(9.0, dtype=torch.float64) + epoch
        assert torch.equal(movement(x[source.slices()]), x)


def test_nothing_is_staged_among_ranks_that_are_alone_or_all_together(P_world, comm):
    site = CallSite(Machine.of(P_world), "few")
    P = P_world.create_cartesian_topology_partition((comm.size,))
    source, target = Decomposition.balanced(P, (9,)), Decomposition.replicated(P, (9,))
    movement = movement_or_none(site, source, target, torch.float64, "at once")
    if len(site.machine.segments.segment.nodes) in (1, comm.size):
        assert isinstance(movement, Movement)
    assert movement_or_none(site, source, source, torch.float64, "nothing") is None
