"""Distributed convolutions and transposed convolutions.

Which of three forms a layer has follows from its partitions, on (batch, channel, height, width)::

    P_x (1, 1, 2, 2)                     feature-distributed: every rank has all weights, and sends halos
    P_x (1, 2, 1, 1), P_W (2, 2, 1, 1)   channel-distributed: ranks have blocks of the weights; inputs are
                                         broadcast along dimension 0 of P_W, partial outputs are summed along
                                         1
    P_x, P_y, P_W of any grid            both at once

The layer checks arguments and places weights. Everything else, schedules included, is the operation's
(``layers/ops/conv``), which split tensors use too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as as_int
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from distdl_rma.errors import ArgumentError, PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition, alike
from distdl_rma.layers.ops.conv.conv_transpose import TransposedConvolution, output_padding_for
from distdl_rma.layers.ops.conv.convolution import Convolution, convolve
from distdl_rma.layers.ops.conv.worker_grid import IN, OUT, options_of
from distdl_rma.layers.ops.core.autograd import GradientNeeds, reports_failures
from distdl_rma.layers.ops.core.operation import Agreement, Operation
from distdl_rma.layers.partitioned.core.arguments import (
    PlacedOptions,
    check_dims,
    placed_options,
    spatial_dims,
    torchs_layer,
)
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, check_weights, source_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.partitioned.core.placement import Placement, block_placement, whole_placement
from distdl_rma.layers.partitioned.core.refusals import attributed

O = TypeVar("O", bound=Operation)  # noqa: E741
_CHANNELS = ("in_channels", "out_channels")


class ConvolutionLayer(OperatorLayer[O], _ConvNd):
    """Base of convolutions. Final classes have their torch layer as last base."""

    _allowed = ("replicated", "root")
    _by_name = ("P_y", "P_W", "P_w", *PlacedOptions.__annotations__)
    _rows: ClassVar[int]  # dimension of the worker grid that cuts the weight's first dimension

    def __init__(self, P_x: Partition, *arguments: Any, **options: Any) -> None:
        kind, dims = type(self).__name__, spatial_dims(type(self))
        named = {key: options.pop(key, None) for key in ("P_y", "P_W", "P_w")}
        P_y, P_W, arguments = partitions_among(type(self), LEADING + dims, (P_x, *arguments), named)
        own, placement = placed_options(type(self), self._allowed, options)
        # The torch layer checks its arguments and has the initial weights of the sequential model.
        like = torchs_layer(type(self), *arguments, **options)
        _check(kind, like, dims)
        P_y = P_y or P_x
        with attributed(kind, ShapeError, ArgumentError):
            found = options_of(vars(like), tuple(like.weight.shape), P_x, P_y, self._rows, P_W)
        super().__init__(P_x, P_y, found.workers.grid, **own)
        self.options = found
        self.P_W, self.placement, self.weights = P_W, placement, placement
        self.take_over(like)
        self.place({"weight": like.weight, "bias": like.bias}, self._placement)

    def _source_of(self, facts: dict[int, InputFacts]) -> tuple[Decomposition, torch.dtype]:
        source, dtype = source_of(self.P_x, facts)
        check_weights(dtype, facts)
        if not dtype.is_floating_point:
            raise UnsupportedError(f"input and weights are {dtype}, only floating point is supported")
        return source, dtype

    def _placement(self, key: str) -> Placement:
        workers, pattern, of_weight = self.options.workers, self.placement, key == "weight"
        users = workers.grid if of_weight or self._rows == OUT else self.P_y
        if self.P_W is None:
            shape = workers.weight if of_weight else (self.out_channels,)
            return whole_placement(self.machine, self.P_x, users, shape, pattern)
        blocks = workers.blocks() if of_weight else workers.bias(self.out_channels)
        if users is workers.grid:
            return block_placement(blocks, pattern)
        # In a transposed convolution the owners of the output add the bias, after the sum of partial outputs:
        # a bias in each of these would be added several times. The owners may be on other ranks.
        channels = Balanced(self.out_channels, users.shape[1])
        use = Decomposition(users, (channels,), tuple(0 if d == 1 else None for d in range(users.dim)))
        return Placement(block_placement(blocks, pattern).store, use)


def partitions_among(
    layer: type, dims: int, positional: Sequence[Any], named: dict[str, Partition | None]
) -> tuple[Partition | None, Partition | None, tuple[Any, ...]]:
    """P_y and P_W, None if not given, and the positional arguments behind P_x, P_y and P_W.

    Partitions are found by their type, so that ``(P_x, 3, 8, 3)`` and ``(P_x, P_y, P_W, 3, 8, 3)`` are both
    in torch's order behind the partitions.
    """
    kind, (P_x, *others) = layer.__name__, positional
    count = next((i for i, a in enumerate(others) if not isinstance(a, Partition)), len(others))
    if count > 2:
        raise PartitionError(f"{kind}: takes P_x, P_y and P_W, got {count + 1} partitions")
    given = [("P_x", P_x), *zip(("P_y", "P_W"), others[:count], strict=False)]
    given += [("P_W" if key == "P_w" else key, p) for key, p in named.items() if p is not None]
    found: dict[str, Partition] = {}
    for key, partition in given:
        if key in found:
            raise PartitionError(f"{kind}: {key} is given twice, {found[key]} and {partition}")
        found[key] = partition
    check_dims(layer, (dims,), **found)
    return found.get("P_y"), found.get("P_W"), tuple(others[count:])


def _check(kind: str, like: Any, dims: int) -> None:
    # Torch checks most of this in the first call only, where ranks wait for each other.
    if min(like.in_channels, like.out_channels) < 1:
        raise ArgumentError(f"{kind}: needs channels, got {like.in_channels} in and {like.out_channels} out")
    for key in ("kernel_size", "stride", "dilation", "padding", "output_padding"):
        value = getattr(like, key)
        if not isinstance(value, str) and len(value) != dims:
            raise ArgumentError(f"{kind}: {key} needs {dims} numbers, got {value}")
    for extra, stride, dilation in zip(like.output_padding, like.stride, like.dilation, strict=True):
        if not 0 <= extra < max(stride, dilation):
            raise ArgumentError(
                f"{kind}: output_padding {like.output_padding} must be smaller than stride {like.stride} or"
                f" dilation {like.dilation}"
            )
    if not like.weight.dtype.is_floating_point:
        raise UnsupportedError(f"{kind}: dtype {like.weight.dtype} is not supported, only floating point is")


class DistributedConv(ConvolutionLayer[Convolution]):
    """Convolution of a tensor that is split over ranks in any of its dimensions.

    ``DistributedConv2d(P_x, in_channels, out_channels, kernel_size, ...)`` is the feature-distributed form,
    ``DistributedConv2d(P_x, P_y, P_W, in_channels, ...)`` the channel-distributed and the general one.

    Local output: the balanced shard on P_y. If P_y is P_x and P_W is not given, the batch stays cut as it is.
    The result equals that of torch's layer on the global tensor, for every argument of torch, also with
    uneven shards, empty shards, and shards smaller than the kernel.

    Parameters
    ----------
    P_x, P_y
        Partitions of input and output ``(batch, channel, *spatial)``; P_y is P_x if None.
    P_W
        Partition of the computation, ``(out-channel, in-channel, *spatial)``; also called ``P_w``. If None,
        every rank of P_y computes its own part of the output.
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, ...
        As in torch.
    placement
        ``"replicated"``: parameters are on all ranks that use them, without P_W on all ranks of the machine,
        and their gradients are summed. ``"root"``: each block is on one rank, which sends it to its users in
        each forward and sums its gradients. Without P_W that is the first rank of P_x. With P_W weights are
        on the first spatial block of P_W, and the bias is there on the first in-channel block. Other ranks
        have empty parameters.

    Notes
    -----
    Interface document, chapter 3; convolution document, feature-distributed, channel-distributed and
    generalized convolution; requirements A3, A17, A18, B7, B8.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> conv = DistributedConv2d(P_x, 3, 8, kernel_size=3, padding=1)
    >>> conv(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 8, 16, 16])
    """

    _rows = OUT
    _shown = (*_CHANNELS, "kernel_size", "stride", "padding", "dilation", "groups", "bias", "padding_mode")

    def plan(self, facts: dict[int, InputFacts]) -> Convolution:
        """Operation for the input that the ranks form."""
        source, dtype = self._source_of(facts)
        return Convolution(self.site, self.options, source, self.P_y, dtype)

    def run(
        self, agreement: Agreement[Convolution], xs: Sequence[Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, GradientNeeds]:
        """As in the base; writes gradients of the weights to the memory that a ``GradientSync`` offers."""
        return convolve(agreement, self.options.overlaps, xs[0], weights, self.placed.fill)  # type: ignore[union-attr]


class DistributedConv1d(DistributedConv, nn.Conv1d):
    """Distributed ``torch.nn.Conv1d``; tensors are (batch, channel, width)."""


class DistributedConv2d(DistributedConv, nn.Conv2d):
    """Distributed ``torch.nn.Conv2d``; tensors are (batch, channel, height, width)."""


class DistributedConv3d(DistributedConv, nn.Conv3d):
    """Distributed ``torch.nn.Conv3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedConvTranspose(ConvolutionLayer[TransposedConvolution]):
    """Transposed convolution of a tensor that is split over ranks in any of its dimensions.

    On one partition without P_W, every rank gathers the inputs that add to its outputs, and convolves once.
    With P_W, from P_x to another P_y and in 16 bits, every rank applies the transposed convolution to its own
    data. Overlapping outputs are then summed and sent to their owners, which add the bias. Output and
    arguments are as for :class:`DistributedConv`. With P_W the bias is kept on its first in-channel block and
    sent to P_y.

    Notes
    -----
    Requirements A3, B11; the partitions are those of the convolution document.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> conv = DistributedConvTranspose2d(P_x, 3, 8, kernel_size=2, stride=2)
    >>> conv(shard(P_x, torch.rand(1, 3, 16, 16))).shape
    torch.Size([1, 8, 32, 32])
    """

    _call_arguments = (None,)
    _rows = IN
    _shown = (*_CHANNELS, "kernel_size", "stride", "padding", "output_padding", "groups", "bias", "dilation")

    @reports_failures
    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply to ``input``, the local shard on P_x or a tensor without elements elsewhere.

        ``output_size`` has global extents, in space or in all dimensions, as in torch, equal on all ranks.
        """
        try:
            given = None if output_size is None else tuple(as_int(n) for n in output_size)
        except TypeError:
            problem = f"output_size is a sequence of integers, got {output_size!r}"
            return self.apply_to(input, problem=problem)
        return self.apply_to(input, call_arguments=(given,))

    def plan(self, facts: dict[int, InputFacts]) -> TransposedConvolution:
        """Operation for the input that the ranks form; ``ShapeError`` if their ``output_size`` differ."""
        source, dtype = self._source_of(facts)
        sizes = {rank: fact.call_arguments[0] for rank, fact in facts.items()}
        expected: Any = alike(sizes, "output_size must be alike on all ranks: rank {} has {} but rank {} {}")
        extra = self.output_padding
        if expected is not None:
            extra = output_padding_for(self.options.stencil, source.shape[LEADING:], expected)
        return TransposedConvolution(self.site, self.options, source, self.P_y, dtype, extra)


class DistributedConvTranspose1d(DistributedConvTranspose, nn.ConvTranspose1d):
    """Distributed ``torch.nn.ConvTranspose1d``; tensors are (batch, channel, width)."""


class DistributedConvTranspose2d(DistributedConvTranspose, nn.ConvTranspose2d):
    """Distributed ``torch.nn.ConvTranspose2d``; tensors are (batch, channel, height, width)."""


class DistributedConvTranspose3d(DistributedConvTranspose, nn.ConvTranspose3d):
    """Distributed ``torch.nn.ConvTranspose3d``; tensors are (batch, channel, depth, height, width)."""
