"""Up-sampling, and resizing in general: every rank fetches what its outputs interpolate between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.movement import movement_or_none
from distdl_rma.ops.core.tensors import sum_dtype
from distdl_rma.ops.windows.interpolation import Interpolation, Resize
from distdl_rma.ops.windows.window_operation import WindowOperation


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


class Resizing(WindowOperation[ResizeOptions]):
    """Weighted sums of neighbours, by torch's rules and from the global extents."""

    def _outputs(self, shape: tuple[int, ...], options: ResizeOptions) -> list[int]:
        return [resize.outputs for resize in options.resizes(shape[LEADING:])]

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
