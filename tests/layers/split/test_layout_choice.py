"""Where cuts go."""

import pytest

from distdl_rma.geometry.intervals import Balanced, Listed, lengths_of
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split import layout_choice


def cut(shape, dim, ranks=2):
    grid = tuple(ranks if d == dim else 1 for d in range(len(shape)))
    return lay.balanced(Partition(tuple(range(ranks)), grid, 0), shape)


def test_parts_end_at_multiples():
    assert lengths_of(layout_choice.fitted(Balanced(21, 2), 7)) == (14, 7)
    assert layout_choice.fitted(Balanced(14, 2), 7) == Balanced(14, 2)
    assert layout_choice.fitted(Balanced(7, 2), 7) is None
    assert min(lengths_of(layout_choice.fitted(Listed((1, 1, 7)), 3))) == 3


def test_groups_of_dimensions_with_the_same_elements():
    assert layout_choice.groups((2, 3, 4, 1), (6, 1, 2, 2)) == [([0, 1], [0]), ([2], [2, 3])]


@pytest.mark.parametrize(
    ("dim", "shape", "source", "result"),
    [
        (2, (2, 3, 24), (2,), (2,)),  # the first of its group stays
        (3, (2, 3, 24), (2,), (2,)),  # another one moves to the first
        (1, (6, 6, 4), (0,), (0,)),
        (2, (1, 2, 3, 1, 6, 2, 2), (2,), (4,)),
    ],
)
def test_where_the_cut_of_a_reshaped_tensor_goes(dim, shape, source, result):
    before, after = layout_choice.reshaped(cut((2, 3, 6, 4), dim), shape)
    assert (before.cut_dims, after.cut_dims) == (source, result)


def test_what_cannot_be_cut_is_copied():
    assert layout_choice.reshaped(cut((1, 3, 2, 2), 2, 5), (1, 12))[0].axes == (None,) * 4
    assert layout_choice.cut_other_dims(cut((1, 3), 1), [1]).axes == (None, None)
    assert layout_choice.cut_other_dims(cut((4, 3, 9), 1), [1]).cut_dims == (2,)
    # Less moves than for copies, though it is shorter than the number of ranks.
    assert layout_choice.cut_other_dims(cut((1, 9, 2), 1, 4), [1]).cut_dims == (2,)


@pytest.mark.parametrize("bounds", [(0, 11, 1), (1, 11, 3), (5, 5, 1), (9, 10, 2), (0, 1, 4)])
def test_parts_of_a_slice(bounds):
    split, whole = Balanced(11, 3), list(range(11))
    kept, within = layout_choice.sliced(split, *bounds)
    blocks = [whole[slice(*split.interval(part))] for part in range(3)]
    parts = [block[low : high : bounds[2]] for block, (low, high) in zip(blocks, within, strict=True)]
    assert [each for part in parts for each in part] == whole[slice(*bounds)]
    assert tuple(map(len, parts)) == lengths_of(kept)


def test_little_that_is_joined_moves_nothing():
    assert lengths_of(layout_choice.joined([1, 16], 1, Balanced(16, 2))) == (9, 8)
    assert layout_choice.joined([16, 16], 1, Balanced(16, 2)) == Balanced(32, 2)
