"""A weight that is kept in shards, and is whole only while it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.machine import Machine
from distdl_rma.ops.autograd import GradientNeeds, anchor, first_derivative
from distdl_rma.ops.movement import Movement, OneWay
from distdl_rma.ops.set_up_transfer import PASS_NBYTES
from distdl_rma.segments.channel import Channel

# Columns are moved in bundles, so that the copies read and write more than single elements.
_RUN_NBYTES = 256


class Shards:
    """All-gather of the shards of a matrix, and reduce-scatter of its gradients, in passes.

    Each pass moves a stripe of the matrix of half a MiB at most, or a row or 256 bytes of each row if that
    is more. The segment is staging memory: of a group of D ranks it holds on each ``2 (D-1)/D`` stripes to
    gather and, from the first gradient on, ``2 (D-1)/D`` to scatter, whatever the size of the matrix.

    Parameters
    ----------
    machine
        The machine.
    group
        Ranks that keep the shards, in their order, this one included; one-dimensional.
    shape
        Shape of the matrix.
    dim
        Dimension in which it is cut into balanced shards; stripes cut the other one.
    name
        For messages.
    """

    def __init__(
        self, machine: Machine, group: Partition, shape: tuple[int, int], dim: int, name: str
    ) -> None:
        self.machine, self.group, self.shape, self.dim, self.name = machine, group, shape, dim, name
        self._movements: dict[torch.dtype, Movement] = {}

    @property
    def nbytes_staged(self) -> int:
        """Bytes of segment that this rank holds to move stripes."""
        return sum(movement.nbytes for movement in self._movements.values())

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The whole matrix, in memory of its own; collective over the group, blocking."""
        return self._move(shard, lambda movement: movement.forwards)

    def scatter(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the sum of the ranks' matrices; collective over the group, blocking."""
        return self._move(matrix, lambda movement: movement.backwards)

    def _move(self, x: torch.Tensor, way: Callable[[Movement], OneWay]) -> torch.Tensor:
        direction = way(self._movement(x.dtype))
        y = self._empty_like(x, direction.channel)
        height, starts = self._stripes(x.dtype)
        across = 1 - self.dim
        stripes = direction.stream(x.narrow(across, start, height) for start in starts)
        for start, stripe in zip(starts, stripes, strict=True):
            y.narrow(across, start, height).copy_(stripe)
        return y

    def _empty_like(self, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        shape = list(self.shape)
        shape[self.dim] = channel.exchange.need.shape[self.dim]
        return x.new_empty(shape)

    def _stripes(self, dtype: torch.dtype) -> tuple[int, list[int]]:
        # Stripes of one height. The last one reaches back where it would stick out: what it moves again is
        # the same again.
        extent, width = self.shape[1 - self.dim], self.shape[self.dim]
        if not extent * width:
            return 0, []
        least = 1 if self.dim else _RUN_NBYTES // dtype.itemsize
        count = -(-extent // max(least, PASS_NBYTES // (width * dtype.itemsize)))
        height = -(-extent // count)
        return height, [min(start, extent - height) for start in range(0, extent, height)]

    def _movement(self, dtype: torch.dtype) -> Movement:
        movement = self._movements.get(dtype)
        if movement is None:
            stripe = list(self.shape)
            stripe[1 - self.dim] = self._stripes(dtype)[0]
            cut = [Balanced(n, self.group.size if d == self.dim else 1) for d, n in enumerate(stripe)]
            source = Decomposition(self.group, tuple(cut), (self.dim,))
            target = Decomposition.replicated(self.group, stripe)
            exchange = Exchange(self.machine.rank, source, target)
            movement = Movement(self.machine, exchange, dtype, self.name)
            self._movements[dtype] = movement
        return movement


def sharded_linear(
    shards: Shards, needs: GradientNeeds, x: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x W^T + b`` with a weight that is gathered for it, and gathered again for the backward.

    Collective over the group of the shards, and so is the backward: what of it there is, is what any rank
    ``needs``. Only the shard is kept in between.
    """
    # In rows, and shaped outside: torch would refuse to change a view that an operation made within.
    y: torch.Tensor = _ShardedLinear.apply(_rows(x), shard, bias, anchor(needs.any), shards, needs)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shard: torch.Tensor,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        shards: Shards,
        needs: GradientNeeds,
    ) -> torch.Tensor:
        y = F.linear(x, shards.gather(shard), bias)
        ctx.shards, ctx.needs, ctx.machine = shards, needs, shards.machine
        ctx.save_for_backward(x if needs.weights else None, shard)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x, shard), shards, needs = ctx.saved_tensors, ctx.shards, ctx.needs
        inner = outer = offset = None
        with torch.autocast("cpu", enabled=False):
            if needs.input:
                # The matrix goes before the gradient of the matrix comes.
                inner = torch.mm(gradient, shards.gather(shard).conj())
            if needs.weights:
                outer = shards.scatter(torch.mm(gradient.t(), x.conj()))
            if ctx.needs_input_grad[2]:
                offset = gradient.sum(0)
        return inner, outer, offset, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
