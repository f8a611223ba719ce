"""Up-sampling, and resizing in general: every rank fetches what its outputs interpolate between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import TableWindow
from distdl_rma.ops.core.staged import movement_or_none
from distdl_rma.ops.windows.window_operation import WindowOperation

# Mode to the number of spatial dimensions that it is for.
MODES: dict[str, tuple[int, ...]] = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
}
# The constant of torch's cubic convolution.
_CUBIC = -0.75


@dataclass(frozen=True)
class Resize:
    """From how many elements to how many one dimension is resized."""

    extent: int
    outputs: int
    scale: float | None = None  # the user's factor, which then decides where outputs lie; else the extents do
    align_corners: bool = False  # whether the outermost elements keep their places

    def positions(self, dtype: torch.dtype) -> torch.Tensor:
        """Where the outputs lie among the inputs, computed in the given type."""
        index = torch.arange(self.outputs, dtype=dtype)
        if self.align_corners:
            steps = max(self.outputs - 1, 1)
            return index * (torch.tensor(self.extent - 1, dtype=dtype) / steps)
        if self.scale is not None:
            step = torch.tensor(1.0 / self.scale, dtype=dtype)
        else:
            step = torch.tensor(self.extent, dtype=dtype) / self.outputs
        return step * (index + 0.5) - 0.5


@dataclass(frozen=True)
class Interpolation:
    """Inputs that each output of one dimension reads, and their weights."""

    index: torch.Tensor  # one row per tap, one column per output; rising along both
    weight: torch.Tensor | None = None  # likewise; None for copies

    @classmethod
    def of(cls, mode: str, dims: int, resize: Resize, dtype: torch.dtype) -> Interpolation:
        """Taps of a mode, for tensors of ``dims`` spatial dimensions, computed in the given type."""
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

    def apply(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Weighted sum of the inputs along one dimension."""
        if self.weight is None:
            return x.index_select(dim, self.index[0])
        column = (-1, *(1,) * (x.dim() - dim - 1))
        first, *others = zip(self.index, self.weight, strict=True)
        y: torch.Tensor = x.index_select(dim, first[0]) * first[1].view(column)
        for index, weight in others:
            y = y + x.index_select(dim, index) * weight.view(column)
        return y


def _nearest(mode: str, dims: int, resize: Resize, dtype: torch.dtype) -> Interpolation:
    # How torch rounds depends on the dimensions and the type: let it resize the numbers of the inputs.
    ones = (1,) * (dims - 1)
    numbers = torch.arange(resize.extent, dtype=dtype).view(1, 1, *ones, -1)
    if resize.scale is None:
        found = F.interpolate(numbers, size=(*ones, resize.outputs), mode=mode)
    else:
        found = F.interpolate(numbers, scale_factor=(*map(float, ones), resize.scale), mode=mode)
    return Interpolation(found.reshape(1, -1).to(torch.int64))


def _linear(resize: Resize, dtype: torch.dtype) -> Interpolation:
    if resize.extent == resize.outputs:
        # As torch, whatever the factor.
        return Interpolation(torch.arange(resize.outputs).view(1, -1))
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
    # Weight of an input at a distance of at most 1.
    return ((_CUBIC + 2) * d - (_CUBIC + 3)) * d * d + 1


def _far(d: torch.Tensor) -> torch.Tensor:
    # Weight of an input at a distance from 1 to 2.
    return ((_CUBIC * d - 5 * _CUBIC) * d + 8 * _CUBIC) * d - 4 * _CUBIC


@dataclass(frozen=True)
class ResizeOptions:
    """Arguments of ``torch.nn.functional.interpolate``, with a number for each dimension."""

    size: tuple[int, ...] | None
    scale_factor: tuple[float, ...] | None
    mode: str
    align_corners: bool | None = None
    recompute_scale_factor: bool | None = None

    def resizes(self, extents: tuple[int, ...]) -> list[Resize]:
        """How each dimension changes; ``ShapeError`` if one has no elements before or after."""
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


class Resizing(WindowOperation[ResizeOptions]):
    """Weighted sums of neighbours, by torch's rules and from the global extents."""

    def _prepare(self, source: Decomposition, options: ResizeOptions) -> None:
        wide, dims = sum_dtype(self.dtype), len(self.extents)
        whole = [Interpolation.of(options.mode, dims, each, wide) for each in options.resizes(self.extents)]
        reads = self.read_by_tables([each.window for each in whole])
        self.gather = movement_or_none(self.site, source, reads, self.dtype, "neighbours")
        parts = zip(whole, self.box.bounds[LEADING:], reads.box(self.rank).start[LEADING:], strict=True)
        self._interpolations = [each.part(*bounds, start) for each, bounds, start in parts]

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(sum_dtype(x.dtype))
        for d, interpolation in enumerate(self._interpolations, LEADING):
            y = interpolation.apply(y, d)
        return y.to(x.dtype)
