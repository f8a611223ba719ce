"""Layouts: decompositions in a normal form, under what functions do to dimensions."""

from math import prod

import pytest

from distdl_rma import Partition
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.layers.split import layout as lay

GRID = (1, 1, 2, 3)
SHAPE = (2, 3, 7, 8)


def partition(me=0, shape=GRID):
    return Partition(tuple(range(prod(shape))), shape, me)


def test_the_normal_form_forgets_what_cuts_nothing():
    found = lay.balanced(partition(), SHAPE)
    assert found.axes == (None, None, 2, 3)
    assert found.cut_dims == (2, 3)
    listed = Decomposition(partition(), (*found.splits[:3], Listed((3, 3, 2))), (0, 1, 2, 3))
    assert lay.normal(listed) == found


def test_dimensions_in_another_order():
    found = lay.reordered(lay.balanced(partition(), SHAPE), (3, None, 0, 2))
    assert found.shape == (8, 1, 2, 7)
    assert found.axes == (None, None, 3, 0)


def test_a_dimension_left_out_leaves_copies():
    found = lay.reordered(lay.whole(lay.balanced(partition(), SHAPE), [3]), (0, 1, 2))
    assert found.copied_along == (3,)
    assert lay.line(found, [3]) == (0, 1, 2)
    assert lay.owners(found).partition.ranks == (0, 3)


@pytest.mark.parametrize("me", range(6))
def test_the_grid_of_blocks_has_those_with_the_same_copies(me):
    found = lay.reordered(lay.whole(lay.balanced(partition(me), SHAPE), [3]), (2, 0))
    grid = lay.on_grid(found)
    assert grid.partition.shape == (2, 1)
    assert grid.partition.ranks == (me % 3, me % 3 + 3)
    assert grid.box(me) == found.box(me)


def test_the_grid_is_in_the_order_of_the_tensor():
    found = lay.reordered(lay.balanced(partition(), SHAPE), (3, 2))
    grid = lay.on_grid(found)
    assert grid.partition.shape == (3, 2)
    assert grid.partition.ranks == (0, 3, 1, 4, 2, 5)
    assert all(grid.box(rank) == found.box(rank) for rank in range(6))


def test_what_ranks_hold_of_another_layout():
    cut = lay.balanced(partition(), SHAPE)
    assert lay.holds(lay.whole(cut, [2]), cut)
    assert not lay.holds(cut, lay.whole(cut, [2]))
    assert not lay.holds(cut, lay.with_splits(cut, {2: Listed((3, 4))}))
    assert lay.holds(cut, cut)


def test_the_simplest_form_of_parts():
    assert lay.simplest(Listed((3, 3, 2))) == Balanced(8, 3)
    assert lay.simplest(Listed((3, 2, 3))) == Listed((3, 2, 3))
    assert lay.described(lay.balanced(partition(), SHAPE)) == "2 x 3 over dims 2, 3"
    assert lay.described(lay.replicated(partition(), SHAPE)) == "replicated"
