"""Padding layers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Unpack

import torch

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.stencil import Stencil, Window
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan
from distdl_rma.layers.windows.base import WindowLayer
from distdl_rma.ops.window_gather import WindowGather

# Modes in which torch lets all dimensions end without elements; some of them may in every mode.
_MAY_BE_EMPTY = ("zeros", "constant", "circular")
# Modes in which torch crops before it pads, and so cannot crop more than there is.
_CROP_FIRST = ("zeros", "constant")


class DistributedPad(WindowLayer):
    """Padding of a tensor that is split over ranks, in batch, channels and space.

    Local input: the shard of this rank, of any size that forms a grid with the others'. Local output: the
    balanced shard of the padded global tensor on P_y; where that is P_x the batch stays cut as it is. Any
    type of elements. Collective to construct over the machine; a call involves the ranks of P_x and P_y.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    padding
        As in torch: one integer for all sides, or left and right of the last dimension, then of the one
        before it, and so on. A negative padding crops.
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
        grid, the types differ, or the padding does not fit the global input.
    UnsupportedError
        If a circular padding crops one end of a dimension and pads the other.

    Notes
    -----
    Requirements B8 and B11.
    """

    _mode = "zeros"
    _inexact = False

    def __init__(
        self,
        P_x: Partition,
        padding: int | Sequence[int],
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        sides = _sides(type(self).__name__, padding, self._dims)
        if self._mode == "circular" and any(min(pair) < 0 < max(pair) for pair in sides):
            raise UnsupportedError(
                f"{type(self).__name__}: padding {padding!r} crops one end of a dimension and wraps around at"
                " the other; crop by a layer of its own before this one"
            )
        super().__init__(P_x, P_y, name=name, **callbacks)
        # torch's order: the last dimension first.
        self.padding = tuple(side for pair in reversed(sides) for side in pair)
        self.stencil = Stencil(tuple(Window(1, left=left, right=right) for left, right in sides))
        self.value = 0.0

    def route(self, source: Decomposition, dtype: torch.dtype) -> CallPlan:
        """Every rank fetches what its part of the padded tensor shows."""
        extents = source.shape[2:]
        padded = tuple(w.outputs(n) for w, n in zip(self.stencil.windows, extents, strict=True))
        cropped = [-min(w.left, 0) - min(w.right, 0) for w in self.stencil.windows]
        too_few = self._mode in _CROP_FIRST and any(c > n for c, n in zip(cropped, extents, strict=True))
        if too_few or min(padded) < 0 or (max(padded) < 1 and self._mode not in _MAY_BE_EMPTY):
            raise ShapeError(f"padding {self.padding} leaves {padded} of the global input {extents}")
        outputs = self.balanced(source, padded)
        reading = WindowGather(self.site, self.stencil, source, outputs, dtype, self._mode, self.value)
        return CallPlan(
            reading.movement, None, reading=reading, box=outputs.box(self.machine.rank), dtype=dtype
        )

    def local(self, flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """Add the padding that is no other element's copy; everything else has been moved."""
        y: torch.Tensor = flow.facts["reading"].add_padding(x)
        # Where nothing had to move, the result would be the input itself.
        return y.clone() if flow.gather is None else y

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"padding={self.padding}, {super().extra_repr()}"


def _sides(kind: str, padding: int | Sequence[int], dims: int) -> list[tuple[int, int]]:
    # A pair per dimension, the first dimension first.
    values = tuple(padding) if isinstance(padding, Sequence) else (padding,) * (2 * dims)
    try:
        numbers = tuple(as_int(v) for v in values)
    except TypeError:
        numbers = ()
    if len(numbers) != 2 * dims:
        raise ShapeError(f"{kind}: padding is an integer, or {2 * dims} of them; got {padding!r}")
    return list(zip(numbers[::2], numbers[1::2], strict=True))[::-1]


class DistributedConstantPad(DistributedPad):
    """Padding by a constant; otherwise as :class:`DistributedPad`.

    Parameters
    ----------
    P_x, padding
        As in :class:`DistributedPad`.
    value
        What the padding holds.
    P_y, name
        As in :class:`DistributedPad`.
    """

    _mode = "constant"

    def __init__(
        self,
        P_x: Partition,
        padding: int | Sequence[int],
        value: float,
        *,
        P_y: Partition | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, padding, P_y=P_y, name=name, **callbacks)
        self.value = value

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"{super().extra_repr()}, value={self.value}"


class DistributedZeroPad1d(DistributedPad):
    """Distributed ``torch.nn.ZeroPad1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedZeroPad2d(DistributedPad):
    """Distributed ``torch.nn.ZeroPad2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedZeroPad3d(DistributedPad):
    """Distributed ``torch.nn.ZeroPad3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3


class DistributedConstantPad1d(DistributedConstantPad):
    """Distributed ``torch.nn.ConstantPad1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedConstantPad2d(DistributedConstantPad):
    """Distributed ``torch.nn.ConstantPad2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedConstantPad3d(DistributedConstantPad):
    """Distributed ``torch.nn.ConstantPad3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3


class DistributedReflectionPad1d(DistributedPad):
    """Distributed ``torch.nn.ReflectionPad1d``; tensors are (batch, channel, width)."""

    _dims = 1
    _mode = "reflect"


class DistributedReflectionPad2d(DistributedPad):
    """Distributed ``torch.nn.ReflectionPad2d``; tensors are (batch, channel, height, width)."""

    _dims = 2
    _mode = "reflect"


class DistributedReflectionPad3d(DistributedPad):
    """Distributed ``torch.nn.ReflectionPad3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3
    _mode = "reflect"


class DistributedReplicationPad1d(DistributedPad):
    """Distributed ``torch.nn.ReplicationPad1d``; tensors are (batch, channel, width)."""

    _dims = 1
    _mode = "replicate"


class DistributedReplicationPad2d(DistributedPad):
    """Distributed ``torch.nn.ReplicationPad2d``; tensors are (batch, channel, height, width)."""

    _dims = 2
    _mode = "replicate"


class DistributedReplicationPad3d(DistributedPad):
    """Distributed ``torch.nn.ReplicationPad3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3
    _mode = "replicate"


class DistributedCircularPad1d(DistributedPad):
    """Distributed ``torch.nn.CircularPad1d``; tensors are (batch, channel, width)."""

    _dims = 1
    _mode = "circular"


class DistributedCircularPad2d(DistributedPad):
    """Distributed ``torch.nn.CircularPad2d``; tensors are (batch, channel, height, width)."""

    _dims = 2
    _mode = "circular"


class DistributedCircularPad3d(DistributedPad):
    """Distributed ``torch.nn.CircularPad3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3
    _mode = "circular"
