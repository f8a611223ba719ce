"""How a convolution of collected data falls apart: what a rank has itself, and what comes from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.stencil import Stencil
from distdl_rma.ops.conv.own_and_halo import Patch
from distdl_rma.ops.conv.split_convolution import LocalConvolution
from distdl_rma.ops.uncompiled import uncompiled


@dataclass(frozen=True)
class OwnPart:
    """A box of inputs (batch, channel, *spatial), and what it adds to the outputs that read it.

    Parameters
    ----------
    data
        The inputs.
    patch
        Their part in space.
    """

    data: Box
    patch: Patch

    @classmethod
    def of(cls, stencil: Stencil, data: Box, outputs: Box) -> OwnPart | None:
        """What some inputs add to a box of outputs; None if that is nothing."""
        if data.empty or outputs.empty:
            return None
        patch = Patch.of(stencil, _space(data), _space(outputs))
        return None if patch is None else cls(data, patch)

    def convolve(
        self, local: LocalConvolution, x: torch.Tensor, held: Box, weight: torch.Tensor, first: int
    ) -> torch.Tensor:
        """What the part adds, from a tensor that holds the box ``held``; differentiable.

        Parameters
        ----------
        local
            The arithmetic.
        x, held
            The tensor, and its box.
        weight, first
            Block of the weight, and the first input channel that it is for.
        """
        low, high = self.data.bounds[1]
        block = x[self.data.slices(held)]
        return local.convolve(
            self.patch, block, _space(self.data), weight[:, low - first : high - first], None
        )

    def place(self, outputs: Box) -> tuple[slice, ...]:
        """Slices of what it adds to in a tensor that holds the box ``outputs``."""
        (begin, end), origin = self.data.bounds[0], outputs.bounds[0][0]
        space = self.patch.outputs.slices(_space(outputs))
        return (slice(begin - origin, end - origin), slice(None), *space)


class OwnAndOthers:
    """The inputs that a rank's outputs read, in disjoint boxes: its own, and those that others have.

    Parameters
    ----------
    stencil
        The sliding windows.
    own
        Inputs of this rank.
    reads
        Inputs that its outputs read; nothing is beyond ``domain``.
    domain
        All inputs.
    outputs
        Outputs of this rank; of the input's batch, any channels.
    """

    def __init__(self, stencil: Stencil, own: Box, reads: Box, domain: Box, outputs: Box) -> None:
        self.own, self.reads, self.outputs = own, reads, outputs
        rest = reads & domain
        mine = own & rest
        local = OwnPart.of(stencil, mine, outputs)
        self._own = () if local is None else (local,)
        sides = []
        for d, (low, high) in enumerate(mine.bounds if self._own else ()):
            start, stop = rest.bounds[d]
            sides += [rest.replace(d, start, low), rest.replace(d, high, stop)]
            rest = rest.replace(d, low, high)
        found = (OwnPart.of(stencil, side, outputs) for side in sides)
        self._others = tuple(part for part in found if part is not None)

    @property
    def both(self) -> bool:
        """Whether there is something to do before the others' data are there, and something after."""
        return bool(self._own) and bool(self._others)

    def of_own(
        self, local: LocalConvolution, x: torch.Tensor, weight: torch.Tensor, first: int
    ) -> list[torch.Tensor]:
        """What this rank's shard adds, as of :meth:`OwnPart.convolve`."""
        return [part.convolve(local, x, self.own, weight, first) for part in self._own]

    def of_others(
        self, local: LocalConvolution, collected: torch.Tensor, weight: torch.Tensor, first: int
    ) -> list[torch.Tensor]:
        """What all that was collected adds beside that."""
        return [part.convolve(local, collected, self.reads, weight, first) for part in self._others]

    def fuse(self, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of what the own shard and the others' data add."""
        shape = (self.outputs.shape[0], found[0].shape[1], *self.outputs.shape[LEADING:])
        places = tuple(part.place(self.outputs) for part in (*self._own, *self._others))
        y: torch.Tensor = _Fuse.apply(shape, places, *found)  # type: ignore[no-untyped-call]
        return y


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], places: tuple[tuple[slice, ...], ...], *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.places = places
        y = parts[0].new_zeros(shape)
        for place, part in zip(places, parts, strict=True):
            y[place] += part
        return y

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *(gradient[place] for place in ctx.places)


def _space(box: Box) -> Box:
    return Box(box.bounds[LEADING:])
