"""ZeRO: products with a weight that is kept in shards, and is whole only while it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import GradientNeeds, OperatorFunction, anchor, first_derivative
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.staged import Moves, movement_between
from distdl_rma.ops.linear.linear_grid import BLOCKS, COLUMNS, ROWS, LinearGrid
from distdl_rma.ops.set_up_transfer import PASS_NBYTES

# Columns are moved in bundles, so that the copies read and write more than single elements.
_RUN_NBYTES = 256


class ShardedMatrix:
    """All-gather of the shards of a matrix, and reduce-scatter of its gradients, in stripes.

    A stripe has half a MiB at most, or is a row, or 256 bytes of each row if that is more. The segment is
    staging memory: of a group of D ranks it holds on each ``2 (D-1)/D`` stripes to gather and, from the
    first gradient on, ``2 (D-1)/D`` to scatter, whatever the size of the matrix.

    ``group`` is one-dimensional, keeps the shards in its order, and has this rank; ``dim`` is the dimension
    of the matrix that is cut into balanced shards. Stripes cut the other one.
    """

    def __init__(self, site: CallSite, group: Partition, shape: tuple[int, int], dim: int) -> None:
        self.site, self.group, self.shape, self.dim = site, group, shape, dim
        # To gather, and to scatter.
        self._movements: dict[tuple[torch.dtype, bool], Moves] = {}

    @classmethod
    def of(cls, site: CallSite, grid: LinearGrid, dim: int) -> ShardedMatrix | None:
        """This rank's block of a weight, in shards on the data-parallel blocks; None where nothing is cut."""
        index = grid.P_w.index
        if index is None or grid.blocks == 1:
            return None
        group = grid.P_w.slab({ROWS: index[ROWS], COLUMNS: index[COLUMNS]})
        line = group.create_cartesian_topology_partition([group.shape[BLOCKS]])
        height, width = grid.weight.box(site.machine.rank).shape
        return cls(CallSite(site.machine, f"{site.name} (weight)"), line, (height, width), dim)

    @property
    def nbytes_staged(self) -> int:
        """Bytes of segment that this rank holds to move stripes."""
        return sum(movement.nbytes for movement in self._movements.values())

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The whole matrix, in memory of its own; collective over the group, blocking."""
        return self._move(shard, self.shape[self.dim], scatter=False)

    def reduce_scatter(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the sum of the ranks' matrices; collective over the group, blocking."""
        begin, end = Balanced(self.shape[self.dim], self.group.size).interval(self.group.rank or 0)
        return self._move(matrix, end - begin, scatter=True)

    def _move(self, x: torch.Tensor, extent: int, *, scatter: bool) -> torch.Tensor:
        shape = list(self.shape)
        shape[self.dim] = extent
        y, across = x.new_empty(shape), 1 - self.dim
        height, starts = self._stripes(x.dtype)
        movement = self._movement(x.dtype, scatter)
        stripes = movement.stream(x.narrow(across, start, height) for start in starts)
        for start, stripe in zip(starts, stripes, strict=True):
            y.narrow(across, start, height).copy_(stripe)
        return y

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

    def _movement(self, dtype: torch.dtype, scatter: bool) -> Moves:
        movement = self._movements.get((dtype, scatter))
        if movement is None:
            stripe = list(self.shape)
            stripe[1 - self.dim] = self._stripes(dtype)[0]
            cut = [Balanced(n, self.group.size if d == self.dim else 1) for d, n in enumerate(stripe)]
            source = Decomposition(self.group, tuple(cut), (self.dim,))
            ends = source, Decomposition.replicated(self.group, stripe)
            movement = movement_between(
                self.site, *(ends[::-1] if scatter else ends), dtype, "scatter" if scatter else ""
            )
            self._movements[dtype, scatter] = movement
        return movement


def zero_linear(
    matrix: ShardedMatrix,
    needs: GradientNeeds,
    x: torch.Tensor,
    shard: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``x W^T + b`` with a weight that is gathered for it, and again for the backward.

    Only the shard is kept in between. Collective over the group of the matrix, and so is the backward: what
    of it there is, is what any rank ``needs``.
    """
    # In rows, and shaped outside: torch would refuse to change a view that an operation made within.
    rows = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    y: torch.Tensor = _ZeroProduct.apply(rows, shard, bias, anchor(needs.any), matrix, needs)
    return y.view(*x.shape[:-1], y.shape[-1])


class _ZeroProduct(OperatorFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shard: torch.Tensor,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        matrix: ShardedMatrix,
        needs: GradientNeeds,
    ) -> torch.Tensor:
        y = F.linear(x, matrix.all_gather(shard), bias)
        ctx.matrix, ctx.needs, ctx.machine = matrix, needs, matrix.site.machine
        ctx.save_for_backward(x if needs.weights else None, shard)
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[Any, ...]:
        (x, shard), matrix, needs = ctx.saved_tensors, ctx.matrix, ctx.needs
        d_x = d_shard = d_bias = None
        with torch.autocast("cpu", enabled=False):
            if needs.input:
                # The matrix goes before the gradient of the matrix comes.
                d_x = torch.mm(d_y, matrix.all_gather(shard).conj())
            if needs.weights:
                d_shard = matrix.reduce_scatter(torch.mm(d_y.t(), x.conj()))
            if ctx.needs_input_grad[2]:
                d_bias = d_y.sum(0)
        return d_x, d_shard, d_bias, None, None, None
