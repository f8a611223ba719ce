"""Padding layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index as as_int
from typing import Any, ClassVar, Unpack

from torch import nn

from distdl_rma.errors import UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.arguments import each_dim
from distdl_rma.layers.windows.base import WindowLayer, WindowOptions
from distdl_rma.ops.windows.pad import Padding, PadOptions


class DistributedPad(WindowLayer):
    """Padding of a tensor that is split over ranks, in batch, channels and space; any type of elements.

    Partitions are those of :class:`DistributedAvgPool`.

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
    """Padding by a constant ``value``; otherwise as :class:`DistributedPad`."""

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
