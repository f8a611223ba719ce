"""Resizing: every rank gathers the inputs between which its outputs lie, and interpolates.

The base of these operations, and how a rank gathers, are in ``windows``. The position of an output among the
inputs follows from the extents of the whole, or from the user's factor. Two ranks, 8 inputs, 12 outputs,
linear: output o lies at (o + 1/2) * 8 / 12 - 1/2::

    inputs      rank 0  |0 1 2 3|                       rank 1  |4 5 6 7|
    outputs             |0 1 2 3 4 5|                           |6 7 8 9 10 11|
    positions            -1/6 1/2 7/6 11/6 5/2 19/6              23/6 9/2 31/6 ...

The first output of rank 1 lies between inputs 3 and 4, so the rank gathers input 3. torch's kernel would put
the outputs of a part elsewhere: it places them as if the part were the whole. ``Resize.factor`` says where a
part can begin such that the kernel's positions are those of the whole. Elsewhere the rank sums inputs by
weights of its own, ``Interpolation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import TableWindow
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.staged import movement_or_none
from distdl_rma.layers.ops.windows import WindowOperation
from distdl_rma.layers.staging import up

# Torch's kernel of each mode and number of spatial dimensions.
_KERNELS: dict[str, dict[int, Any]] = {
    "nearest": {n: getattr(torch.ops.aten, f"upsample_nearest{n}d") for n in (1, 2, 3)},
    "nearest-exact": {n: getattr(torch.ops.aten, f"_upsample_nearest_exact{n}d") for n in (1, 2, 3)},
    "linear": {1: torch.ops.aten.upsample_linear1d},
    "bilinear": {2: torch.ops.aten.upsample_bilinear2d},
    "bicubic": {2: torch.ops.aten.upsample_bicubic2d},
    "trilinear": {3: torch.ops.aten.upsample_trilinear3d},
}
# The constant of torch's cubic convolution.
_CUBIC = -0.75
# Most inputs by which a part begins earlier for torch's kernel.
_LARGEST_DENOMINATOR = 16


@dataclass(frozen=True)
class Resize:
    """Resizing of one dimension, from ``extent`` to ``outputs`` elements."""

    extent: int
    outputs: int
    scale: float | None = None  # the user's factor, to place outputs by; if None, the extents place them
    align_corners: bool = False  # whether the outermost elements keep their positions

    def positions(self, dtype: torch.dtype) -> torch.Tensor:
        """Positions of the outputs in units of the inputs, computed in the given type."""
        index = torch.arange(self.outputs, dtype=dtype)
        if self.align_corners:
            steps = max(self.outputs - 1, 1)
            return index * (torch.tensor(self.extent - 1, dtype=dtype) / steps)
        if self.scale is not None:
            step = torch.tensor(1.0 / self.scale, dtype=dtype)
        else:
            step = torch.tensor(self.extent, dtype=dtype) / self.outputs
        return step * (index + 0.5) - 0.5

    @property
    def factor(self) -> Fraction | None:
        """Factor with which torch's kernel resizes a part as it resizes the whole; None if it does not.

        In a part that begins at an input whose index is a multiple of the denominator, positions are those of
        the whole less a whole number. Floating point numbers hold both exactly if the numerator is a power
        of two.
        """
        if self.align_corners:
            return Fraction(1) if self.extent == self.outputs else None
        factor = Fraction(self.outputs, self.extent) if self.scale is None else Fraction(self.scale)
        exact = factor.numerator.bit_count() == 1 and factor.denominator <= _LARGEST_DENOMINATOR
        return factor if exact else None


@dataclass(frozen=True)
class Interpolation:
    """Inputs that each output of one dimension reads, and their weights.

    Four outputs of two inputs, linear. They lie at -0.25, which becomes 0, at 0.25, 0.75 and 1.25::

        index    0 0 0 1        weight    1.0  0.75  0.25  0.75
                 1 1 1 1                  0.0  0.25  0.75  0.25

    The last output takes the last input twice, with weights that sum to 1.
    """

    index: torch.Tensor  # one row per tap, one column per output; rising along both
    weight: torch.Tensor | None = None  # of the same shape; None for copies

    @classmethod
    def of(cls, mode: str, dims: int, resize: Resize, dtype: torch.dtype) -> Interpolation:
        """Taps of a mode for tensors with ``dims`` spatial dimensions; weights are of the given type."""
        if mode.startswith("nearest"):
            return _nearest(mode, dims, resize, dtype)
        return (_cubic if mode == "bicubic" else _linear)(resize, dtype)

    @property
    def window(self) -> TableWindow:
        """First and last input of each output."""
        return TableWindow(tuple(self.index[0].tolist()), tuple(self.index[-1].tolist()))

    def part(self, start: int, stop: int, first: int) -> Interpolation:
        """Taps of outputs ``[start, stop)`` in a tensor that begins with input ``first``."""
        weight = None if self.weight is None else self.weight[:, start:stop]
        return Interpolation(self.index[:, start:stop] - first, weight)

    def to(self, device: torch.device) -> Interpolation:
        """The same on a device."""
        weight = None if self.weight is None else up(self.weight, device)
        return Interpolation(up(self.index, device), weight)

    def apply(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Weighted sum of the inputs along one dimension."""
        if self.weight is None:
            return x.index_select(dim, self.index[0])
        column = (-1, *(1,) * (x.dim() - dim - 1))
        first, *others = zip(self.index, self.weight, strict=True)
        y: torch.Tensor = x.index_select(dim, first[0]) * first[1].view(column)
        for index, weight in others:
            y.addcmul_(x.index_select(dim, index), weight.view(column))
        return y


def _nearest(mode: str, dims: int, resize: Resize, dtype: torch.dtype) -> Interpolation:
    # torch's rounding depends on the dimensions and the type: torch resizes the indices of the inputs here.
    ones = (1,) * (dims - 1)
    numbers = torch.arange(resize.extent, dtype=dtype).view(1, 1, *ones, -1)
    if resize.scale is None:
        found = F.interpolate(numbers, size=(*ones, resize.outputs), mode=mode)
    else:
        found = F.interpolate(numbers, scale_factor=(*map(float, ones), resize.scale), mode=mode)
    return Interpolation(found.reshape(1, -1).to(torch.int64))


def _linear(resize: Resize, dtype: torch.dtype) -> Interpolation:
    if resize.extent == resize.outputs:
        # As in torch, for any factor; an infinite element times a weight of 0 is NaN.
        index, fraction = torch.arange(resize.outputs), torch.zeros(resize.outputs, dtype=dtype)
        return Interpolation(torch.stack([index, index]), torch.stack([1 - fraction, fraction]))
    index, fraction = _split(resize.positions(dtype).clamp(min=0), resize.extent)
    taps = [index, (index + 1).clamp(max=resize.extent - 1)]
    return Interpolation(torch.stack(taps), torch.stack([1 - fraction, fraction]))


def _cubic(resize: Resize, dtype: torch.dtype) -> Interpolation:
    index, t = _split(resize.positions(dtype), resize.extent)
    weights = [_far(t + 1), _near(t), _near(1 - t), _far(2 - t)]
    taps = [(index + step).clamp(0, resize.extent - 1) for step in (-1, 0, 1, 2)]
    return Interpolation(torch.stack(taps), torch.stack(weights))


def _split(position: torch.Tensor, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = position.floor().clamp(max=extent - 1)
    return index.to(torch.int64), (position - index).clamp(0, 1)


def _near(d: torch.Tensor) -> torch.Tensor:
    # Weight of an input at distance d, 0 to 1.
    return ((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1


def _far(d: torch.Tensor) -> torch.Tensor:
    # Weight of an input at distance d, 1 to 2.
    return ((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC


@dataclass(frozen=True)
class ResizeOptions:
    """Arguments of ``torch.nn.functional.interpolate``, with one number per spatial dimension."""

    size: tuple[int, ...] | None
    scale_factor: tuple[float, ...] | None
    mode: str
    align_corners: bool | None = None
    recompute_scale_factor: bool | None = None

    def resizes(self, extents: tuple[int, ...]) -> list[Resize]:
        """Resizing of each dimension; ``ShapeError`` if one has no elements before or after."""
        sizes, factors = self.size, self.scale_factor
        if factors is not None:
            sizes = tuple(int(n * factor) for n, factor in zip(extents, factors, strict=True))
        scales: Sequence[float | None] = (None,) * len(extents)
        if factors is not None and not self.recompute_scale_factor:
            scales = factors
        if sizes is None or min(*extents, *sizes) < 1:
            raise ShapeError(f"cannot resize {extents} to {sizes}: both need elements")
        corners = bool(self.align_corners)
        return [Resize(*numbers, corners) for numbers in zip(extents, sizes, scales, strict=True)]

    def outputs(self, shape: tuple[int, ...]) -> list[int]:
        """Spatial extents of the output."""
        return [resize.outputs for resize in self.resizes(shape[LEADING:])]

    def windows(self, extents: tuple[int, ...], dtype: torch.dtype) -> list[TableWindow]:
        """Inputs that each output reads, per dimension, if all are cut."""
        return [line.window for line in self.lines(extents, [True] * len(extents), sum_dtype(dtype))]

    def lines(self, extents: tuple[int, ...], cut: Sequence[bool], dtype: torch.dtype) -> list[_ResizedLine]:
        """Resizing of each dimension: of all by taps, or of all by torch's kernel."""
        resizes, dims, nearest = self.resizes(extents), len(extents), self.mode.startswith("nearest")
        by_taps = False
        for resize, is_cut in zip(resizes, cut, strict=True):
            factor, same = resize.factor, resize.extent == resize.outputs
            # Torch's backward is not always the adjoint of its forward: for the nearest neighbours it may
            # round otherwise, and where a factor leaves the extent as it is, it may copy. And a cubic kernel
            # reads neighbours where it copies, which may be NaN.
            by_taps |= factor is None and (is_cut or nearest or same)
            by_taps |= is_cut and factor == 1 and self.mode == "bicubic"
        return [
            _ResizedLine(self.mode, dims, *each, by_taps, dtype) for each in zip(resizes, cut, strict=True)
        ]


class _ResizedPart(NamedTuple):
    """Resizing of a part of one dimension: by torch's kernel to ``size``, and then by ``taps`` if given."""

    size: int
    scale: float | None = None
    inside: slice = slice(None)  # outputs of the kernel that belong to the part
    taps: Interpolation | None = None


class _ResizedLine:
    """Resizing of one dimension: by torch's kernel if it computes parts of all as the whole, else by taps.

    torch computes the position of an output as ``step * (index + 0.5) - 0.5``, rounded: a part has other
    indices, and so other roundings. For factors that floating point numbers hold exactly, there are none, and
    its kernel gives the same numbers, several times faster than taps. A part then begins at an input before
    that of its first output, at a multiple of the factor's denominator; outputs before its first one are
    cropped.
    """

    def __init__(
        self, mode: str, dims: int, resize: Resize, cut: bool, by_taps: bool, dtype: torch.dtype
    ) -> None:
        factor = resize.factor
        self.resize, self.factor, self.taps = resize, factor or Fraction(1), None
        self.whole = not (cut or by_taps)
        if self.whole:
            self.window = TableWindow((0,) * resize.outputs, (resize.extent - 1,) * resize.outputs)
        elif factor == 1 and not by_taps:
            self.window = TableWindow(tuple(range(resize.extent)), tuple(range(resize.extent)))
        else:
            taps = Interpolation.of(mode, dims, resize, dtype)
            self.window = taps.window
            if by_taps or factor is None:
                self.taps = taps
            else:
                first = (at - at % factor.denominator for at in self.window.first)
                self.window = TableWindow(tuple(first), self.window.last)

    def part(self, outputs: tuple[int, int], inputs: tuple[int, int]) -> _ResizedPart:
        """Resizing to a range of outputs, from the range of inputs that these read."""
        (start, stop), length = outputs, inputs[1] - inputs[0]
        if self.whole:
            return _ResizedPart(self.resize.outputs, self.resize.scale)
        if self.taps is not None:
            return _ResizedPart(length, taps=self.taps.part(start, stop, inputs[0]))
        before = int(inputs[0] * self.factor)
        # Torch copies where both sizes are equal, and takes each nearest neighbour twice where one is double
        # the other, whatever the factor: one output more avoids that.
        size = stop - before
        size += any(size == n * length and self.factor != n for n in (1, 2))
        inside = slice(None) if size == stop - start else slice(start - before, stop - before)
        return _ResizedPart(size, float(self.factor), inside)


class Resizing(WindowOperation[ResizeOptions]):
    """Resizing by torch's rules for the global extents."""

    def _prepare(self, source: Decomposition, options: ResizeOptions) -> None:
        dims, splits = len(self.extents), self.output.splits[LEADING:]
        lines = options.lines(self.extents, [split.parts > 1 for split in splits], sum_dtype(self.dtype))
        reads = self.read_by_tables([line.window for line in lines])
        self.gather = movement_or_none(self.site, source, reads, self.dtype, "neighbours")
        bounds = self.box.bounds[LEADING:], reads.box(self.rank).bounds[LEADING:]
        sizes, scales, inside, taps = zip(*map(_ResizedLine.part, lines, *bounds), strict=True)
        corners = () if options.mode.startswith("nearest") else (bool(options.align_corners),)
        self._kernel, self._arguments = _KERNELS[options.mode][dims], (sizes, *corners, *scales)
        self._inside = (..., *inside)
        self._crops = any(part != slice(None) for part in inside)
        self._taps = [(d, each) for d, each in enumerate(taps, LEADING) if each is not None]

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(sum_dtype(x.dtype)) if self._taps else self._kernel(x, *self._arguments)
        y = y[self._inside].clone() if self._crops else y
        for d, taps in self._taps:
            y = (taps if y.is_cpu else taps.to(y.device)).apply(y, d)
        return y.to(x.dtype)
