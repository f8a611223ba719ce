"""Movements of tensors between ranks, as one pair of autograd operations."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import torch

from distdl_rma.dtypes import as_words, sum_dtype, word_dtype
from distdl_rma.errors import ClosedError, ProtocolError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange, Piece, by_peer
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import OperatorFunction, anchor, first_derivative
from distdl_rma.ops.core.result_memory import landing, result
from distdl_rma.ops.core.tensors import as_tensor
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.lanes import SLOTS, in_steps

# Parts of a result, with where they belong: None for all of it, and for a part that is there already.
_Parts = Iterator[tuple[tuple[slice, ...] | None, torch.Tensor | None]]
# Less than so many bytes stay in the cache anyway.
_ECHOED_NBYTES = 1 << 20


class CallSite(NamedTuple):
    """A place in a program that calls an operator: whose memory it is, and what messages call it."""

    machine: Machine
    name: str


class Request:
    """One movement under way: made by ``Movement.start``, given to ``Movement.wait``."""

    def __init__(self, movement: Movement, x: torch.Tensor) -> None:
        self.movement, self.shape, self.dtype = movement, x.shape, x.dtype
        self.token: torch.Tensor | None = None
        self._sent: tuple[torch.Tensor, int] | None = None

    def depart(self, direction: OneWay, x: torch.Tensor) -> None:
        """Start on ``x``, the local shard that goes in."""
        self._sent = direction.depart(x)

    def arrive(self, direction: OneWay) -> torch.Tensor:
        """Receive what was started."""
        if self._sent is None:
            raise ProtocolError(f"{direction.channel.name!r}: wait without a start")
        (x, epoch), self._sent = self._sent, None
        return direction.arrive(x, epoch)

    def gradient(self) -> torch.Tensor:
        """Gradient of what went in, in its shape."""
        gradient = self.arrive(self.movement.backwards).reshape(self.shape)
        # What has no elements came in any type; torch does not turn complex gradients into others.
        return gradient if gradient.numel() else gradient.new_empty(self.shape, dtype=self.dtype)


class OneWay:
    """A channel and where in the tensors its pieces lie, worked out once."""

    def __init__(self, machine: Machine, channel: Channel, dtype: torch.dtype, backward: bool) -> None:
        exchange = channel.exchange
        own, need = exchange.own, exchange.need
        self.channel, self.dtype, self.backward, self._trace = channel, dtype, backward, machine.trace
        # None where this rank owns something.
        self._nothing = torch.empty(own.shape, dtype=dtype) if own.empty else None
        self._shape = need.shape
        # Short types are summed in a longer one, with one rounding at the end.
        self._wide = dtype if exchange.disjoint else sum_dtype(dtype)
        self._disjoint = exchange.disjoint
        self._mine = [(piece.target.slices(need), piece.box.slices(own)) for piece in exchange.local]
        # None where a piece is all of the result.
        self._theirs = [None if piece.box == need else piece.box.slices(need) for piece in channel.receives]
        # What this rank keeps it may copy while that is sent: where those for the first peer are that.
        # Only where it receives nothing, so that the result is there before.
        self._echoes = [piece.box.slices(own) for piece in _sent_and_kept(channel)]
        self._echoed: dict[int, torch.Tensor] = {}
        # Sums in the order of the partition: alike on all ranks. Without sums what is here goes first.
        self._before = channel.count(0 if exchange.disjoint else exchange.before_local)
        first = [*channel.receives[: self._before], *exchange.local, *channel.receives][:1]
        self._zeroes = not exchange.complete and [piece.target for piece in first] != [need]
        # Pieces of each of several contributions that are all of the result; 0 if they are not.
        self._layers = 0
        if self._wide == dtype and (whole := _same_of_all(channel)):
            self._layers = len(whole)
            self._mine = [(box.slices(need), box.slices(own)) for box in whole if exchange.local]

    def depart(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Start on a local shard; return it as it moves, and the epoch."""
        # What has no elements may come in any shape and type.
        x = x.detach() if self._nothing is None else self._nothing
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        channel = self.channel
        mark = self._trace.marks(channel.name, self.backward)
        mark("start")
        parts = channel.cut(as_words(x))
        if self._echoes:
            y = result(self._shape, self.dtype)
            epoch = channel.start(self._echo(parts, y))
            self._echoed[epoch] = y
            # One that was given up is of no use any more.
            self._echoed.pop(epoch - SLOTS, None)
        else:
            epoch = channel.start(parts)
        mark("")
        return x, epoch

    def _echo(self, parts: Iterable[Any], y: torch.Tensor) -> Iterator[Any]:
        # Read twice in a row, each piece comes out of the cache the second time. By numpy: of memory that is
        # larger than a core's own cache torch's copy takes a tenth longer.
        kept = as_words(y)
        for part, where in zip_longest(parts, self._echoes):
            if where is not None:
                kept[where] = part
            yield part

    def arrive(self, x: torch.Tensor, epoch: int) -> torch.Tensor:
        """Receive an epoch into a new tensor, blocking. Elements that several ranks own are summed."""
        mark = self._trace.marks(self.channel.name, self.backward)
        mark("wait")
        y = self._arrive(x, epoch)
        mark("")
        return y

    def stream(self, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Move one local shard after another; yield what arrives, in order. Blocking.

        The next one travels while a result is used.
        """
        under_way: deque[tuple[torch.Tensor, int]] = deque()
        for part in parts:
            under_way.append(self.depart(part))
            if len(under_way) == 2:
                yield self.arrive(*under_way.popleft())
        while under_way:
            yield self.arrive(*under_way.popleft())

    def _arrive(self, x: torch.Tensor, epoch: int) -> torch.Tensor:
        echoed = self._echoed.pop(epoch, None)
        if echoed is not None:
            for _ in self._received(epoch):
                pass
            return echoed
        landed: Any = self.channel.take_result(epoch)
        y = result(self._shape, self._wide) if landed is None else landed
        local = ((target, x[source]) for target, source in self._mine)
        parts: _Parts = chain(islice(theirs := self._received(epoch), self._before), local, theirs)
        if self._layers:
            self._sum(parts, y)
            return y
        fresh = True
        for where, part in parts:
            if part is None:
                # It was put there by who sent it.
                fresh = False
                continue
            if fresh and self._zeroes:
                y.zero_()
            target = y if where is None else y[where]
            # What is still zero is overwritten: one pass over the memory less.
            if fresh or self._disjoint:
                target.copy_(part)
            else:
                target += part if part.dtype == self._wide else part.to(self._wide)
            fresh = False
        if fresh:
            y.zero_()
        return y if self._wide == self.dtype else y.to(self.dtype)

    def _sum(self, parts: Iterator[Any], y: torch.Tensor) -> None:
        # The first two in one pass over the memory. What has arrived stays in its slot until all has been
        # received: nobody acknowledges a slot of this epoch before.
        first = list(islice(parts, self._layers))
        for (where, one), (_, other) in zip(first, parts, strict=False):
            torch.add(one, other, out=y if where is None else y[where])
        for where, part in parts:
            target = y if where is None else y[where]
            target += part

    def _received(self, epoch: int) -> _Parts:
        received = zip(self._theirs, self.channel.landed, self.channel.receive(epoch), strict=True)
        for where, landed, (_, words) in received:
            yield where, None if landed else as_tensor(words, self.dtype)


class Movement:
    """An exchange and its adjoint: ``start`` and ``wait``, in both directions of autograd.

    Starting and waiting are two autograd operations, each the adjoint of the other: a forward ``start,
    compute, wait`` becomes a backward ``wait^T, compute^T, start^T`` with the same overlap.

    Construction is local, and allocates slots for one direction. Those of the adjoint are allocated by the
    first backward, or by ``connect``: what only moves forward never has any. The exchange is this rank's
    part, in all tensor dimensions; the name is for messages.
    """

    def __init__(self, machine: Machine, exchange: Exchange, dtype: torch.dtype, name: str) -> None:
        self.machine, self.name, self.dtype = machine, name, dtype
        self.forward = _channel(machine, exchange, dtype, name)
        self.forwards = OneWay(machine, self.forward, dtype, backward=False)
        self._made = [self.forward]
        # The last graph that still needs the adjoint keeps the memory, whoever let go of the rest.
        self._finalizer = weakref.finalize(self, _close_all, self._made)

    @cached_property
    def adjoint(self) -> Channel:
        """Channel of the adjoint movement; asking for it allocates its slots, once. Local."""
        if not self._finalizer.alive:
            raise ClosedError(f"movement of {self.name!r}: already closed")
        adjoint = _channel(self.machine, self.forward.exchange.T, self.dtype, f"{self.name} (adjoint)")
        self._made.append(adjoint)
        return adjoint

    @cached_property
    def backwards(self) -> OneWay:
        """The adjoint, and where its pieces lie."""
        return OneWay(self.machine, self.adjoint, self.dtype, backward=True)

    @property
    def nbytes(self) -> int:
        """Bytes of segment that the movement holds now."""
        return sum(channel.nbytes for channel in self._made)

    def start(self, x: torch.Tensor, needs_grad: bool = False) -> Request:
        """Put the pieces of ``x`` on their way; does not wait for the transfer.

        The local shard has the shape ``exchange.own.shape``, or any if that is empty, and must not change
        until ``wait``. If some rank needs a gradient, every rank takes part in the backward.
        """
        request = Request(self, x)
        request.token = _Start.apply(x, anchor(needs_grad), request)
        return request

    def wait(self, request: Request) -> torch.Tensor:
        """Local result of shape ``exchange.need.shape``, in memory of its own; blocking."""
        # Of a request that kept it, the token's graph would keep the request.
        token, request.token = request.token, None
        y: torch.Tensor = _Wait.apply(token, request)
        return y

    def __call__(self, x: torch.Tensor, needs_grad: bool = False) -> torch.Tensor:
        """Start and wait, as one operation: nothing is to be done in between."""
        root = None if x.requires_grad else anchor(needs_grad)
        y: torch.Tensor = _Move.apply(x, root, Request(self, x))
        return y

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """Local result, outside of autograd; blocking."""
        return self.forwards.arrive(*self.forwards.depart(x))

    def stream(self, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Move one local tensor after another, outside of autograd; as ``OneWay.stream``."""
        return self.forwards.stream(parts)

    def connect(self) -> None:
        """Exchange addresses with the neighbours for both directions, if that is not done yet; blocking."""
        self.forward.connect()
        self.adjoint.connect()

    def void(self) -> None:
        """Give up a forward that some ranks may have started; on all ranks alike."""
        self.forward.void()

    def close(self) -> None:
        """Give the memory back when no peer writes to it any more; local."""
        self._finalizer()


def movements_through(
    site: CallSite, stages: Sequence[tuple[Decomposition, Decomposition]], dtype: torch.dtype
) -> list[Movement]:
    """Movements that follow one another, from sources to targets.

    These are there where a rank keeps what it has, too: its result is memory of
    its own, and in the graph when any rank needs a gradient.
    """
    machine, name = site
    return [
        Movement(machine, Exchange(machine.rank, *ends), dtype, f"{name} (stage {at})" if at else name)
        for at, ends in enumerate(stages)
    ]


def _same_of_all(channel: Channel) -> list[Box]:
    # Boxes of the pieces, where all that comes, and what stays, is all of the result in the same pieces.
    exchange, itemsize = channel.exchange, channel.dtype.itemsize
    # Images of one rank's data may lie on each other.
    if exchange.disjoint or exchange.images or any(p.target != p.box for p in exchange.local):
        return []
    pieces = (*channel.receives, *in_steps(exchange.local, itemsize))
    first, *others = ([piece.box for piece in theirs] for _, theirs in by_peer(pieces))
    whole = sum(box.volume for box in first) == exchange.need.volume
    return first if whole and all(boxes == first for boxes in others) else []


def _sent_and_kept(channel: Channel) -> list[Piece]:
    # Pieces for the first peer, if they are what stays here, where it is, and large; else none.
    exchange = channel.exchange
    if channel.receives or len(exchange.local) != 1 or not channel.sends:
        return []
    (kept,) = exchange.local
    first = [piece for piece in channel.sends if piece.peer == channel.sends[0].peer]
    alike = sum(piece.box.volume for piece in first) == kept.box.volume == exchange.need.volume
    here = kept.target == kept.box == exchange.own
    large = kept.box.volume * channel.dtype.itemsize >= _ECHOED_NBYTES
    inside = all((piece.box & kept.box) == piece.box for piece in first)
    return first if alike and here and large and inside else []


def _channel(machine: Machine, exchange: Exchange, dtype: torch.dtype, name: str) -> Channel:
    make_result = partial(landing, exchange.need.shape, dtype)
    return Channel(machine.segments, exchange, word_dtype(dtype, name), name, make_result)


def _close_all(channels: list[Channel]) -> None:
    for channel in channels:
        channel.close()


class _Start(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _anchor: torch.Tensor | None, request: Request) -> torch.Tensor:
        ctx.request, ctx.machine = request, request.movement.machine
        request.depart(request.movement.forwards, x)
        # Of the type that moves: x itself may have come in any type, if without elements.
        return x.new_empty(0, dtype=request.movement.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, _token: torch.Tensor) -> tuple[Any, ...]:
        return ctx.request.gradient(), None, None


class _Wait(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, _token: torch.Tensor | None, request: Request) -> torch.Tensor:
        ctx.request, ctx.machine = request, request.movement.machine
        return request.arrive(request.movement.forwards)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.request.depart(ctx.request.movement.backwards, gradient)
        return gradient.new_empty(0), None


class _Move(OperatorFunction):
    # Start and wait in one: half of the cost of two operations, which small tensors feel.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _anchor: torch.Tensor | None, request: Request) -> torch.Tensor:
        ctx.request, ctx.machine = request, request.movement.machine
        request.depart(request.movement.forwards, x)
        return request.arrive(request.movement.forwards)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.request.depart(ctx.request.movement.backwards, gradient)
        return ctx.request.gradient(), None, None
