"""Convolution of split tensors: own data while the halo travels, then the halo; and its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from distdl_rma.dtypes import as_words, sum_dtype
from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.intervals import Balanced, Split
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.conv.joined_tile import JoinedTile, Mark
from distdl_rma.ops.conv.kernels import ConvolutionArguments, Needs, convolution
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo, adjoint_of_pieces, pieces_of, with_channels
from distdl_rma.ops.conv.worker_grid import IN, ConvolutionOptions, channels_out
from distdl_rma.ops.core.autograd import (
    GradientNeeds,
    OperatorFunction,
    anchor,
    first_derivative,
    recomputed_by_all,
    tied,
)
from distdl_rma.ops.core.movement import CallSite, Movement
from distdl_rma.ops.core.operation import Agreement, GatherComputeScatter
from distdl_rma.ops.core.staged import Moves, movement_or_none
from distdl_rma.ops.core.tensors import as_tensor, no_autocast
from distdl_rma.ops.window_gather import WindowGather

# Writes the gradient of "weight" or "bias" to its place, and returns it there.
Fill = Callable[[str, Tensor], Tensor]


class GridConvolution(GatherComputeScatter):
    """A convolution by a grid of ranks: each computes partial outputs with its block of the weight.

    Calls pass this rank's block of the weight, or the whole weight. ``source`` is the decomposition of the
    input (batch, channel, *spatial). ``ShapeError`` if it has another number of channels than the layer, or
    no elements in space. ``ends`` are the decompositions of the partial outputs and of the output.
    """

    def __init__(
        self,
        site: CallSite,
        options: ConvolutionOptions,
        source: Decomposition,
        dtype: torch.dtype,
        ends: tuple[Decomposition, Decomposition],
        row_split: Split | None = None,
    ) -> None:
        workers, rank, (computed, output) = options.workers, site.machine.rank, ends
        super().__init__(site, source.partition.active, workers.grid.active, output)
        self.scatter = movement_or_none(site, computed, output, dtype, "output")
        self._workers, transposed = workers, workers.rows == IN
        self._steps = ConvolutionArguments.of(options.stencil, workers.groups, transposed)
        self._shape, self._block = computed.box(rank).shape, workers.blocks(row_split).box(rank)
        self._empty = 0 in (*self._shape, *self._block.shape)
        self._runs = [
            (channels, rows, self._steps._replace(groups=groups))
            for channels, rows, groups in workers.runs(self._block)
        ]

    def block(self, weight: Tensor) -> Tensor:
        """This rank's block, from the block itself or from the whole weight."""
        if self._empty or weight.shape == self._block.shape:
            return weight
        return weight[tuple(slice(*bounds) for bounds in self._block.bounds)]

    def compute(self, x: Tensor, **weights: Any) -> Tensor:
        """Partial output of this rank, by torch's autograd."""
        weight, bias = weights["weight"], weights.get("bias")
        if self._empty:
            return recomputed_by_all(tied(weight.new_zeros(self._shape), (x, weight, bias)))
        return self.convolve_block(x, self.block(weight), bias)

    def convolve_block(self, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
        """Partial output of a rank whose part is not empty, from its block of the weight."""
        raise NotImplementedError

    def in_runs(self, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve each run of whole groups, or part of a group; outputs side by side in channels."""
        if len(self._runs) == 1:
            return convolution(x, block, bias, self._runs[0][-1])
        found = [
            convolution(x[:, channels], block[rows], None if bias is None else bias[rows], steps)
            for channels, rows, steps in self._runs
        ]
        return torch.cat(found, 1)


class Convolution(GridConvolution):
    """Convolution by a grid of ranks: input in any decomposition, output in balanced blocks on ``target``.

    With ``on_workers`` the target is the worker grid, and the batch keeps the input's cut. With ``overlaps``
    a rank convolves its own data while the halo travels. Otherwise it first gathers all inputs that it reads.
    ``ShapeError`` also if the input is too small for a window or for the padding.
    """

    def __init__(
        self,
        site: CallSite,
        options: ConvolutionOptions,
        source: Decomposition,
        target: Partition,
        dtype: torch.dtype,
    ) -> None:
        stencil, workers, machine, batch = options.stencil, options.workers, site.machine, source.splits[0]
        channels = channels_out(workers, source)
        rank, extents = machine.rank, stencil.outputs(source.shape[LEADING:])
        space = [Balanced(n, p) for n, p in zip(extents, workers.grid.shape[LEADING + 1 :], strict=True)]
        output = Decomposition.balanced(target, (source.shape[0], channels, *extents))
        if options.on_workers:
            output = output.with_splits({0: batch})
        else:
            batch = Balanced(source.shape[0], workers.grid.shape[0])
        computed, reads = workers.by_rows(batch, space), workers.by_columns(batch, space)
        super().__init__(site, options, source, dtype, (computed, output))
        self.dtype, self.overlaps = dtype, options.overlaps
        if not self.overlaps:
            self._window = WindowGather(site, stencil, source, reads, dtype, options.padding_mode)
            self.gather = self._window.movement
            return
        # A rank that owns data sends it, even if it computes nothing.
        self.works, self._sum_dtype, self._trace = True, sum_dtype(dtype), machine.trace
        widened = dict(enumerate(stencil.with_halo(space, source.shape[LEADING:]), LEADING))
        self._halo = Movement(machine, Exchange(rank, source, reads.with_splits(widened)), dtype, site.name)
        (first, last), (batches, _, *outputs) = reads.box(rank).bounds[1], computed.box(rank).bounds
        self.parts = OwnAndHalo(
            with_channels(stencil, first, last - first),
            Box.of_shape(source.shape),
            source.box(rank),
            Box((batches, (0, int(not self._empty)), *outputs)),
            workers.groups,
        )
        # No pieces for short types: their sum would be rounded once per piece.
        core = self.parts.core if self._sum_dtype == dtype else None
        self._pieces = () if core is None else pieces_of(core, prod(self._shape), dtype.itemsize)
        # The forward receives a piece where the adjoint sends it: both directions use the same landings.
        self._landings = [self.parts.landing(piece) for piece in self._halo.forward.receives]
        # Ranks may choose differently: the halo is the same. Layers never join: a tile has no ``fill``.
        whole = self._sum_dtype == dtype and self._block.shape == workers.weight
        patch = self.parts.joined if options.joins and whole else None
        self.tile = None if patch is None else JoinedTile(patch, self.parts.own, self._halo)

    def movements(self) -> tuple[Moves | None, ...]:
        """Movement of the halo, or of all inputs that are read; and of the output."""
        return self._halo if self.overlaps else self.gather, self.scatter

    def void(self) -> None:
        """Give up a halo that some ranks may have sent; blocking."""
        if self.overlaps:
            self._halo.void()

    def carry_out(self, needs: GradientNeeds, x: Tensor, weights: Mapping[str, Any]) -> Tensor:
        """Partial output of this rank; blocking with ``overlaps``."""
        if not self.overlaps:
            return super().carry_out(needs, x, weights)
        weight, bias = weights["weight"], weights.get("bias")
        root = None if weight.requires_grad else anchor(True)
        y: Tensor = _HaloSchedule.apply(x, weight, bias, root, _returned, self, needs)
        return y

    def convolve_block(self, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
        """Partial output from the gathered input."""
        (_, width, *_), (low, high) = self._workers.weight, self._block.bounds[1]
        if not self._window.complete:
            x = self._window.add_padding(x)
        if self._workers.groups > 1 and high - low < width:
            x = x.unflatten(1, (-1, width))[:, :, low:high].flatten(1, 2)
        return self.in_runs(x, block, self._rows(bias))

    def begin(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> _Started:
        """Start the halo; convolve own data, or copy them into the tile."""
        mark = self._trace.marks(self.site.name)
        mark("start")
        channel = self._halo.forward
        # A rank that owns nothing may pass a tensor of any shape without elements.
        epoch = channel.start(channel.cut(as_words(x)) if channel.sends else ())
        mark("local")
        found = self.local(x, weight, bias) if self.tile is None else self.tile.hold(x)
        return epoch, found, mark

    def local(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Outputs of own data and the bias; own data add zero to outputs that read only remote data."""
        core, weight, bias = self.parts.core, self.block(weight), self._rows(bias)
        if core is not None and core.complete:
            return core.convolve(x, weight, bias)
        y = torch.zeros(self._shape, dtype=self.dtype)
        if core is not None:
            y[core.place] = core.convolve(x, weight)
        return y if bias is None else y.add_(bias.view(-1, *(1,) * (y.dim() - LEADING)))

    def add_remote(self, y: Tensor, epoch: int, weight: Tensor, mark: Mark) -> list[Tensor]:
        """Receive the halo and add its outputs to ``y``; return the data, one tensor per strip. Blocking."""
        strips, block = self.parts.strips, self.block(weight)
        blocks, arrays = [], []
        for strip in strips:
            blocks.append(strip.hold(self.dtype))
            arrays.append(as_words(blocks[-1]))
        for (_, view), landing in zip(self._halo.forward.receive(epoch), self._landings, strict=True):
            for number, there, here in landing:
                arrays[number][there] = view[here]
        for strip, data in zip(strips, blocks, strict=True):
            mark("remote")
            part = strip.convolve(data, block)
            mark("fuse")
            rim = y[strip.place]
            rim += part
        return blocks

    def start_adjoint(self, gradients: list[Tensor]) -> int:
        """Start to send the gradients of the strips to the owners of the data; return the epoch."""
        channel, pieces = self._halo.adjoint, []
        for piece, landing in zip(channel.sends, self._landings, strict=True):
            parts = [(here, gradients[number][there]) for number, there, here in landing]
            pieces.append(as_words(self.parts.filled_up(parts, piece.box.shape, self.dtype)))
        return channel.start(pieces)

    def local_adjoint(
        self, gradient: Tensor, x: Tensor, block: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of own data, and of weight and bias from own data; None where own data add nothing."""
        core = self.parts.core
        if core is None:
            return None, None, None
        gradient = gradient[core.place]
        if self._pieces:
            return adjoint_of_pieces(self._pieces, gradient, x, block, needs)
        # Together with the weight's gradient, the bias needs no further pass over the output's gradient.
        with_bias = needs[1] and needs[2] and core.complete and self._sum_dtype == self.dtype
        return core.convolve_adjoint(gradient, x, block, (needs[0], needs[1], with_bias))

    def add_adjoint(self, gradient: Tensor, epoch: int) -> Tensor:
        """Receive the gradients of this rank's data from its readers, and add them; blocking."""
        channel, trace, name = self._halo.adjoint, self._trace, self.site.name
        total = gradient.to(self._sum_dtype)
        for piece, words in trace.awaited(channel.receive(epoch), name, backward=True):
            with trace.span("fuse", name, backward=True):
                total[piece.box.slices(channel.exchange.need)].add_(as_tensor(words, self.dtype))
        return total.to(gradient.dtype)

    def _rows(self, bias: Tensor | None) -> Tensor | None:
        # Part of the bias that this rank adds; None if another rank with the same outputs adds it.
        start, stop = self._block.bounds[0]
        if bias is None or bias.shape[0] == stop - start:
            return bias
        return bias[start:stop] if bias.shape[0] else None

    def fill_weight(
        self, weight: Tensor, core: Tensor | None, strips: list[Tensor | None], fill: Fill
    ) -> Tensor:
        """Weight gradient of own and remote data, summed in the place that ``fill`` gives."""
        if core is not None and core.shape == weight.shape:
            mine = total = fill("weight", core)
        else:
            total = fill("weight", torch.zeros_like(weight))
            mine = self.block(total)
            if self.parts.core is not None and core is not None:
                mine[self.parts.core.weight] = core
        for strip, taps in zip(self.parts.strips, strips, strict=True):
            if taps is not None:
                mine[strip.weight].add_(taps)
        return total

    def fill_bias(self, bias: Tensor, found: Tensor | None, gradient: Tensor, fill: Fill) -> Tensor:
        """Gradient of the bias in the place that ``fill`` gives; ``found`` if it was computed before."""
        total = gradient.sum((0, *range(LEADING, gradient.dim()))) if found is None else found
        if total.shape != bias.shape:
            mine, total = total, torch.zeros_like(bias)
            if len(bias):
                total[slice(*self._block.bounds[0])] = mine
        return fill("bias", total)


def _returned(_name: str, gradient: Tensor) -> Tensor:
    return gradient


def convolve(
    agreement: Agreement[Convolution],
    overlaps: bool,
    x: Tensor,
    weights: Mapping[str, Tensor],
    fill: Fill = _returned,
) -> tuple[Tensor, GradientNeeds]:
    """Agree on a convolution and carry it out: local output, and the needs of any rank. Blocking.

    With ``overlaps``, the operation that this rank expects starts before the ranks agree, and ``fill``
    gives the places of the weights' gradients.
    """
    # All ranks refuse a value that is no tensor when they agree.
    if not (overlaps and isinstance(x, Tensor)):
        operation, needs = agreement.settle()
        return operation(needs, x, **weights), needs
    weight, bias = weights["weight"], weights.get("bias")
    root, call = None if weight.requires_grad else anchor(True), _Agreeing(agreement)
    with no_autocast():
        y: Tensor = _HaloSchedule.apply(x, weight, bias, root, fill, call, None)
    operation, needs = call.agreed
    return y if operation.scatter is None else operation.scatter(y, needs.any), needs


# Epoch of a halo under way, outputs of own data or the tile, and the function that records the trace.
_Started = tuple[int, Tensor, Mark]


class _Agreeing:
    # A convolution that begins before its ranks have agreed on it.
    agreed: tuple[Convolution, GradientNeeds]

    def __init__(self, agreement: Agreement[Convolution]) -> None:
        self._agreement = agreement

    def begin(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> _Started:
        """Begin the expected operation and agree; if the ranks agree on another one, begin that one."""
        guess = self._agreement.guess
        started = None if guess is None else guess.begin(x, weight, bias)
        if started is not None:
            *_, mark = started
            mark("")
        self.agreed = operation, _ = self._agreement.settle()
        if started is None or operation is not guess:
            started = operation.begin(x, weight, bias)
        return started


class _HaloSchedule(OperatorFunction):
    """The schedule: the halo travels while own data are convolved, or copied into a tile."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        _anchor: Any,
        fill: Fill,
        call: Any,
        needs: GradientNeeds | None,
    ) -> Tensor:
        """Start the halo, own data, wait; then convolve remote strips and add them, or convolve the tile."""
        # call is a convolution with known needs, or an _Agreeing.
        started: _Started = call.begin(x, weight, bias)
        (epoch, y, mark), operation = started, call
        if needs is None:
            operation, needs = call.agreed
        mark("wait")
        if operation.tile is None:
            kept = operation.add_remote(y, epoch, weight, mark)
        else:
            y, kept = operation.tile.convolve(y, epoch, weight, bias, mark)
        mark("")
        if not any(ctx.needs_input_grad[:3]) and not needs.any:
            ctx.mark_non_differentiable(y)
        else:
            ctx.save_for_backward(x, weight, bias if operation.tile is None else None, *kept)
        ctx.operation, ctx.machine = operation, operation.site.machine
        ctx.fill, ctx.needs_halo = fill, needs.input
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Start to send the strips' gradients, compute local ones, wait, add; or the adjoint of the tile."""
        operation: Convolution = ctx.operation
        x, weight, bias, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        mark = ctx.machine.trace.marks(operation.site.name, backward=True)
        if operation.tile is not None:
            needs = ctx.needs_halo, needs_weight, needs_bias
            d_x, d_weight, d_bias = operation.tile.adjoint(gradient, x, kept, weight, needs, mark)
            mark("")
            return d_x if needs_x else None, d_weight, d_bias, None, None, None, None
        parts, block = operation.parts, operation.block(weight)
        mark("remote")
        needs = ctx.needs_halo, needs_weight, False
        rim = [
            strip.convolve_adjoint(gradient[strip.place], data, block, needs)
            for strip, data in zip(parts.strips, kept, strict=True)
        ]
        epoch, d_x, d_weight, d_bias = 0, None, None, None
        if ctx.needs_halo:
            mark("start")
            epoch = operation.start_adjoint([edge for edge, *_ in rim if edge is not None])
        mark("local")
        if needs_x or needs_weight:
            d_x, d_weight, d_bias = operation.local_adjoint(gradient, x, block, ctx.needs_input_grad[:3])
        if needs_bias:
            d_bias = operation.fill_bias(bias, d_bias, gradient, ctx.fill)
        if needs_weight:
            mark("fuse")
            d_weight = operation.fill_weight(weight, d_weight, [taps for _, taps, _ in rim], ctx.fill)
        mark("")
        if ctx.needs_halo:
            d_x = operation.add_adjoint(torch.zeros_like(x) if d_x is None else d_x, epoch)
        return d_x if needs_x else None, d_weight, d_bias, None, None, None, None
