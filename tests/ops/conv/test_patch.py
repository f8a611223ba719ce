"""A patch of a convolution: no output and no tap is missed, and zeros stand where no data is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo, Patch, adjoint_of_pieces, with_channels
from tests.ops.conv.tiles import any_tile, points, some


def patches(tile):
    return [patch for patch in (tile.core, *tile.rim) if patch is not None]


@some
@given(any_tile)
def test_a_patch_misses_no_output_and_no_tap_that_reads_its_data(tile):
    for data in (tile.own, *tile.halo):
        patch = Patch.of(tile.stencil, data, tile.outputs)
        for output in points(tile.outputs):
            for tap in np.ndindex(*(window.kernel for window in tile.stencil.windows)):
                read = tuple(
                    j * window.stride - window.left + t * window.dilation
                    for j, t, window in zip(output, tap, tile.stencil.windows, strict=True)
                )
                if read in points(data):
                    assert patch is not None
                    assert output in points(patch.outputs)
                    assert all(low <= t < high for t, (low, high) in zip(tap, patch.taps, strict=True))
                    assert read in points(patch.region)


@some
@given(any_tile)
def test_margins_fill_the_region_around_the_data(tile):
    for patch in patches(tile):
        inside = np.ones(patch.data.shape)[(patch.data & patch.region).slices(patch.data)]
        assert inside.size
        assert min(itertools.chain(*patch.margins)) >= 0
        assert np.pad(inside, patch.margins).shape == patch.region.shape
        before = [low for low, _ in patch.margins]
        assert (patch.data & patch.region).start == tuple(np.add(patch.region.start, before))


# Windows, extents of all inputs, which of them are own in the first dimension, instances, groups, pieces.
CUTS = {
    "rows": ([Window(3, 1, 1, 1, 1)] * 2, (160, 5), (0, 90), 1, 1, 3),
    "rows between others": ([Window(3, 1, 1, 1, 1)] * 2, (160, 5), (40, 130), 1, 2, 3),
    "dilated": ([Window(3, 1, 2, 2, 2)] * 2, (200, 9), (0, 130), 2, 1, 3),
    "strided": ([Window(3, 2, 1, 1, 1)] * 2, (160, 6), (0, 80), 1, 1, 3),
    "columns": ([Window(1, 1, 1, 0, 0), Window(4, 1, 1, 2, 1)], (6, 140), (0, 3), 1, 1, 4),
    "volume": ([Window(2, 1, 1, 0, 1)] * 3, (70, 4, 3), (0, 60), 1, 1, 3),
    "instances": ([Window(3, 1, 1, 1, 1)], (20,), (0, 10), 6, 1, 5),
    "line": ([Window(5, 1, 1, 2, 2)], (300,), (0, 200), 1, 1, 5),
}


def core_of_rows(windows, extents, rows, instances, groups):
    """What own rows add to the outputs of an even number of ranks."""
    stencil, shape = Stencil(tuple(windows)), (instances, 2 * groups, *extents)
    own = Box.of_shape(shape).replace(2, *rows)
    outputs = Box.of_shape((instances, 1, *stencil.outputs(extents)))
    outputs = outputs & with_channels(stencil, 0, 2 * groups).readers(own)
    return OwnAndHalo(with_channels(stencil, 0, 2 * groups), Box.of_shape(shape), own, outputs, groups).core


@pytest.mark.parametrize("case", CUTS)
def test_gradients_of_pieces_are_those_of_the_whole(case):
    *tile, count = CUTS[case]
    core = core_of_rows(*tile)
    pieces = core.cut(count)
    assert len(pieces) == count
    torch.manual_seed(0)
    groups = core.groups
    # Integers, whose sums are exact in any order.
    x, weight, gradient = (
        torch.randint(-9, 10, shape).to(torch.float64)
        for shape in (
            core.data.shape,
            (3 * groups, 2, *(window.kernel for window in core.stencil.windows[2:])),
            (core.outputs.shape[0], 3 * groups, *core.outputs.shape[2:]),
        )
    )
    for needs in ((True, True, False), (True, False, False), (False, True, False)):
        found = adjoint_of_pieces(pieces, gradient, x, weight, needs)
        expected = core.convolve_adjoint(gradient, x, weight, needs)
        for mine, theirs, needed in zip(found, expected, needs, strict=True):
            assert torch.equal(mine, theirs) if needed else mine is None


def test_pieces_that_leave_data_out_are_none():
    jumps = core_of_rows([Window(1, 2)], (200,), (0, 100), 1, 1)
    assert jumps.cut(3) == (), "of two elements nobody reads the second"
    short = core_of_rows([Window(3, 1, 1, 1, 1)], (20,), (0, 20), 1, 1)
    assert short.cut(3) == short.cut(1) == short.cut(0) == (), "windows would be most of a piece"
