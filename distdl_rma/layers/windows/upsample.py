"""Up-sampling, and resizing in general."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

from torch import nn

from distdl_rma.errors import ArgumentError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.arguments import each_dim, per_dim
from distdl_rma.layers.windows.base import WindowLayer, WindowOptions
from distdl_rma.ops.windows.resize import MODES, ResizeOptions, Resizing


class DistributedUpsample(WindowLayer, nn.Upsample):
    """Resize a tensor that is split over ranks, in batch, channels and space.

    Every rank fetches what its outputs read, which is found by torch's rules from the *global* extents.
    Partitions are those of :class:`DistributedAvgPool`, for tensors of 3, 4 or 5 dimensions.

    Parameters
    ----------
    size, scale_factor, align_corners, recompute_scale_factor
        As in torch, of the global tensors.
    mode
        ``"nearest"``, ``"nearest-exact"``, ``"linear"``, ``"bilinear"``, ``"trilinear"`` or ``"bicubic"``.

    Raises
    ------
    ShapeError
        In a call, if input or output are empty.
    UnsupportedError
        In a call, if the input is not of floating point numbers.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/upsampling.md``.
    """

    operation = Resizing
    _shown = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        **options: Unpack[WindowOptions],
    ) -> None:
        super().__init__(P_x, **options)
        kind, dims = type(self).__name__, self._dims
        _check_mode(kind, mode, dims, align_corners)
        if (size is None) == (scale_factor is None):
            raise ArgumentError(
                f"{kind}: give either size or scale_factor; got size={size!r}, scale_factor={scale_factor!r}"
            )
        if recompute_scale_factor and size is not None:
            raise ArgumentError(f"{kind}: recompute_scale_factor has no meaning with an explicit size")
        sizes = None if size is None else per_dim(kind, "size", size, dims, 1)
        scales: tuple[float, ...] | None = None
        if scale_factor is not None:
            scales = each_dim(kind, "scale_factor", scale_factor, dims, _positive, "a positive number")
        self.size, self.scale_factor, self.mode = sizes, scales, mode
        self.align_corners, self.recompute_scale_factor = align_corners, recompute_scale_factor
        self.options = ResizeOptions(sizes, scales, mode, align_corners, recompute_scale_factor)


def _check_mode(kind: str, mode: str, dims: int, align_corners: bool | None) -> None:
    if mode not in MODES:
        raise ArgumentError(f"{kind}: mode is one of {tuple(MODES)}, got {mode!r}")
    if dims not in MODES[mode]:
        raise ArgumentError(
            f"{kind}: mode {mode!r} is for {MODES[mode][0]} spatial dimensions, P_x has {dims}"
        )
    if mode.startswith("nearest") and align_corners is not None:
        raise ArgumentError(f"{kind}: align_corners has no meaning with mode {mode!r}")


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


class _Upsampling2d(DistributedUpsample, dims=2):
    # In torch's way to say it a mode is a class.
    _mode: ClassVar[tuple[str, bool | None]]

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        **options: Unpack[WindowOptions],
    ) -> None:
        super().__init__(P_x, size, scale_factor, *self._mode, **options)


class DistributedUpsamplingNearest2d(_Upsampling2d, nn.UpsamplingNearest2d):
    """Distributed ``torch.nn.UpsamplingNearest2d``; tensors are (batch, channel, height, width)."""

    _mode = ("nearest", None)


class DistributedUpsamplingBilinear2d(_Upsampling2d, nn.UpsamplingBilinear2d):
    """Distributed ``torch.nn.UpsamplingBilinear2d``: corners are aligned; (batch, channel, height, width)."""

    _mode = ("bilinear", True)
