"""Up-sampling, and resizing in general."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Split
from distdl_rma.geometry.stencil import ReadsSplit
from distdl_rma.layers.core.arguments import per_dim
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan
from distdl_rma.layers.windows.base import WindowLayer
from distdl_rma.ops.movement import movement_or_none
from distdl_rma.ops.tensors import sum_dtype
from distdl_rma.ops.windows.interpolation import MODES, Interpolation, Resize


class DistributedUpsample(WindowLayer):
    """Resize a tensor that is split over ranks, in batch, channels and space.

    Every rank fetches what its outputs read, which is found by torch's rules from the *global* extents.
    Local input: the shard of this rank, of any size that forms a grid with the others'. Local output: the
    balanced shard of the global output on P_y; where that is P_x the batch stays cut as it is. Collective
    to construct over the machine; a call involves the ranks of P_x and P_y.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor: 3, 4 or 5.
    size, scale_factor
        As in torch: the global output, or the factor to it.
    mode
        ``"nearest"``, ``"nearest-exact"``, ``"linear"``, ``"bilinear"``, ``"trilinear"`` or ``"bicubic"``.
    align_corners, recompute_scale_factor
        As in torch.
    P_y
        Partition of the output; P_x if None.
    name
        For messages.

    Raises
    ------
    PartitionError
        If a partition does not fit the dimensions.
    ShapeError
        If an argument is none that torch takes. In a call, on all ranks alike: if the local shapes form no
        grid, the types differ, or input or output are empty.
    UnsupportedError
        In a call, if the input is not of floating point numbers.

    Notes
    -----
    Requirement B11.
    """

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind, dims = type(self).__name__, self._dims or P_x.dim - LEADING
        if dims not in (1, 2, 3):
            raise PartitionError(f"{kind}: P_x has {P_x.dim} dimensions {P_x.shape}, tensors have 3, 4 or 5")
        _check(kind, mode, dims, align_corners)
        if (size is None) == (scale_factor is None):
            raise ShapeError(
                f"{kind}: give either size or scale_factor; got size={size!r}, scale_factor={scale_factor!r}"
            )
        if recompute_scale_factor and size is not None:
            raise ShapeError(f"{kind}: recompute_scale_factor has no meaning with an explicit size")
        sizes = None if size is None else per_dim(kind, "size", size, dims, 1)
        scales = None if scale_factor is None else _scales(kind, scale_factor, dims)
        super().__init__(P_x, P_y, dims, name=name, **callbacks)
        self.size, self.scale_factor, self.mode = sizes, scales, mode
        self.align_corners, self.recompute_scale_factor = align_corners, recompute_scale_factor

    def route(self, source: Decomposition, dtype: torch.dtype) -> CallPlan:
        """Every rank fetches what its outputs read."""
        rank, wide = self.machine.rank, sum_dtype(dtype)
        resizes = self._resizes(source.shape[LEADING:])
        taps = [Interpolation.of(self.mode, self._dims, resize, wide) for resize in resizes]
        outputs = self.balanced(source, [resize.outputs for resize in resizes])
        box = outputs.box(rank)
        reads: dict[int, Split] = {
            d: ReadsSplit(outputs.splits[d], tap.reach, source.shape[d])
            for d, tap in enumerate(taps, LEADING)
        }
        target = outputs.with_splits(reads)
        first = target.box(rank).start[LEADING:]
        return CallPlan(
            movement_or_none(self.site, source, target, dtype, "neighbours"),
            None,
            box=box,
            dtype=dtype,
            taps=[
                tap.part(*bounds, start)
                for tap, bounds, start in zip(taps, box.bounds[LEADING:], first, strict=True)
            ],
        )

    def _resizes(self, extents: tuple[int, ...]) -> list[Resize]:
        sizes: Sequence[int]
        scales: Sequence[float | None] = (None,) * self._dims
        if self.scale_factor is None:
            sizes = self.size or ()
        else:
            sizes = [int(n * scale) for n, scale in zip(extents, self.scale_factor, strict=True)]
            if not self.recompute_scale_factor:
                scales = self.scale_factor
        if min(*extents, *sizes) < 1:
            raise ShapeError(f"cannot resize {extents} to {tuple(sizes)}: both need elements")
        corners = bool(self.align_corners)
        return [Resize(*numbers, corners) for numbers in zip(extents, sizes, scales, strict=True)]

    def local(self, flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """Weighted sums of neighbours, one dimension after the other."""
        y = x.to(sum_dtype(x.dtype))
        for d, taps in enumerate(flow.facts["taps"], LEADING):
            y = taps.apply(y, d)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        target = f"scale_factor={self.scale_factor}" if self.size is None else f"size={self.size}"
        return (
            f"{target}, mode={self.mode!r}, align_corners={self.align_corners},"
            f" recompute_scale_factor={self.recompute_scale_factor}, {super().extra_repr()}"
        )


def _check(kind: str, mode: str, dims: int, align_corners: bool | None) -> None:
    if mode not in MODES:
        raise ShapeError(f"{kind}: mode is one of {tuple(MODES)}, got {mode!r}")
    if dims not in MODES[mode]:
        raise ShapeError(f"{kind}: mode {mode!r} is for {MODES[mode][0]} spatial dimensions, P_x has {dims}")
    if mode.startswith("nearest") and align_corners is not None:
        raise ShapeError(f"{kind}: align_corners has no meaning with mode {mode!r}")


def _scales(kind: str, value: float | Sequence[float], dims: int) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    scales = tuple(float(v) for v in values)
    if len(scales) != dims or not all(0 < scale < float("inf") for scale in scales):
        raise ShapeError(f"{kind}: scale_factor is a positive number, or {dims} of them; got {value!r}")
    return scales


class DistributedUpsamplingNearest2d(DistributedUpsample):
    """Distributed ``torch.nn.UpsamplingNearest2d``; tensors are (batch, channel, height, width)."""

    _dims = 2

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, size, scale_factor, mode="nearest", P_y=P_y, name=name, **callbacks)


class DistributedUpsamplingBilinear2d(DistributedUpsample):
    """Distributed ``torch.nn.UpsamplingBilinear2d``: corners are aligned; (batch, channel, height, width)."""

    _dims = 2

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(
            P_x, size, scale_factor, mode="bilinear", align_corners=True, P_y=P_y, name=name, **callbacks
        )
