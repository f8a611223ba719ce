"""Distributed convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.geometry.stencil import Stencil
from distdl_rma.layers.conv.arguments import Partitions, check_input, stencil_of, torch_layer
from distdl_rma.layers.core.callbacks import callbacks_among
from distdl_rma.layers.core.gather_compute_scatter import CallPlan, ExchangingLayer
from distdl_rma.layers.core.layer import source_of
from distdl_rma.layers.core.placement import block_placement, whole_placement
from distdl_rma.layers.core.plan_cache import InputFacts, PlanCache, common_dtype
from distdl_rma.ops.autograd import GradientNeeds, anchor, tells_peers
from distdl_rma.ops.conv.halo_plan import HaloPlan
from distdl_rma.ops.conv.own_and_others import OwnAndOthers
from distdl_rma.ops.conv.split_convolution import LocalConvolution, SplitConvolution
from distdl_rma.ops.conv.worker_grid import IN, OUT, WorkerGrid, group_runs
from distdl_rma.ops.idle_ranks import tied
from distdl_rma.ops.movement import movement_or_none
from distdl_rma.ops.tensors import autocast
from distdl_rma.ops.window_gather import WindowGather

_TORCH_LAYERS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class DistributedConv(ExchangingLayer):
    """Convolution of a tensor that is split over ranks in any of its dimensions.

    ``DistributedConv2d(P_x, in_channels, out_channels, kernel_size, ...)`` is the feature-distributed form,
    ``DistributedConv2d(P_x, P_y, P_W, in_channels, ...)`` the channel-distributed and the general one.

    Local input: the shard of this rank on P_x, of any size that forms a grid with the others' (balanced
    blocks if all follow the library). Local output: the balanced shard of the global output on P_y; where
    P_y is P_x and P_W is not given, the batch stays cut as it is. The numbers are those of the sequential
    torch layer on the global tensor, for every argument of torch, with uneven, too small and empty shards.
    Collective to construct over the machine; a call involves the ranks of the three partitions.

    Parameters
    ----------
    P_x
        Partition of the input (batch, channel, *spatial).
    P_y
        Partition of the output; P_x if None. Also the second positional argument.
    P_W
        Partition of the work, (out-channel, in-channel, *spatial); also the third positional argument, and
        by name ``P_w``. If None, every rank of the output computes its own part of it.
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        As in torch, in torch's order, positional or by name.
    device, dtype
        As in torch; floating point, on the CPU.
    weights
        ``"replicated"``: on all ranks that use them, gradients summed; without P_W these are all ranks of
        the machine. ``"root"``: each block on one rank only, sent to the others in each forward, gradients
        summed there: without P_W on the first rank of P_x, else weights on the first spatial block of P_W,
        the bias there on the first in-channel block. Ranks that keep none hold empty parameters.
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
    Interface document, chapter 3; convolution document, feature-distributed, channel-distributed and
    generalized convolution; requirements A3, A17, A18, B7, B8.
    """

    _dims = 0
    _casts = True
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
        stencil = stencil_of(kind, like)
        P_y, P_W = given.P_y or P_x, given.P_W
        work = WorkerGrid(given.workers(P_y, OUT), OUT, like.groups, tuple(like.weight.shape))
        super().__init__(P_x, P_y, work.grid, name=name, **callbacks)
        self.P_W, self.weights, self.work, self.local = (
            P_W,
            weights,
            work,
            LocalConvolution(stencil, like.groups),
        )
        self.in_channels, self.out_channels, self.groups = like.in_channels, like.out_channels, like.groups
        self.kernel_size, self.stride, self.dilation = like.kernel_size, like.stride, like.dilation
        self.padding, self.padding_mode = like.padding, like.padding_mode
        self._in_place = P_y == P_x and P_W is None
        self._place(like)
        self._fused = given.feature and (self.padding_mode == "zeros" or not padded(stencil))

    @cached_property
    def plans(self) -> PlanCache[HaloPlan] | None:
        """Plans of the feature-distributed form; None on ranks without a part of it, and of other forms."""
        if not self._fused or not self.P_x.active:
            return None
        return PlanCache(self.machine, self.P_x.ranks, self.name, self._halo, self.built_with, self.outcome)

    def _place(self, like: Any) -> None:
        values = {"weight": like.weight, "bias": like.bias}
        blocks = {"weight": self.work.blocks(), "bias": self.work.bias(self.out_channels)}
        self.place(
            values,
            {
                key: whole_placement(self.machine, self.P_x, self.work.grid, value.shape, self.weights)
                if self.P_W is None
                else block_placement(blocks[key], self.weights)
                for key, value in values.items()
                if value is not None
            },
        )

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        grids = ", ".join(f"{key}={getattr(self, key).shape}" for key in ("P_x", "P_y"))
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride},"
            f" padding={self.padding}, dilation={self.dilation}, groups={self.groups},"
            f" bias={self.bias is not None}, padding_mode={self.padding_mode!r}, {grids}"
            + ("" if self.P_W is None else f", P_W={self.P_W.shape}")
            + f", weights={self.weights!r}"
        )

    @tells_peers
    def connect(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> None:
        """Plan for an input before it is there, as of :class:`ExchangingLayer`."""
        if not self._fused:
            super().connect(shape, dtype)
            return
        x = self.expected(self.P_x, shape, dtype)
        self.connect_parameters()
        if self.plans is not None:
            with torch.no_grad():
                plan, _ = self.plans.agree(x, self.weight)
            plan.connect()

    @tells_peers
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        if not self._fused:
            return self.apply_to(input)
        used = {} if self.placed is None else self.placed.use()
        if self.plans is None:
            return self.stand_aside(input, used.values())
        local: Any
        local, weight, bias = autocast(input, used["weight"], used.get("bias"))
        # Outside of the autograd function, inside of which grad mode is off.
        guess = self.plans.begin((local,), weight)
        with torch.autocast("cpu", enabled=False):
            y: torch.Tensor = SplitConvolution.apply(local, weight, bias, anchor(True), self, guess)  # type: ignore[no-untyped-call]
        return y

    def _halo(self, facts: dict[int, InputFacts]) -> HaloPlan:
        dtype = common_dtype(facts)
        shapes = {rank: fact.shape for rank, fact in facts.items()}
        check_input(self.in_channels, Decomposition.from_local_shapes(self.P_x, shapes), dtype, facts)
        # Data moves among the ranks that hold the same instances.
        group = self.P_x.slab({0: self.P_x.index_of(self.machine.rank)[0]})
        source = Decomposition.from_local_shapes(group, shapes)
        return HaloPlan(self.machine, self.local.stencil, source, dtype, self.name)

    def plan(self, facts: dict[int, InputFacts]) -> CallPlan:
        """Plan the composed form: what is read, what is computed, and whom it is for."""
        source, dtype = source_of(self.P_x, facts)
        check_input(self.in_channels, source, dtype, facts)
        extents = self.local.stencil.outputs(source.shape[2:])
        grid = self.work.grid
        space = [Balanced(n, p) for n, p in zip(extents, grid.shape[3:], strict=True)]
        batch = source.splits[0] if self._in_place else Balanced(source.shape[0], grid.shape[0])
        partial = self.work.by_rows(batch, space)
        reads = self.work.by_columns(batch, space)
        reading = WindowGather(self.site, self.local.stencil, source, reads, dtype, self.padding_mode)
        scatter = None
        if not self._in_place:
            target = Decomposition.balanced(self.P_y, (source.shape[0], self.out_channels, *extents))
            scatter = movement_or_none(self.site, partial, target, dtype, "output")
        known: dict[str, Any] = {"reading": reading, "shape": partial.box(self.machine.rank).shape}
        parts = self._parts(reading, source, partial)
        if parts is None:
            return CallPlan(reading.movement, scatter, **known)
        return CallPlan(None, scatter, reading.movement, parts=parts, **known)

    def _parts(
        self, reading: WindowGather, source: Decomposition, partial: Decomposition
    ) -> OwnAndOthers | None:
        # What can be computed before the rest arrives; where that is nothing, or all, there is one part.
        made_up = self.padding_mode != "zeros" and padded(self.local.stencil)
        if reading.movement is None or self.groups > 1 or made_up:
            return None
        rank = self.machine.rank
        reads = reading.movement.forward.exchange.need
        parts = OwnAndOthers(
            self.local.stencil, source.box(rank), reads, Box.of_shape(source.shape), partial.box(rank)
        )
        return parts if parts.both else None

    def carry_out(
        self, flow: CallPlan, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor
    ) -> torch.Tensor:
        """Convolve what this rank has while it collects what others have, then that, and fuse."""
        if flow.collect is None:
            return super().carry_out(flow, needs, x, **weights)
        parts: OwnAndOthers = flow.facts["parts"]
        weight, bias = self._block(**weights)
        first = self.work.blocks().box(self.machine.rank).bounds[1][0]
        phase = self.machine.trace.phases(self.name)
        flight = flow.collect.start(x, needs.input)
        with phase("local"):
            found = parts.of_own(self.local, x, weight, first)
        collected = flow.collect.wait(flight)
        with phase("remote"):
            found += parts.of_others(self.local, collected, weight, first)
        with phase("fuse"):
            y = parts.fuse(found)
            return y if bias is None else y.add_(bias.view(-1, *(1,) * self._dims))

    def compute(self, flow: CallPlan, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Convolve what was read with this rank's block of the weight."""
        used, used_bias = self._block(**weights)
        (o0, o1), (c0, c1) = self.work.blocks().box(self.machine.rank).bounds[:2]
        if 0 in flow.facts["shape"] or c0 == c1:
            nothing = used.new_zeros(flow.facts["shape"])
            return tied(nothing, (x, *weights.values()))
        x = flow.facts["reading"].add_padding(x)
        out, width = self.out_channels // self.groups, self.work.weight[1]
        if self.groups > 1 and c1 - c0 < width:
            x = x.unflatten(1, (-1, width))[:, :, c0:c1].flatten(1, 2)
        parts = []
        for start, stop, groups in group_runs(o0, o1, out):
            first = (start // out - o0 // out) * (c1 - c0)
            parts.append(
                self.local.valid(
                    x[:, first : first + groups * (c1 - c0)],
                    used[start - o0 : stop - o0],
                    None if used_bias is None else used_bias[start - o0 : stop - o0],
                    groups,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _block(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # What this rank computes with, of the parameters as they are kept.
        blocks = self.work.blocks()
        if self.P_W is None:
            (o0, o1), *_ = blocks.box(self.machine.rank).bounds
            return weight[blocks.slices()], None if bias is None else bias[o0:o1]
        return weight, None if blocks.partition.index_of(self.machine.rank)[IN] else bias


def padded(stencil: Stencil) -> bool:
    """Whether there is any padding, of whatever kind."""
    return any(window.left or window.right for window in stencil.windows)


class DistributedConv1d(DistributedConv):
    """Distributed ``torch.nn.Conv1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedConv2d(DistributedConv):
    """Distributed ``torch.nn.Conv2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedConv3d(DistributedConv):
    """Distributed ``torch.nn.Conv3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3
