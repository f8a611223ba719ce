"""Own data and what comes later: together their convolutions are the whole one, and so are the adjoints."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.layers.ops.conv.kernels import ConvolutionArguments, convolution
from distdl_rma.layers.ops.conv.own_and_halo import OwnAndHalo, with_channels

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
        held, _ = patch.hold(x.dtype)
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
