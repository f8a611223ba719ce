"""Distributed convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack, overload

import torch
from torch import nn

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.conv.arguments import Extents, Options, check_dtypes, takes_arguments_of
from distdl_rma.layers.conv.base import ConvolutionLayer
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.ops.conv.convolution import Convolution, convolve
from distdl_rma.ops.conv.worker_grid import OUT
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.operation import Agreement


class DistributedConv(ConvolutionLayer[Convolution]):
    """Convolution of a tensor that is split over ranks in any of its dimensions.

    ``DistributedConv2d(P_x, in_channels, out_channels, kernel_size, ...)`` is the feature-distributed form,
    ``DistributedConv2d(P_x, P_y, P_W, in_channels, ...)`` the channel-distributed and the general one.

    Local output: the balanced shard on P_y; where P_y is P_x and P_W is not given, the batch stays cut as it
    is. The numbers are those of the sequential torch layer on the global tensor, for every argument of torch,
    with uneven, too small and empty shards.

    Parameters
    ----------
    P_x, P_y
        Partitions of input and output (batch, channel, *spatial); P_y is P_x if None.
    P_W
        Partition of the work, (out-channel, in-channel, *spatial); by name also ``P_w``. If None, every rank
        of the output computes its own part of it.
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, ...
        As in torch.
    placement
        ``"replicated"``: on all ranks that use them, gradients summed; without P_W these are all ranks of
        the machine. ``"root"``: each block on one rank only, sent to the others in each forward, gradients
        summed there: without P_W on the first rank of P_x, else weights on the first spatial block of P_W,
        the bias there on the first in-channel block. Ranks that keep none hold empty parameters.

    Notes
    -----
    Interface document, chapter 3; convolution document, feature-distributed, channel-distributed and
    generalized convolution; requirements A3, A17, A18, B7, B8.
    """

    _rows = OUT
    _shown = ("kernel_size", "stride", "padding", "dilation", "groups", "bias", "padding_mode")

    @overload
    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Extents,
        stride: Extents = 1,
        padding: Extents | str = 0,
        dilation: Extents = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
        **options: Unpack[Options],
    ) -> None: ...

    @overload
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_W: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Extents,
        stride: Extents = 1,
        padding: Extents | str = 0,
        dilation: Extents = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None: ...

    @takes_arguments_of(nn.Conv2d)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

    def plan(self, facts: dict[int, InputFacts]) -> Convolution:
        """Who reads and computes what, and whom it is for."""
        source, dtype = source_of(self.P_x, facts)
        check_dtypes(dtype, facts)
        return Convolution(self.site, self.options, source, self.P_y, dtype)

    def run(
        self,
        agreement: Agreement[Convolution],
        xs: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, GradientNeeds]:
        """As of every layer; the gradients of the weights go where a ``GradientSync`` wants them."""
        return convolve(agreement, self.options.overlaps, xs[0], weights, self.placed.fill)  # type: ignore[union-attr]


class DistributedConv1d(DistributedConv, nn.Conv1d):
    """Distributed ``torch.nn.Conv1d``; tensors are (batch, channel, width)."""

    _dims, _twin = 1, nn.Conv1d


class DistributedConv2d(DistributedConv, nn.Conv2d):
    """Distributed ``torch.nn.Conv2d``; tensors are (batch, channel, height, width)."""

    _dims, _twin = 2, nn.Conv2d


class DistributedConv3d(DistributedConv, nn.Conv3d):
    """Distributed ``torch.nn.Conv3d``; tensors are (batch, channel, depth, height, width)."""

    _dims, _twin = 3, nn.Conv3d
