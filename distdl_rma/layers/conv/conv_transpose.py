"""Distributed transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, Unpack, overload

import torch
from torch import nn

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.conv.arguments import Extents, Options, check_dtypes, takes_arguments_of
from distdl_rma.layers.conv.base import ConvolutionLayer
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.ops.conv.conv_transpose import TransposedConvolution, output_padding_for
from distdl_rma.ops.conv.worker_grid import IN
from distdl_rma.ops.core.autograd import tells_peers


class DistributedConvTranspose(ConvolutionLayer[TransposedConvolution]):
    """Transposed convolution of a tensor that is split over ranks in any of its dimensions.

    Every rank applies the transposed convolution to its own data, outputs that overlap are summed on their
    way to their owners, who add the bias. Outputs and numbers are as of :class:`DistributedConv`.

    Parameters
    ----------
    P_x, P_y, P_W
        As of :class:`DistributedConv`; without P_W every rank of P_x computes with its own data.
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, ...
        As in torch.
    placement
        As of :class:`DistributedConv`. With P_W the bias is kept on its first in-channel block and sent to
        P_y.

    Notes
    -----
    Requirements A3, B11; the partitions are those of the convolution document.
    """

    _call_arguments = (False,)
    _rows = IN
    _shown = ("kernel_size", "stride", "padding", "output_padding", "groups", "bias", "dilation")

    @overload
    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Extents,
        stride: Extents = 1,
        padding: Extents = 0,
        output_padding: Extents = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Extents = 1,
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
        padding: Extents = 0,
        output_padding: Extents = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Extents = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None: ...

    @takes_arguments_of(nn.ConvTranspose2d)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

    @tells_peers
    def forward(self, input: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """Apply to ``input``, the local shard on P_x or a tensor without elements elsewhere.

        Parameters
        ----------
        input
            Local shard.
        output_size
            Global extents of the output, in space or in all dimensions, as in torch; alike on all ranks.
        """
        try:
            call_arguments = () if output_size is None else tuple(as_int(n) for n in output_size)
        except TypeError:
            problem = f"output_size is a sequence of integers, got {output_size!r}"
            return self.apply_to(input, call_arguments=self._call_arguments, problem=problem)
        return self.apply_to(input, call_arguments=(output_size is not None, *call_arguments))

    def plan(self, facts: dict[int, InputFacts]) -> TransposedConvolution:
        """Where the data is computed with, and whom the partial outputs are for."""
        source, dtype = source_of(self.P_x, facts)
        check_dtypes(dtype, facts)
        given, *output_size = _common_arguments(facts)
        extra = self.output_padding
        if given:
            extra = output_padding_for(self.options.stencil, source.shape[LEADING:], output_size)
        return TransposedConvolution(self.site, self.options, source, self.P_y, dtype, extra)


def _common_arguments(facts: dict[int, InputFacts]) -> tuple[int, ...]:
    (first, expected), *others = ((rank, fact.call_arguments) for rank, fact in facts.items())
    for rank, call_arguments in others:
        if call_arguments != expected:
            raise ShapeError(
                f"output_size must be alike on all ranks: rank {first} has {expected[1:] or None}"
                f" but rank {rank} {call_arguments[1:] or None}"
            )
    return expected


class DistributedConvTranspose1d(DistributedConvTranspose, nn.ConvTranspose1d):
    """Distributed ``torch.nn.ConvTranspose1d``; tensors are (batch, channel, width)."""

    _dims, _twin = 1, nn.ConvTranspose1d


class DistributedConvTranspose2d(DistributedConvTranspose, nn.ConvTranspose2d):
    """Distributed ``torch.nn.ConvTranspose2d``; tensors are (batch, channel, height, width)."""

    _dims, _twin = 2, nn.ConvTranspose2d


class DistributedConvTranspose3d(DistributedConvTranspose, nn.ConvTranspose3d):
    """Distributed ``torch.nn.ConvTranspose3d``; tensors are (batch, channel, depth, height, width)."""

    _dims, _twin = 3, nn.ConvTranspose3d
