"""Boxes behave as the sets of points that they stand for."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import Box

bounds = st.tuples(st.integers(-5, 5), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))
some = settings(max_examples=60)


def boxes(dim):
    return st.lists(bounds, min_size=dim, max_size=dim).map(lambda given: Box(tuple(given)))


any_box = st.integers(1, 3).flatmap(boxes)
two_boxes = st.integers(1, 3).flatmap(lambda dim: st.tuples(boxes(dim), boxes(dim)))


def points(box):
    return set(product(*(range(start, stop) for start, stop in box.bounds)))


@some
@given(two_boxes)
def test_intersection_holds_the_common_points(pair):
    a, b = pair
    assert points(a & b) == points(a) & points(b)
    assert a & b == b & a


@some
@given(any_box)
def test_volume_counts_the_points(box):
    assert box.volume == len(points(box))
    assert box.empty == (not points(box))
    assert box.dim == len(box.shape) == len(box.start) == len(box.bounds)


@some
@given(any_box, st.data())
def test_shift_moves_every_point(box, data):
    offset = data.draw(st.lists(st.integers(-9, 9), min_size=box.dim, max_size=box.dim))
    moved = box.shift(offset)
    assert moved.shape == box.shape
    assert points(moved) == {tuple(np.add(point, offset)) for point in points(box)}
    assert moved.shift([-o for o in offset]) == box


@some
@given(any_box, bounds, st.data())
def test_replace_changes_one_dimension_only(box, other, data):
    dim = data.draw(st.integers(0, box.dim - 1))
    replaced = box.replace(dim, *other)
    assert replaced.bounds[dim] == other
    assert replaced.replace(dim, *box.bounds[dim]) == box


@some
@given(two_boxes)
def test_slices_select_exactly_the_points_of_the_box_and_refuse_those_outside(pair):
    origin, box = pair
    if not points(box) <= points(origin):
        with pytest.raises(ShapeError, match="is not inside"):
            box.slices(origin)
    inner = origin & box
    if inner.empty:
        return
    coordinates = np.stack(
        np.meshgrid(*(np.arange(start, stop) for start, stop in origin.bounds), indexing="ij")
    )
    selected = coordinates[(slice(None), *inner.slices(origin))]
    assert selected.shape[1:] == inner.shape
    assert {tuple(point) for point in selected.reshape(origin.dim, -1).T} == points(inner)


def test_box_of_shape_starts_at_the_origin():
    assert Box.of_shape((2, 0, 3)) == Box(((0, 2), (0, 0), (0, 3)))
    assert Box.of_shape(np.array([2, 3])) == Box(((0, 2), (0, 3)))
    assert {type(stop) for _, stop in Box.of_shape(np.array([2, 3])).bounds} == {int}


def test_box_without_dimensions_holds_one_element():
    assert Box(()).volume == 1
    assert not Box(()).empty
    assert Box(()) & Box(()) == Box(())
    assert Box(()).slices(Box(())) == ()


def test_boxes_compare_by_content_cannot_be_changed_and_print_like_slices():
    a, b = (Box(((-1, 2), (0, 0))) for _ in range(2))
    assert (a == b, hash(a) == hash(b), a != Box(((-1, 2), (0, 1)))) == (True,) * 3
    assert str(a) == "[-1:2, 0:0]"
    with pytest.raises(AttributeError):
        a.bounds = ()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Box(((2, 5), (0, 1))).slices(Box(((0, 4), (0, 1)))), "[2:5, 0:1] is not inside [0:4, 0:1]"),
        (lambda: Box.of_shape((3, -2)), "box bounds must not fall: got (0, -2) in ((0, 3), (0, -2))"),
        (lambda: Box(((0, 1), (3, 2))), "box bounds must not fall: got (3, 2) in ((0, 1), (3, 2))"),
        (lambda: Box(((0, 1),)) & Box(((0, 1), (0, 2))),
         "boxes of 1 and 2 dimensions do not intersect: [0:1], [0:1, 0:2]"),
    ],
)  # fmt: skip
def test_what_is_no_box_is_refused_with_the_numbers(build, message):
    with pytest.raises(ShapeError) as caught:
        build()
    assert str(caught.value) == message
