"""Statistic groups of all ranks, simulated in one process."""

from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry import Decomposition, Partition
from distdl_rma.geometry.intervals import Listed
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes, StatisticGroups


@st.composite
def groups_of_channels(draw):
    """Layout, partition and source of a group norm, with parts of any length."""
    groups = draw(st.integers(1, 4))
    channels = groups * draw(st.integers(1, 5))
    grid = (draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 2)))
    shape = (draw(st.integers(1, 3)), channels, draw(st.integers(1, 4)))
    splits = []
    for extent, parts in zip(shape, grid, strict=True):
        cuts = sorted(draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
        splits.append(Listed(tuple(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True))))
    P_x = Partition(tuple(range(prod(grid))), grid, 0)
    return NormAxes((1, 2), (1,), groups), P_x, Decomposition(P_x, tuple(splits), (0, 1, 2))


def group_of(source, rank, groups):
    """Group of every element of a rank's tensor."""
    width = source.shape[1] // groups
    whole = (torch.arange(source.shape[1]) // width).view(1, -1, 1).expand(source.shape)
    return whole[source.slices(rank)]


@settings(max_examples=40)
@given(groups_of_channels())
def test_ranks_share_groups_with_all_ranks_that_hold_elements_of_them(case):
    axes, P_x, source = case
    width = source.shape[1] // axes.groups
    for rank in P_x.ranks:
        shared, mine = StatisticGroups(axes, source, rank), group_of(source, rank, axes.groups).unique()
        for other in P_x.ranks:
            same_instances = P_x.index_of(other)[0] == P_x.index_of(rank)[0]
            common = set(mine.tolist()) & set(group_of(source, other, axes.groups).unique().tolist())
            if same_instances and common:
                assert other in shared.ranks
        for other in shared.ranks:
            theirs = StatisticGroups(axes, source, other)
            assert (theirs.ranks, theirs.shape) == (shared.ranks, shared.shape)
            assert torch.equal(theirs.counts, shared.counts)
        # Together they have whole groups.
        assert set(shared.total.flatten().tolist()) <= {width * source.shape[2]}


@settings(max_examples=40)
@given(groups_of_channels())
def test_values_of_rows_are_summed_by_group_and_spread_back(case):
    axes, P_x, source = case
    width = source.shape[1] // axes.groups
    for rank in P_x.ranks:
        shared, box = StatisticGroups(axes, source, rank), source.box(rank)
        first = min(source.box(r).start[1] for r in shared.ranks) // width
        of_channels = [channel // width - first for channel in range(*box.bounds[1])]
        assert shared.rows == (*box.shape[:2], 1)
        rows = np.random.default_rng(0).integers(0, 9, (2, *shared.rows)).astype(float)
        expected = np.zeros((2, *shared.shape))
        for channel, group in enumerate(of_channels):
            expected[:, :, group] += rows[:, :, channel]
        assert (shared.sums(rows) == expected).all()
        out = np.full((2, *shared.shape), np.nan)
        assert shared.sums(rows, out) is out
        assert (out == expected).all()
        numbers = np.arange(prod(shared.shape), dtype=float).reshape(shared.shape)
        spread = shared.spread(numbers)
        assert spread.shape == shared.rows
        assert all((spread[:, at] == numbers[:, group]).all() for at, group in enumerate(of_channels))


def test_rows_of_a_group_have_a_weight_each_unless_each_element_has():
    source = Decomposition.balanced(Partition((0,), (1, 1, 1), 0), (2, 6, 5))
    for axes, rows in (
        (NormAxes((0, 2), (1,)), (1, 6, 1)),
        (NormAxes((2,), (1,)), (2, 6, 1)),
        (NormAxes((1, 2), (1,), 3), (2, 6, 1)),
        (NormAxes((1, 2), (1, 2)), (2, 1, 1)),
    ):
        found = StatisticGroups(axes, source, 0)
        assert found.rows == rows
        assert axes.elementwise == (axes.weighted == axes.reduced)


def test_without_groups_the_slab_along_the_reduced_dimensions_shares():
    P_x = Partition(tuple(range(12)), (2, 2, 3), 0)
    source = Decomposition.balanced(P_x, (4, 6, 7))
    batch, layer = NormAxes((0, 2), (1,)), NormAxes((1, 2), (1, 2))
    assert StatisticGroups(batch, source, 4).ranks == (3, 4, 5, 9, 10, 11)
    assert StatisticGroups(layer, source, 4).ranks == (0, 1, 2, 3, 4, 5)
    assert StatisticGroups(batch, source, 4).shape == (1, 3, 1)
    assert StatisticGroups(layer, source, 4).total.item() == 42
    assert layer.instances(3) == (0,)
    assert batch.instances(3) == ()
