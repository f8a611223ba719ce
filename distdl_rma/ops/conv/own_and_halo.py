"""What one rank convolves: own data and each side of its halo apart, or own data and halo in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.exchange import Piece
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.ops.conv.kernels import ConvolutionArguments, Needs, convolution, convolution_adjoint
from distdl_rma.ops.core.result_memory import result

Slices = tuple[slice, ...]
_ALL = slice(None)
# Gradients of larger patches are computed in pieces, of about so many bytes for each thread.
_LARGE_NBYTES, _PIECE_NBYTES = 1 << 22, 1 << 19
# Of fewer elements, the last dimension of volumes apart, torch leaves them to slower kernels.
_PIECE_ELEMENTS = 1 << 15


def with_channels(stencil: Stencil, first: int, count: int) -> Stencil:
    """Windows of all tensor dimensions: an instance reads itself, and there is one window of channels.

    Boxes of outputs accordingly have the interval (0, 1) of channels, whatever filters there are.
    """
    return Stencil((Window(1), Window(max(count, 1), left=-first), *stencil.windows))


@dataclass(frozen=True)
class Patch:
    """A block of input data and the outputs that it adds to; boxes have batch, channel and space.

    A convolution is linear: the sum over disjoint blocks of data is the whole convolution. The outputs are
    those ``within`` a box that read any of the data. The taps are bounds, per dimension, of those of the
    kernel by which they do; the region is what they read through these, and zero where no data is. The
    tensor that is convolved is ``held``: the region, or any box that has all of its data.
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
        """Patch of a block of data and those outputs that lie ``within`` a box; None if there are none."""
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
    def place(self) -> Slices:
        """Slices of the outputs in the local tensor of all outputs ``within``."""
        batch, _, *space = self.outputs.slices(self.within)
        return (batch, _ALL, *space)

    @cached_property
    def complete(self) -> bool:
        """Whether these are all outputs there are."""
        return self.outputs == self.within

    @cached_property
    def inside(self) -> Box:
        """Data of the region."""
        return self.data & self.region

    @cached_property
    def crop(self) -> Slices:
        """Slices of it in the tensor that is held."""
        return self.inside.slices(self.held)

    @cached_property
    def margins(self) -> tuple[tuple[int, int], ...]:
        """Per dimension the zeros before and behind the data in the region."""
        bounds = zip(self.inside.bounds, self.region.bounds, strict=True)
        return tuple((i[0] - r[0], r[1] - i[1]) for i, r in bounds)

    @cached_property
    def padding(self) -> tuple[int | None, ...]:
        """Torch's own padding per dimension; None where only zeros beside the data give these outputs."""
        found: list[int | None] = []
        for window, (low, high), n, (before, _), outputs in zip(
            self.stencil.windows, self.taps, self.inside.shape, self.margins, self.outputs.shape, strict=True
        ):
            span = window.dilation * (high - low - 1) + 1
            found.append(before if (n + 2 * before - span) // window.stride + 1 == outputs else None)
        return tuple(found)

    @cached_property
    def convolved(self) -> Box:
        """The least that torch convolves: the data, with zeros along dimensions without torch's padding."""
        both = zip(self.padding, self.inside.bounds, self.region.bounds, strict=True)
        return Box(tuple(region if padding is None else inside for padding, inside, region in both))

    @cached_property
    def zeros(self) -> list[Slices]:
        """Slices of the zeros beside the data in the tensor that is held, where that has no other data."""
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
        """What torch's convolution of it is told."""
        steps = ConvolutionArguments.of(Stencil(self.stencil.windows[LEADING:]), self.groups)
        if self.held == self.region:
            return steps
        return steps._replace(padding=tuple(n or 0 for n in self.padding[LEADING:]))

    def _operand(self, block: Tensor) -> Tensor:
        # What torch convolves with the padding of the steps, exact for the outputs of the patch.
        inside = block[self.crop]
        return inside if self.data_in_convolved is None else torch.constant_pad_nd(inside, self._around)

    @cached_property
    def _around(self) -> list[int]:
        # Zeros beside the data, as torch wants them: of the last dimension first.
        margins = zip(reversed(self.padding[LEADING:]), reversed(self.margins[LEADING:]), strict=True)
        return [n for padding, pair in margins for n in (pair if padding is None else (0, 0))]

    @cached_property
    def data_in_convolved(self) -> Slices | None:
        """Slices of the data in what is convolved; None if that is all."""
        return None if self.inside == self.convolved else self.inside.slices(self.convolved)

    def hold(self, dtype: torch.dtype) -> Tensor:
        """Tensor for the data, zero beside them and not initialised where they belong."""
        block = result(self.held.shape, dtype)
        for zeros in self.zeros:
            block[zeros] = 0
        return block

    def convolve(self, block: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Outputs of the patch, from the tensor that is held."""
        data = block if self._convolves_held else self._operand(block)
        return convolution(data, weight[self.weight], bias, self.steps)

    def convolve_adjoint(
        self, gradient: Tensor, block: Tensor, weight: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of what is held, in its shape, of the patch's part of the weight, of the bias."""
        data = block if self._convolves_held else self._operand(block)
        inner, taps, offsets = convolution_adjoint(gradient, data, weight[self.weight], self.steps, needs)
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
        """Patches of so many pieces of its data, or down to half as many; none where that cannot be.

        Along the first dimension that is long enough: what two neighbours both compute is little then.
        """
        dims = [d for d in range(len(self.data.bounds)) if d != 1]
        most = [min(count, self._most_pieces(d)) for d in dims]
        if max(most) < max(2, count / 2):
            return ()
        count, d = max(most), dims[most.index(max(most))]
        low, high = self.data.bounds[d]
        ends = [low + (high - low) * n // count for n in range(count + 1)]
        boxes = [self.data.replace(d, *bounds) for bounds in pairwise(ends)]
        found = [Patch.of(self.stencil, box, self.outputs, self.held, self.groups) for box in boxes]
        pieces = tuple(p for p in found if p is not None and p.taps == self.taps and p.inside == p.data)
        return pieces if len(pieces) == count else ()

    def _most_pieces(self, d: int) -> int:
        # Eight windows a piece; instances are independent of each other.
        low, high = self.data.bounds[d]
        return (high - low) // (8 * self.stencil.windows[d].span) if d else high - low


def pieces_of(patch: Patch, outputs: int, itemsize: int) -> tuple[Patch, ...]:
    """Pieces to compute the gradients of a patch in, that has so many outputs; none if it is small."""
    each = max(patch.data.volume, outputs) * itemsize // torch.get_num_threads()
    count, most = each // _PIECE_NBYTES, prod(patch.data.shape[:4]) // _PIECE_ELEMENTS
    return patch.cut(count) if each >= _LARGE_NBYTES and count <= most else ()


def adjoint_of_pieces(
    pieces: Sequence[Patch], gradient: Tensor, block: Tensor, weight: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None, None]:
    """The same as :meth:`Patch.convolve_adjoint` of the patch that was cut into them, in little memory.

    Without that of a bias: two pieces may compute the same outputs.
    Torch orders a tensor's elements anew for its kernels, and back: of all of a large one that takes more
    memory than the step has at any other time, mostly fresh pages, which take longer than the order itself.
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
    """The convolution of one rank: a core on its own data, and a strip per side with remote data.

    The stencil has windows of all tensor dimensions. Beyond the domain, all inputs there are, lies the
    padding, which is zero. Where there are several groups, no rank's channels differ from another's.
    """

    stencil: Stencil
    domain: Box
    own: Box
    outputs: Box
    groups: int = 1

    @cached_property
    def core(self) -> Patch | None:
        """What own data adds."""
        return Patch.of(self.stencil, self.own, self.outputs, self.own, self.groups)

    @cached_property
    def joined(self) -> Patch | None:
        """All outputs, of own and remote data in one tensor; None if no own data is read."""
        if self.outputs.empty:
            return None
        region = self.stencil.reads(self.outputs)
        data, taps = region & self.domain, tuple((0, window.kernel) for window in self.stencil.windows)
        if (data & self.own).empty:
            return None
        patch = Patch(self.stencil, data, self.outputs, self.outputs, taps, region, region, self.groups)
        return replace(patch, held=patch.convolved)

    @cached_property
    def halo(self) -> tuple[Box, ...]:
        """Disjoint boxes that make up all inputs of the domain that are read beyond the own ones.

        The two sides of the first dimension take the corners, those of the next what is left.
        """
        rest = self.stencil.reads(self.outputs) & self.domain
        sides = []
        for d, ((start, stop), (low, high)) in enumerate(zip(rest.bounds, self.own.bounds, strict=True)):
            low, high = min(max(low, start), stop), min(max(high, start), stop)
            sides += [rest.replace(d, start, low), rest.replace(d, high, stop)]
            rest = rest.replace(d, low, high)
        return tuple(side for side in sides if not side.empty)

    @cached_property
    def strips(self) -> tuple[Patch, ...]:
        """What remote data adds, one patch per side of the halo that any output reads."""
        patches = (Patch.of(self.stencil, side, self.outputs, groups=self.groups) for side in self.halo)
        return tuple(patch for patch in patches if patch is not None)

    def landing(self, piece: Piece) -> list[tuple[int, Slices, Slices]]:
        """Where a received piece goes: strip number, slices in its region, slices in the piece."""
        common = [piece.box & strip.inside for strip in self.strips]
        return [
            (number, box.slices(strip.region), box.slices(piece.box))
            for number, (strip, box) in enumerate(zip(self.strips, common, strict=True))
            if not box.empty
        ]

    @staticmethod
    def filled_up(parts: Sequence[tuple[Slices, Tensor]], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Tensor of disjoint parts, zero beside them; the first part itself where that is all of it."""
        if parts and parts[0][1].shape == shape:
            return parts[0][1]
        whole = torch.zeros(tuple(shape), dtype=dtype)
        for here, part in parts:
            whole[here] = part
        return whole
