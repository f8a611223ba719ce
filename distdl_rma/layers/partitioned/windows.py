"""Layers without parameters whose outputs read a part of the input: pooling, padding, up-sampling.

A layer is a row of two facts: the operation of its family, and torch's layer, which has the options::

    class DistributedMaxPool2d(DistributedMaxPool, nn.MaxPool2d)
                               |                   |
          operation = MaxPooling                   kernel_size, stride, ... and 2 spatial dimensions

A window is that of the global tensor. So what a rank reads of others follows from the global extents, and a
layer is exact for shards that are smaller than a window, too. Options of rules for split tensors come from
the same function (``layers/ops/window_options.py``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.resizing import Resizing
from distdl_rma.layers.ops.window_options import options_of
from distdl_rma.layers.ops.windows import (
    AdaptiveAvgPooling,
    AdaptiveMaxPooling,
    AvgPooling,
    MaxPooling,
    MaxWindows,
    Padding,
    WindowOperation,
)
from distdl_rma.layers.partitioned.core.arguments import (
    LayerOptions,
    check_dims,
    own_options,
    spatial_dims,
    torchs_layer,
)
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, source_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.partitioned.core.refusals import attributed

# By number of spatial dimensions: extents of images without memory that torch's layers are tried with. Large,
# so that windows, paddings and sizes of any user fit; their products are below 2**63.
_EXTENTS = {1: 1 << 30, 2: 1 << 20, 3: 1 << 13}
# Modes of torch's classes of padding, by the first half of their names.
_PAD_MODES = {"Reflection": "reflect", "Replication": "replicate", "Circular": "circular"}


class WindowLayer(OperatorLayer[WindowOperation[Any]]):
    """Layer on (batch, channel, *spatial) that consists of an operation with options, without parameters.

    A class for users is a row: its family, and torch's layer as last base, whose name has the number of
    spatial dimensions. Torch's layer checks the arguments, and the options are those of its attributes.
    """

    operation: ClassVar[type[WindowOperation[Any]]]
    # Arguments that torch's layer may lack.
    _beside: ClassVar[tuple[str, ...]] = ()
    _by_name = ("P_y", *LayerOptions.__annotations__)

    def __init__(self, P_x: Partition, *arguments: Any, P_y: Partition | None = None, **options: Any) -> None:
        own, beside = own_options(options), {key: options.pop(key) for key in self._beside if key in options}
        kind, dims = type(self), spatial_dims(type(self)) or P_x.dim - LEADING
        if dims not in _EXTENTS:
            raise PartitionError(
                f"{kind.__name__}: P_x has {P_x.dim} dimensions {P_x.shape}, tensors have 3, 4 or 5"
            )
        check_dims(kind, (LEADING + dims,), P_x=P_x, P_y=P_y)
        sample = torch.empty(1, 1, *[_EXTENTS[dims]] * dims, device="meta")
        like = torchs_layer(kind, *arguments, **options, sample=[sample])
        vars(like).update(beside)
        mode = _PAD_MODES.get(type(like).__name__.partition("Pad")[0], "zeros")
        super().__init__(P_x, P_y, **own)
        self.take_over(like)
        who = kind.__name__
        with attributed(who, UnsupportedError), attributed(who, ShapeError, ArgumentError):
            self.options = options_of(self.operation, {"mode": mode, **vars(like)}, dims)

    def plan(self, facts: dict[int, InputFacts]) -> WindowOperation[Any]:
        """Operation for the global input that the ranks form."""
        source, dtype = source_of(self.P_x, facts)
        return self.operation(self.site, source, self.P_y, dtype, self.options)


class MaxLayer(WindowLayer):
    """Layer that can also return the indices of the largest elements, in the flattened global plane."""

    return_indices: bool

    def forward(self, input: torch.Tensor) -> Any:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        y = super().forward(input)
        if not self.return_indices:
            return y
        if isinstance(self._last, MaxWindows):
            return y, self._last.take_indices(y)
        return y, torch.zeros(y.shape, dtype=torch.int64, device=y.device)


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


class DistributedConstantPad(DistributedPad):
    """Padding by a constant ``value``; otherwise as :class:`DistributedPad`.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pad = DistributedConstantPad2d(P_x, 1, value=2.0)
    >>> pad(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 18, 18])
    """


class DistributedZeroPad1d(DistributedPad, nn.ZeroPad1d):
    """Distributed ``torch.nn.ZeroPad1d``; tensors are (batch, channel, width)."""


class DistributedZeroPad2d(DistributedPad, nn.ZeroPad2d):
    """Distributed ``torch.nn.ZeroPad2d``; tensors are (batch, channel, height, width)."""


class DistributedZeroPad3d(DistributedPad, nn.ZeroPad3d):
    """Distributed ``torch.nn.ZeroPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedConstantPad1d(DistributedConstantPad, nn.ConstantPad1d):
    """Distributed ``torch.nn.ConstantPad1d``; tensors are (batch, channel, width)."""


class DistributedConstantPad2d(DistributedConstantPad, nn.ConstantPad2d):
    """Distributed ``torch.nn.ConstantPad2d``; tensors are (batch, channel, height, width)."""


class DistributedConstantPad3d(DistributedConstantPad, nn.ConstantPad3d):
    """Distributed ``torch.nn.ConstantPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedReflectionPad1d(DistributedPad, nn.ReflectionPad1d):
    """Distributed ``torch.nn.ReflectionPad1d``; tensors are (batch, channel, width)."""


class DistributedReflectionPad2d(DistributedPad, nn.ReflectionPad2d):
    """Distributed ``torch.nn.ReflectionPad2d``; tensors are (batch, channel, height, width)."""


class DistributedReflectionPad3d(DistributedPad, nn.ReflectionPad3d):
    """Distributed ``torch.nn.ReflectionPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedReplicationPad1d(DistributedPad, nn.ReplicationPad1d):
    """Distributed ``torch.nn.ReplicationPad1d``; tensors are (batch, channel, width)."""


class DistributedReplicationPad2d(DistributedPad, nn.ReplicationPad2d):
    """Distributed ``torch.nn.ReplicationPad2d``; tensors are (batch, channel, height, width)."""


class DistributedReplicationPad3d(DistributedPad, nn.ReplicationPad3d):
    """Distributed ``torch.nn.ReplicationPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedCircularPad1d(DistributedPad, nn.CircularPad1d):
    """Distributed ``torch.nn.CircularPad1d``; tensors are (batch, channel, width)."""


class DistributedCircularPad2d(DistributedPad, nn.CircularPad2d):
    """Distributed ``torch.nn.CircularPad2d``; tensors are (batch, channel, height, width)."""


class DistributedCircularPad3d(DistributedPad, nn.CircularPad3d):
    """Distributed ``torch.nn.CircularPad3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedAvgPool(WindowLayer):
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
    # Average pools of one dimension have none.
    _beside = ("divisor_override",)

    def __init__(self, P_x: Partition, *arguments: Any, **options: Any) -> None:
        super().__init__(P_x, *arguments, **options)
        divisor = self.options.divisor_override
        number = hasattr(divisor, "__index__") and not isinstance(divisor, bool)
        if divisor is not None and not (number and divisor):
            wanted = f"{type(self).__name__}: divisor_override is an integer but 0"
            raise ArgumentError(f"{wanted}, got {divisor!r}")


class DistributedMaxPool(MaxLayer):
    """Max pooling of a tensor that is split over ranks, in batch, channels and space.

    Partitions, shapes and errors are as for :class:`DistributedAvgPool`, but integers are taken also; a call
    also raises ``ShapeError`` if a window reads only padding. With ``return_indices`` the result is a pair:
    the output, and the indices of its elements in the flattened *global* plane, as in torch.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> pool = DistributedMaxPool2d(P_x, kernel_size=2)
    >>> pool(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 3, 8, 8])
    """

    operation = MaxPooling


class DistributedAvgPool1d(DistributedAvgPool, nn.AvgPool1d):
    """Distributed ``torch.nn.AvgPool1d``; tensors are (batch, channel, width)."""


class DistributedAvgPool2d(DistributedAvgPool, nn.AvgPool2d):
    """Distributed ``torch.nn.AvgPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAvgPool3d(DistributedAvgPool, nn.AvgPool3d):
    """Distributed ``torch.nn.AvgPool3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedMaxPool1d(DistributedMaxPool, nn.MaxPool1d):
    """Distributed ``torch.nn.MaxPool1d``; tensors are (batch, channel, width)."""


class DistributedMaxPool2d(DistributedMaxPool, nn.MaxPool2d):
    """Distributed ``torch.nn.MaxPool2d``; tensors are (batch, channel, height, width)."""


class DistributedMaxPool3d(DistributedMaxPool, nn.MaxPool3d):
    """Distributed ``torch.nn.MaxPool3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedAdaptiveAvgPool(WindowLayer):
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


class DistributedAdaptiveMaxPool(MaxLayer):
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


class DistributedAdaptiveAvgPool1d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool1d):
    """Distributed ``torch.nn.AdaptiveAvgPool1d``; tensors are (batch, channel, width)."""


class DistributedAdaptiveAvgPool2d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool2d):
    """Distributed ``torch.nn.AdaptiveAvgPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAdaptiveAvgPool3d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool3d):
    """Distributed ``torch.nn.AdaptiveAvgPool3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedAdaptiveMaxPool1d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool1d):
    """Distributed ``torch.nn.AdaptiveMaxPool1d``; tensors are (batch, channel, width)."""


class DistributedAdaptiveMaxPool2d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool2d):
    """Distributed ``torch.nn.AdaptiveMaxPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAdaptiveMaxPool3d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool3d):
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


class DistributedUpsamplingNearest2d(DistributedUpsample, nn.UpsamplingNearest2d):
    """Distributed ``torch.nn.UpsamplingNearest2d``; tensors are (batch, channel, height, width)."""


class DistributedUpsamplingBilinear2d(DistributedUpsample, nn.UpsamplingBilinear2d):
    """Distributed ``torch.nn.UpsamplingBilinear2d``: corners are aligned; (batch, channel, height, width)."""
