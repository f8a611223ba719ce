"""Own data and what comes later: together their convolutions are the whole one, and so are the adjoints."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.layers.ops.conv import own_and_halo
from distdl_rma.layers.ops.conv.kernels import ConvolutionArguments, convolution
from distdl_rma.layers.ops.conv.own_and_halo import (
    OwnAndHalo,
    adjoint_of_pieces,
    outputs_of_pieces,
    pieces_of_outputs,
    with_channels,
)

# One instance, and one channel.
ONE = ((0, 1), (0, 1))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_rank_that_owns_everything_convolves_at_once_with_the_padding_of_the_layer(stride, padding):
    window, whole = Window(3, stride, 1, padding, padding), Box.of_shape((1, 1, 8, 8))
    stencil = with_channels(Stencil((window, window)), 0, 1)
    tile = OwnAndHalo(stencil, whole, whole, Box.of_shape(stencil.outputs(whole.shape)))
    assert tile.core.outputs == tile.outputs and tile.core.taps == (*ONE, (0, 3), (0, 3))
    assert tile.core.padding == (0, 0, padding, padding) and (tile.halo, tile.rim) == ((), ())


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
