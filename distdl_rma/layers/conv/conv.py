"""Distributed convolutions, and transposed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as as_int

from torch import Tensor, nn

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.layers.conv.base import ConvolutionLayer, check_dtypes
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.ops.conv.conv_transpose import TransposedConvolution, output_padding_for
from distdl_rma.ops.conv.convolution import Convolution, convolve
from distdl_rma.ops.conv.worker_grid import IN, OUT
from distdl_rma.ops.core.autograd import GradientNeeds, tells_peers
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

    def plan(self, facts: dict[int, InputFacts]) -> Convolution:
        """Who reads and computes what, and whom it is for."""
        source, dtype = source_of(self.P_x, facts)
        check_dtypes(dtype, facts)
        return Convolution(self.site, self.options, source, self.P_y, dtype)

    def run(
        self, agreement: Agreement[Convolution], xs: Sequence[Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, GradientNeeds]:
        """As of every layer; the gradients of the weights go where a ``GradientSync`` wants them."""
        return convolve(agreement, self.options.overlaps, xs[0], weights, self.placed.fill)  # type: ignore[union-attr]


class DistributedConv1d(DistributedConv, nn.Conv1d, dims=1):
    """Distributed ``torch.nn.Conv1d``; tensors are (batch, channel, width)."""


class DistributedConv2d(DistributedConv, nn.Conv2d, dims=2):
    """Distributed ``torch.nn.Conv2d``; tensors are (batch, channel, height, width)."""


class DistributedConv3d(DistributedConv, nn.Conv3d, dims=3):
    """Distributed ``torch.nn.Conv3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedConvTranspose(ConvolutionLayer[TransposedConvolution]):
    """Transposed convolution of a tensor that is split over ranks in any of its dimensions.

    Every rank applies the transposed convolution to its own data, without P_W to that of P_x; outputs that
    overlap are summed on their way to their owners, who add the bias. Outputs, numbers and arguments are as
    of :class:`DistributedConv`; with P_W the bias is kept on its first in-channel block and sent to P_y.

    Notes
    -----
    Requirements A3, B11; the partitions are those of the convolution document.
    """

    _call_arguments = (False,)
    _rows = IN
    _shown = ("kernel_size", "stride", "padding", "output_padding", "groups", "bias", "dilation")

    @tells_peers
    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply to ``input``, the local shard on P_x or a tensor without elements elsewhere.

        ``output_size`` are the global extents of the output, in space or in all dimensions, as in torch;
        alike on all ranks.
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
        (first, expected), *others = ((rank, fact.call_arguments) for rank, fact in facts.items())
        for rank, call_arguments in others:
            if call_arguments != expected:
                raise ShapeError(
                    f"output_size must be alike on all ranks: rank {first} has {expected[1:] or None}"
                    f" but rank {rank} {call_arguments[1:] or None}"
                )
        (given, *output_size), extra = expected, self.output_padding
        if given:
            extra = output_padding_for(self.options.stencil, source.shape[LEADING:], output_size)
        return TransposedConvolution(self.site, self.options, source, self.P_y, dtype, extra)


class DistributedConvTranspose1d(DistributedConvTranspose, nn.ConvTranspose1d, dims=1):
    """Distributed ``torch.nn.ConvTranspose1d``; tensors are (batch, channel, width)."""


class DistributedConvTranspose2d(DistributedConvTranspose, nn.ConvTranspose2d, dims=2):
    """Distributed ``torch.nn.ConvTranspose2d``; tensors are (batch, channel, height, width)."""


class DistributedConvTranspose3d(DistributedConvTranspose, nn.ConvTranspose3d, dims=3):
    """Distributed ``torch.nn.ConvTranspose3d``; tensors are (batch, channel, depth, height, width)."""
