"""Tiles: local data and remote strips together are the whole convolution, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange, Piece
from distdl_rma.geometry.stencil import Stencil, Window, WindowSplit
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo, Patch
from tests.geometry.strategies import extents_for, partitions, splits, unbalanced, windows

some = settings(max_examples=80)
each_dimension = pytest.mark.parametrize("dim", [1, 2])


def points(box):
    return set(itertools.product(*(range(start, stop) for start, stop in box.bounds)))


@st.composite
def boxes(draw, shape):
    """A box inside of a shape, possibly empty."""
    bounds = []
    for extent in shape:
        start = draw(st.integers(0, extent))
        bounds.append((start, draw(st.integers(start, extent))))
    return Box(tuple(bounds))


@st.composite
def stencils(draw, dim):
    """A stencil and an input shape that it fits into."""
    found = [draw(windows()) for _ in range(dim)]
    return Stencil(tuple(found)), tuple(draw(extents_for(window, most=9)) for window in found)


@st.composite
def tiles(draw, dim):
    """A tile of any own inputs and any outputs, whether they have to do with each other or not."""
    stencil, shape = draw(stencils(dim))
    outputs = draw(boxes(stencil.outputs(shape)))
    return OwnAndHalo(stencil=stencil, domain=Box.of_shape(shape), own=draw(boxes(shape)), outputs=outputs)


any_tile = st.integers(1, 2).flatmap(tiles)


def patches(tile):
    return [patch for patch in (tile.core, *tile.strips) if patch is not None]


def convolve(x, w, stencil):
    """Convolution without padding over the last dimensions, tap by tap."""
    spatial = x.shape[-len(stencil.windows) :]
    taps = w.shape[-len(stencil.windows) :]
    counts = [
        (n - window.dilation * (k - 1) - 1) // window.stride + 1
        for window, n, k in zip(stencil.windows, spatial, taps, strict=True)
    ]
    y = np.zeros((*x.shape[: -len(spatial)], *counts), dtype=np.int64)
    for tap in np.ndindex(*taps):
        read = (
            slice(t * window.dilation, t * window.dilation + (n - 1) * window.stride + 1, window.stride)
            for t, window, n in zip(tap, stencil.windows, counts, strict=True)
        )
        y += w[(0, 0, *tap)] * x[(..., *read)]
    return y


def padded(x, margins):
    return np.pad(x, [(0, 0), (0, 0), *margins])


def global_case(stencil, shape, seed):
    """Input and weight with leading dimensions of 1, and the whole convolution."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 10, (1, 1, *shape))
    w = rng.integers(-9, 10, (1, 1, *(window.kernel for window in stencil.windows)))
    return x, w, convolve(padded(x, [(window.left, window.right) for window in stencil.windows]), w, stencil)


def part_of(x, box, domain):
    return x[(slice(None), slice(None), *box.slices(domain))]


def core_of(tile, x, w, y):
    """Add what the tile's own data adds."""
    if tile.core is not None:
        inside = part_of(x, tile.own, tile.domain)[tile.core.crop(tile.own)]
        y[tile.core.place(tile.outputs)] += convolve(
            padded(inside, tile.core.margins), w[tile.core.weight], tile.stencil
        )


def strips_of(tile, blocks, w, y):
    """Add what the remote data adds, given in one block per strip."""
    for strip, block in zip(tile.strips, blocks, strict=True):
        y[strip.place(tile.outputs)] += convolve(block, w[strip.weight], tile.stencil)


def test_the_reference_convolution_is_one():
    stencil = Stencil((Window(3, stride=2, dilation=2),))
    x, w = np.arange(1, 9).reshape(1, 1, -1), np.array([1, 10, 100]).reshape(1, 1, -1)
    assert convolve(x, w, stencil).tolist() == [[[531, 753]]]


@each_dimension
@some
@given(data=st.data(), seed=st.integers(0, 99))
def test_core_and_strips_add_up_to_the_convolution(dim, data, seed):
    tile = data.draw(tiles(dim))
    x, w, whole = global_case(tile.stencil, tile.domain.shape, seed)
    y = np.zeros((1, 1, *tile.outputs.shape), dtype=np.int64)
    core_of(tile, x, w, y)
    blocks = []
    for strip in tile.strips:
        given = strip.data & strip.region & tile.domain
        block = np.zeros((1, 1, *strip.region.shape), dtype=np.int64)
        block[(..., *given.slices(strip.region))] = part_of(x, given, tile.domain)
        blocks.append(block)
    strips_of(tile, blocks, w, y)
    assert np.array_equal(y, part_of(whole, tile.outputs, Box.of_shape(whole.shape[2:])))


@st.composite
def layouts(draw, dim):
    """A stencil, who owns which inputs (batch, channel, *spatial), and how the outputs are cut."""
    stencil, shape = draw(stencils(dim))
    partition = draw(partitions(dim))
    partition = partition.create_cartesian_topology_partition((1, 1, *partition.shape))
    source = draw(unbalanced(partition, (1, 1, *shape)))
    outputs = zip(stencil.outputs(shape), partition.shape[2:], strict=True)
    return stencil, source, [draw(splits(n, p)) for n, p in outputs]


def tiles_of(stencil, source, y_splits):
    """Every rank's plan of the halo exchange, and its tile."""
    shape = source.shape[2:]
    reads = {
        2 + d: WindowSplit(split, window, n)
        for d, (split, window, n) in enumerate(zip(y_splits, stencil.windows, shape, strict=True))
    }
    target = source.with_splits(reads)
    y_boxes = Decomposition(source.partition, (*source.splits[:2], *y_splits), source.axes)
    for rank in source.partition.ranks:
        own, outputs = (Box(ends.box(rank).bounds[2:]) for ends in (source, y_boxes))
        tile = OwnAndHalo(stencil=stencil, domain=Box.of_shape(shape), own=own, outputs=outputs)
        yield Exchange(rank, source, target), tile


@each_dimension
@some
@given(data=st.data(), seed=st.integers(0, 99))
def test_the_halo_exchange_brings_what_the_strips_need(dim, data, seed):
    stencil, source, y_splits = data.draw(layouts(dim))
    x, w, whole = global_case(stencil, source.shape[2:], seed)
    for plan, tile in tiles_of(stencil, source, y_splits):
        y = np.zeros((1, 1, *tile.outputs.shape), dtype=np.int64)
        core_of(tile, x, w, y)
        blocks = [np.zeros((1, 1, *strip.region.shape), dtype=np.int64) for strip in tile.strips]
        for piece in plan.receives:
            received = x[piece.box.slices(Box.of_shape(source.shape))]
            for number, there, here in tile.landing(piece):
                blocks[number][there] = received[here]
        strips_of(tile, blocks, w, y)
        assert np.array_equal(y, part_of(whole, tile.outputs, Box.of_shape(whole.shape[2:])))


def inputs_read(tile):
    """Inputs of the domain that some output reads through some tap, no more."""
    per_dim = [
        {
            j * window.stride - window.left + t * window.dilation
            for j in range(*outputs)
            for t in range(window.kernel)
        }
        for window, outputs in zip(tile.stencil.windows, tile.outputs.bounds, strict=True)
    ]
    return set(itertools.product(*per_dim)) & points(tile.domain)


@each_dimension
@some
@given(data=st.data())
def test_landings_put_every_needed_element_once_in_its_place(dim, data):
    for plan, tile in tiles_of(*data.draw(layouts(dim))):
        landed = []
        for piece in plan.receives:
            spatial = Box(piece.box.bounds[2:])
            for number, there, here in tile.landing(piece):
                assert there[:2] == here[:2] == (slice(None), slice(None))
                region = tile.strips[number].region
                from_piece, in_region = (
                    [
                        tuple(np.add(point, box.start))
                        for point in itertools.product(*(range(s.start, s.stop) for s in places[2:]))
                    ]
                    for box, places in ((spatial, here), (region, there))
                )
                assert from_piece == in_region
                assert set(from_piece) <= points(spatial) & points(tile.strips[number].data)
                landed += from_piece
        assert len(landed) == len(set(landed))
        assert inputs_read(tile) - points(tile.own) <= set(landed)
        assert not set(landed) & points(tile.own)


@some
@given(any_tile)
def test_sides_are_disjoint_and_with_the_own_data_they_cover_what_is_read(tile):
    sides = [points(side) for side in tile.sides]
    together = set().union(*sides)
    assert sum(len(side) for side in sides) == len(together)
    hull = tile.stencil.reads(tile.outputs) & tile.domain
    assert together == points(hull) - points(tile.own)
    assert inputs_read(tile) <= points(tile.own) | together
    assert len(sides) <= 2 * tile.own.dim


@some
@given(any_tile)
def test_a_patch_misses_no_output_and_no_tap_that_reads_its_data(tile):
    for data in (tile.own, *tile.sides):
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
        block, w = (np.ones((1, 1, *shape), dtype=int) for shape in (patch.region.shape, kernel))
        assert convolve(block, w, tile.stencil).shape[2:] == patch.outputs.shape
        assert all(
            0 <= low < high <= window.kernel
            for (low, high), window in zip(patch.taps, tile.stencil.windows, strict=True)
        )


@some
@given(any_tile)
def test_margins_fill_the_region_around_the_data(tile):
    for patch in patches(tile):
        inside = np.ones((1, 1, *patch.data.shape))[patch.crop(patch.data)]
        assert inside.size
        assert min(itertools.chain(*patch.margins)) >= 0
        assert padded(inside, patch.margins).shape[2:] == patch.region.shape
        before = [low for low, _ in patch.margins]
        assert (patch.data & patch.region).start == tuple(np.add(patch.region.start, before))


@some
@given(any_tile, st.integers(0, 99))
def test_native_padding_gives_what_explicit_zeros_give(tile, seed):
    rng = np.random.default_rng(seed)
    for patch in patches(tile):
        native = patch.native_padding(tile.stencil)
        inside = rng.integers(-9, 10, (1, 1, *patch.data.shape))[patch.crop(patch.data)]
        w = rng.integers(-9, 10, (1, 1, *(high - low for low, high in patch.taps)))
        if native is not None:
            explicit = convolve(padded(inside, patch.margins), w, tile.stencil)
            assert np.array_equal(
                convolve(padded(inside, [(n, n) for n in native]), w, tile.stencil), explicit
            )


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_rank_that_owns_everything_convolves_at_once_with_the_padding_of_the_layer(stride, padding):
    window = Window(3, stride, 1, padding, padding)
    whole = Box.of_shape((8, 8))
    stencil = Stencil((window, window))
    tile = OwnAndHalo(
        stencil=stencil, domain=whole, own=whole, outputs=Box.of_shape(stencil.outputs(whole.shape))
    )
    assert tile.core is not None
    assert tile.core.outputs == tile.outputs
    assert tile.core.taps == ((0, 3), (0, 3))
    assert tile.core.native_padding(stencil) == (padding, padding)
    assert (tile.sides, tile.strips) == ((), ())


def test_a_tile_in_the_middle_has_a_strip_per_side_and_the_first_two_take_the_corners():
    window = Window(3, left=1, right=1)
    middle = Box(((4, 8), (4, 8)))
    tile = OwnAndHalo(
        stencil=Stencil((window, window)), domain=Box.of_shape((12, 12)), own=middle, outputs=middle
    )
    assert tile.sides == (
        Box(((3, 4), (3, 9))),
        Box(((8, 9), (3, 9))),
        Box(((4, 8), (3, 4))),
        Box(((4, 8), (8, 9))),
    )
    assert [str(strip.outputs) for strip in tile.strips] == [
        "[4:5, 4:8]",
        "[7:8, 4:8]",
        "[4:8, 4:5]",
        "[4:8, 7:8]",
    ]
    assert [strip.taps[0] for strip in tile.strips] == [(0, 1), (2, 3), (0, 3), (0, 3)]
    assert tile.core.native_padding(tile.stencil) == (1, 1)


def test_a_tile_without_own_data_has_strips_only():
    tile = OwnAndHalo(
        stencil=Stencil((Window(3, left=1, right=1),)),
        domain=Box.of_shape((4,)),
        own=Box(((4, 4),)),
        outputs=Box(((3, 4),)),
    )
    assert tile.core is None
    assert tile.sides == (Box(((2, 4),)),)
    assert [strip.outputs for strip in tile.strips] == [tile.outputs]


def test_a_tile_without_outputs_needs_nothing():
    tile = OwnAndHalo(
        stencil=Stencil((Window(3, left=1, right=1),)),
        domain=Box.of_shape((4,)),
        own=Box(((0, 2),)),
        outputs=Box(((4, 4),)),
    )
    assert (tile.core, tile.sides, tile.strips) == (None, (), ())
    assert tile.landing(Piece(1, Box(((0, 1), (0, 1), (2, 4))))) == []


def test_own_data_that_falls_between_the_windows_adds_nothing():
    tile = OwnAndHalo(
        stencil=Stencil((Window(1, stride=4),)),
        domain=Box.of_shape((8,)),
        own=Box(((1, 3),)),
        outputs=Box(((0, 2),)),
    )
    assert tile.core is None
    assert [strip.data for strip in tile.strips] == [Box(((0, 1),)), Box(((3, 5),))]
