"""Movements of tensors between ranks, as one pair of autograd operations.

A start and a wait, with the computation of the user in between. Autograd runs the adjoint of each in the
reverse order, so that the gradients travel while the adjoint of the computation runs::

    forward     x ---- start ----> token . . . . . . . . . . . . . . wait ----> y
                         |                 user computes              ^
                         +------------- pieces travel ----------------+

    backward   d_x <--- wait --- token <  . . . . . . . . . . . . . start <--- d_y
                         ^                 user's adjoint             |
                         +------------ gradients travel --------------+

The *token* is a tensor without elements. It has two jobs: it puts start and wait into one graph though no
data flow between them there, and its gradient tells autograd that the wait of the adjoint has to run after
its start.

An exchange says which box of whose block goes where (``geometry/exchange.py``), and its transpose is that of
the gradients: where one element went to several ranks, the backward sums what these return. Elements are
summed in the order of the partition on every rank, so that ranks which get the same sum get the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl_rma.errors import ClosedError, ProtocolError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange, Piece
from distdl_rma.layers.dtypes import MOVING, NUMPY, as_words, sum_dtype, word_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, anchor, first_derivative
from distdl_rma.layers.ops.core.order import channel_of
from distdl_rma.layers.ops.core.result_memory import result, tensor_over
from distdl_rma.layers.ops.core.tensors import as_tensor
from distdl_rma.layers.staging import from_host, to_host
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.reduction import without_fp_errors
from distdl_rma.segments.large_arrays import LARGE_NBYTES
from distdl_rma.segments.machine import Machine

# Parts of a result: the slices of each (None for the whole result), and its data (None if the sender has
# already put them into the result), an array or a tensor.
_Parts = Iterator[tuple[tuple[slice, ...] | None, Any]]


class CallSite(NamedTuple):
    """A place in a program that calls an operator: the machine, and the name in messages."""

    machine: Machine
    name: str


class Request:
    """One started movement: made by ``Movement.start``, given to ``Movement.wait``.

    Always true: at most one direction is under way, since the graph runs the backward after the forward. What
    was sent stays here until it has arrived: peers of the same node may load it from this rank's memory.
    """

    def __init__(self, movement: Movement, x: torch.Tensor) -> None:
        self.movement, self.shape, self.dtype = movement, x.shape, x.dtype
        self.token: torch.Tensor | None = None
        self._sent: tuple[torch.Tensor, int] | None = None

    def depart(self, direction: OneWay, x: torch.Tensor) -> None:
        """Start to move ``x``, the local shard."""
        self._sent = direction.depart(x)

    def arrive(self, direction: OneWay) -> torch.Tensor:
        """Local result of the started movement; blocking."""
        if self._sent is None:
            raise ProtocolError(f"{direction.channel.name!r}: wait without a start")
        (x, epoch), self._sent = self._sent, None
        return direction.arrive(x, epoch)

    def gradient(self) -> torch.Tensor:
        """Gradient of the input, in the input's shape; blocking."""
        gradient = self.arrive(self.movement.backwards).reshape(self.shape)
        # An input without elements may have any type; torch does not convert complex gradients to real ones.
        return gradient if gradient.numel() else gradient.new_empty(self.shape, dtype=self.dtype)


class OneWay:
    """One direction of a movement: a channel, and the slices of its pieces in the local tensors.

    How the result is put together depends on the exchange, and is decided once, at the construction::

        pieces are disjoint          each piece is copied to its place
        several ranks own elements   pieces are summed, own ones at this rank's turn in the partition's order
        a sender knows the result    it has put its pieces there already (``landed``)

    Short types are summed in a longer one, and rounded once. A result has memory of its own, which nobody
    else writes once ``arrive`` has returned.
    """

    def __init__(self, machine: Machine, channel: Channel, dtype: torch.dtype, backward: bool) -> None:
        exchange = channel.exchange
        own, need = exchange.own, exchange.need
        self.channel, self.dtype, self.backward, self._trace = channel, dtype, backward, machine.trace
        # None where this rank owns something.
        self._nothing = torch.empty(own.shape, dtype=dtype) if own.empty else None
        self._shape = need.shape
        # Short types are summed in a longer type, with one rounding at the end.
        self._wide = dtype if exchange.disjoint else sum_dtype(dtype)
        self._disjoint = exchange.disjoint
        # None where a piece is the whole result.
        self._mine = [(_where(piece.target, need), piece.box.slices(own)) for piece in exchange.local]
        self._theirs = [_where(piece.box, need) for piece in channel.receives]
        # All ranks sum in the partition's order, for equal results. Without sums local pieces come first.
        self._before = channel.count(0 if exchange.disjoint else exchange.before_local)
        first = [*channel.receives[: self._before], *exchange.local, *channel.receives][:1]
        self._zeroes = not exchange.complete and [piece.target for piece in first] != [need]
        # Types in which numpy adds and copies small parts on a CPU, in a quarter of torch's time: of numbers,
        # if numpy knows these and adds as torch, and of words. None where torch does it.
        small = need.volume * dtype.itemsize < LARGE_NBYTES
        self._numbers = NUMPY.get(dtype) if small and sum_dtype(dtype) == dtype else None
        self._array_dtype = channel.dtype if small and exchange.disjoint else self._numbers
        self._add = without_fp_errors(np.add)

    def depart(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Start to move a local shard; return the shard in the movement's type, and the epoch."""
        # An input without elements may have any shape and type.
        if self._nothing is None:
            x = x.detach()
        else:
            x = self._nothing if x.is_cpu else x.new_empty(self._nothing.shape)
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        channel = self.channel
        mark = self._trace.marks(channel.name, self.backward)
        mark("start")
        if x.is_cpu:
            parts = channel.cut(as_words(x))
        else:
            parts = to_host(channel.cut(x)).wait() if channel.sends else []
        epoch = channel.start(parts)
        mark("")
        return x, epoch

    def arrive(self, x: torch.Tensor, epoch: int) -> torch.Tensor:
        """Receive an epoch into a new tensor; blocking. Elements that several ranks own are summed."""
        mark = self._trace.marks(self.channel.name, self.backward)
        mark("wait")
        y = self._arrive(x, epoch)
        mark("")
        return y

    def _arrive(self, x: torch.Tensor, epoch: int) -> torch.Tensor:
        landed = self.channel.take_result(epoch)
        if not x.is_cpu:
            y = x.new_empty(self._shape, dtype=self._wide)
        else:
            y = result(self._shape, self._wide) if landed is None else tensor_over(landed, self._wide)
        # An array would keep memory that moves to the disk while this rank waits.
        kind = self._array_dtype if x.is_cpu and not MOVING else None
        own: Any = x if kind is None else as_words(x).view(kind)
        whole, theirs, add = self._received(y, epoch, kind, landed)
        local = ((target, own[source]) for target, source in self._mine)
        parts: _Parts = chain(islice(theirs, self._before), local, theirs)
        fresh = True
        for where, part in parts:
            if part is None:
                # The sender has put this part into the result.
                fresh = False
                continue
            if fresh and self._zeroes:
                y.zero_()
            target = whole if where is None else whole[where]
            # The first part overwrites zeros: one pass over the memory less than a sum.
            if fresh or self._disjoint:
                target[...] = part
            else:
                add(target, part, out=target)
            fresh = False
        if fresh:
            y.zero_()
        return y if self._wide == self.dtype else y.to(self.dtype)

    def add_to(self, total: torch.Tensor, epoch: int, mark: Callable[[str], object]) -> None:
        """Add what an epoch brings to a tensor of the result's shape that only the caller knows; blocking."""
        exact = total.is_cpu and total.dtype == self.dtype
        whole, theirs, add = self._received(total, epoch, self._numbers if exact else None)
        mark("wait")
        for where, part in theirs:
            mark("fuse")
            target = whole if where is None else whole[where]
            add(target, part, out=target)
            mark("wait")

    def _received(
        self, y: torch.Tensor, epoch: int, kind: np.dtype[Any] | None, landed: Any = None
    ) -> tuple[Any, _Parts, Callable[..., object]]:
        # What parts of y are written to, an array of this type or y itself; the parts; and what adds them.
        channel, dtype = self.channel, self.dtype
        if not y.is_cpu:
            there = uploaded(channel, epoch, dtype, y.device, landed)
            return y, zip(self._theirs, (part for _, part in there), strict=True), _add
        received = zip(self._theirs, channel.landed, channel.receive(epoch), strict=True)
        if kind is None:
            parts = ((at, None if lies else as_tensor(words, dtype)) for at, lies, (_, words) in received)
            return y, parts, _add
        arrays = ((at, None if lies else words.view(kind)) for at, lies, (_, words) in received)
        return as_words(y).view(kind), arrays, self._add


def _where(box: Box, whole: Box) -> tuple[slice, ...] | None:
    return None if box == whole else box.slices(whole)


def _add(total: torch.Tensor, part: torch.Tensor, out: torch.Tensor) -> None:
    # Torch does not add unsigned integers to wider ones.
    torch.add(total, part.to(total.dtype), out=out)


class Movement:
    """An exchange and its adjoint: ``start`` and ``wait``, in both directions of autograd.

    Start and wait are two autograd operations, each the adjoint of the other: a forward ``start, compute,
    wait`` becomes a backward ``wait^T, compute^T, start^T`` with the same overlap.

    Construction is local, and allocates slots for the forward. The first backward, or ``connect``, allocates
    the slots of the adjoint. The exchange is this rank's part, in all tensor dimensions.

    Examples
    --------
    >>> from distdl_rma.geometry import Decomposition, Exchange
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((P_world.size,))
    >>> blocks = Decomposition.balanced(P_x, (4,))
    >>> gather = Exchange(P_x.me, blocks, Decomposition.replicated(P_x, (4,)))
    >>> movement = Movement(Machine.of(P_x), gather, torch.float32, "gather")
    >>> request = movement.start(torch.ones(2))
    >>> movement.wait(request)
    tensor([1., 1., 1., 1.])
    """

    def __init__(self, machine: Machine, exchange: Exchange, dtype: torch.dtype, name: str) -> None:
        self.machine, self.name, self.dtype = machine, name, dtype
        self.forward = _channel(machine, exchange, dtype, name)
        self.forwards = OneWay(machine, self.forward, dtype, backward=False)
        self._made = [self.forward]
        # Graphs that need the adjoint hold a reference, so the memory lives as long as the last of them.
        self._finalizer = weakref.finalize(self, _close_all, self._made)

    @cached_property
    def adjoint(self) -> Channel:
        """Channel of the adjoint movement; the first access allocates its slots. Local."""
        if not self._finalizer.alive:
            raise ClosedError(f"movement of {self.name!r}: already closed")
        adjoint = _channel(self.machine, self.forward.exchange.T, self.dtype, f"{self.name} (adjoint)")
        self._made.append(adjoint)
        return adjoint

    @cached_property
    def backwards(self) -> OneWay:
        """The adjoint direction."""
        return OneWay(self.machine, self.adjoint, self.dtype, backward=True)

    @property
    def nbytes(self) -> int:
        """Bytes of segment that the movement holds now."""
        return sum(channel.nbytes for channel in self._made)

    def start(self, x: torch.Tensor, needs_grad: bool = False) -> Request:
        """Start to send the pieces of ``x``; does not wait for the transfer.

        ``x`` is the local shard, of shape ``exchange.own.shape``, or any if that is empty. It must not change
        until ``wait``. With ``needs_grad``, some rank needs a gradient: all ranks take part in the backward.
        """
        request = Request(self, x)
        request.token = _Start.apply(x, anchor(needs_grad), request)
        return request

    def wait(self, request: Any) -> torch.Tensor:
        """Local result of shape ``exchange.need.shape``, in memory of its own; blocking."""
        # The token's graph refers to the request: a request that kept the token would be a reference cycle.
        token, request.token = request.token, None
        return _Wait.apply(token, request)

    def __call__(self, x: torch.Tensor, needs_grad: bool = False) -> torch.Tensor:
        """Start and wait, as one autograd operation; blocking.

        Half of the cost of two operations, for callers that compute nothing in between.
        """
        root = None if x.requires_grad else anchor(needs_grad)
        return _Move.apply(x, root, Request(self, x))

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """Local result, outside of autograd; blocking."""
        return self.forwards.arrive(*self.forwards.depart(x))

    def connect(self) -> None:
        """Exchange addresses with the neighbours for both directions, once; blocking."""
        self.forward.connect()
        self.adjoint.connect()

    def void(self) -> None:
        """Give up a forward that some ranks may have started; all ranks of the exchange call it. Blocking."""
        self.forward.void()

    def close(self) -> None:
        """Free the memory once no peer writes to it any more; local."""
        self._finalizer()


def uploaded(
    channel: Channel, epoch: int, dtype: torch.dtype, device: torch.device, landed: Any = None
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """What ``channel.receive`` yields, as tensors on a device, in one copy; blocking.

    ``landed`` is the result that senders have put parts of to the memory of the host.
    """

    def arrays() -> Iterator[Any]:
        for lies, (piece, words) in zip(channel.landed, channel.receive(epoch), strict=True):
            yield landed[piece.box.slices(channel.exchange.need)] if lies else words

    count = sum(piece.box.volume for piece in channel.receives)
    return zip(channel.receives, from_host(arrays(), count, dtype, device), strict=True)


def movements_through(
    site: CallSite, stages: Sequence[tuple[Decomposition, Decomposition]], dtype: torch.dtype
) -> list[Movement]:
    """Movement of each stage, also where a rank keeps its data: its result is in new memory and the graph."""
    machine, name = site
    return [
        Movement(machine, Exchange(machine.rank, *ends), dtype, f"{name} (stage {at})" if at else name)
        for at, ends in enumerate(stages)
    ]


def _channel(machine: Machine, exchange: Exchange, dtype: torch.dtype, name: str) -> Channel:
    return channel_of(machine, exchange, word_dtype(dtype, name), name)


def _close_all(channels: list[Channel]) -> None:
    for channel in channels:
        channel.close()


class _Start(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _anchor: torch.Tensor | None, request: Request) -> torch.Tensor:
        ctx.request, ctx.machine = request, request.movement.machine
        request.depart(request.movement.forwards, x)
        # An x without elements may have another type than the movement.
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
    # Start and wait in one operation, at half of the cost of two, which matters for small tensors.
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
