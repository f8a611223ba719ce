"""Tiles: local data and remote strips together are the whole convolution, exactly."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.ops.conv import own_and_halo
from distdl_rma.ops.conv.kernels import ConvolutionArguments, convolution
from distdl_rma.ops.conv.own_and_halo import (
    OwnAndHalo,
    outputs_of_pieces,
    pieces_of_outputs,
    with_channels,
)
from tests.geometry.strategies import partitions, splits, unbalanced
from tests.ops.conv.tiles import (
    ONE,
    any_tile,
    each_dimension,
    inputs_read,
    points,
    some,
    stencils,
)


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
@each_dimension
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
    window = Window(3, stride, 1, padding, padding)
    whole = Box.of_shape((1, 1, 8, 8))
    stencil = with_channels(Stencil((window, window)), 0, 1)
    tile = OwnAndHalo(
        stencil=stencil, domain=whole, own=whole, outputs=Box.of_shape(stencil.outputs(whole.shape))
    )
    assert tile.core is not None
    assert tile.core.outputs == tile.outputs
    assert tile.core.taps == ((0, 1), (0, 1), (0, 3), (0, 3))
    assert tile.core.padding == (0, 0, padding, padding)
    assert (tile.halo, tile.rim) == ((), ())


def test_a_tile_in_the_middle_has_a_strip_per_side_and_the_first_two_take_the_corners():
    window = Window(3, left=1, right=1)
    middle = Box((*ONE, (4, 8), (4, 8)))
    tile = OwnAndHalo(
        stencil=with_channels(Stencil((window, window)), 0, 1),
        domain=Box.of_shape((1, 1, 12, 12)),
        own=middle,
        outputs=middle,
    )
    assert tile.halo == (
        Box((*ONE, (3, 4), (3, 9))),
        Box((*ONE, (8, 9), (3, 9))),
        Box((*ONE, (4, 8), (3, 4))),
        Box((*ONE, (4, 8), (8, 9))),
    )
    assert [str(strip.outputs) for strip in tile.rim] == [
        "[0:1, 0:1, 4:5, 4:8]",
        "[0:1, 0:1, 7:8, 4:8]",
        "[0:1, 0:1, 4:8, 4:5]",
        "[0:1, 0:1, 4:8, 7:8]",
    ]
    assert [strip.taps[2] for strip in tile.rim] == [(0, 1), (2, 3), (0, 3), (0, 3)]
    assert tile.core.padding == (0, 0, 1, 1)


def test_a_tile_without_own_data_has_strips_only():
    tile = OwnAndHalo(
        stencil=with_channels(Stencil((Window(3, left=1, right=1),)), 0, 1),
        domain=Box.of_shape((1, 1, 4)),
        own=Box((*ONE, (4, 4))),
        outputs=Box((*ONE, (3, 4))),
    )
    assert tile.core is None
    assert tile.halo == (Box((*ONE, (2, 4))),)
    assert [strip.outputs for strip in tile.rim] == [tile.outputs]


def test_a_tile_without_outputs_needs_nothing():
    tile = OwnAndHalo(
        stencil=with_channels(Stencil((Window(3, left=1, right=1),)), 0, 1),
        domain=Box.of_shape((1, 1, 4)),
        own=Box((*ONE, (0, 2))),
        outputs=Box((*ONE, (4, 4))),
    )
    assert (tile.core, tile.halo, tile.rim) == (None, (), ())
    assert tile.landing(Box(((0, 1), (0, 1), (2, 4)))) == []


def test_own_data_that_falls_between_the_windows_adds_nothing():
    tile = OwnAndHalo(
        stencil=with_channels(Stencil((Window(1, stride=4),)), 0, 1),
        domain=Box.of_shape((1, 1, 8)),
        own=Box((*ONE, (1, 3))),
        outputs=Box((*ONE, (0, 2))),
    )
    assert tile.core is None
    assert [strip.data for strip in tile.rim] == [Box((*ONE, (0, 1))), Box((*ONE, (3, 5)))]


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
        edge, taps, _ = patch.convolve_adjoint(gradient, held, weight, (True, True, False))
        assert edge.shape == held.shape
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


@pytest.mark.parametrize("nbytes", [1, 20, 60])
def test_pieces_of_the_outputs_are_those_of_the_patch(nbytes, monkeypatch):
    monkeypatch.setattr(own_and_halo, "_OUTPUTS_NBYTES", nbytes)
    monkeypatch.setattr(own_and_halo, "_KEPT_NBYTES", 0)
    counts = []
    for seed in range(60):
        torch.manual_seed(seed)
        stencil, parts, (low, high) = random_parts(random.Random(seed))
        core = parts.core
        pieces = pieces_of_outputs(core, 3, 8, 4 * nbytes)
        if pieces:
            x = torch.randn(core.held.shape, dtype=torch.float64)
            weight = torch.randn(3, high - low, *(w.kernel for w in stencil.windows), dtype=torch.float64)
            bias = torch.randn(3, dtype=torch.float64)
            y = outputs_of_pieces(pieces, core.outputs, x, weight, bias)
            torch.testing.assert_close(y, core.convolve(x, weight, bias), rtol=1e-11, atol=1e-11)
        counts.append(len(pieces))
        assert not pieces_of_outputs(core, 3, 8, 1 << 20)
    assert max(counts) > 1
    assert any(counts) and not all(counts)


def test_the_gradient_of_a_bias_is_the_sum_of_all_gradients():
    parts = OwnAndHalo(
        with_channels(Stencil((Window(3, left=1, right=1),)), 0, 2),
        Box.of_shape((2, 2, 8)),
        Box.of_shape((2, 2, 8)),
        Box.of_shape((2, 1, 8)),
    )
    x, weight, gradient = torch.randn(2, 2, 8), torch.randn(3, 2, 3), torch.randint(-9, 9, (2, 3, 8)).float()
    *_, offsets = parts.core.convolve_adjoint(gradient, x, weight, (True, True, True))
    assert torch.equal(offsets, gradient.sum((0, 2)))
