"""What a rank sends in each call: as the page says, as real ranks count it, and not by the ranks."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks.scaling.plans import Cluster, Staged, Vote, loss, outcome
from distdl_rma import Machine, shard
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import DistributedKLDivLoss, DistributedLinear
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.staged import movement_between
from distdl_rma.layers.partitioned.core.refusals import CallOutcome
from messages import PAGE, busiest, calls, grid_of, written
from tests.pretended import pretended_nodes

COUNTED = ("puts", "bytes_put", "gets", "bytes_got", "collectives", "bytes_collective")
CALLS = list(calls())


def test_the_page_is_what_the_plans_say():
    assert PAGE.read_text() == written(), "run docs/messages.py"


@pytest.mark.parametrize("per_node", [1, 4, 16])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_in_a_step_grows_with_the_ranks_but_by_a_logarithm_of_the_nodes(name, per_node):
    call = calls()[name]
    most = busiest(call, Cluster(grid_of(64), 1)).nbytes + busiest(call, Cluster(grid_of(64), 16)).nbytes
    for size in (8, 64, 256, 1024):
        found = busiest(call, Cluster(grid_of(size), per_node))
        nodes = math.ceil(size / per_node)
        # A sum of one round goes to 31 others at most; two sums load and store the shares of a node.
        assert found.messages <= 31 + 2 * (2 * per_node + 2 * math.ceil(math.log2(nodes)))
        # Of a sum in one round everyone gets up to 8 KiB; in a tree a rank tells 32 others a KiB. What goes
        # to all ranks leaves none of them more than a few times.
        assert found.nbytes <= max(2 * most, 32 << 10)


def counted(machine, call):
    """What one call moves, by the counters."""
    for _ in range(2):
        y = call()
    before = copy.copy(machine.segments.counters)
    y = call()
    after = machine.segments.counters
    return y, [getattr(after, name) - getattr(before, name) for name in COUNTED]


def expected(machine, grid, communications):
    """The same from plans."""
    cluster = Cluster(grid, machine.size)
    found = [each.traffic(cluster, machine.rank) for each in communications]
    return [sum(getattr(traffic, name) for traffic in found) for name in COUNTED]


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_real_ranks_count_what_the_stages_over_nodes_say(comm):
    n, (batch, features) = comm.size, (6, 12)
    with Machine(comm, segment_size="16MiB", timeout=15) as machine, pretended_nodes(machine):
        me, P, cluster = machine.rank, machine.partition((1, n)), Cluster((1, 1, n, 1), 2)
        source, target = (Decomposition.balanced(P, (batch, features), copied) for copied in ((), (1,)))
        root = Decomposition.replicated(P.create_partition_inclusive([0]), (batch, features))
        for ends in itertools.permutations((source, target, root), 2):
            plan = Staged(*ends)
            movement = movement_between(CallSite(machine, "counted"), *ends, torch.float32, str(len(ends)))
            x = torch.ones(ends[0].box(me).shape)
            _, moved = counted(machine, functools.partial(movement, x))
            traffic = plan.traffic(cluster, me)
            assert moved == [getattr(traffic, name) for name in COUNTED]
            movement.close()
        layer = DistributedLinear(P, P, machine.partition((n, 1)), features, features)
        mine = torch.ones(source.box(me).shape)
        with torch.no_grad():
            _, moved = counted(machine, lambda: layer(mine))
        votes = Vote().traffic(Cluster((1, n), n), me)
        gathered = Staged(source, target).traffic(cluster, me)
        assert moved == [getattr(votes, name) + getattr(gathered, name) for name in COUNTED]


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_where_blocks_suffice_nothing_moves(comm):
    with Machine(comm, segment_size="16MiB", timeout=15) as machine:
        x = shard(machine.partition((comm.size, 1)), torch.randn(4 * comm.size, 5))
        weight = torch.randn(2, 5)
        with torch.no_grad():
            _, moved = counted(machine, lambda: F.gelu(F.linear(x, weight)) * 2 - 1)
        assert moved == [0] * len(COUNTED)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_what_few_know_of_a_call_is_counted_as_the_plans_say(comm):
    with Machine(comm, segment_size="16MiB", timeout=15) as machine:
        P_x, grid = machine.partition((comm.size,)), (comm.size,)
        loss_of, x = DistributedKLDivLoss(P_x, "batchmean"), torch.ones(3)
        _, moved = counted(machine, lambda: loss_of(x, x))
        assert moved == expected(machine, grid, (Vote(), loss()))
        told = CallOutcome.among(machine, P_x.ranks[:1], P_x.ranks, "layer")
        _, moved = counted(machine, told.connect)
        assert moved == expected(machine, grid, (outcome(),))
