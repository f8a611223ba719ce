"""A patch of a convolution: no output and no tap is missed, and zeros stand where no data is."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distdl_rma.ops.conv.own_and_halo import Patch
from tests.ops.conv.tiles import any_tile, convolve, padded, points, some


def patches(tile):
    return [patch for patch in (tile.core, *tile.strips) if patch is not None]


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
def test_the_region_of_a_patch_gives_exactly_its_outputs(tile):
    for patch in patches(tile):
        assert not patch.outputs.empty
        assert patch.outputs & tile.outputs == patch.outputs
        kernel = [high - low for low, high in patch.taps]
        block, w = (np.ones(shape, dtype=int) for shape in (patch.region.shape, kernel))
        assert convolve(block, w, tile.stencil).shape == patch.outputs.shape
        assert all(
            0 <= low < high <= window.kernel
            for (low, high), window in zip(patch.taps, tile.stencil.windows, strict=True)
        )


@some
@given(any_tile)
def test_margins_fill_the_region_around_the_data(tile):
    for patch in patches(tile):
        inside = np.ones(patch.data.shape)[(patch.data & patch.region).slices(patch.data)]
        assert inside.size
        assert min(itertools.chain(*patch.margins)) >= 0
        assert padded(inside, patch.margins).shape == patch.region.shape
        before = [low for low, _ in patch.margins]
        assert (patch.data & patch.region).start == tuple(np.add(patch.region.start, before))


@some
@given(any_tile, st.integers(0, 99))
def test_native_padding_gives_what_explicit_zeros_give(tile, seed):
    rng = np.random.default_rng(seed)
    for patch in patches(tile):
        native = patch.native_padding
        inside = rng.integers(-9, 10, (patch.data & patch.region).shape)
        w = rng.integers(-9, 10, [high - low for low, high in patch.taps])
        if native is not None:
            explicit = convolve(padded(inside, patch.margins), w, tile.stencil)
            assert np.array_equal(
                convolve(padded(inside, [(n, n) for n in (0, 0, *native)]), w, tile.stencil), explicit
            )
