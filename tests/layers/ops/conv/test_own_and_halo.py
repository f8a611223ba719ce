"""Tiles and their patches: local data and remote strips together are the whole convolution, exactly."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.layers.ops.conv.kernels import ConvolutionArguments, convolution
from distdl_rma.layers.ops.conv.own_and_halo import (
    OwnAndHalo,
    Patch,
    with_channels,
)
from tests.geometry.strategies import extents_for, partitions, splits, unbalanced, windows

# One instance, and one channel.
ONE = ((0, 1), (0, 1))
some = settings(max_examples=80)


def points(box):
    return set(itertools.product(*(range(start, stop) for start, stop in box.bounds)))


@st.composite
def boxes(draw, shape):
    """A box of the one instance and channel inside of a shape, possibly empty in space."""
    bounds = [*ONE]
    for extent in shape[2:]:
        start = draw(st.integers(0, extent))
        bounds.append((start, draw(st.integers(start, extent))))
    return Box(tuple(bounds))


@st.composite
def stencils(draw, dim):
    """A stencil of all tensor dimensions and an input shape that it fits into; one instance, one channel."""
    found = [draw(windows()) for _ in range(dim)]
    extents = tuple(draw(extents_for(window, most=9)) for window in found)
    return with_channels(Stencil(tuple(found)), 0, 1), (1, 1, *extents)


@st.composite
def tiles(draw, dim):
    """A tile of any own inputs and any outputs, whether they have to do with each other or not."""
    stencil, shape = draw(stencils(dim))
    outputs = draw(boxes(stencil.outputs(shape)))
    return OwnAndHalo(stencil=stencil, domain=Box.of_shape(shape), own=draw(boxes(shape)), outputs=outputs)


any_tile = st.integers(1, 2).flatmap(tiles)


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


@st.composite
def layouts(draw, dim):
    """A stencil, who owns which inputs (batch, channel, *spatial), and how the outputs are cut."""
    stencil, shape = draw(stencils(dim))
    partition = draw(partitions(dim))
    partition = partition.create_cartesian_topology_partition((1, 1, *partition.shape))
    source = draw(unbalanced(partition, shape))
    outputs = zip(stencil.outputs(shape), partition.shape, strict=True)
    return stencil, source, [draw(splits(n, p)) for n, p in outputs]


def tiles_of(stencil, source, y_splits, joins=False):
    """Every rank's plan of the halo exchange, and its tile."""
    target = source.with_splits(dict(enumerate(stencil.with_halo(y_splits, source.shape))))
    y_boxes = Decomposition(source.partition, tuple(y_splits), source.axes)
    for rank in source.partition.ranks:
        own, outputs = (ends.box(rank) for ends in (source, y_boxes))
        tile = OwnAndHalo(stencil, Box.of_shape(source.shape), own, outputs, joins=joins)
        yield Exchange(rank, source, target), tile


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
@some
@given(data=st.data())
def test_landings_put_every_needed_element_once_in_its_place(dim, joins, data):
    for plan, tile in tiles_of(*data.draw(layouts(dim)), joins):
        landed = []
        for box in (tile.own, *(piece.box for piece in plan.receives)):
            for number, there, here in tile.landing(box):
                from_piece, in_tensor = (
                    [
                        tuple(np.add(point, whole.start))
                        for point in itertools.product(*(range(s.start, s.stop) for s in places))
                    ]
                    for whole, places in ((box, here), (tile.rim[number].held, there))
                )
                assert from_piece == in_tensor
                assert set(from_piece) <= points(box) & points(tile.rim[number].data)
                landed += from_piece
        assert len(landed) == len(set(landed))
        assert inputs_read(tile) - points(tile.own) <= set(landed)
        if tile.core is None:
            assert inputs_read(tile) <= set(landed)
        else:
            assert not set(landed) & points(tile.own)


@some
@given(any_tile)
def test_sides_are_disjoint_and_with_the_own_data_they_cover_what_is_read(tile):
    sides = [points(side) for side in tile.halo]
    together = set().union(*sides)
    assert sum(len(side) for side in sides) == len(together)
    hull = tile.stencil.reads(tile.outputs) & tile.domain
    assert together == points(hull) - points(tile.own)
    assert inputs_read(tile) <= points(tile.own) | together
    assert len(sides) <= 2 * tile.own.dim


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_rank_that_owns_everything_convolves_at_once_with_the_padding_of_the_layer(stride, padding):
    window, whole = Window(3, stride, 1, padding, padding), Box.of_shape((1, 1, 8, 8))
    stencil = with_channels(Stencil((window, window)), 0, 1)
    tile = OwnAndHalo(stencil, whole, whole, Box.of_shape(stencil.outputs(whole.shape)))
    assert tile.core.outputs == tile.outputs and tile.core.taps == (*ONE, (0, 3), (0, 3))
    assert tile.core.padding == (0, 0, padding, padding) and (tile.halo, tile.rim) == ((), ())


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


def some_of(rng, extent):
    start = rng.randint(0, extent)
    return start, rng.randint(start, extent)


def random_parts(rng):
    """Windows, what is read, and the parts that it falls into: one of own data, and some that come later."""
    while True:
        dims = rng.choice([1, 2, 2, 3])
        kernel, stride, dilation = (tuple(rng.randint(1, n) for _ in range(dims)) for n in (4, 2, 2))
        padding = tuple((rng.randint(0, 3), rng.randint(0, 3)) for _ in range(dims))
        stencil = Stencil.of(kernel, stride, dilation, padding)
        extents = tuple(rng.randint(9, 13) for _ in range(dims))
        batch, channels = rng.randint(1, 4), rng.randint(1, 5)
        domain = Box.of_shape((batch, channels, *extents))
        low, high = some_of(rng, channels)
        space = (some_of(rng, n) for n in stencil.outputs(extents))
        outputs = Box((some_of(rng, batch), (0, int(low < high)), *space))
        own = Box(tuple(some_of(rng, n) for n in domain.shape))
        parts = OwnAndHalo(with_channels(stencil, low, high - low), domain, own, outputs)
        if parts.core is not None and parts.rim:
            return stencil, parts, (low, high)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_parts_of_any_dimension_add_up_to_the_whole_and_so_do_their_adjoints(seed, joins):
    torch.manual_seed(seed)
    stencil, parts, (low, high) = random_parts(random.Random(seed))
    parts = replace(parts, joins=joins)
    assert (parts.core is None) == joins
    reads, filters = parts.stencil.reads(parts.outputs), 2
    x = torch.randn(parts.domain.shape, dtype=torch.float64)
    weight = torch.randn(filters, high - low, *(w.kernel for w in stencil.windows), dtype=torch.float64)
    # All that is read, with zeros beyond the domain.
    whole = torch.zeros(reads.shape, dtype=torch.float64)
    whole[(reads & parts.domain).slices(reads)] = x[(reads & parts.domain).slices(parts.domain)]
    both, twin = whole.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = convolution(both, twin, None, ConvolutionArguments.of(stencil, 1))
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    y, d_weight, d_reads = torch.zeros_like(expected), torch.zeros_like(weight), torch.zeros_like(whole)
    for patch in (*(() if joins else (parts.core,)), *parts.rim):
        # A patch of the rim holds zeros beside its data; own data may be anything.
        held = patch.hold(x.dtype)
        mine = patch.held if patch is parts.core else patch.data & patch.region
        held[mine.slices(patch.held)] = x[mine.slices(parts.domain)]
        y[patch.place] += patch.convolve(held, weight)
        edge, taps, offsets = patch.convolve_adjoint(gradient, held, weight, (True, True, True))
        assert edge.shape == held.shape and (offsets is not None) == patch.complete
        if offsets is not None:
            torch.testing.assert_close(offsets, gradient.transpose(0, 1).flatten(1).sum(1))
        d_weight[patch.weight] += taps
        inside = patch.data & patch.region
        d_reads[inside.slices(reads)] += edge[inside.slices(patch.held)]
        if patch is parts.core:
            edge[inside.slices(patch.held)] = 0
            assert not edge.any()
    exactly = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(y, expected, **exactly)
    torch.testing.assert_close(d_weight, twin.grad, **exactly)
    inside = (reads & parts.domain).slices(reads)
    torch.testing.assert_close(d_reads[inside], both.grad[inside], **exactly)
