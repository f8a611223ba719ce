"""Who computes which part of a convolution."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdl_rma.geometry import Box, Decomposition, Partition, Stencil
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.layers.ops.conv.worker_grid import IN, OUT, WorkerGrid, can_overlap, group_runs, overlap_pays


@given(st.integers(0, 40), st.integers(0, 20), st.integers(1, 6))
def test_runs_make_up_the_interval_and_never_share_a_group(start, length, size):
    found = list(group_runs(start, start + length, size))
    assert [n for a, b, _ in found for n in range(a, b)] == list(range(start, start + length))
    for a, b, groups in found:
        assert a // size + groups - 1 == (b - 1) // size
        assert groups == 1 or (a % size == 0 and b % size == 0)
    assert len(found) <= 3


@pytest.mark.parametrize("rows", [OUT, IN])
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_every_block_of_the_weight_finds_the_channels_it_works_on(rows, first, second, groups, out, width):
    shape = (1, first, second, 2) if rows == OUT else (1, second, first, 2)
    grid = Partition(tuple(range(first * second * 2)), shape, 0)
    work = WorkerGrid(grid, rows, groups, (groups * out, width, 3))
    halves = [Balanced(4, 2)]
    by_rows, by_columns = work.by_rows(Balanced(1, 1), halves), work.by_columns(Balanced(1, 1), halves)
    assert (by_rows.shape[1], by_columns.shape[1]) == (groups * out, groups * width)
    counted = set()
    for rank in grid.ranks:
        (a, b), (c, d) = work.blocks().box(rank).bounds[:2]
        assert by_rows.box(rank).bounds[1] == (a, b)
        low, high = by_columns.box(rank).bounds[1]
        needed = {row // out * width + column for row in range(a, b) for column in range(c, d)}
        assert needed <= set(range(low, high))
        counted |= {(row, column) for row in range(a, b) for column in range(c, d)}
    assert counted == {(row, column) for row in range(groups * out) for column in range(width)}


@pytest.mark.parametrize("rows", [OUT, IN])
def test_runs_of_a_block_say_which_channels_meet_which_rows(rows):
    # Three groups of four rows and two columns; the block has half of the first, all of the second, no third.
    work = WorkerGrid(Partition((0,), (1, 1, 1, 1), 0), rows, 3, (12, 2, 3))
    runs = work.runs(Box(((2, 8), (0, 2), (0, 3))))
    channels = {OUT: (slice(0, 2), slice(2, 4)), IN: (slice(0, 2), slice(2, 6))}[rows]
    assert runs == [(channels[0], slice(0, 2), 1), (channels[1], slice(2, 6), 1)]
    assert work.channels == ((6, 12) if rows == OUT else (12, 6))


@pytest.mark.parametrize(
    ("mode", "groups", "channels", "overlaps"),
    [
        ("zeros", 1, 2, True),
        ("zeros", 2, 1, True),
        ("zeros", 2, 2, False),
        ("reflect", 1, 1, False),
    ],
)
def test_only_sums_over_disjoint_boxes_overlap(mode, groups, channels, overlaps):
    P_x = Partition((0, 1), (1, channels, 2 // channels), 0)
    workers = WorkerGrid(Partition((0, 1), (1, 1, 1, 2), 0), OUT, groups, (4, 2, 3))
    padded, bare = (Stencil.of((3,), (1,), (1,), ((n, n),)) for n in (1, 0))
    assert can_overlap(padded, mode, workers, P_x) is overlaps
    assert can_overlap(bare, mode, workers, P_x) is (overlaps or mode == "reflect")


# Grid of rows and columns, channels, extents, how rows are cut if not evenly, and whether it pays.
BLOCKS = [
    *(
        ((2, 1), channels, (rows, columns), cut, pays)
        for channels, rows, columns, pays in (
            (16, 256, 256, True),
            (16, 128, 128, False),
            (4, 16, 16, False),
            (4096, 16, 16, False),
        )
        for cut in (None, (rows // 2 + 1, rows // 2 - 1))
    ),
    # All ranks go by the largest block.
    *(((2, 1), 16, (512, 128), cut, True) for cut in ((500, 12), (12, 500), (0, 512))),
    # Each neighbour asks for more to convolve meanwhile.
    *(
        (grid, 16, (256, 256), None, pays)
        for grid, pays in (((4, 1), False), ((2, 2), False), ((1, 2), True))
    ),
]


@pytest.mark.parametrize(("grid", "channels", "extents", "cut", "pays"), BLOCKS)
def test_halos_are_convolved_apart_where_the_largest_block_is_large(grid, channels, extents, cut, pays):
    stencil = Stencil.of((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    for rank in range(prod(grid)):
        P_x = Partition(tuple(range(prod(grid))), (1, 1, *grid), rank)
        source = Decomposition.balanced(P_x, (1, channels, *extents))
        source = source if cut is None else source.with_splits({2: Listed(cut)})
        assert overlap_pays(stencil, source, 4) == pays
