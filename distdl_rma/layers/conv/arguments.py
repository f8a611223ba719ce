"""Arguments that convolutions share: partitions first, then those of torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.stencil import Stencil
from distdl_rma.layers.core.plan_cache import InputFacts
from distdl_rma.ops.conv.worker_grid import IN, OUT

_PATTERNS = ("replicated", "root")


class Partitions(NamedTuple):
    """The partitions that a convolution was given; None where it was not."""

    P_x: Partition
    P_y: Partition | None
    P_W: Partition | None

    @classmethod
    def of(
        cls,
        kind: str,
        dims: int,
        P_x: Partition,
        arguments: tuple[Any, ...],
        named: dict[str, Partition | None],
    ) -> tuple[Partitions, tuple[Any, ...]]:
        """Partitions among the arguments of a layer, and its other arguments.

        Parameters
        ----------
        kind
            Kind of the layer, for messages.
        dims
            Number of dimensions of its tensors.
        P_x
            Input partition.
        arguments
            Its other positional arguments; the first ones may be P_y and P_W.
        named
            The same given by name; ``P_w`` is another name for ``P_W``.

        Raises
        ------
        PartitionError
            If one is given twice, is not a partition, or has another number of dimensions.
        """
        count = next((i for i, a in enumerate(arguments) if not isinstance(a, Partition)), len(arguments))
        if count > 2:
            raise PartitionError(f"{kind}: takes P_x, P_y and P_W, got {count + 1} partitions")
        given = [("P_x", P_x), *zip(("P_y", "P_W"), arguments[:count], strict=False)]
        given += [("P_W" if key == "P_w" else key, p) for key, p in named.items() if p is not None]
        found: dict[str, Partition] = {}
        for key, partition in given:
            if key in found:
                raise PartitionError(f"{kind}: {key} is given twice, {found[key]} and {partition}")
            if not isinstance(partition, Partition):
                raise PartitionError(f"{kind}: {key} must be a partition, got {partition!r}")
            if partition.dim != dims:
                raise PartitionError(
                    f"{kind}: {key} has {partition.dim} dimensions {partition.shape}, the tensor has {dims}"
                )
            found[key] = partition
        return cls(P_x, found.get("P_y"), found.get("P_W")), arguments[count:]

    @property
    def feature(self) -> bool:
        """Whether only batch and space are split, and every rank computes what it owns."""
        if self.P_x.shape[1] != 1 or self.P_y not in (None, self.P_x):
            return False
        return self.P_W is None or (self.P_x == self.P_W and self.P_x.shape[0] == 1)

    def workers(self, default: Partition, channels: int) -> Partition:
        """Ranks that compute, on a grid (batch, out-channel, in-channel, *spatial).

        Without P_W those of a default partition, whose channel dimension cuts the one named.
        """
        if self.P_W is not None:
            return self.P_W.create_cartesian_topology_partition((1, *self.P_W.shape))
        batch, count, *space = default.shape
        both = [count if d == channels else 1 for d in (OUT, IN)]
        return default.create_cartesian_topology_partition((batch, *both, *space))


def check_input(
    channels: int, source: Decomposition, dtype: torch.dtype, facts: dict[int, InputFacts]
) -> None:
    """Check an input against the layer that it is given to.

    Raises
    ------
    ShapeError
        If it has another number of channels, no spatial extent, or another type than the weights.
    UnsupportedError
        If it is not of floating point.
    """
    if source.shape[1] != channels:
        raise ShapeError(f"input has {source.shape[1]} channels, the layer takes {channels}")
    if 0 in source.shape[2:]:
        raise ShapeError(f"the global input {source.shape} has no elements in space")
    for rank, fact in facts.items():
        if fact.weights != dtype:
            raise ShapeError(f"input is {dtype}, the weights of rank {rank} are {fact.weights}")
    if not dtype.is_floating_point:
        raise UnsupportedError(f"input and weights are {dtype}, only floating point is supported")


def torch_layer(
    kind: str,
    cls: type[nn.Module],
    dims: int,
    weights: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Build the torch layer of the same arguments: it checks them, and makes the initial weights.

    Raises
    ------
    ShapeError
        If an argument is refused by torch, or would be when the layer is called.
    UnsupportedError
        If the layer were complex, or not on the CPU.
    """
    if weights not in _PATTERNS:
        raise ShapeError(f"{kind}: weights is one of {_PATTERNS}, got {weights!r}")
    try:
        like: Any = cls(*arguments, **options)
    except (ValueError, RuntimeError) as error:
        raise ShapeError(f"{kind}: {error}") from None
    if min(like.in_channels, like.out_channels) < 1:
        raise ShapeError(f"{kind}: needs channels, got {like.in_channels} in and {like.out_channels} out")
    for key in ("kernel_size", "stride", "dilation", "padding", "output_padding"):
        value = getattr(like, key)
        if not isinstance(value, str) and len(value) != dims:
            raise ShapeError(f"{kind}: {key} needs {dims} numbers, got {value}")
    if not like.weight.dtype.is_floating_point:
        raise UnsupportedError(f"{kind}: dtype {like.weight.dtype} is not supported, only floating point is")
    if like.weight.device.type != "cpu":
        raise UnsupportedError(f"{kind}: device {like.weight.device} is not supported, only the CPU is")
    return like


def stencil_of(kind: str, like: Any) -> Stencil:
    """Sliding windows of a torch convolution.

    Raises
    ------
    ShapeError
        If an argument is out of range.
    """
    # torch keeps (left, right) per dimension, last dimension first.
    sides = like._reversed_padding_repeated_twice
    padding = tuple(zip(sides[::2], sides[1::2], strict=True))[::-1]
    try:
        return Stencil.of(like.kernel_size, like.stride, like.dilation, padding)
    except ShapeError as error:
        raise ShapeError(f"{kind}: {error}") from None
