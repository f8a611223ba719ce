"""Who computes which part of a convolution."""

from math import prod

import pytest

from distdl_rma.geometry import Decomposition, Partition, Stencil
from distdl_rma.geometry.intervals import Listed
from distdl_rma.layers.ops.conv.worker_grid import OUT, WorkerGrid, can_overlap, overlap_pays


@pytest.mark.parametrize(
    ("mode", "groups", "channels", "overlaps"),
    [("zeros", 1, 2, True), ("zeros", 2, 1, True), ("zeros", 2, 2, False), ("reflect", 1, 1, False)],
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
