"""Convolution of one rank, as a sum over patches: own data and each side of the halo, or all in one.

A rank with a block in the middle of an image, and windows of 3 x 3::

       data that the rank reads               outputs that it computes

    +---+---------------------+---+          t  also read the side above, with its corners
    |           above             |          l  also read the left side, r the right one
    +---+---------------------+---+          b  also read the side below, with its corners
    |   |                     |   |          +---------------------+
    | l |                     | r |          | tl  t  t  t  t   tr |
    | e |      own data       | i |          | l                 r |
    | f |                     | g |          | l    own data     r |
    | t |                     | h |          | l      only       r |
    |   |                     | t |          | bl  b  b  b  b   br |
    +---+---------------------+---+          +---------------------+
    |           below             |
    +---+---------------------+---+

A convolution is linear: the outputs are the sum over disjoint boxes of data of what each box alone gives,
with zeros in the place of all other data. So a rank convolves its own data, the *core*, as soon as a call
begins, and adds the part of each side, the *rim*, when it has come::

    outputs  =  conv(own data)
                + conv(above) at t  +  conv(below) at b  +  conv(left) at l  +  conv(right) at r

Only a few outputs read a side, and through a few taps: those of the first row read the side above through the
first row of the kernel. A :class:`Patch` has exactly these taps and outputs, so that a thin side costs
little. The same patches give the adjoint: each has the gradient of its data, and a part of the weight's.

A small block has no core, since several calls cost more than a copy of the block: its rim is a single patch,
of own data and halo in one tensor (``joins``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.layers.dtypes import as_words
from distdl_rma.layers.ops.conv.kernels import ConvolutionArguments, Needs, convolution, convolution_adjoint
from distdl_rma.layers.ops.core.result_memory import result

Slices = tuple[slice, ...]
ALL = slice(None)


def with_channels(stencil: Stencil, first: int, count: int) -> Stencil:
    """Stencil of all tensor dimensions; one window reads all channels, so outputs have channels (0, 1)."""
    return Stencil((Window(1), Window(max(count, 1), left=-first), *stencil.windows))


@dataclass(frozen=True)
class Patch:
    """A block of input data and the outputs that it adds to; boxes have batch, channel and space.

    ``outputs`` are the outputs ``within`` a box that read any of the data. ``taps`` bounds, per dimension,
    the taps through which they read the data. ``region`` contains all inputs that the outputs read through
    these taps; it is zero outside of the data. ``held`` is the box of the tensor in memory: it contains the
    region's data.

    One row of 8 elements, of which a rank has the first 4, and windows of 3, padding 1. The side that it
    receives is element 4, which output 3 reads through its last tap::

        element      0   1   2   3 | 4   5   6   7          data      [4, 5)
        own         [.   .   .   .]|                        outputs   [3, 4)
        output 3             a   b | c                      taps      [2, 3): c alone
                                                            region    [4, 5)

    Always true: ``region`` is what a convolution without padding by these taps reads for these outputs, so
    that data, with zeros up to the region, give the outputs and nothing else.
    """

    stencil: Stencil
    data: Box
    outputs: Box
    within: Box
    taps: tuple[tuple[int, int], ...]
    region: Box
    held: Box
    groups: int = 1

    @classmethod
    def of(
        cls, stencil: Stencil, data: Box, within: Box, held: Box | None = None, groups: int = 1
    ) -> Patch | None:
        """Patch of a block of data and of its outputs ``within`` a box; None if there are none."""
        outputs = stencil.readers(data) & within
        if data.empty or outputs.empty:
            return None
        taps, region = [], []
        for window, d, o in zip(stencil.windows, data.bounds, outputs.bounds, strict=True):
            low, high = window.taps(*d, *o)
            if low == high:
                return None
            (start, _), (last, _) = window.reads(*o), window.reads(o[1] - 1, o[1])
            taps.append((low, high))
            region.append((start + low * window.dilation, last + (high - 1) * window.dilation + 1))
        around = Box(tuple(region))
        return cls(stencil, data, outputs, within, tuple(taps), around, held or around, groups)

    @cached_property
    def weight(self) -> Slices:
        """Slices of the weight tensor (out, in, *kernel)."""
        return (ALL, *(slice(low, high) for low, high in self.taps[1:]))

    @cached_property
    def _whole_weight(self) -> bool:
        return self.taps == tuple((0, window.kernel) for window in self.stencil.windows)

    @cached_property
    def place(self) -> Slices:
        """Slices of the outputs in the local tensor of all outputs ``within``."""
        batch, _, *space = self.outputs.slices(self.within)
        return (batch, ALL, *space)

    @cached_property
    def complete(self) -> bool:
        """Whether the outputs are all of ``within``."""
        return self.outputs == self.within

    @cached_property
    def inside(self) -> Box:
        """Data of the region."""
        return self.data & self.region

    @cached_property
    def crop(self) -> Slices:
        """Slices of ``inside`` in the held tensor."""
        return self.inside.slices(self.held)

    @cached_property
    def margins(self) -> tuple[tuple[int, int], ...]:
        """Per dimension the numbers of zeros before and after the data in the region."""
        bounds = zip(self.inside.bounds, self.region.bounds, strict=True)
        return tuple((i[0] - r[0], r[1] - i[1]) for i, r in bounds)

    @cached_property
    def padding(self) -> tuple[int | None, ...]:
        """Padding argument of torch per dimension; None where only zeros in the tensor give these outputs.

        torch pads both ends alike. That is right if the zeros behind the data, as many as before, make no
        further output; it saves a copy of the data into a larger tensor.
        """
        found: list[int | None] = []
        for window, (low, high), n, (before, _), outputs in zip(
            self.stencil.windows, self.taps, self.inside.shape, self.margins, self.outputs.shape, strict=True
        ):
            span = window.dilation * (high - low - 1) + 1
            found.append(before if (n + 2 * before - span) // window.stride + 1 == outputs else None)
        return tuple(found)

    @cached_property
    def convolved(self) -> Box:
        """Smallest box to convolve: the data, with zeros along the dimensions that torch cannot pad.

        Between the data alone, if torch can pad everywhere, and the whole region.
        """
        both = zip(self.padding, self.inside.bounds, self.region.bounds, strict=True)
        return Box(tuple(region if padding is None else inside for padding, inside, region in both))

    @cached_property
    def zeros(self) -> list[Slices]:
        """Slices of the held tensor outside of the data, which are zero unless other data are there."""
        found, held = [], self.held
        for d, (low, high) in enumerate(self.inside.bounds):
            start, stop = held.bounds[d]
            sides = (held.replace(d, start, low), held.replace(d, high, stop))
            found += [side.slices(self.held) for side in sides if not side.empty]
            held = held.replace(d, low, high)
        return found

    @cached_property
    def _convolves_held(self) -> bool:
        return self.held in (self.region, self.convolved)

    @cached_property
    def steps(self) -> ConvolutionArguments:
        """Arguments of torch's convolution."""
        steps = ConvolutionArguments.of(Stencil(self.stencil.windows[LEADING:]), self.groups)
        if self.held == self.region:
            return steps
        return steps._replace(padding=tuple(n or 0 for n in self.padding[LEADING:]))

    def operand(self, block: Tensor) -> Tensor:
        """Tensor whose convolution, with the padding of ``steps``, has exactly the outputs of the patch."""
        inside = block[self.crop]
        return inside if self.data_in_convolved is None else torch.constant_pad_nd(inside, self._around)

    @cached_property
    def _around(self) -> list[int]:
        # Zeros beside the data, in torch's order: the last dimension first.
        margins = zip(reversed(self.padding[LEADING:]), reversed(self.margins[LEADING:]), strict=True)
        return [n for padding, pair in margins for n in (pair if padding is None else (0, 0))]

    @cached_property
    def data_in_convolved(self) -> Slices | None:
        """Slices of the data in ``convolved``; None if they are all of it."""
        return None if self.inside == self.convolved else self.inside.slices(self.convolved)

    def hold(self, dtype: torch.dtype, like: Tensor | None = None) -> tuple[Tensor, Any]:
        """Held tensor on the device of ``like``: zero outside of the data, uninitialised in their place.

        And what the data are written to: its words, of which numpy cuts a slice in a tenth of torch's time;
        on a device itself.
        """
        block = result(self.held.shape, dtype, like)
        elements: Any = as_words(block) if block.is_cpu else block
        for zeros in self.zeros:
            elements[zeros] = 0
        return block, elements

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Outputs of the patch, from the held tensor."""
        data = block if self._convolves_held else self.operand(block)
        taps = weight if self._whole_weight else weight[self.weight]
        return convolution(data, taps, bias, self.steps)

    def convolve_adjoint(
        self, gradient: Tensor, block: Tensor, weight: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of the held tensor, of the patch's part of the weight, and of the bias if ``complete``.

        ``gradient`` is that of all outputs ``within``.
        """
        needs = *needs[:2], needs[2] and self.complete
        gradient = gradient if self.complete else gradient[self.place]
        data = block if self._convolves_held else self.operand(block)
        weight = weight if self._whole_weight else weight[self.weight]
        inner, taps, offsets = convolution_adjoint(gradient, data, weight, self.steps, needs)
        if inner is None or self._convolves_held:
            return inner, taps, offsets
        if self.data_in_convolved is not None:
            inner = inner[self.data_in_convolved]
        if inner.shape == block.shape:
            return inner, taps, offsets
        outer = torch.zeros_like(block)
        outer[self.crop] = inner
        return outer, taps, offsets


@dataclass(frozen=True)
class OwnAndHalo:
    """The convolution of one rank as a sum: a core of own data, and a rim of patches that wait for the halo.

    Always true: the data of core and rim are disjoint, and together all data in the domain that the outputs
    read; so their outputs, added up, are the convolution. A patch whose data no output reads is left out.

    The rim is one patch per side of the halo. With ``joins`` it is instead a single patch, of own data and
    halo in one tensor, and there is no core. The stencil has windows of all tensor dimensions. The domain is
    the global input; the padding around it is zero. With several groups every rank has all channels.
    """

    stencil: Stencil
    domain: Box
    own: Box
    outputs: Box
    groups: int = 1
    joins: bool = False

    @cached_property
    def core(self) -> Patch | None:
        """Patch of own data alone; None if they add to no output, or are in the rim."""
        return None if self._joined else Patch.of(self.stencil, self.own, self.outputs, self.own, self.groups)

    @cached_property
    def rim(self) -> tuple[Patch, ...]:
        """Patches that wait for the halo: of each of its sides that any output reads, or of all data."""
        if self._joined is not None:
            return (self._joined,)
        patches = (Patch.of(self.stencil, side, self.outputs, groups=self.groups) for side in self.halo)
        return tuple(patch for patch in patches if patch is not None)

    @cached_property
    def base(self) -> Patch | None:
        """First of core and rim, if it gives all outputs; None if all patches add to zeros."""
        first = self.core or next(iter(self.rim), None)
        return first if first is not None and first.complete else None

    @cached_property
    def _joined(self) -> Patch | None:
        data = self.stencil.reads(self.outputs) & self.domain
        if not self.joins or (data & self.own).empty:
            return None
        patch = Patch.of(self.stencil, data, self.outputs, groups=self.groups)
        return None if patch is None else replace(patch, held=patch.convolved)

    @cached_property
    def halo(self) -> tuple[Box, ...]:
        """Disjoint boxes of the remote data to read; the sides of the first dimension have the corners.

        Dimension by dimension, what lies before and behind own data is cut off from what is left.
        """
        rest, sides = self.stencil.reads(self.outputs) & self.domain, []
        for d, ((start, stop), (low, high)) in enumerate(zip(rest.bounds, self.own.bounds, strict=True)):
            low, high = min(max(low, start), stop), min(max(high, start), stop)
            sides += [rest.replace(d, start, low), rest.replace(d, high, stop)]
            rest = rest.replace(d, low, high)
        return tuple(side for side in sides if not side.empty)

    def landing(self, box: Box) -> list[tuple[int, Slices, Slices]]:
        """Places of a box of data: number of a patch of the rim, slices in its tensor, slices in the box.

        A received piece may lie in several patches, and hold elements that no patch reads.
        """
        common = [box & patch.inside for patch in self.rim]
        return [
            (number, part.slices(patch.held), part.slices(box))
            for number, (patch, part) in enumerate(zip(self.rim, common, strict=True))
            if not part.empty
        ]
