"""Partitions: ranks on a row-major grid, the same value on every process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.partition import Partition
from tests.geometry.strategies import RANKS, partitions

some = settings(max_examples=60)
any_partition = st.integers(1, 3).flatmap(partitions)


def world(size, me=0, home=None):
    return Partition(tuple(range(size)), (size,), me, home)


def seen_by(partition, me):
    return Partition(partition.ranks, partition.shape, me)


class Home:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


@some
@given(any_partition)
def test_ranks_lie_on_the_grid_in_row_major_order(partition):
    places = np.array(partition.ranks).reshape(partition.shape)
    for index in np.ndindex(partition.shape):
        assert partition.rank_at(index) == places[index]
        assert partition.index_of(places[index]) == index
    assert partition.size == len(partition.ranks) == places.size
    assert partition.dim == places.ndim


@some
@given(any_partition)
def test_every_process_finds_its_own_place(partition):
    for me in range(RANKS):
        here = seen_by(partition, me)
        assert here.active == (me in partition.ranks)
        assert (here.rank is None) == (here.index is None) == (not here.active)
        if here.active:
            assert here.ranks[here.rank] == me
            assert here.rank == np.ravel_multi_index(here.index, here.shape)


@some
@given(any_partition)
def test_equality_and_hash_ignore_who_looks(partition):
    views = {seen_by(partition, me) for me in range(RANKS)} | {
        Partition(partition.ranks, partition.shape, 0, Home(), Home())
    }
    assert views == {partition}
    ranks, shape = partition.ranks, partition.shape
    assert (partition == Partition(ranks[::-1], shape, 0)) == (len(ranks) == 1)
    assert partition != Partition(ranks, (*shape, 1), 0)


@some
@given(any_partition, st.data())
def test_ranks_in_a_box_of_indices_come_row_major(partition, data):
    starts = [data.draw(st.integers(0, extent)) for extent in partition.shape]
    stops = [data.draw(st.integers(*ends)) for ends in zip(starts, partition.shape, strict=True)]
    inside = np.array(partition.ranks).reshape(partition.shape)[tuple(map(slice, starts, stops))]
    assert list(partition.ranks_in([*map(range, starts, stops)])) == inside.flatten().tolist()


@some
@given(any_partition, st.data())
def test_slab_holds_the_members_with_the_given_indices(partition, data):
    dims = data.draw(st.sets(st.integers(0, partition.dim - 1)))
    fixed = {d: data.draw(st.integers(0, partition.shape[d] - 1)) for d in dims}
    slab = partition.slab(fixed)
    assert slab.ranks == tuple(
        rank for rank in partition.ranks if all(partition.index_of(rank)[d] == i for d, i in fixed.items())
    )
    assert slab.shape == tuple(1 if d in fixed else n for d, n in enumerate(partition.shape))


@some
@given(any_partition, st.data())
def test_sub_partition_names_ranks_by_their_position_and_a_topology_keeps_them(partition, data):
    positions = data.draw(st.lists(st.integers(0, partition.size - 1), min_size=1, unique=True))
    part = partition.create_partition_inclusive(positions)
    assert part.ranks == tuple(partition.ranks[p] for p in positions)
    assert part.shape == (len(positions),)
    assert part.me == partition.me
    line = partition.create_partition_inclusive(range(partition.size))
    assert line == partition.create_cartesian_topology_partition((partition.size,))
    assert line.create_cartesian_topology_partition(partition.shape) == partition


@pytest.mark.parametrize("kind", [list, tuple, np.array, iter, lambda ranks: np.array(ranks, dtype=np.uint8)])
def test_ranks_and_grids_may_be_of_any_integer_sequence(kind):
    part = world(8).create_partition_inclusive(kind([5, 2, 7, 0]))
    grid = part.create_cartesian_topology_partition(kind([2, 2]))
    assert grid == Partition((5, 2, 7, 0), (2, 2), 0)
    # Plain integers: an array's own would print, and so fingerprint, differently.
    assert {type(number) for number in (*grid.ranks, *grid.shape)} == {int}
    assert world(8).create_partition_inclusive(np.arange(4, 8)).ranks == (4, 5, 6, 7)


def test_derived_partitions_belong_to_the_same_home():
    home = Home()
    part = world(4, me=1, home=home).create_partition_inclusive([0, 1, 2, 3])
    grid = part.create_cartesian_topology_partition((2, 2))
    assert [p.home for p in (part, grid, grid.slab({0: 1}))] == [home] * 3
    assert [p.me for p in (part, grid, grid.slab({0: 1}))] == [1] * 3


def test_deactivate_closes_what_was_opened_for_this_partition_alone():
    home, opened = Home(), Home()
    root = Partition((0, 1), (2,), 0, home, opened)
    root.create_partition_inclusive([0, 1]).deactivate()
    root.create_cartesian_topology_partition((1, 2)).deactivate()
    world(2, home=home).deactivate()
    assert (opened.closed, home.closed) == (0, 0)
    root.deactivate()
    assert (opened.closed, home.closed) == (1, 0)
    assert root == world(2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Partition((0, 1, 2), (2, 2), 0), "partition has 3 ranks but grid (2, 2) needs 4"),
        (lambda: world(1).create_cartesian_topology_partition((2,)),
         "partition has 1 rank but grid (2,) needs 2"),
        (lambda: Partition((0, 1), (2, -1), 0), "every extent of a grid must be at least 1, got (2, -1)"),
        (lambda: world(4).create_cartesian_topology_partition((4, 0)),
         "every extent of a grid must be at least 1, got (4, 0)"),
        (lambda: world(4).create_partition_inclusive([1, 3, 1]),
         "rank 1 is listed more than once in (1, 3, 1)"),
        (lambda: world(4).create_partition_inclusive([0, 4]),
         "position 4 is none of a partition of 4 ranks, which has positions 0 to 3"),
        (lambda: world(1).create_partition_inclusive([-1]),
         "position -1 is none of a partition of 1 rank, which has positions 0 to 0"),
        (lambda: world(4).create_partition_inclusive([]), "a partition needs at least one rank, got none"),
        (lambda: world(4).create_partition_inclusive([0.0, 1.0]),
         "ranks of a partition must be integers, got [0.0, 1.0]"),
        (lambda: world(4).create_cartesian_topology_partition([2.0, 2.0]),
         "extents of a grid must be integers, got [2.0, 2.0]"),
        (lambda: world(2).index_of(5), "rank 5 is not in the partition of ranks (0, 1)"),
        (lambda: world(2).rank_at((2,)), "index (2,) is outside of grid (2,)"),
        (lambda: world(2).rank_at((-1,)), "index (-1,) is outside of grid (2,)"),
        (lambda: world(2).slab({0: 2}), "index (2,) is outside of grid (2,)"),
    ],
)  # fmt: skip
def test_errors_say_what_came_and_what_was_wanted(build, message):
    with pytest.raises(PartitionError) as caught:
        build()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_partition_without_dimensions_has_one_place():
    point = Partition((3,), (), me=3)
    assert (point.size, point.dim, point.rank, point.index) == (1, 0, 0, ())
    assert point.rank_at(()) == 3
