"""The halo exchange of sliding windows: what a rank's outputs read of other ranks' inputs."""

from __future__ import annotations

import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.split import Balanced
from distdl_rma.geometry.stencil import Stencil
from distdl_rma.machine import Machine
from distdl_rma.ops.conv.own_and_halo import OwnAndHalo
from distdl_rma.ops.movement import Movement
from distdl_rma.ops.tensors import as_tensor, as_words


class HaloPlan:
    """What one global input shape means for a rank that computes sliding windows.

    The outputs are balanced over the ranks that hold the input; each rank needs what its outputs read.

    Parameters
    ----------
    machine
        The machine.
    stencil
        The sliding windows, one per spatial dimension.
    source
        Who owns which part of the input (batch, channel, *spatial).
    dtype
        Type of the elements.
    name
        Name of the layer.
    """

    def __init__(
        self, machine: Machine, stencil: Stencil, source: Decomposition, dtype: torch.dtype, name: str
    ) -> None:
        extents = source.shape[2:]
        outputs = stencil.outputs(extents)
        y_splits = [Balanced(n, p) for n, p in zip(outputs, source.partition.shape[2:], strict=True)]
        reads = dict(enumerate(stencil.splits(y_splits, extents), 2))
        rank = machine.rank
        exchange = Exchange(rank, source, source.with_splits(reads))
        self.halo = Movement(machine, exchange, dtype, name)
        index = source.partition.index_of(rank)[2:]
        y_box = Box(tuple(split.interval(i) for split, i in zip(y_splits, index, strict=True)))
        self.tile = OwnAndHalo(stencil, Box.of_shape(extents), Box(source.box(rank).bounds[2:]), y_box)
        # A halo arrives where the adjoint sends from: the same landings serve both directions.
        self.landings = [self.tile.landing(piece) for piece in self.halo.forward.receives]

    def connect(self) -> None:
        """Exchange addresses with the neighbours; blocking."""
        self.halo.connect()

    def void(self) -> None:
        """Give up a halo exchange that some ranks may have started."""
        self.halo.void()

    def start(self, x: torch.Tensor) -> int:
        """Put this rank's edges into the neighbours' slots."""
        channel = self.halo.forward
        return channel.start(channel.cut(as_words(x)))

    def strips(self, x: torch.Tensor, epoch: int) -> list[torch.Tensor]:
        """Remote data, one block per strip, zero where the domain ends; blocking."""
        blocks = [x.new_zeros((*x.shape[:2], *strip.region.shape)) for strip in self.tile.strips]
        arrays = [as_words(block) for block in blocks]
        received = self.halo.forward.receive(epoch)
        for (_, view), landing in zip(received, self.landings, strict=True):
            for number, there, here in landing:
                arrays[number][there] = view[here]
        return blocks

    def start_adjoint(self, gradients: list[torch.Tensor | None], x: torch.Tensor) -> int:
        """Put the gradients of the strips on their way back to the owners of the data."""
        channel = self.halo.adjoint
        parts = []
        for piece, landing in zip(channel.sends, self.landings, strict=True):
            part = x.new_zeros(piece.box.shape)
            for number, there, here in landing:
                block = gradients[number]
                if block is not None:
                    part[here] = block[there]
            parts.append(as_words(part))
        return channel.start(parts)

    def add_adjoint(self, gradient: torch.Tensor, epoch: int) -> None:
        """Add what the readers of this rank's data send back; blocking."""
        channel, trace, name = self.halo.adjoint, self.halo.machine.trace, self.halo.name
        for piece, words in trace.awaited(channel.receive(epoch), name, backward=True):
            with trace.span("fuse", name, backward=True):
                gradient[piece.box.slices(channel.exchange.need)] += as_tensor(words, gradient.dtype)
