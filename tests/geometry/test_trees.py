"""Broadcasts and sums in stages: the same as at once, whatever the nodes, and no rank talks to all others."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.trees import all_reduction, broadcast, reduction, reversed_stages
from tests.geometry.simulation import equal, execute, product_of
from tests.geometry.strategies import RANKS, nodes, one_of

many = settings(max_examples=100)


@st.composite
def groups_of_ranks(draw):
    """Disjoint groups of ranks in any order, the length of their vectors, and a root for each."""
    order = draw(st.permutations(range(RANKS)))
    cuts = sorted(draw(st.sets(st.integers(1, RANKS), min_size=1, max_size=3)))
    groups = tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], cuts, strict=False))
    lengths = [draw(one_of(5, 4, 3, 7, 2, 1, 0, 5000)) for _ in groups]
    roots = draw(st.permutations(range(RANKS)))[: len(groups)]
    return groups, lengths, roots


def play(stages, x):
    """Vectors of all ranks after the movements, and all plans of the ranks."""
    for source, target in stages:
        plans = {rank: Exchange(rank, source, target) for rank in range(RANKS)}
        empty = np.zeros(0, int)
        x = execute(plans, {rank: x[rank] if rank in source.partition else empty for rank in plans})
    return x


def vectors(groups, lengths, seed):
    rng = np.random.default_rng(seed)
    x = {rank: np.zeros(0, int) for rank in range(RANKS)}
    x |= {rank: rng.integers(-9, 10, n) for group, n in zip(groups, lengths, strict=True) for rank in group}
    return x


@many
@given(case=groups_of_ranks(), node_of=nodes())
def test_reduction_over_nodes_sums_every_group_at_its_root_and_broadcast_is_its_adjoint(case, node_of):
    groups, lengths, roots = case
    there = reduction(groups, roots, lengths, node_of, 0)
    back = broadcast(roots, groups, lengths, node_of, 0)
    x, g = vectors(groups, lengths, 1), vectors([(root,) for root in roots], lengths, 2)
    sums, copies = play(there, x), play(back, g)
    for group, root in zip(groups, roots, strict=True):
        assert np.array_equal(sums[root], sum(x[rank] for rank in group))
        assert all(np.array_equal(copies[rank], g[root]) for rank in group)
    assert all(sums[rank].size == 0 for rank in range(RANKS) if rank not in roots)
    assert product_of(sums, g) == product_of(x, copies)


@many
@given(case=groups_of_ranks(), node_of=nodes())
def test_all_reduction_over_nodes_gives_every_rank_the_sum_of_its_group(case, node_of):
    groups, lengths, _ = case
    x = vectors(groups, lengths, 1)
    stages = all_reduction(groups, lengths, node_of, 0)
    y = play(stages, x)
    for group in groups:
        assert all(np.array_equal(y[rank], sum(x[other] for other in group)) for rank in group)
    assert equal(play(reversed_stages(stages), x), y)


def messages(stages, rank):
    """Messages that a rank sends and receives in each stage."""
    plans = [Exchange(rank, *ends) for ends in stages]
    return [(len(plan.sends), len(plan.receives)) for plan in plans]


@pytest.mark.parametrize(
    ("ranks", "root", "per_node", "expected"),
    [
        # One node, a root elsewhere, and a tree of nodes of one rank.
        (48, 0, 48, [(0, 47)]),
        (8, 8, 8, [(0, 0), (0, 1)]),
        (4096, 7, 1, [(0, 31), (0, 31), (0, 3)]),
        *((1024, root, 32, [(0, 31), (0, 31)]) for root in (0, 500, 1023)),
    ],
)
def test_a_reduction_has_as_many_stages_as_its_nodes_need_and_no_rank_more_messages_than_a_node(
    ranks, root, per_node, expected
):
    groups = (tuple(range(ranks)),)
    there = reduction(groups, [root], [100_000], lambda rank: rank // per_node, 0)
    assert messages(there, root) == expected
    back = broadcast([root], groups, [100_000], lambda rank: rank // per_node, 0)
    assert messages(back, root) == [(sent, received) for received, sent in reversed(expected)]
    for rank in range(1024) if ranks == 1024 else ():
        assert max(chain(*messages(there, rank), *messages(back, rank))) <= 31


def test_all_reduction_of_1024_ranks_on_32_nodes_moves_two_vectors_per_rank():
    groups, n = (tuple(range(1024)),), 1 << 15
    stages = all_reduction(groups, [n], lambda rank: rank // 32, 0)
    for rank in (0, 31, 500, 1023):
        assert messages(stages, rank) == [(31, 31)] * 4
        sent = sum(piece.box.volume for ends in stages for piece in Exchange(rank, *ends).sends)
        assert sent <= 2.1 * n
