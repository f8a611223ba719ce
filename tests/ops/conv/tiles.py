"""Tiles of any own inputs and any outputs, and a convolution of integers to compare them with."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.halo import Stencil
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo, with_channels
from tests.geometry.strategies import extents_for, windows

# One instance, and one channel.
ONE = ((0, 1), (0, 1))
some = settings(max_examples=80)
each_dimension = pytest.mark.parametrize("dim", [1, 2])


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
