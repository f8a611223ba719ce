"""Decompositions: which box each rank has, and which ranks have a part of a box."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition
from tests.geometry.counting import Counting
from tests.geometry.strategies import (
    RANKS,
    cuts_along,
    decompositions,
    partitions,
    shapes,
    unbalanced,
    windows,
)

some = settings(max_examples=60)


@st.composite
def blocks(draw):
    """A decomposition of which every grid dimension cuts its own tensor dimension."""
    dim = draw(st.integers(1, 3))
    return draw(unbalanced(draw(partitions(dim)), draw(shapes(dim))))


def owners(decomposition):
    """Number of members that own each element."""
    count = np.zeros(decomposition.shape, dtype=int)
    for rank in decomposition.partition.ranks:
        count[decomposition.box(rank).slices(Box.of_shape(decomposition.shape))] += 1
    return count


@some
@given(st.data())
def test_replicated_dimensions_hold_copies(data):
    partition = data.draw(partitions(data.draw(st.integers(1, 3))))
    shape = data.draw(shapes(partition.dim))
    copied = data.draw(st.sets(st.integers(0, partition.dim - 1)))
    decomposition = Decomposition.balanced(partition, shape, replicate=copied)
    assert decomposition.shape == shape
    assert (owners(decomposition) == prod(partition.shape[d] for d in copied)).all()
    if len(copied) == partition.dim:
        assert decomposition == Decomposition.replicated(partition, shape)
    for rank in partition.ranks:
        assert all(decomposition.box(rank).bounds[d] == (0, shape[d]) for d in copied)


@some
@given(blocks())
def test_slices_cut_the_shards_out_of_the_global_tensor_and_equality_ignores_who_looks(decomposition):
    places = np.indices(decomposition.shape)
    for rank in range(RANKS):
        box = decomposition.box(rank)
        start = np.reshape(box.start, (-1, *(1,) * box.dim))
        assert np.array_equal(places[(..., *decomposition.slices(rank))], np.indices(box.shape) + start)
    P = decomposition.partition
    here = [
        Decomposition(Partition(P.ranks, P.shape, me), decomposition.splits, decomposition.axes)
        for me in range(RANKS)
    ]
    assert [d.slices() for d in here] == [decomposition.slices(rank) for rank in range(RANKS)]
    assert set(here) == {decomposition}


def test_slices_of_what_sticks_out_of_the_tensor_are_refused():
    reads = Decomposition(grid(2), (WindowSplit(Balanced(4, 2), Window(3, left=1, right=1), 4),), (0,))
    with pytest.raises(ShapeError, match="is not inside"):
        reads.slices(0)


@some
@given(st.data())
def test_local_shapes_come_back_and_those_that_are_balanced_as_the_balanced_decomposition(data):
    partition = data.draw(partitions(data.draw(st.integers(1, 3))))
    copied = data.draw(st.sets(st.integers(0, partition.dim - 1)))
    axes = tuple(None if d in copied else d for d in range(partition.dim))
    shape = data.draw(shapes(partition.dim))
    cut = Decomposition(partition, data.draw(cuts_along(partition, shape, axes)), axes)
    local = {rank: cut.box(rank).shape for rank in partition.ranks}
    found = Decomposition.from_local_shapes(partition, local, copied)
    assert found.shape == shape
    assert [found.box(rank) for rank in range(RANKS)] == [cut.box(rank) for rank in range(RANKS)]
    assert (owners(found) == prod(partition.shape[d] for d in copied)).all()
    balanced = Decomposition.balanced(partition, shape, replicate=copied)
    same = all(balanced.box(rank) == found.box(rank) for rank in partition.ranks)
    assert (balanced == found) == same


@some
@given(st.data())
def test_meeting_finds_the_members_that_share_an_element_in_their_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    decomposition = data.draw(decompositions(shape))
    through = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    decomposition = decomposition.with_splits(
        {d: WindowSplit(decomposition.splits[d], data.draw(windows()), shape[d]) for d in through}
    )
    bounds = [(start := data.draw(st.integers(-3, 6)), start + data.draw(st.integers(0, 5))) for _ in shape]
    box = Box(tuple(bounds))
    everyone = ((rank, decomposition.box(rank) & box) for rank in decomposition.partition.ranks)
    assert list(decomposition.meeting(box)) == [
        (rank, common) for rank, common in everyone if not common.empty
    ]


def test_where_copies_have_nothing_no_rank_is_looked_at():
    split = Counting(Balanced(10, 1))
    copies = Decomposition(Partition(tuple(range(4096)), (4096,), me=0), (split,), (None,))
    assert list(copies.meeting(Box(((10, 12),)))) == []
    assert len(split.asked) <= 2
    assert len(list(copies.meeting(Box(((9, 12),))))) == 4096


def test_a_grid_dimension_may_cut_any_tensor_dimension():
    P = Partition((0, 1, 2, 3, 4, 5), (2, 3), me=0)
    crossed = Decomposition(P, (Balanced(6, 3), Balanced(5, 1), Balanced(4, 2)), (2, 0))
    assert crossed.shape == (6, 5, 4)
    for rank, (i, j) in enumerate(itertools.product(range(2), range(3))):
        assert crossed.box(rank) == Box(((2 * j, 2 * j + 2), (0, 5), (2 * i, 2 * i + 2)))


@some
@given(blocks(), windows())
def test_replacing_splits_leaves_the_other_dimensions_alone(decomposition, window):
    d = len(decomposition.splits) - 1
    split = WindowSplit(decomposition.splits[d], window, decomposition.shape[d])
    replaced = decomposition.with_splits({d: split})
    assert replaced.shape == decomposition.shape
    for rank in decomposition.partition.ranks:
        index = decomposition.partition.index_of(rank)
        assert replaced.box(rank) == decomposition.box(rank).replace(d, *split.interval(index[d]))
    assert decomposition.with_splits({}) == decomposition


def grid(*shape):
    return Partition(tuple(range(prod(shape))), shape, me=0)


UNEVEN = {0: (3, 2), 1: (3, 1), 2: (2, 2), 3: (1, 1)}


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        (lambda: Decomposition.balanced(grid(2, 2), (4, 4, 4)), PartitionError,
         "grid (2, 2) has 2 dimensions but tensor shape (4, 4, 4) has 3"),
        (lambda: Decomposition(grid(2, 2), (Balanced(4, 2), Balanced(4, 2)), (0,)), PartitionError,
         "grid (2, 2) takes one axis a dimension, got (0,)"),
        (lambda: Decomposition(grid(2, 3), (Balanced(4, 2), Balanced(4, 2)), (0, 1)), PartitionError,
         "tensor dimension 1 is cut into 2 parts but grid (2, 3) has 3 places for it"),
        (lambda: Decomposition(grid(2), (Balanced(4, 2), Balanced(4, 2)), (1,)), PartitionError,
         "tensor dimension 0 is cut into 2 parts but grid (2,) has 1 places for it"),
        (lambda: Decomposition.balanced(grid(2), (4,)).with_splits({0: Balanced(4, 3)}), PartitionError,
         "tensor dimension 0 is cut into 3 parts but grid (2,) has 2 places for it"),
        (lambda: Decomposition.from_local_shapes(grid(2), {0: (3,), 1: (3, 1)}), ShapeError,
         "rank 1 has a tensor of 2 dimensions, shape (3, 1), but grid (2,) needs 1"),
        (lambda: Decomposition.from_local_shapes(grid(2, 2), UNEVEN), ShapeError,
         ("local shapes do not form a grid (2, 2): rank 2 has (2, 2) and rank 3 has (1, 1),"
          " which must agree in dimension 0")),
        (lambda: Decomposition.from_local_shapes(grid(3), {0: (3,), 1: (4,), 2: (3,)}, replicate={0}),
         ShapeError,
         ("local shapes do not form a grid (3,): rank 0 has (3,) and rank 1 has (4,),"
          " which must agree in dimension 0")),
    ],
)  # fmt: skip
def test_errors_name_the_numbers(build, kind, message):
    with pytest.raises(kind) as caught:
        build()
    assert str(caught.value) == message


def test_local_shapes_of_other_ranks_do_not_matter():
    P = Partition((3, 1), (2,), me=0)
    decomposition = Decomposition.from_local_shapes(P, {0: (0, 0), 1: (2,), 2: (9,), 3: (5,)})
    assert decomposition.splits == (Listed((5, 2)),)
    assert [decomposition.box(rank).bounds[0] for rank in range(4)] == [(0, 0), (5, 7), (0, 0), (0, 5)]
