"""The arithmetic of a split convolution: patches, and the schedule that overlaps them with puts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.stencil import Stencil
from distdl_rma.machine import Machine
from distdl_rma.ops.autograd import GradientNeeds, first_derivative
from distdl_rma.ops.conv.halo_plan import HaloPlan
from distdl_rma.ops.conv.kernels import ConvolutionSteps, convolution, convolution_adjoint
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo, Patch


@dataclass(frozen=True)
class LocalConvolution:
    """Convolution of single patches by torch's own kernels, forward and adjoint, in any dimension.

    Parameters
    ----------
    stencil
        The sliding windows of the whole layer.
    groups
        As in torch.
    """

    stencil: Stencil
    groups: int

    @cached_property
    def _unpadded(self) -> ConvolutionSteps:
        windows = self.stencil.windows
        stride, dilation = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
        return ConvolutionSteps(stride, (0,) * len(windows), dilation, self.groups)

    def _padded(self, padding: tuple[int, ...]) -> ConvolutionSteps:
        return ConvolutionSteps(self._unpadded.stride, padding, self._unpadded.dilation, self.groups)

    def _operand(self, patch: Patch, block: torch.Tensor, data: Box) -> tuple[torch.Tensor, tuple[int, ...]]:
        # Tensor to convolve and its symmetric padding, exact for the outputs of the patch.
        if data != patch.region:
            block = block[patch.crop(data)]
            native = patch.native_padding(self.stencil)
            if native is not None:
                return block, native
            block = F.pad(block, [n for pair in reversed(patch.margins) for n in pair])
        return block, (0,) * len(self.stencil.windows)

    def valid(
        self,
        block: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        groups: int,
        transposed: bool = False,
    ) -> torch.Tensor:
        """Convolve a block without any padding; under autograd, which ``convolve`` is not made for."""
        return convolution(block, weight, bias, self._unpadded._replace(groups=groups, transposed=transposed))

    def convolve(
        self, patch: Patch, block: torch.Tensor, data: Box, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Outputs of a patch from a block that holds the box ``data``."""
        operand, padding = self._operand(patch, block, data)
        return convolution(operand, weight[patch.weight], bias, self._padded(padding))

    def convolve_adjoint(
        self,
        patch: Patch,
        gradient: torch.Tensor,
        block: torch.Tensor,
        data: Box,
        weight: torch.Tensor,
        needs: tuple[bool, bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of a patch's block, in the shape of the block, and of its part of the weight."""
        operand, padding = self._operand(patch, block, data)
        steps = self._padded(padding)
        inner, taps = convolution_adjoint(gradient, operand, weight[patch.weight], steps, needs)
        if inner is None or data == patch.region:
            return inner, taps
        if inner.shape[2:] == patch.region.shape:
            inside = data & patch.region
            place: tuple[Any, ...] = (..., *inside.slices(patch.region))
            inner = inner[place]
        if inner.shape == block.shape:
            return inner, taps
        outer = torch.zeros_like(block)
        outer[patch.crop(data)] = inner
        return outer, taps


class GradientPlace(Protocol):
    """Where the gradient of a parameter is wanted."""

    def fill(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient in the place that it is wanted."""


class HaloAgreement(Protocol):
    """What the ranks agree on."""

    def settle(self) -> tuple[HaloPlan, GradientNeeds]:
        """Plan that holds, and what any rank needs the gradient of; blocking."""


class Layer(Protocol):
    """What the schedule needs of a layer."""

    machine: Machine
    name: str
    local: LocalConvolution
    replica: GradientPlace
    plans: HaloAgreement
    out_channels: int


class SplitConvolution(torch.autograd.Function):
    """The fused schedule of a distributed convolution; equal to the composed form, measurably faster."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        layer: Layer,
        guess: HaloPlan | None,
    ) -> torch.Tensor:
        """Start the halo, convolve local data, wait, convolve remote strips, fuse."""
        plans, local = layer.plans, layer.local
        phase = layer.machine.trace.phases(layer.name)
        started = None if guess is None else _begin(layer, guess, phase, x, weight, bias)
        plan, needs = plans.settle()
        if started is None or plan is not guess:
            started = _begin(layer, plan, phase, x, weight, bias)
        epoch, y = started
        with phase("wait"):
            strips = plan.strips(x, epoch)
        for patch, block in zip(plan.tile.strips, strips, strict=True):
            with phase("remote"):
                part = local.convolve(patch, block, patch.region, weight, None)
            with phase("fuse"):
                y[patch.place(plan.tile.outputs)] += part
        if not any(ctx.needs_input_grad[:3]) and not needs.any:
            ctx.mark_non_differentiable(y)
        ctx.layer, ctx.plan, ctx.needs_halo = layer, plan, needs.input
        ctx.has_bias, ctx.machine = bias is not None, layer.machine
        ctx.save_for_backward(x, weight, *strips)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Start the strips' gradients on their way, local gradients, wait, fuse."""
        layer: Layer = ctx.layer
        plan, tile = ctx.plan, ctx.plan.tile
        x, weight, *strips = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        phase = layer.machine.trace.phases(layer.name, backward=True)

        def adjoint(
            patch: Patch, block: torch.Tensor, data: Box, needs: tuple[bool, bool]
        ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            part = gradient[patch.place(tile.outputs)]
            return layer.local.convolve_adjoint(patch, part, block, data, weight, needs)

        with phase("remote"):
            rim = [
                adjoint(patch, block, patch.region, (ctx.needs_halo, needs_weight))
                for patch, block in zip(tile.strips, strips, strict=True)
            ]
        epoch = 0
        if ctx.needs_halo:
            with phase("start"):
                epoch = plan.start_adjoint([block for block, _ in rim], x)
        d_x = d_weight = d_bias = None
        with phase("local"):
            if tile.core is not None:
                d_x, d_weight = adjoint(tile.core, x, tile.own, (needs_x, needs_weight))
            if ctx.has_bias and ctx.needs_input_grad[2]:
                d_bias = layer.replica.fill("bias", gradient.sum((0, *range(2, gradient.dim()))))
        if needs_weight:
            with phase("fuse"):
                d_weight = _fuse(layer, weight, tile, d_weight, [taps for _, taps in rim])
        if ctx.needs_halo:
            d_x = torch.zeros_like(x) if d_x is None else d_x
            plan.add_adjoint(d_x, epoch)
        return d_x if needs_x else None, d_weight, d_bias, None, None, None


def _begin(
    layer: Layer,
    plan: HaloPlan,
    phase: Callable[[str], AbstractContextManager[object]],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[int, torch.Tensor]:
    # Epoch of the halo that is on its way, and what local data gives meanwhile.
    with phase("start"):
        epoch = plan.start(x)
    with phase("local"):
        return epoch, _core(layer, plan.tile, x, weight, bias)


def _core(
    layer: Layer, tile: OwnAndHalo, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # Full-speed local convolution, zeros where the neighbours' data would be.
    core = tile.core
    if core is not None and core.outputs == tile.outputs:
        return layer.local.convolve(core, x, tile.own, weight, bias)
    y = x.new_zeros((x.shape[0], layer.out_channels, *tile.outputs.shape))
    if core is not None:
        y[core.place(tile.outputs)] = layer.local.convolve(core, x, tile.own, weight, None)
    return y if bias is None else y.add_(bias.view(-1, *(1,) * (x.dim() - 2)))


def _fuse(
    layer: Layer,
    weight: torch.Tensor,
    tile: OwnAndHalo,
    core: torch.Tensor | None,
    strips: list[torch.Tensor | None],
) -> torch.Tensor:
    # Weight gradient of local and remote data, fused in the segment where there is a place.
    if core is not None and core.shape == weight.shape:
        whole = core
    else:
        whole = torch.zeros_like(weight)
        if tile.core is not None and core is not None:
            whole[tile.core.weight] = core
    total = layer.replica.fill("weight", whole)
    for patch, part in zip(tile.strips, strips, strict=True):
        if part is not None:
            total[patch.weight] += part
    return total
