"""Distributed transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced, Split
from distdl_rma.layers.conv.arguments import Partitions, check_input, stencil_of, torch_layer
from distdl_rma.layers.core.callbacks import callbacks_among
from distdl_rma.layers.core.gather_compute_scatter import CallPlan, ExchangingLayer
from distdl_rma.layers.core.layer import source_of
from distdl_rma.layers.core.placement import Placement, block_placement, whole_placement
from distdl_rma.layers.core.plan_cache import InputFacts
from distdl_rma.ops.autograd import tells_peers
from distdl_rma.ops.conv.split_convolution import LocalConvolution
from distdl_rma.ops.conv.worker_grid import IN, WorkerGrid, group_runs
from distdl_rma.ops.idle_ranks import tied
from distdl_rma.ops.movement import movement_or_none

_TORCH_LAYERS: dict[int, type[nn.Module]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}


class DistributedConvTranspose(ExchangingLayer):
    """Transposed convolution of a tensor that is split over ranks in any of its dimensions.

    Every rank applies the transposed convolution to its own data, outputs that overlap are summed on their
    way to their owners, who add the bias. Local input: the shard of this rank on P_x, of any size that
    forms a grid with the others'. Local output: the balanced shard of the global output on P_y; where that
    is P_x and P_W is not given, the batch stays cut as it is. The numbers are those of the sequential torch
    layer on the global tensor, for every argument of torch. Collective to construct over the machine; a
    call involves the ranks of the three partitions.

    Parameters
    ----------
    P_x
        Partition of the input (batch, channel, *spatial).
    P_y
        Partition of the output; P_x if None. Also the second positional argument.
    P_W
        Partition of the work, (out-channel, in-channel, *spatial); also the third positional argument, and
        by name ``P_w``. If None, every rank of P_x computes with its own data.
    in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation
        As in torch, in torch's order, positional or by name; ``padding_mode`` too.
    device, dtype
        As in torch; floating point, on the CPU.
    weights
        ``"replicated"``: on all ranks that use them, gradients summed; without P_W these are all ranks of
        the machine. ``"root"``: each block on one rank only, sent to the others in each forward, gradients
        summed there. With P_W the bias is kept on its first in-channel block and sent to P_y.
    name
        For messages.
    options
        The rest of torch's arguments, and :class:`Callbacks`.

    Raises
    ------
    PartitionError
        If a partition does not fit the dimensions, is given twice, or is of another machine.
    ShapeError
        If an argument is out of range.
    UnsupportedError
        If the dtype is not floating point, or the device is not the CPU.

    Notes
    -----
    Requirements A3, B11; the partitions are those of the convolution document.
    """

    _dims = 0
    _casts = True
    _call_arguments = (False,)
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        P_x: Partition,
        *arguments: Any,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
        P_w: Partition | None = None,
        weights: str = "replicated",
        name: str | None = None,
        **options: Any,
    ) -> None:
        kind, dims = type(self).__name__, self._dims
        named = {"P_y": P_y, "P_W": P_W, "P_w": P_w}
        given, arguments = Partitions.of(kind, dims + 2, P_x, arguments, named)
        callbacks = callbacks_among(options)
        # The torch layer checks its arguments and makes the same initial weights from the same seed.
        like = torch_layer(kind, _TORCH_LAYERS[dims], dims, weights, arguments, options)
        local = LocalConvolution(stencil_of(kind, like), like.groups)
        _check_output_padding(kind, like)
        work = WorkerGrid(given.workers(P_x, IN), IN, like.groups, tuple(like.weight.shape))
        super().__init__(P_x, given.P_y or P_x, work.grid, name=name, **callbacks)
        self.P_W, self.weights, self.work, self.local = given.P_W, weights, work, local
        self.in_channels, self.out_channels, self.groups = like.in_channels, like.out_channels, like.groups
        self.kernel_size, self.stride, self.dilation = like.kernel_size, like.stride, like.dilation
        self.padding, self.output_padding = like.padding, like.output_padding
        self.padding_mode = like.padding_mode
        self.place({"weight": like.weight, "bias": like.bias}, self._placements(like))

    def _placements(self, like: Any) -> dict[str, Placement]:
        channels = Decomposition(
            self.P_y,
            (Balanced(self.out_channels, self.P_y.shape[1]),),
            tuple(0 if d == 1 else None for d in range(self.P_y.dim)),
        )
        if self.P_W is None:
            shape = tuple(like.weight.shape)
            weight = whole_placement(self.machine, self.P_x, self.P_x, shape, self.weights)
            bias = whole_placement(self.machine, self.P_x, self.P_y, (self.out_channels,), self.weights)
        else:
            weight = block_placement(self.work.blocks(), self.weights)
            # The owners of the output add it, wherever they are.
            bias = Placement(block_placement(self.work.bias(self.out_channels), self.weights).store, channels)
        self._channels = channels
        return {"weight": weight} if like.bias is None else {"weight": weight, "bias": bias}

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        grids = ", ".join(f"{key}={getattr(self, key).shape}" for key in ("P_x", "P_y"))
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride},"
            f" padding={self.padding}, output_padding={self.output_padding}, groups={self.groups},"
            f" bias={self.bias is not None}, dilation={self.dilation}, {grids}"
            + ("" if self.P_W is None else f", P_W={self.P_W.shape}")
            + f", weights={self.weights!r}"
        )

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
            return self.apply_to(input, self._call_arguments, problem)
        return self.apply_to(input, (output_size is not None, *call_arguments))

    def _output_padding(self, extents: Sequence[int], call_arguments: tuple[int, ...]) -> tuple[int, ...]:
        given, *wanted = call_arguments
        if not given:
            return tuple(self.output_padding)
        if len(wanted) not in (self._dims, self._dims + 2):
            raise ShapeError(
                f"output_size has {len(wanted)} numbers, it needs {self._dims} or {self._dims + 2}"
            )
        wanted = wanted[-self._dims :]
        least = [
            (n - 1) * w.stride + w.span - w.left - w.right
            for n, w in zip(extents, self.local.stencil.windows, strict=True)
        ]
        most = [low + w.stride - 1 for low, w in zip(least, self.local.stencil.windows, strict=True)]
        if any(not low <= n <= high for low, n, high in zip(least, wanted, most, strict=True)):
            raise ShapeError(
                f"output_size {tuple(wanted)} is not between {tuple(least)} and {tuple(most)},"
                f" for a global input of {tuple(extents)}"
            )
        return tuple(n - low for n, low in zip(wanted, least, strict=True))

    def plan(self, facts: dict[int, InputFacts]) -> CallPlan:
        """Plan where the data is computed with, and whom the partial outputs are for."""
        source, dtype = source_of(self.P_x, facts)
        check_input(self.in_channels, source, dtype, facts)
        call_arguments = _common_arguments(facts)
        windows, inputs = self.local.stencil.windows, source.shape[2:]
        extents = tuple(
            (n - 1) * w.stride + w.span - w.left - w.right + extra
            for n, w, extra in zip(inputs, windows, self._output_padding(inputs, call_arguments), strict=True)
        )
        if min(extents) < 1:
            raise ShapeError(f"global input {inputs} is too small: the output would be {extents}")
        rows: Split | None = None
        batch: Split
        space: Sequence[Split]
        if self.P_W is None:
            batch, rows, *space = source.splits
        else:
            parts = self.work.grid.shape
            batch = Balanced(source.shape[0], parts[0])
            space = [Balanced(n, p) for n, p in zip(inputs, parts[3:], strict=True)]
        own = self.work.by_rows(batch, space, rows)
        reach = self.local.stencil.splits(space, extents)
        partial = self.work.by_columns(batch, reach, rows)
        target = Decomposition.balanced(self.P_y, (source.shape[0], self.out_channels, *extents))
        if self.P_W is None and self.P_y == self.P_x:
            target = target.with_splits({0: source.splits[0]})
        gather = None if self.P_W is None else movement_or_none(self.site, source, own, dtype, "input")
        scatter = movement_or_none(self.site, partial, target, dtype, "output")
        block = self.work.blocks(rows).box(self.machine.rank).bounds[:2]
        return CallPlan(gather, scatter, block=block, shape=partial.box(self.machine.rank).shape)

    def compute(self, flow: CallPlan, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Partial outputs of the data of this rank."""
        weight, bias = weights["weight"], weights.get("bias")
        (i0, i1), (c0, c1) = flow.facts["block"]
        shape = flow.facts["shape"]
        if 0 in shape or i0 == i1 or c0 == c1:
            return tied(weight.new_zeros(shape), (x, weight, bias))
        used = weight[i0:i1, c0:c1] if self.P_W is None else weight
        parts = [
            self.local.valid(x[:, a - i0 : b - i0], used[a - i0 : b - i0], None, groups, transposed=True)
            for a, b, groups in group_runs(i0, i1, self.in_channels // self.groups)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        width = self.work.weight[1]
        if self.groups > 1 and c1 - c0 < width:
            # Each group's channels, those of other columns too, which are zero here.
            sides = (0, 0) * self._dims + (c0, width - c1)
            y = F.pad(y.unflatten(1, (-1, c1 - c0)), sides).flatten(1, 2)
        return y if bias is None else y + bias.flatten()[:0].sum()

    def finish(self, flow: CallPlan, y: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Add the bias, once."""
        if "bias" not in weights:
            return y
        bias = weights["bias"]
        if self.P_W is None:
            bias = bias[self._channels.slices()]
        return y + bias.view(-1, *(1,) * self._dims)


def _check_output_padding(kind: str, like: Any) -> None:
    # torch's own rule, at construction instead of in the first call.
    for extra, stride, dilation in zip(like.output_padding, like.stride, like.dilation, strict=True):
        if not 0 <= extra < max(stride, dilation):
            raise ShapeError(
                f"{kind}: output_padding {like.output_padding} must be smaller than stride {like.stride} or"
                f" dilation {like.dilation}"
            )


def _common_arguments(facts: dict[int, InputFacts]) -> tuple[int, ...]:
    (first, expected), *others = ((rank, fact.call_arguments) for rank, fact in facts.items())
    for rank, call_arguments in others:
        if call_arguments != expected:
            raise ShapeError(
                f"output_size must be alike on all ranks: rank {first} has {expected[1:] or None}"
                f" but rank {rank} {call_arguments[1:] or None}"
            )
    return expected


class DistributedConvTranspose1d(DistributedConvTranspose):
    """Distributed ``torch.nn.ConvTranspose1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedConvTranspose2d(DistributedConvTranspose):
    """Distributed ``torch.nn.ConvTranspose2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedConvTranspose3d(DistributedConvTranspose):
    """Distributed ``torch.nn.ConvTranspose3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3
