"""Arguments that convolutions share: partitions first, then those of torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.stencil import Stencil
from distdl_rma.layers.core.agreement import InputFacts
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.ops.conv.worker_grid import IN, OUT

F = TypeVar("F", bound=Callable[..., None])
Extents = int | Sequence[int]


class Options(Callbacks, total=False):
    """What a convolution takes by name alone, beside what torch's takes."""

    P_w: Partition | None
    placement: str | None
    weights: str | None
    name: str | None


class Partitions(NamedTuple):
    """The partitions that a convolution was given; None where it was not."""

    P_x: Partition
    P_y: Partition | None
    P_W: Partition | None

    @classmethod
    def among(
        cls, kind: str, dims: int, positional: Sequence[Any], named: dict[str, Partition | None]
    ) -> tuple[Partitions, tuple[Any, ...]]:
        """Partitions among the arguments of a layer, P_x, P_y and P_W at first, and its other arguments."""
        P_x, *others = positional
        count = next((i for i, a in enumerate(others) if not isinstance(a, Partition)), len(others))
        if count > 2:
            raise PartitionError(f"{kind}: takes P_x, P_y and P_W, got {count + 1} partitions")
        given = [("P_x", P_x), *zip(("P_y", "P_W"), others[:count], strict=False)]
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
        return cls(P_x, found.get("P_y"), found.get("P_W")), tuple(others[count:])

    def workers(self, default: Partition, channels: int) -> Partition:
        """Ranks that compute, on a grid (batch, out-channel, in-channel, *spatial).

        Without P_W those of a default partition, whose channel dimension cuts the one named.
        """
        if self.P_W is not None:
            return self.P_W.create_cartesian_topology_partition((1, *self.P_W.shape))
        batch, count, *space = default.shape
        both = [count if d == channels else 1 for d in (OUT, IN)]
        return default.create_cartesian_topology_partition((batch, *both, *space))


def takes_arguments_of(twin: type[nn.Module]) -> Callable[[F], F]:
    """Show a constructor's arguments: P_x, those of a torch layer, then the named ones."""
    torchs, kinds = inspect.signature(twin).parameters, inspect.Parameter
    first = [kinds(key, kinds.POSITIONAL_OR_KEYWORD) for key in ("self", "P_x")]
    named = [kinds(key, kinds.KEYWORD_ONLY, default=None) for key in ("P_y", "P_W", *Options.__annotations__)]

    def shown(constructor: F) -> F:
        vars(constructor)["__signature__"] = inspect.Signature([*first, *torchs.values(), *named])
        return constructor

    return shown


def torch_layer(
    kind: str, twin: type[nn.Module], dims: int, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Build the torch layer of the same arguments: it checks them, and makes the initial weights.

    Raises ``TypeError`` where one is missing, or unknown by its name; ``ArgumentError`` where torch refuses
    one, or would when the layer is called; ``UnsupportedError`` of a layer that is complex or not on the CPU.
    """
    try:
        inspect.signature(twin).bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"{kind}: {error}; it takes partitions, then {inspect.signature(twin)}") from None
    try:
        like: Any = twin(*arguments, **options)
    except (ValueError, RuntimeError) as error:
        raise ArgumentError(f"{kind}: {error}") from None
    if min(like.in_channels, like.out_channels) < 1:
        raise ArgumentError(f"{kind}: needs channels, got {like.in_channels} in and {like.out_channels} out")
    for key in ("kernel_size", "stride", "dilation", "padding", "output_padding"):
        value = getattr(like, key)
        if not isinstance(value, str) and len(value) != dims:
            raise ArgumentError(f"{kind}: {key} needs {dims} numbers, got {value}")
    for extra, stride, dilation in zip(like.output_padding, like.stride, like.dilation, strict=True):
        # torch's own rule, at construction instead of in the first call.
        if not 0 <= extra < max(stride, dilation):
            raise ArgumentError(
                f"{kind}: output_padding {like.output_padding} must be smaller than stride {like.stride} or"
                f" dilation {like.dilation}"
            )
    if not like.weight.dtype.is_floating_point:
        raise UnsupportedError(f"{kind}: dtype {like.weight.dtype} is not supported, only floating point is")
    if like.weight.device.type != "cpu":
        raise UnsupportedError(f"{kind}: device {like.weight.device} is not supported, only the CPU is")
    return like


def stencil_of(kind: str, like: Any) -> Stencil:
    """Sliding windows of a torch convolution; ``ArgumentError`` if an argument is out of range."""
    # torch keeps (left, right) per dimension, last dimension first.
    sides = like._reversed_padding_repeated_twice
    padding = tuple(zip(sides[::2], sides[1::2], strict=True))[::-1]
    try:
        return Stencil.of(like.kernel_size, like.stride, like.dilation, padding)
    except (ShapeError, ArgumentError) as error:
        raise ArgumentError(f"{kind}: {error}") from None


def check_dtypes(dtype: torch.dtype, facts: dict[int, InputFacts]) -> None:
    """Refuse an input of another type than the weights of any rank, or not of floating point."""
    for rank, fact in facts.items():
        if fact.weights != dtype:
            raise ShapeError(f"input is {dtype}, the weights of rank {rank} are {fact.weights}")
    if not dtype.is_floating_point:
        raise UnsupportedError(f"input and weights are {dtype}, only floating point is supported")
