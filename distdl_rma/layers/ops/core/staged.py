"""Movements between decompositions: one exchange, or several stages within and between nodes.

One rank has a tensor, and all ranks of three nodes need a copy. In one exchange six copies would go through
the network. In stages each element reaches a node once: its ranks get a share each, and then exchange the
shares::

    stage 1, between nodes     rank 0 ---> rank 3 (first third)    rank 4 (second)    rank 5 (last)
                                      ---> rank 6 (first third)    rank 7 (second)    rank 8 (last)
    stage 2, within nodes      ranks 3, 4, 5 and ranks 6, 7, 8 exchange their thirds

``geometry/gathering.py`` says which stages there are. This file joins them to one differentiable operation;
the backward runs them in reverse, and so sums within each node before anything goes to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.gathering import FlatStages, Step, steps
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.layers.ops.core.movement import CallSite, Movement, Request

# Shifts of a periodic tensor, one number per dimension.
Images = tuple[tuple[int, ...], ...]
# A part of a staged movement: takes a local tensor, and whether any rank needs a gradient; returns a tensor.
Part = Callable[[torch.Tensor, bool], torch.Tensor]


def movement_between(
    site: CallSite,
    source: Decomposition,
    target: Decomposition,
    dtype: torch.dtype,
    what: str = "",
    images: Images = (),
) -> Moves:
    """Movement between two decompositions; local to make.

    It has stages where ranks of several nodes hold copies or terms of sums, or where one rank holds all of
    the source or of the target: each element reaches a node once, and no rank sends to all others. Each node
    sums first, then the sums of the nodes are added.
    """
    return _movement(site, Exchange(site.machine.rank, source, target, images=images), dtype, what)


def movement_or_none(
    site: CallSite,
    source: Decomposition,
    target: Decomposition,
    dtype: torch.dtype,
    what: str,
    images: Images = (),
) -> Moves | None:
    """Movement between two decompositions, or None if this rank keeps all its data and exchanges none.

    Ranks decide each for themselves: a rank without a movement has nobody that waits for it, in either
    direction.
    """
    exchange = Exchange(site.machine.rank, source, target, images=images)
    return None if exchange.idle else _movement(site, exchange, dtype, what)


def _movement(site: CallSite, exchange: Exchange, dtype: torch.dtype, what: str) -> Moves:
    machine, named = site.machine, CallSite(site.machine, f"{site.name} ({what})" if what else site.name)
    nodes, source, target = machine.segments.segment.nodes, exchange.source, exchange.target
    copies = source.copied_along or target.copied_along
    if len(nodes) > 1 and (copies or 1 in (source.partition.size, target.partition.size)):
        node_of = {member: number for number, node in enumerate(nodes) for member in node}
        found = steps(source, target, node_of.__getitem__, machine.rank)
        staged = StagedMovement(named, found, dtype, exchange.images)
        if staged.moves:
            return staged
    return Movement(machine, exchange, dtype, named.name)


class StagedRequest(NamedTuple):
    """A started movement in stages: its first exchange is under way."""

    movement: StagedMovement
    first: Request
    needs_grad: bool


class StagedMovement:
    """Several exchanges as one movement; short types travel in the type of their sums, for one rounding.

    Between two stages a rank may hold several boxes of a tensor, which are no block: it packs them into a
    vector. The movements of all stages are the owners of segment memory. A rank that takes part in none of
    them has no movement at all, and ``moves`` is false.
    """

    def __init__(
        self, site: CallSite, found: Sequence[Step], dtype: torch.dtype, images: Images = ()
    ) -> None:
        self.dtype, self._wide, self._site = dtype, sum_dtype(dtype), site
        self._made: list[Movement] = []
        parts: list[Part] = [
            part for number, step in enumerate(found) for part in self._parts_of(number, step, images)
        ]
        # This rank can compute while its first exchange is under way.
        self._first = next((at for at, part in enumerate(parts) if isinstance(part, Movement)), len(parts))
        self._parts = parts

    def start(self, x: torch.Tensor, needs_grad: bool = False) -> StagedRequest:
        """Start to send the pieces of ``x`` of the first stage; does not wait for the transfer."""
        y = self._through(x.to(self._wide) if x.numel() else x, self._parts[: self._first], needs_grad)
        return StagedRequest(self, self._made[0].start(y, needs_grad), needs_grad)

    def wait(self, request: Any) -> torch.Tensor:
        """Wait for the first exchange, run the other stages and return the local result; blocking."""
        y = self._made[0].wait(request.first)
        return self._through(y, self._parts[self._first + 1 :], request.needs_grad).to(self.dtype)

    def __call__(self, x: torch.Tensor, needs_grad: bool = False) -> torch.Tensor:
        """Start and wait; blocking."""
        y = x.to(self._wide) if x.numel() else x
        return self._through(y, self._parts, needs_grad).to(self.dtype)

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """Local result, outside of autograd; blocking."""
        with torch.no_grad():
            return self(x)

    @property
    def moves(self) -> bool:
        """Whether this rank takes part in any exchange."""
        return bool(self._made)

    @property
    def nbytes(self) -> int:
        """Bytes of segment that the movement holds now."""
        return sum(movement.nbytes for movement in self._made)

    def connect(self) -> None:
        """Exchange addresses with the neighbours of all stages; blocking."""
        for movement in self._made:
            movement.connect()

    def close(self) -> None:
        """Free the memory once no peer writes to it any more; local."""
        for movement in self._made:
            movement.close()

    def _through(self, y: torch.Tensor, parts: Sequence[Part], needs_grad: bool) -> torch.Tensor:
        for part in parts:
            y = part(y, needs_grad)
        return y

    def _parts_of(self, number: int, step: Step, images: Images) -> Iterator[Part]:
        if not isinstance(step, FlatStages):
            yield from self._exchange(f"step {number}", *step, images)
            return
        yield _Places(step.own, step.gives).pack
        for at, stage in enumerate(step.stages):
            yield from self._exchange(f"step {number}, stage {at}", *stage)
        yield _Places(step.need, step.takes).unpack

    def _exchange(
        self, what: str, source: Decomposition, target: Decomposition, images: Images = ()
    ) -> Iterator[Movement]:
        machine, name = self._site
        exchange = Exchange(machine.rank, source, target, images=images)
        if not exchange.idle:
            self._made.append(Movement(machine, exchange, self._wide, f"{name} ({what})"))
            yield self._made[-1]


# Both have the same methods; each takes the requests that it has made itself.
Moves = Movement | StagedMovement


class _Places:
    # Packs the boxes that fill a tensor into a flat vector, one box after another, and unpacks them.
    def __init__(self, whole: Box, boxes: tuple[Box, ...]) -> None:
        filled = [box for box in boxes if not box.empty]
        # One-dimensional boxes are intervals of the flattened tensor.
        origin = whole if not filled or filled[0].dim == whole.dim else Box.of_shape((whole.volume,))
        self.shape, self.seen = whole.shape, origin.shape
        self.volumes = [box.volume for box in filled]
        self.slices = [box.slices(origin) for box in filled]
        self.trivial = filled in ([], [origin])

    def pack(self, x: torch.Tensor, _needs_grad: bool) -> torch.Tensor:
        return x.reshape(-1) if self.trivial else _Place.apply(x, self, True)

    def unpack(self, x: torch.Tensor, _needs_grad: bool) -> torch.Tensor:
        # A tensor without elements may have any shape.
        return x.reshape(self.shape) if self.trivial else _Place.apply(x, self, False)

    def placed(self, x: torch.Tensor, pack: bool) -> torch.Tensor:
        if pack:
            seen = x.reshape(self.seen)
            return torch.cat([seen[where].reshape(-1) for where in self.slices])
        y = x.new_empty(self.seen)
        for where, part in zip(self.slices, x.split(self.volumes), strict=True):
            place = y[where]
            place.copy_(part.view(place.shape))
        return y.view(self.shape)


class _Place(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: _Places, pack: bool) -> torch.Tensor:
        ctx.places, ctx.pack = places, pack
        return places.placed(x, pack)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.places.placed(gradient, not ctx.pack), None, None
