"""Statistic groups of all ranks, simulated in one process."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry import Decomposition, Partition
from distdl_rma.geometry.intervals import Listed
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups


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
    for rank in P_x.ranks:
        shared, mine = (
            StatisticGroups(axes, source, rank),
            group_of(source, rank, axes.groups).unique(),
        )
        for other in P_x.ranks:
            same_instances = P_x.index_of(other)[0] == P_x.index_of(rank)[0]
            common = set(mine.tolist()) & set(group_of(source, other, axes.groups).unique().tolist())
            if same_instances and common:
                assert other in shared.ranks
        for other in shared.ranks:
            theirs = StatisticGroups(axes, source, other)
            assert (theirs.ranks, theirs.shape) == (shared.ranks, shared.shape)
            assert torch.equal(theirs.counts, shared.counts)


@settings(max_examples=40)
@given(groups_of_channels())
def test_counts_of_the_sharing_ranks_add_up_to_whole_groups(case):
    axes, P_x, source = case
    width = source.shape[1] // axes.groups
    for rank in P_x.ranks:
        shared = StatisticGroups(axes, source, rank)
        assert set(shared.total.flatten().tolist()) <= {width * source.shape[2]}


@settings(max_examples=40)
@given(groups_of_channels())
def test_runs_are_all_local_channels_in_order_each_in_its_group(case):
    axes, P_x, source = case
    width = source.shape[1] // axes.groups
    for rank in P_x.ranks:
        shared, box = StatisticGroups(axes, source, rank), source.box(rank)
        first = min(source.box(r).start[1] for r in shared.ranks) // width
        x = torch.arange(box.start[1], box.bounds[1][1]).view(1, -1, 1).expand(box.shape)
        seen = []
        for run in shared.runs:
            view = run.of(x)
            seen += view.flatten(1, 2).unique().tolist() if view.numel() else range(*box.bounds[1])
            places = torch.arange(shared.shape[1]).view(1, -1, 1, 1)
            groups = run.of_groups(places) + first
            if view.numel():
                assert torch.equal((view // width), groups.expand(view.shape))
        assert len(shared.runs) <= 3
        if not box.empty:
            assert seen == list(range(*box.bounds[1]))


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
