"""Which ranks are reduced together: the printed examples of the sum-reduce document, and what they obey."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.partition import (
    Partition,
    grouped,
    groups_along,
    groups_onto,
    leaders,
    share_holders,
    transposed,
)
from tests.geometry.strategies import partitions

WORLD = Partition(tuple(range(48)), (48,), me=0)


def grid(shape, first=0):
    """A partition made as the documents make theirs."""
    ranks = np.arange(first, first + prod(shape))
    return WORLD.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def sums(x_shape, y_shape, transpose_src=False, transpose_dest=False):
    """Index in P_y to the indices in P_x that are summed there."""
    P_x, P_y = grid(x_shape), grid(y_shape)
    groups = groups_onto(P_x, P_y, transpose_src, transpose_dest)
    return {
        P_y.index_of(root): [P_x.index_of(rank) for rank in group]
        for root, group in zip(P_y.ranks, groups, strict=True)
    }


# Grids of P_x and P_y, which of them are transposed, and what is summed where.
EXAMPLES = {
    "1": ((4,), (1,), "", {(0,): [(0,), (1,), (2,), (3,)]}),
    "2": ((2, 3), (1,), "", {(0,): [(i, j) for i in range(2) for j in range(3)]}),
    "3": ((3, 4), (3, 1), "", {(i, 0): [(i, j) for j in range(4)] for i in range(3)}),
    "4": ((4, 4, 3), (1, 1, 3), "",
          {(0, 0, k): [(i, j, k) for i in range(4) for j in range(4)] for k in range(3)}),
    "6, source": ((1, 3), (3, 1), "x", {(i, 0): [(0, i)] for i in range(3)}),
    "6, destination": ((1, 3), (3, 1), "y", {(i, 0): [(0, i)] for i in range(3)}),
    "7": ((3, 4), (1, 3), "x", {(0, i): [(i, j) for j in range(4)] for i in range(3)}),
    "8": ((3, 4), (4, 1), "y", {(j, 0): [(i, j) for i in range(3)] for j in range(4)}),
    "4 x 3 x 1 behaves as 1 x 3 x 4":
        ((4, 3, 1), (1, 4), "x", {(0, k): [(k, j, 0) for j in range(3)] for k in range(4)}),
    # 3 x 4 counts as 1 x 4 x 3, not as 4 x 3 x 1.
    "transposition comes before the extension with ones":
        ((2, 4, 3), (3, 4), "y", {(j, i): [(k, i, j) for k in range(2)] for j in range(3) for i in range(4)}),
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_printed_examples_reduce_as_they_say(example):
    x_shape, y_shape, turned, expected = EXAMPLES[example]
    assert sums(x_shape, y_shape, "x" in turned, "y" in turned) == expected


@pytest.mark.parametrize("shapes", [((3, 3, 2), (1, 1, 3)), ((1, 3), (3, 1)), ((4,), (1, 4)), ((1,), (4,))])
def test_grids_that_do_not_fit_are_refused_also_where_the_document_prints_them(shapes):
    with pytest.raises(PartitionError, match=re.escape("{} and {} do not fit".format(*shapes))):
        sums(*shapes)


def test_the_refusal_of_a_grid_names_what_it_is_transposed_to():
    with pytest.raises(PartitionError, match=r"\(3, 4\) transposed to \(4, 3\)"):
        sums((4, 3, 2), (3, 4), transpose_dest=True)


@given(partition=st.integers(1, 3).flatmap(partitions))
def test_transposing_moves_i_j_k_to_k_j_i_and_back(partition):
    turned = transposed(partition)
    assert all(turned.index_of(rank) == partition.index_of(rank)[::-1] for rank in partition.ranks)
    assert transposed(turned) == partition


@given(partition=st.integers(1, 3).flatmap(partitions), data=st.data())
def test_groups_part_the_ranks_in_their_order(partition, data):
    axes = data.draw(st.sets(st.integers(0, partition.dim - 1)))
    groups = groups_along(partition, axes)
    assert sorted(rank for group in groups for rank in group) == sorted(partition.ranks)
    for group in groups:
        assert list(group) == [rank for rank in partition.ranks if rank in group]
        kept = {tuple(i for d, i in enumerate(partition.index_of(rank)) if d not in axes) for rank in group}
        assert len(kept) == 1
    assert {len(group) for group in groups} == {prod(partition.shape[d] for d in axes)}


@given(st.lists(st.integers(0, 30), unique=True, min_size=1), st.integers(1, 8))
def test_ranks_of_a_node_are_together_and_in_the_order_given(ranks, per_node):
    nodes = grouped(ranks, lambda rank: rank // per_node)
    assert sorted(sum(nodes, ())) == sorted(ranks)
    for node in nodes:
        assert len({rank // per_node for rank in node}) == 1
        assert list(node) == [rank for rank in ranks if rank in node]
    assert [node[0] for node in nodes] == sorted((node[0] for node in nodes), key=ranks.index)


def test_a_root_leads_its_group_and_the_first_rank_any_other():
    assert leaders(((3, 1), (2, 0), (5,)), 0) == (3, 0, 5)


def test_every_node_has_as_many_holders_as_the_smallest_has_ranks():
    assert share_holders(((3, 1, 4), (2, 0))) == ((3, 1), (2, 0))
    assert share_holders(((3, 1, 4), (2,), (0, 5))) == ((3,), (2,), (0,))
