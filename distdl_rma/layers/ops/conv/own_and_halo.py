"""Convolution of one rank, as a sum over patches: own data and each side of the halo, or all in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.layers.ops.conv.kernels import ConvolutionArguments, Needs, convolution, convolution_adjoint
from distdl_rma.layers.ops.core.result_memory import result

Slices = tuple[slice, ...]
_ALL = slice(None)
# Gradients of patches with more than so many bytes per thread are computed in pieces of so many.
_LARGE_NBYTES, _PIECE_NBYTES = 1 << 22, 1 << 19
# Outputs of large patches of images are computed in pieces of so many at most, whose memory is used again.
# Where the allocator keeps only smaller memory than the second number, pieces would be too small.
_OUTPUTS_NBYTES, _KEPT_NBYTES = 1 << 20, 1 << 20
# torch uses slower kernels for pieces of fewer elements, not counting the last dimension of volumes.
_PIECE_ELEMENTS = 1 << 15


def with_channels(stencil: Stencil, first: int, count: int) -> Stencil:
    """Stencil of all tensor dimensions; one window reads all channels, so outputs have channels (0, 1)."""
    return Stencil((Window(1), Window(max(count, 1), left=-first), *stencil.windows))


@dataclass(frozen=True)
class Patch:
    """A block of input data and the outputs that it adds to; boxes have batch, channel and space.

    A convolution is linear: the sum over disjoint blocks of data is the whole convolution. ``outputs`` are
    the outputs ``within`` a box that read any of the data. ``taps`` bounds, per dimension, the taps through
    which they read the data. ``region`` contains all inputs that the outputs read through these taps; it is
    zero outside of the data. ``held`` is the box of the tensor in memory: it contains the region's data.
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
        return (_ALL, *(slice(low, high) for low, high in self.taps[1:]))

    @cached_property
    def _whole_weight(self) -> bool:
        return self.taps == tuple((0, window.kernel) for window in self.stencil.windows)

    @cached_property
    def place(self) -> Slices:
        """Slices of the outputs in the local tensor of all outputs ``within``."""
        batch, _, *space = self.outputs.slices(self.within)
        return (batch, _ALL, *space)

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
        """Padding argument of torch per dimension; None where only zeros in the tensor give these outputs."""
        found: list[int | None] = []
        for window, (low, high), n, (before, _), outputs in zip(
            self.stencil.windows, self.taps, self.inside.shape, self.margins, self.outputs.shape, strict=True
        ):
            span = window.dilation * (high - low - 1) + 1
            found.append(before if (n + 2 * before - span) // window.stride + 1 == outputs else None)
        return tuple(found)

    @cached_property
    def convolved(self) -> Box:
        """Smallest box to convolve: the data, with zeros along the dimensions that torch cannot pad."""
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

    def _operand(self, block: Tensor) -> Tensor:
        # Tensor whose convolution, with the padding of the steps, has exactly the outputs of the patch.
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

    def hold(self, dtype: torch.dtype) -> Tensor:
        """Held tensor: zero outside of the data, uninitialised in their place."""
        block = result(self.held.shape, dtype)
        for zeros in self.zeros:
            block[zeros] = 0
        return block

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Outputs of the patch, from the held tensor."""
        data = block if self._convolves_held else self._operand(block)
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
        data = block if self._convolves_held else self._operand(block)
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

    def cut(self, count: int) -> tuple[Patch, ...]:
        """Patches of ``count`` pieces of the data, of fewer down to half as many, or none.

        They are cut along the dimension that gives most pieces. Neighbours compute some outputs twice.
        """
        dims = [d for d in range(len(self.data.bounds)) if d != 1]
        most = [min(count, self._most_pieces(d)) for d in dims]
        if max(most) < max(2, count / 2):
            return ()
        count, d = max(most), dims[most.index(max(most))]
        low, high = self.data.bounds[d]
        ends = [low + (high - low) * n // count for n in range(count + 1)]
        boxes = [self.data.replace(d, *bounds) for bounds in pairwise(ends)]
        found = [Patch.of(self.stencil, box, self.within, self.held, self.groups) for box in boxes]
        pieces = tuple(p for p in found if p is not None and p.taps == self.taps and p.inside == p.data)
        return pieces if len(pieces) == count else ()

    def _most_pieces(self, d: int) -> int:
        # At least eight windows per piece, so that few outputs are computed twice. Samples share no outputs.
        low, high = self.data.bounds[d]
        return (high - low) // (8 * self.stencil.windows[d].span) if d else high - low


def pieces_of(patch: Patch, outputs: int, itemsize: int) -> tuple[Patch, ...]:
    """Pieces in which the gradients of a patch with so many outputs are computed; none if it is small."""
    each = max(patch.data.volume, outputs) * itemsize // torch.get_num_threads()
    count, most = each // _PIECE_NBYTES, prod(patch.data.shape[:4]) // _PIECE_ELEMENTS
    return patch.cut(count) if each >= _LARGE_NBYTES and count <= most else ()


def pieces_of_outputs(patch: Patch, channels: int, itemsize: int, above: int) -> tuple[Patch, ...]:
    """Pieces in which outputs of a patch of images are computed: samples, or rows of all samples.

    There are none for tensors up to ``above`` bytes, the size above which tensors have new pages. torch's
    kernels reorder what they read and what they write: of a piece in the cache, and of a large tensor in new
    pages, whose first use takes longer than a convolution of few channels.
    """
    samples, _, *space = patch.outputs.shape
    each = max(channels, patch.data.shape[1]) * space[-1] * itemsize
    if len(space) != 2 or above < _KEPT_NBYTES or each * samples * space[0] <= above:
        return ()
    most = min(_OUTPUTS_NBYTES * torch.get_num_threads(), above // 4)
    count = each * samples * space[0] // most
    d, length = (0, samples) if samples >= count else (LEADING, space[0])
    step, (start, stop) = max(1, length // max(1, count)), patch.outputs.bounds[d]
    parts = [patch.outputs.replace(d, low, min(stop, low + step)) for low in range(start, stop, step)]
    pieces = [Patch.of(patch.stencil, patch.data, part, patch.held, patch.groups) for part in parts]
    found = tuple(piece for piece in pieces if piece is not None and piece.complete)
    return found if len(found) == len(parts) else ()


def outputs_of_pieces(
    pieces: Sequence[Patch], outputs: Box, block: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """:meth:`Patch.convolve` of the patch of these pieces, which has these outputs."""
    samples, _, *space = outputs.shape
    y = result((samples, weight.shape[0], *space), weight.dtype)
    for piece in pieces:
        batch, _, *place = piece.outputs.slices(outputs)
        y[(batch, _ALL, *place)] = piece.convolve(block, weight, bias)
    return y


def adjoint_of_pieces(
    pieces: Sequence[Patch], gradient: Tensor, block: Tensor, weight: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None, None]:
    """:meth:`Patch.convolve_adjoint` of the patch of these pieces, in little memory.

    There is no gradient of a bias: two pieces may compute the same outputs. torch reorders the elements of a
    tensor for its kernels, and back. For a large tensor this needs more memory than any other part of the
    step, mostly new pages, whose first use takes longer than the reordering.
    """
    outer, total, needs = torch.empty_like(block) if needs[0] else None, None, (*needs[:2], False)
    for piece in pieces:
        part, taps, _ = convolution_adjoint(
            gradient[piece.place], piece._operand(block), weight[piece.weight], piece.steps, needs
        )
        if outer is not None and part is not None:
            inside = piece.data_in_convolved
            outer[piece.crop] = part if inside is None else part[inside]
        total = taps if total is None or taps is None else total.add_(taps)
    return outer, total, None


@dataclass(frozen=True)
class OwnAndHalo:
    """The convolution of one rank as a sum: a core of own data, and a rim of patches that wait for the halo.

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
        """Disjoint boxes of the remote data to read; the sides of the first dimension have the corners."""
        rest = self.stencil.reads(self.outputs) & self.domain
        sides = []
        for d, ((start, stop), (low, high)) in enumerate(zip(rest.bounds, self.own.bounds, strict=True)):
            low, high = min(max(low, start), stop), min(max(high, start), stop)
            sides += [rest.replace(d, start, low), rest.replace(d, high, stop)]
            rest = rest.replace(d, low, high)
        return tuple(side for side in sides if not side.empty)

    def landing(self, box: Box) -> list[tuple[int, Slices, Slices]]:
        """Places of a box of data: number of a patch of the rim, slices in its tensor, slices in the box."""
        common = [box & patch.inside for patch in self.rim]
        return [
            (number, part.slices(patch.held), part.slices(box))
            for number, (patch, part) in enumerate(zip(self.rim, common, strict=True))
            if not part.empty
        ]
