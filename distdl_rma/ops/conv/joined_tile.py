"""A rank's convolution in one: own data and what windows read beyond them in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from distdl_rma.dtypes import as_words
from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.halo import Stencil
from distdl_rma.ops.conv.kernels import ConvolutionArguments, convolution, convolution_adjoint
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo, Slices
from distdl_rma.ops.core.autograd import GradientNeeds, OperatorFunction, anchor, first_derivative
from distdl_rma.ops.core.movement import CallSite, Movement
from distdl_rma.ops.core.result_memory import SMALLEST_NBYTES, result
from distdl_rma.ops.core.tensors import as_tensor


@dataclass(frozen=True)
class JoinedTile:
    """A block of data that outputs read, some of its own data among it; boxes have batch, channel and space.

    Beyond the domain is the padding, zeros: torch's own along dimensions where it is as wide on both sides,
    others are ``held`` beside the data.
    """

    parts: OwnAndHalo

    @cached_property
    def region(self) -> Box:
        """What is read, padding included."""
        return self.parts.stencil.reads(self.parts.outputs)

    @cached_property
    def inside(self) -> Box:
        """What is read of the domain."""
        return self.region & self.parts.domain

    @cached_property
    def padding(self) -> tuple[int | None, ...]:
        """Torch's own padding per dimension; None where zeros are held."""
        found: list[int | None] = []
        for window, (low, high), (start, _), (first, last) in zip(
            self.parts.stencil.windows,
            self.inside.bounds,
            self.region.bounds,
            self.parts.outputs.bounds,
            strict=True,
        ):
            before = low - start
            most = (high - low + 2 * before - window.span) // window.stride + 1
            found.append(before if most == last - first else None)
        return tuple(found)

    @cached_property
    def held(self) -> Box:
        """What the tensor has that is convolved."""
        both = zip(self.padding, self.inside.bounds, self.region.bounds, strict=True)
        return Box(tuple(region if padding is None else inside for padding, inside, region in both))

    @cached_property
    def place(self) -> Slices:
        """Slices of own data in it."""
        return (self.parts.own & self.inside).slices(self.held)

    @cached_property
    def read(self) -> Slices | None:
        """Slices of own data that are read; None if all are."""
        read = self.parts.own & self.inside
        return None if read == self.parts.own else read.slices(self.parts.own)

    @cached_property
    def zeros(self) -> list[Slices]:
        """Slices of the zeros beside the data in it."""
        found, held = [], self.held
        for d, ((low, high), (start, stop)) in enumerate(zip(self.inside.bounds, held.bounds, strict=True)):
            sides = (held.replace(d, start, low), held.replace(d, high, stop))
            found += [side.slices(held) for side in sides if not side.empty]
        return found

    @cached_property
    def steps(self) -> ConvolutionArguments:
        """What torch's convolution of it wants to know."""
        steps = ConvolutionArguments.of(Stencil(self.parts.stencil.windows[LEADING:]), self.parts.groups)
        return steps._replace(padding=tuple(n or 0 for n in self.padding[LEADING:]))

    def hold(self, x: Tensor, tensor: Tensor) -> None:
        """Put own data into the tensor that is convolved, and zeros beyond the domain."""
        tensor[self.place] = x if self.read is None else x[self.read]
        for zeros in self.zeros:
            tensor[zeros] = 0

    def own_part(self, tensor: Tensor) -> Tensor:
        """Own part of a tensor of the shape that is held, zero where it is not read."""
        part = tensor[self.place]
        if self.read is None:
            return part
        whole = part.new_zeros(self.parts.own.shape)
        whole[self.read] = part
        return whole


class JoinedConvolution:
    """Convolutions of the data of a tile, whose halo a movement brings."""

    def __init__(self, site: CallSite, tile: JoinedTile, halo: Movement) -> None:
        self.site, self.tile, self.halo = site, tile, halo
        # Small ones are kept for the backward. Of others it has what goes in anyway, and joins it again.
        self.kept = tile.held.volume * halo.dtype.itemsize < SMALLEST_NBYTES
        # A halo arrives where the adjoint sends from.
        self.remote = [piece.box.slices(tile.held) for piece in halo.forward.receives]
        self.edges = [piece.box.slices(tile.parts.own) for piece in halo.forward.sends]

    def __call__(self, needs: GradientNeeds, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Outputs of the tile; blocking."""
        root = None if weight.requires_grad else anchor(True)
        y: Tensor = _Schedule.apply(x, weight, bias, root, self, needs)
        return y


class _Schedule(OperatorFunction):
    """The schedule: own data are copied while the halo travels; then one convolution of both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        _anchor: Any,
        joined: JoinedConvolution,
        needs: GradientNeeds,
    ) -> Tensor:
        """Start the halo, copy local data, wait, convolve."""
        (machine, name), tile, channel = joined.site, joined.tile, joined.halo.forward
        mark = machine.trace.marks(name)
        mark("start")
        epoch = channel.start(channel.cut(as_words(x)))
        mark("local")
        data = result(tile.held.shape, joined.halo.dtype)
        tile.hold(x, data)
        mark("wait")
        words = as_words(data)
        for (_, view), place in zip(channel.receive(epoch), joined.remote, strict=True):
            words[place] = view
        mark("local")
        y = convolution(data, weight, bias, tile.steps)
        mark("")
        if not any(ctx.needs_input_grad[:3]) and not needs.any:
            ctx.mark_non_differentiable(y)
        ctx.joined, ctx.machine, ctx.needs_halo = joined, machine, needs.input
        if joined.kept:
            ctx.save_for_backward(weight, data)
        elif needs.any:
            ctx.save_for_backward(weight, x, *[data[place].clone() for place in joined.remote])
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """All gradients at once, those of the halo on their way, wait, fuse."""
        joined, (weight, data, *halo) = ctx.joined, ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        tile, channel = joined.tile, joined.halo.adjoint if ctx.needs_halo else None
        mark = ctx.machine.trace.marks(joined.site.name, backward=True)
        mark("local")
        if not joined.kept:
            x, data = data, result(tile.held.shape, joined.halo.dtype)
            tile.hold(x, data)
            for place, part in zip(joined.remote, halo, strict=True):
                data[place] = part
        # That of a bias alone is a sum, and no pass over the data.
        needs = ctx.needs_halo, needs_weight, needs_weight and needs_bias
        inner, d_weight, d_bias = convolution_adjoint(gradient, data, weight, tile.steps, needs)
        if needs_bias and d_bias is None:
            d_bias = gradient.sum((0, *range(LEADING, gradient.dim())))
        if channel is not None and inner is not None:
            mark("start")
            words = as_words(inner)
            epoch = channel.start([words[place] for place in joined.remote])
            mark("wait")
            # Nobody else has this tensor: what comes back is added in its place.
            inner = tile.own_part(inner)
            for (_, view), place in zip(channel.receive(epoch), joined.edges, strict=True):
                inner[place].add_(as_tensor(view, inner.dtype))
        mark("")
        return inner if needs_x else None, d_weight, d_bias, None, None, None


def joined(site: CallSite, parts: OwnAndHalo, halo: Movement) -> JoinedConvolution | None:
    """The convolution of a rank in one, if it computes anything of its own data; else None.

    Ranks may differ in that: what travels is the same as where core and strips are convolved apart.
    """
    tile = JoinedTile(parts)
    works = not parts.outputs.empty and not (parts.own & tile.inside).empty
    return JoinedConvolution(site, tile, halo) if works else None
