"""Movements of tensors between ranks, as one pair of autograd operations."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import PartitionError, ProtocolError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.agreement import Facts, Plans, common_dtype
from distdl_rma.layers.autograd import anchor, first_derivative, tells_peers
from distdl_rma.layers.tensors import as_tensor, as_words, numpy_dtype, sum_dtype, zero_volume_tensor
from distdl_rma.machine import Machine
from distdl_rma.segments.channel import Channel

__all__ = ["Flight", "Movement", "Repartition", "broadcast"]


class Flight:
    """One movement under way: made by ``Movement.start``, given to ``Movement.wait``."""

    def __init__(self, movement: Movement, shape: torch.Size) -> None:
        self.movement = movement
        self.shape = shape
        self.token = torch.empty(0)
        self._sent: tuple[torch.Tensor, int] | None = None

    def depart(self, channel: Channel, x: torch.Tensor) -> None:
        """Start a channel on ``x``, the local shard that goes in."""
        own = channel.exchange.own
        x = x.detach().to(self.movement.dtype)
        x = x.reshape(own.shape) if own.empty else x
        self._sent = x, channel.start(channel.cut(as_words(x)))

    def arrive(self, channel: Channel) -> torch.Tensor:
        """Receive what the channel was started for."""
        if self._sent is None:
            raise ProtocolError(f"{channel.name!r}: wait without a start")
        (x, epoch), self._sent = self._sent, None
        return collect(channel, x, epoch)


def collect(channel: Channel, x: torch.Tensor, epoch: int) -> torch.Tensor:
    """Receive an epoch into a new tensor: own pieces first, then the others' in plan order; blocking.

    Elements that several ranks own are summed, short types in a longer one with one rounding at the end.
    """
    exchange, dtype = channel.exchange, x.dtype
    need, own = exchange.need, exchange.own
    wide = dtype if exchange.disjoint else sum_dtype(dtype)
    y = (torch.empty if exchange.complete else torch.zeros)(need.shape, dtype=wide)
    first = True
    for piece in exchange.local:
        _add(y, piece.target.slices(need), x[piece.box.slices(own)], exchange.disjoint or first)
        first = False
    for piece, words in channel.receive(epoch):
        _add(y, piece.box.slices(need), as_tensor(words, dtype), exchange.disjoint or first)
        first = False
    return y if wide == dtype else y.to(dtype)


def _add(y: torch.Tensor, place: tuple[slice, ...], part: torch.Tensor, fresh: bool) -> None:
    # What is still zero is overwritten: one pass over the memory less.
    target = y[place]
    if fresh:
        target.copy_(part)
    else:
        target += part if part.dtype == y.dtype else part.to(y.dtype)


class Movement:
    """An exchange and its adjoint: ``start`` and ``wait``, in both directions of autograd.

    Starting and waiting are two autograd operations, each the adjoint of the other: a forward ``start,
    compute, wait`` becomes a backward ``start^T, compute^T, wait^T`` with the same overlap.

    Parameters
    ----------
    machine
        The machine.
    exchange
        This rank's part; shapes include all tensor dimensions.
    dtype
        Type of the elements.
    name
        For messages.
    """

    def __init__(self, machine: Machine, exchange: Exchange, dtype: torch.dtype, name: str) -> None:
        kind = numpy_dtype(dtype, name)
        self.machine, self.name, self.dtype = machine, name, dtype
        self.forward = Channel(machine.segments, exchange, kind, name)
        self.adjoint = Channel(machine.segments, exchange.T, kind, f"{name} (adjoint)")
        # The last graph that still needs the adjoint keeps the memory, whoever let go of the rest.
        self._finalizer = weakref.finalize(self, _close_both, self.forward, self.adjoint)

    def start(self, x: torch.Tensor, needs_grad: bool = False) -> Flight:
        """Put the pieces of ``x`` on their way; does not wait for the transfer.

        Parameters
        ----------
        x
            Local shard of shape ``exchange.own.shape``, or any tensor without elements if that is empty.
            It must not change until ``wait``.
        needs_grad
            Whether some rank needs a gradient: then every rank takes part in the backward.
        """
        flight = Flight(self, x.shape)
        flight.token = _Start.apply(x, anchor(needs_grad), flight)  # type: ignore[no-untyped-call]
        return flight

    def wait(self, flight: Flight) -> torch.Tensor:
        """Local result of shape ``exchange.need.shape``, in memory of its own; blocking."""
        y: torch.Tensor = _Wait.apply(flight.token, flight)  # type: ignore[no-untyped-call]
        return y

    def __call__(self, x: torch.Tensor, needs_grad: bool = False) -> torch.Tensor:
        """Start and wait."""
        return self.wait(self.start(x, needs_grad))

    def void(self) -> None:
        """Give up a forward that some ranks may have started; on all ranks alike."""
        self.forward.void()

    def close(self) -> None:
        """Give the memory back when no peer writes to it any more; local."""
        self._finalizer()


def _close_both(forward: Channel, adjoint: Channel) -> None:
    forward.close()
    adjoint.close()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _anchor: torch.Tensor | None, flight: Flight) -> torch.Tensor:
        ctx.flight, ctx.machine = flight, flight.movement.machine
        flight.depart(flight.movement.forward, x)
        return x.new_empty(0)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, _token: torch.Tensor) -> tuple[Any, ...]:
        flight = ctx.flight
        return flight.arrive(flight.movement.adjoint).reshape(flight.shape), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _token: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight, ctx.machine = flight, flight.movement.machine
        return flight.arrive(flight.movement.forward)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.flight.depart(ctx.flight.movement.adjoint, gradient)
        return gradient.new_empty(0), None


def broadcast(
    machine: Machine, ranks: Sequence[int], shape: Sequence[int], dtype: torch.dtype, name: str
) -> Movement:
    """Movement of a flattened tensor of the given shape from the first of some ranks to all of them."""
    flat = (prod(shape),)
    everyone = Partition(tuple(ranks), (len(ranks),), machine.rank)
    root = Partition(tuple(ranks[:1]), (1,), machine.rank)
    exchange = Exchange(
        machine.rank, Decomposition.replicated(root, flat), Decomposition.replicated(everyone, flat)
    )
    return Movement(machine, exchange, dtype, name)


class Repartition(nn.Module):
    """Move a tensor from one Cartesian partition to another; the result is balanced.

    Collective to construct over the machine; a call involves the ranks of both partitions. The local
    input may have any size that forms a grid with the others; the local output is the balanced shard.

    Parameters
    ----------
    P_x, P_y
        Input and output partition, with as many dimensions as the tensor.
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).
    name
        For messages.

    Raises
    ------
    PartitionError
        If the partitions differ in their number of dimensions.

    Notes
    -----
    Repartition document; requirement B5.
    """

    def __init__(
        self, P_x: Partition, P_y: Partition, preserve_batch: bool = True, *, name: str | None = None
    ) -> None:
        super().__init__()
        if P_x.dim != P_y.dim:
            raise PartitionError(
                f"P_x has {P_x.dim} dimensions {P_x.shape} but P_y has {P_y.dim} {P_y.shape}"
            )
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch
        self.machine = Machine.of(P_x)
        self.name = name or self.machine.layer_name("Repartition")
        members = (*P_x.ranks, *(rank for rank in P_y.ranks if rank not in P_x.ranks))
        self._member = self.machine.rank in members
        self._plans = Plans(self.machine, members, self.name, self._plan) if self._member else None

    @tells_peers
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Move ``x``, the local shard on P_x or a tensor without elements elsewhere."""
        if self._plans is None:
            return x.clone()
        movement, needs = self._plans.agree(x)
        y = movement(x if self.P_x.active else x.new_empty(0), needs.input)
        if self.P_y.active:
            return y
        batch = x.shape[0] if self.preserve_batch and x.dim() else None
        empty = zero_volume_tensor(batch, y.dtype)
        # Added to the empty result, so that a backward reaches the movement on this rank too.
        return empty + y.sum() if y.requires_grad else empty

    def _plan(self, facts: dict[int, Facts]) -> Movement:
        for rank, fact in facts.items():
            if rank not in self.P_x and 0 not in fact.shape:
                raise ShapeError(f"rank {rank} is not in P_x but passes a tensor of shape {fact.shape}")
        given = {rank: facts[rank] for rank in self.P_x.ranks}
        dtype = common_dtype(given)
        source = Decomposition.from_local_shapes(self.P_x, {r: fact.shape for r, fact in given.items()})
        target = Decomposition.balanced(self.P_y, source.shape)
        exchange = Exchange(self.machine.rank, source, target)
        return Movement(self.machine, exchange, dtype, self.name)
