"""Layers without parameters whose outputs read a part of the input: pooling, padding, up-sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index as as_int
from typing import Any, ClassVar, Unpack

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, PartitionError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.halo import Stencil
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.arguments import LayerOptions, each_dim, per_dim
from distdl_rma.layers.core.input_facts import InputFacts, source_of
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.ops.windows import (
    RESIZE_MODES,
    AdaptiveAvgPooling,
    AdaptiveMaxPooling,
    AdaptiveOptions,
    AvgPooling,
    AvgPoolOptions,
    MaxPooling,
    MaxPoolOptions,
    MaxWindows,
    Padding,
    PadOptions,
    ResizeOptions,
    Resizing,
    WindowOperation,
)

Size = int | tuple[int, ...]
# None: the extent of the input.
OutputSize = int | None | Sequence[int | None]


class WindowOptions(LayerOptions, total=False):
    """Keyword arguments of these layers: also the partition of the output, which is P_x if None."""

    P_y: Partition | None


class WindowLayer(OperatorLayer[WindowOperation[Any]]):
    """Layer on (batch, channel, *spatial) that consists of an operation with options, without parameters.

    A class with the class argument ``dims`` is for that many spatial dimensions, and has torch's layer as
    last base. Other classes are for 1 to 3 spatial dimensions.
    """

    operation: ClassVar[type[WindowOperation[Any]]]
    options: Any  # of the operation
    _dims: int = 0

    def __init_subclass__(cls, dims: int | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls._dims = cls._dims if dims is None else dims

    def __init__(self, P_x: Partition, P_y: Partition | None = None, **options: Unpack[LayerOptions]) -> None:
        kind, dims = type(self).__name__, self._dims or P_x.dim - LEADING
        if dims not in (1, 2, 3):
            raise PartitionError(f"{kind}: P_x has {P_x.dim} dimensions {P_x.shape}, tensors have 3, 4 or 5")
        for label, partition in (("P_x", P_x), ("P_y", P_x if P_y is None else P_y)):
            if partition.dim != LEADING + dims:
                raise PartitionError(
                    f"{kind}: {label} has {partition.dim} dimensions {partition.shape}, the tensor has"
                    f" {LEADING + dims}"
                )
        super().__init__(P_x, P_y, **options)
        self._dims = dims

    def plan(self, facts: dict[int, InputFacts]) -> WindowOperation[Any]:
        """Operation for the global input that the ranks form."""
        source, dtype = source_of(self.P_x, facts)
        return type(self).operation(self.site, source, self.P_y, dtype, self.options)


class MaxLayer(WindowLayer):
    """Layer that can also return the indices of the largest elements, in the flattened global plane."""

    return_indices: bool

    def forward(self, input: torch.Tensor) -> Any:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        y = super().forward(input)
        if not self.return_indices:
            return y
        operation = None if self.agreement is None else self.agreement.last
        if isinstance(operation, MaxWindows):
            return y, operation.take_indices(y)
        return y, torch.zeros(y.shape, dtype=torch.int64)


class DistributedPad(WindowLayer):
    """Padding of a tensor that is split over ranks, in batch, channels and space; for any type of elements.

    Partitions are as for :class:`DistributedAvgPool`.

    Parameters
    ----------
    padding
        As in torch: one integer for all sides, or left and right of the last dimension, then of the one
        before it, and so on. A negative padding crops.

    Raises
    ------
    ShapeError
        In a call, if the padding does not fit the global input.
    UnsupportedError
        If a circular padding crops one end of a dimension and pads the other.

    Notes
    -----
    Requirements B8 and B11. Document: ``docs/layers/upsampling.md``.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pad = DistributedZeroPad2d(P_x, 1)
    >>> pad(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 18, 18])
    """

    operation = Padding
    padding: Any
    value: float = 0.0
    _shown: ClassVar[tuple[str, ...]] = ("padding",)
    _mode = "zeros"

    def __init_subclass__(cls, mode: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls._mode = mode or cls._mode

    def __init__(
        self, P_x: Partition, padding: int | Sequence[int], **options: Unpack[WindowOptions]
    ) -> None:
        super().__init__(P_x, **options)
        kind = type(self).__name__
        self.padding = each_dim(kind, "padding", padding, 2 * self._dims, as_int, "an integer")
        # torch's order: the last dimension first.
        sides = tuple(zip(self.padding[::2], self.padding[1::2], strict=True))[::-1]
        if self._mode == "circular" and any(min(pair) < 0 < max(pair) for pair in sides):
            raise UnsupportedError(
                f"{kind}: padding {padding!r} crops one end of a dimension and wraps around at the other;"
                " crop by a layer of its own before this one"
            )
        self.options = PadOptions(sides, self._mode)


class DistributedConstantPad(DistributedPad, mode="constant"):
    """Padding by a constant ``value``; otherwise as :class:`DistributedPad`.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pad = DistributedConstantPad2d(P_x, 1, value=2.0)
    >>> pad(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 18, 18])
    """

    _shown = ("padding", "value")

    def __init__(
        self, P_x: Partition, padding: int | Sequence[int], value: float, **options: Unpack[WindowOptions]
    ) -> None:
        super().__init__(P_x, padding, **options)
        self.value, self.options = value, replace(self.options, value=value)


class DistributedZeroPad1d(DistributedPad, nn.ZeroPad1d, dims=1):
    """Distributed ``torch.nn.ZeroPad1d``; tensors are (batch, channel, width)."""


class DistributedZeroPad2d(DistributedPad, nn.ZeroPad2d, dims=2):
    """Distributed ``torch.nn.ZeroPad2d``; tensors are (batch, channel, height, width)."""


class DistributedZeroPad3d(DistributedPad, nn.ZeroPad3d, dims=3):
    """Distributed ``torch.nn.ZeroPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedConstantPad1d(DistributedConstantPad, nn.ConstantPad1d, dims=1):
    """Distributed ``torch.nn.ConstantPad1d``; tensors are (batch, channel, width)."""


class DistributedConstantPad2d(DistributedConstantPad, nn.ConstantPad2d, dims=2):
    """Distributed ``torch.nn.ConstantPad2d``; tensors are (batch, channel, height, width)."""


class DistributedConstantPad3d(DistributedConstantPad, nn.ConstantPad3d, dims=3):
    """Distributed ``torch.nn.ConstantPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedReflectionPad1d(DistributedPad, nn.ReflectionPad1d, dims=1, mode="reflect"):
    """Distributed ``torch.nn.ReflectionPad1d``; tensors are (batch, channel, width)."""


class DistributedReflectionPad2d(DistributedPad, nn.ReflectionPad2d, dims=2, mode="reflect"):
    """Distributed ``torch.nn.ReflectionPad2d``; tensors are (batch, channel, height, width)."""


class DistributedReflectionPad3d(DistributedPad, nn.ReflectionPad3d, dims=3, mode="reflect"):
    """Distributed ``torch.nn.ReflectionPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedReplicationPad1d(DistributedPad, nn.ReplicationPad1d, dims=1, mode="replicate"):
    """Distributed ``torch.nn.ReplicationPad1d``; tensors are (batch, channel, width)."""


class DistributedReplicationPad2d(DistributedPad, nn.ReplicationPad2d, dims=2, mode="replicate"):
    """Distributed ``torch.nn.ReplicationPad2d``; tensors are (batch, channel, height, width)."""


class DistributedReplicationPad3d(DistributedPad, nn.ReplicationPad3d, dims=3, mode="replicate"):
    """Distributed ``torch.nn.ReplicationPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedCircularPad1d(DistributedPad, nn.CircularPad1d, dims=1, mode="circular"):
    """Distributed ``torch.nn.CircularPad1d``; tensors are (batch, channel, width)."""


class DistributedCircularPad2d(DistributedPad, nn.CircularPad2d, dims=2, mode="circular"):
    """Distributed ``torch.nn.CircularPad2d``; tensors are (batch, channel, height, width)."""


class DistributedCircularPad3d(DistributedPad, nn.CircularPad3d, dims=3, mode="circular"):
    """Distributed ``torch.nn.CircularPad3d``; tensors are (batch, channel, depth, height, width)."""


class _Sliding(WindowLayer):
    # Any: in torch these arguments are not always tuples.
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

    The output is balanced over P_y. If P_y is P_x, the batch stays cut as it is.

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
        In a call, if the input is not of floating point.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/pooling.md``.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pool = DistributedAvgPool2d(P_x, kernel_size=2)
    >>> pool(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 8, 8])
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

    Partitions, shapes and errors are as for :class:`DistributedAvgPool`; a call also raises ``ShapeError`` if
    a window reads only padding. With ``return_indices`` the result is a pair: the output, and the indices of
    its elements in the flattened *global* plane, as in torch.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pool = DistributedMaxPool2d(P_x, kernel_size=2)
    >>> pool(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 8, 8])
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


class _Adaptive(WindowLayer):
    output_size: Any
    _shown: ClassVar[tuple[str, ...]] = ("output_size",)

    def _sizes(self, output_size: OutputSize) -> tuple[int | None, ...]:
        kind, wanted = type(self).__name__, "an integer or None"
        self.output_size = sizes = each_dim(kind, "output_size", output_size, self._dims, _size, wanted)
        return sizes


def _size(value: Any) -> int | None:
    size = None if value is None else as_int(value)
    if size is not None and size < 0:
        raise ValueError
    return size


class DistributedAdaptiveAvgPool(_Adaptive):
    """Average pooling to a given global size, of a tensor that is split over ranks.

    Every rank sums its own elements of each window, and sends these partial sums, not the data, to the owners
    of the outputs. A global pool sends one number per channel and rank. Partitions, shapes and errors are as
    for :class:`DistributedAvgPool`.

    Parameters
    ----------
    output_size
        As in torch, of the global output; None keeps the extent of a dimension.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pool = DistributedAdaptiveAvgPool2d(P_x, output_size=1)
    >>> pool(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 1, 1])
    """

    operation = AdaptiveAvgPooling

    def __init__(self, P_x: Partition, output_size: OutputSize, **options: Unpack[WindowOptions]) -> None:
        super().__init__(P_x, **options)
        self.options = AdaptiveOptions(self._sizes(output_size))


class DistributedAdaptiveMaxPool(_Adaptive, MaxLayer):
    """Max pooling to a given global size, of a tensor that is split over ranks.

    Every rank receives the elements that its outputs read. Arguments are those of
    :class:`DistributedAdaptiveAvgPool`, and ``return_indices`` of :class:`DistributedMaxPool`.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pool = DistributedAdaptiveMaxPool2d(P_x, output_size=1)
    >>> pool(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 1, 1])
    """

    operation = AdaptiveMaxPooling
    _shown = (*_Adaptive._shown, "return_indices")

    def __init__(
        self,
        P_x: Partition,
        output_size: OutputSize,
        return_indices: bool = False,
        **options: Unpack[WindowOptions],
    ) -> None:
        super().__init__(P_x, **options)
        self.return_indices = bool(return_indices)
        self.options = AdaptiveOptions(self._sizes(output_size), self.return_indices)


class DistributedAdaptiveAvgPool1d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool1d, dims=1):
    """Distributed ``torch.nn.AdaptiveAvgPool1d``; tensors are (batch, channel, width)."""


class DistributedAdaptiveAvgPool2d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool2d, dims=2):
    """Distributed ``torch.nn.AdaptiveAvgPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAdaptiveAvgPool3d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool3d, dims=3):
    """Distributed ``torch.nn.AdaptiveAvgPool3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedAdaptiveMaxPool1d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool1d, dims=1):
    """Distributed ``torch.nn.AdaptiveMaxPool1d``; tensors are (batch, channel, width)."""


class DistributedAdaptiveMaxPool2d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool2d, dims=2):
    """Distributed ``torch.nn.AdaptiveMaxPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAdaptiveMaxPool3d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool3d, dims=3):
    """Distributed ``torch.nn.AdaptiveMaxPool3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedUpsample(WindowLayer, nn.Upsample):
    """Resize a tensor that is split over ranks, in batch, channels and space.

    Every rank receives the elements that its outputs read, by torch's rules for the *global* extents.
    Partitions are as for :class:`DistributedAvgPool`, for tensors of 3, 4 or 5 dimensions.

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
        In a call, if the input is not of floating point.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/upsampling.md``.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> resize = DistributedUpsample(P_x, scale_factor=2)
    >>> resize(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 32, 32])
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
    if mode not in RESIZE_MODES:
        raise ArgumentError(f"{kind}: mode is one of {tuple(RESIZE_MODES)}, got {mode!r}")
    if dims not in RESIZE_MODES[mode]:
        raise ArgumentError(
            f"{kind}: mode {mode!r} is for {RESIZE_MODES[mode][0]} spatial dimensions, P_x has {dims}"
        )
    if mode.startswith("nearest") and align_corners is not None:
        raise ArgumentError(f"{kind}: align_corners has no meaning with mode {mode!r}")


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


class _Upsampling2d(DistributedUpsample, dims=2):
    # torch's classes for one mode each.
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
