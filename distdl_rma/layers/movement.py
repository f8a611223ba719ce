"""Movements of tensors between ranks, as one pair of autograd operations."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain, islice
from math import prod
from typing import Any

import torch

from distdl_rma.errors import ProtocolError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.autograd import anchor, first_derivative
from distdl_rma.layers.memory import result
from distdl_rma.layers.tensors import as_tensor, as_words, numpy_dtype, sum_dtype
from distdl_rma.machine import Machine
from distdl_rma.segments.channel import Channel

__all__ = ["Flight", "Movement", "broadcast"]


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
        dtype = self.movement.dtype
        # What has no elements may come in any shape and type.
        x = torch.empty(own.shape, dtype=dtype) if own.empty else x.detach().to(dtype)
        self._sent = x, channel.start(channel.cut(as_words(x)))

    def arrive(self, channel: Channel) -> torch.Tensor:
        """Receive what the channel was started for."""
        if self._sent is None:
            raise ProtocolError(f"{channel.name!r}: wait without a start")
        (x, epoch), self._sent = self._sent, None
        return collect(channel, x, epoch)


def collect(channel: Channel, x: torch.Tensor, epoch: int) -> torch.Tensor:
    """Receive an epoch into a new tensor, blocking.

    Elements that several ranks own are summed, short types in a longer one with one rounding at the end.
    """
    exchange, dtype = channel.exchange, x.dtype
    need, own = exchange.need, exchange.own
    wide = dtype if exchange.disjoint else sum_dtype(dtype)
    y = result(need.shape, wide)
    mine = ((piece.target, x[piece.box.slices(own)]) for piece in exchange.local)
    theirs = ((piece.box, as_tensor(words, dtype)) for piece, words in channel.receive(epoch))
    # Sums in the order of the partition: alike on all ranks. Without sums what is here goes first.
    before = 0 if exchange.disjoint else exchange.before_local
    fresh = True
    for box, part in chain(islice(theirs, before), mine, theirs):
        if fresh and not exchange.complete and box != need:
            y.zero_()
        _add(y, box.slices(need), part, exchange.disjoint or fresh)
        fresh = False
    if fresh:
        y.zero_()
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
        ctx.flight, ctx.machine, ctx.dtype = flight, flight.movement.machine, x.dtype
        flight.depart(flight.movement.forward, x)
        # Of the type that moves: x itself may have come in any type, if without elements.
        return x.new_empty(0, dtype=flight.movement.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, _token: torch.Tensor) -> tuple[Any, ...]:
        flight = ctx.flight
        gradient = flight.arrive(flight.movement.adjoint).reshape(flight.shape)
        if not gradient.numel():
            # What has no elements came in any type; torch does not turn complex gradients into others.
            gradient = gradient.new_empty(flight.shape, dtype=ctx.dtype)
        return gradient, None, None


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
