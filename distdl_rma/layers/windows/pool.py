"""Average and max pooling with sliding windows."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from torch import nn

from distdl_rma.errors import ArgumentError
from distdl_rma.geometry.halo import Stencil
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.arguments import per_dim
from distdl_rma.layers.windows.base import MaxLayer, WindowLayer, WindowOptions
from distdl_rma.ops.windows.pool import AvgPooling, AvgPoolOptions, MaxPooling, MaxPoolOptions

Size = int | tuple[int, ...]


class _Sliding(WindowLayer):
    # Arguments of sliding windows; in torch these are not always tuples.
    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any
    ceil_mode: bool
    _shown: ClassVar[tuple[str, ...]] = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")

    def _windows(
        self, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size, ceil_mode: bool
    ) -> Stencil:
        kind, dims = type(self).__name__, self._dims
        self.kernel_size = kernel = per_dim(kind, "kernel_size", kernel_size, dims, 1)
        self.stride = kernel if stride is None else per_dim(kind, "stride", stride, dims, 1)
        self.padding = sides = per_dim(kind, "padding", padding, dims, 0)
        self.dilation = per_dim(kind, "dilation", dilation, dims, 1)
        self.ceil_mode = bool(ceil_mode)
        for side, taps in zip(sides, kernel, strict=True):
            if side > taps // 2:
                raise ArgumentError(
                    f"{kind}: padding {side} is more than half of kernel_size {taps}:"
                    f" kernel_size={kernel}, padding={sides}"
                )
        return Stencil.of(kernel, self.stride, self.dilation, tuple((p, p) for p in sides), self.ceil_mode)


class DistributedAvgPool(_Sliding):
    """Average pooling of a tensor that is split over ranks, in batch, channels and space.

    Where P_y is P_x, the batch stays cut as it is; otherwise the output is balanced over P_y.

    Parameters
    ----------
    P_x, P_y
        Partitions of input and output, with as many dimensions as the tensors; P_y, by name, is P_x if None.
    kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        As in torch, which has no ``divisor_override`` in one dimension.

    Raises
    ------
    ShapeError
        In a call, if the windows do not fit into the global input.
    UnsupportedError
        In a call, if the input is not of floating point numbers.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/pooling.md``.
    """

    operation = AvgPooling
    _shown = (*_Sliding._shown, "count_include_pad", "divisor_override")

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        **options: Unpack[WindowOptions],
    ) -> None:
        super().__init__(P_x, **options)
        if divisor_override == 0:
            raise ArgumentError(f"{type(self).__name__}: divisor_override must not be zero")
        self.count_include_pad, self.divisor_override = bool(count_include_pad), divisor_override
        stencil = self._windows(kernel_size, stride, padding, 1, ceil_mode)
        self.options = AvgPoolOptions(stencil, self.count_include_pad, divisor_override)


class DistributedMaxPool(_Sliding, MaxLayer):
    """Max pooling of a tensor that is split over ranks, in batch, channels and space.

    Partitions, shapes and errors are those of :class:`DistributedAvgPool`; a call also raises ``ShapeError``
    if a window reads nothing but padding. With ``return_indices`` the output is a pair of it and of where its
    elements are in the *global* plane, flattened, as in torch.
    """

    operation = MaxPooling
    _shown = (*_Sliding._shown, "return_indices")

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
        **options: Unpack[WindowOptions],
    ) -> None:
        super().__init__(P_x, **options)
        self.return_indices = bool(return_indices)
        stencil = self._windows(kernel_size, stride, padding, dilation, ceil_mode)
        self.options = MaxPoolOptions(stencil, self.return_indices)


class DistributedAvgPool1d(DistributedAvgPool, nn.AvgPool1d, dims=1):
    """Distributed ``torch.nn.AvgPool1d``; tensors are (batch, channel, width)."""


class DistributedAvgPool2d(DistributedAvgPool, nn.AvgPool2d, dims=2):
    """Distributed ``torch.nn.AvgPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAvgPool3d(DistributedAvgPool, nn.AvgPool3d, dims=3):
    """Distributed ``torch.nn.AvgPool3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedMaxPool1d(DistributedMaxPool, nn.MaxPool1d, dims=1):
    """Distributed ``torch.nn.MaxPool1d``; tensors are (batch, channel, width)."""


class DistributedMaxPool2d(DistributedMaxPool, nn.MaxPool2d, dims=2):
    """Distributed ``torch.nn.MaxPool2d``; tensors are (batch, channel, height, width)."""


class DistributedMaxPool3d(DistributedMaxPool, nn.MaxPool3d, dims=3):
    """Distributed ``torch.nn.MaxPool3d``; tensors are (batch, channel, depth, height, width)."""
