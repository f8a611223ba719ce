"""Convolution of split tensors: own data while the halo travels, then what came, fused; and its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.ops.conv.kernels import ConvolutionSteps, convolution_in_runs
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo, with_channels
from distdl_rma.ops.conv.worker_grid import ConvolutionOptions, check_shape
from distdl_rma.ops.core.autograd import GradientNeeds, anchor, first_derivative, tied
from distdl_rma.ops.core.movement import CallSite, Movement, movement_or_none
from distdl_rma.ops.core.operation import Agreed, Agreement, Operation
from distdl_rma.ops.core.tensors import as_tensor, as_words, no_autocast, result, sum_dtype
from distdl_rma.ops.window_gather import WindowGather

# Puts the gradient of "weight" or "bias" where it is wanted, and returns it.
Fill = Callable[[str, torch.Tensor], torch.Tensor]


class Convolution(Operation):
    """Convolution of an input that is split in any way, by a grid of ranks, for any partition.

    The ``source`` says who owns which part of the input (batch, channel, *spatial); the ``target`` gets the
    output in balanced blocks. Where that are the workers themselves, ``in_place``, the batch stays cut as it
    is. Weights are this rank's block of the grid, or whole.

    Raises ``ShapeError`` if the input has other channels, or is too small for a window or for the padding.
    """

    def __init__(
        self,
        site: CallSite,
        options: ConvolutionOptions,
        source: Decomposition,
        target: Partition,
        dtype: torch.dtype,
    ) -> None:
        stencil, workers, overlaps = options.stencil, options.workers, options.overlaps
        in_channels, out_channels = workers.channels
        check_shape(source, in_channels)
        machine, rank, grid, batch = site.machine, site.machine.rank, workers.grid, source.splits[0]
        extents = stencil.outputs(source.shape[LEADING:])
        space = [Balanced(n, p) for n, p in zip(extents, grid.shape[LEADING + 1 :], strict=True)]
        self.output = Decomposition.balanced(target, (source.shape[0], out_channels, *extents))
        if options.in_place:
            self.output = self.output.with_splits({0: batch})
        else:
            batch = Balanced(source.shape[0], grid.shape[0])
        computed, reads = workers.by_rows(batch, space), workers.by_columns(batch, space)
        self.site, self.dtype, self.overlaps = site, dtype, overlaps
        self._workers, self._steps = workers, ConvolutionSteps.of(stencil, workers.groups)
        self._shape, self._block = computed.box(rank).shape, workers.blocks().box(rank)
        self._works = 0 not in (*self._shape, *self._block.shape)
        self._scatter = movement_or_none(site, computed, self.output, dtype, "output")
        self._sum_dtype, self._trace = sum_dtype(dtype), machine.trace
        if not overlaps:
            self._gather = WindowGather(site, stencil, source, reads, dtype, options.padding_mode)
            self._movements: Sequence[Movement | None] = (self._gather.movement, self._scatter)
            return
        widened = dict(enumerate(stencil.with_halo(space, source.shape[LEADING:]), LEADING))
        self._halo = Movement(machine, Exchange(rank, source, reads.with_splits(widened)), dtype, site.name)
        self._movements = self._halo, self._scatter
        (first, last), (batches, _, *outputs) = reads.box(rank).bounds[1], computed.box(rank).bounds
        self.parts = OwnAndHalo(
            with_channels(stencil, first, last - first),
            Box.of_shape(source.shape),
            source.box(rank),
            Box((batches, (0, int(self._works)), *outputs)),
            workers.groups,
        )
        # A halo arrives where the adjoint sends from: the same landings serve both directions.
        self._landings = [self.parts.landing(piece) for piece in self._halo.forward.receives]

    def __call__(self, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local result from a local shard."""
        return convolve(Agreed(self, needs), self.overlaps, x, weights)[0]

    def movements(self) -> Sequence[Movement | None]:
        """The halo, or all that is read; and the output."""
        return self._movements

    def void(self) -> None:
        """Give up a halo that some ranks may have sent."""
        if self.overlaps:
            self._halo.void()

    def phases(self, backward: bool = False) -> Callable[[str], AbstractContextManager[object]]:
        """Contexts of what the operation does, for a recording."""
        return self._trace.phases(self.site.name, backward)

    def start(self, x: torch.Tensor) -> int:
        """Put this rank's edges into the neighbours' slots; return the epoch."""
        channel = self._halo.forward
        # Who owns nothing may pass anything without elements.
        return channel.start(channel.cut(as_words(x)) if channel.sends else ())

    def local(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What own data gives, at full speed; zeros where only the neighbours' data would add."""
        core, weight, bias = self.parts.core, self.block(weight), self._rows(bias)
        if core is not None and core.outputs == core.within:
            return core.convolve(x, weight, bias)
        y = torch.zeros(self._shape, dtype=self.dtype)
        if core is not None:
            y[core.place] = core.convolve(x, weight)
        return y if bias is None else y.add_(bias.view(-1, *(1,) * (y.dim() - LEADING)))

    def receive(self, epoch: int) -> list[torch.Tensor]:
        """Remote data, one block per strip, zero where the domain ends; blocking."""
        blocks = [result(strip.region.shape, self.dtype) for strip in self.parts.strips]
        for strip, block in zip(self.parts.strips, blocks, strict=True):
            if strip.sticks_out:
                block.zero_()
        arrays = [as_words(block) for block in blocks]
        for (_, view), landing in zip(self._halo.forward.receive(epoch), self._landings, strict=True):
            for number, there, here in landing:
                arrays[number][there] = view[here]
        return blocks

    def start_adjoint(self, gradients: list[torch.Tensor | None]) -> int:
        """Put the gradients of the strips on their way back to the owners of the data; return the epoch."""
        channel, pieces = self._halo.adjoint, []
        for piece, landing in zip(channel.sends, self._landings, strict=True):
            part = torch.zeros(piece.box.shape, dtype=self.dtype)
            for number, there, here in landing:
                block = gradients[number]
                if block is not None:
                    part[here] = block[there]
            pieces.append(as_words(part))
        return channel.start(pieces)

    def add_adjoint(self, gradient: torch.Tensor, epoch: int) -> torch.Tensor:
        """Add what the readers of this rank's data send back; blocking."""
        channel, name = self._halo.adjoint, self.site.name
        # Short types are summed in a longer one, with one rounding at the end.
        total = gradient.to(self._sum_dtype)
        for piece, words in self._trace.awaited(channel.receive(epoch), name, backward=True):
            with self._trace.span("fuse", name, backward=True):
                total[piece.box.slices(channel.exchange.need)] += as_tensor(words, self.dtype)
        return total.to(gradient.dtype)

    def block(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's block of a weight, which may be all that there is of it."""
        if not self._works or weight.shape == self._block.shape:
            return weight
        return weight[tuple(slice(*bounds) for bounds in self._block.bounds)]

    def _rows(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        # What this rank adds of a bias; None if another rank does, with the same outputs.
        start, stop = self._block.bounds[0]
        if bias is None or len(bias) == stop - start:
            return bias
        return bias[start:stop] if len(bias) else None

    def fill_weight(
        self, weight: torch.Tensor, core: torch.Tensor | None, strips: list[torch.Tensor | None], fill: Fill
    ) -> torch.Tensor:
        """Weight gradient of local and remote data, fused in the place where it is wanted."""
        if core is not None and core.shape == weight.shape:
            mine = total = fill("weight", core)
        else:
            total = fill("weight", torch.zeros_like(weight))
            mine = self.block(total)
            if self.parts.core is not None and core is not None:
                mine[self.parts.core.weight] = core
        for strip, taps in zip(self.parts.strips, strips, strict=True):
            if taps is not None:
                mine[strip.weight] += taps
        return total

    def fill_bias(self, bias: torch.Tensor, gradient: torch.Tensor, fill: Fill) -> torch.Tensor:
        """Gradient of the bias in the place where it is wanted."""
        total = gradient.sum((0, *range(LEADING, gradient.dim())))
        if total.shape != bias.shape:
            mine, total = total, torch.zeros_like(bias)
            if len(bias):
                total[slice(*self._block.bounds[0])] = mine
        return fill("bias", total)

    def scatter(self, needs: GradientNeeds, y: torch.Tensor) -> torch.Tensor:
        """Sum what in-channel blocks have computed, and hand it to the owners of the output; blocking."""
        return y if self._scatter is None else self._scatter(y, needs.any)

    def gathered(
        self, needs: GradientNeeds, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """What this rank computes by torch's autograd, once all that it reads is there."""
        if self._gather.movement is not None:
            x = self._gather.movement(x, needs.input)
        if not self._works:
            return tied(weight.new_zeros(self._shape), (x, weight, bias))
        (_, width, *_), (low, high) = self._workers.weight, self._block.bounds[1]
        with self._trace.span("local", self.site.name):
            x = self._gather.add_padding(x)
            if self._workers.groups > 1 and high - low < width:
                x = x.unflatten(1, (-1, width))[:, :, low:high].flatten(1, 2)
            runs = self._workers.runs(self._block)
            return convolution_in_runs(x, self.block(weight), self._rows(bias), self._steps, runs)


def _returned(_name: str, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def convolve(
    agreement: Agreement[Convolution],
    overlaps: bool,
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    fill: Fill = _returned,
) -> tuple[torch.Tensor, GradientNeeds]:
    """Local output, and what any rank needs, of the convolution that the ranks are about to agree on.

    Where it ``overlaps``, it starts on the operation that this rank guesses.
    """
    weight, bias = weights["weight"], weights.get("bias")
    with no_autocast():
        if overlaps:
            call = _Call(agreement, fill)
            y: torch.Tensor = _Overlapped.apply(x, weight, bias, anchor(True), call)  # type: ignore[no-untyped-call]
            operation, needs = call.operation, call.needs
        else:
            operation, needs = agreement.settle()
            y = operation.gathered(needs, x, weight, bias)
    return operation.scatter(needs, y), needs


class _Call:
    # What goes into the operation of autograd beside tensors, and what comes out.
    operation: Convolution
    needs: GradientNeeds

    def __init__(self, agreement: Agreement[Convolution], fill: Fill) -> None:
        self.agreement, self.fill = agreement, fill


class _Overlapped(torch.autograd.Function):
    """The schedule: the halo travels while local data are convolved, in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        call: _Call,
    ) -> torch.Tensor:
        """Start the halo, convolve local data, wait, convolve remote strips, fuse."""
        guess = call.agreement.guess
        started = None if guess is None else _begin(guess, x, weight, bias)
        call.operation, call.needs = operation, needs = call.agreement.settle()
        if started is None or operation is not guess:
            started = _begin(operation, x, weight, bias)
        epoch, y = started
        phase, block = operation.phases(), operation.block(weight)
        with phase("wait"):
            strips = operation.receive(epoch)
        for strip, data in zip(operation.parts.strips, strips, strict=True):
            with phase("remote"):
                part = strip.convolve(data, block)
            with phase("fuse"):
                y[strip.place] += part
        if not any(ctx.needs_input_grad[:3]) and not needs.any:
            ctx.mark_non_differentiable(y)
        ctx.operation, ctx.fill, ctx.needs_halo = operation, call.fill, needs.input
        ctx.machine = operation.site.machine
        ctx.save_for_backward(x, weight, bias, *strips)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Start the strips' gradients on their way, local gradients, wait, fuse."""
        operation: Convolution = ctx.operation
        x, weight, bias, *strips = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        phase, parts, block = operation.phases(backward=True), operation.parts, operation.block(weight)
        with phase("remote"):
            needs = ctx.needs_halo, needs_weight
            rim = [
                strip.convolve_adjoint(gradient[strip.place], data, block, needs)
                for strip, data in zip(parts.strips, strips, strict=True)
            ]
        epoch = 0
        if ctx.needs_halo:
            with phase("start"):
                epoch = operation.start_adjoint([edge for edge, _ in rim])
        d_x = d_weight = d_bias = None
        with phase("local"):
            if parts.core is not None:
                own = gradient[parts.core.place]
                d_x, d_weight = parts.core.convolve_adjoint(own, x, block, (needs_x, needs_weight))
            if needs_bias:
                d_bias = operation.fill_bias(bias, gradient, ctx.fill)
        if needs_weight:
            with phase("fuse"):
                d_weight = operation.fill_weight(weight, d_weight, [taps for _, taps in rim], ctx.fill)
        if ctx.needs_halo:
            d_x = operation.add_adjoint(torch.zeros_like(x) if d_x is None else d_x, epoch)
        return d_x if needs_x else None, d_weight, d_bias, None, None


def _begin(
    operation: Convolution, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[int, torch.Tensor]:
    # Epoch of the halo that is on its way, and what local data gives meanwhile.
    phase = operation.phases()
    with phase("start"):
        epoch = operation.start(x)
    with phase("local"):
        return epoch, operation.local(x, weight, bias)
