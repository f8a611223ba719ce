"""Linear layers whose weight is in blocks on a grid of ranks, or in shards (ZeRO).

A weight on 2 x 2 workers, rows are output features, columns input features::

                    x, features 0..3   x, features 4..7
                          |                  |
    y, features 0..3   rank 0    --sum--  rank 1         each rank reads the features of its column, and
    y, features 4..7   rank 2    --sum--  rank 3         makes a partial output of its row

``gather`` brings the features of the columns, ``scatter`` sums the partial outputs along the rows. With one
column nothing is summed (all-gather form), with one row each rank reads its features only (reduce-scatter
form). Several data-parallel blocks are copies of this picture, each with a share of the batch.

ZeRO: the data-parallel blocks also cut the weight. It is gathered for a product and freed after it, so that a
rank keeps its shard only; the gradient is summed straight into the shards. Both move in stripes of half a
MiB::

    stripe 0 |====|
    stripe 1      |====|            the next stripe travels while one is copied to its place
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import (
    GradientNeeds,
    OperatorFunction,
    anchor,
    first_derivative,
    uncompiled,
)
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.staged import Moves, movement_between, movement_or_none
from distdl_rma.layers.ops.set_up_transfer import PASS_NBYTES

# Dimensions of the grid: data-parallel blocks, and the rows and columns of the weight.
BLOCKS, ROWS, COLUMNS = range(3)
# Dimensions of the weight (out_features, in_features): the grid cuts them into rows and columns.
OUT, IN = range(2)


@dataclass(frozen=True)
class LinearGrid:
    """Ranks on a grid (data-parallel blocks, rows, columns), and the size of their weight.

    Each data-parallel block has a share of the batch and all of the weight. Column 0 adds the bias.
    """

    P_w: Partition
    in_features: int
    out_features: int

    @property
    def blocks(self) -> int:
        """Number of data-parallel blocks."""
        return self.P_w.shape[BLOCKS]

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds its block of the bias."""
        return self.P_w.index is not None and self.P_w.index[COLUMNS] == 0

    @property
    def weight(self) -> Decomposition:
        """Block of the weight that each rank computes with."""
        _, rows, columns = self.P_w.shape
        splits = Balanced(self.out_features, rows), Balanced(self.in_features, columns)
        return Decomposition(self.P_w, splits, (None, OUT, IN))

    @property
    def bias(self) -> Decomposition:
        """Block of the bias that the ranks of column 0 compute with."""
        P_b = self.P_w.slab({COLUMNS: 0})
        return Decomposition(P_b, (Balanced(self.out_features, P_b.shape[ROWS]),), (None, OUT, None))

    def inputs(self, shape: Sequence[int]) -> Decomposition:
        """Part of an input (batch, ..., in_features) that each rank reads; replicated along the rows."""
        return self._features(shape, COLUMNS)

    def outputs(self, shape: Sequence[int]) -> Decomposition:
        """Partial output (batch, ..., out_features) of each rank for that input; columns are to be summed."""
        return self._features((*shape[:-1], self.out_features), ROWS)

    def _features(self, shape: Sequence[int], cuts: int) -> Decomposition:
        splits = [Balanced(extent, 1) for extent in shape]
        axes: list[int | None] = [None] * self.P_w.dim
        for grid, axis in ((BLOCKS, 0), (cuts, len(shape) - 1)):
            if self.P_w.shape[grid] > 1:
                splits[axis], axes[grid] = Balanced(shape[axis], self.P_w.shape[grid]), axis
        return Decomposition(self.P_w, tuple(splits), tuple(axes))

    def zero_weight(self, dim: int) -> Decomposition:
        """ZeRO: the weight is also cut over the data-parallel blocks, in a dimension that no worker cuts.

        So the shards of a worker's block are a one-dimensional matter, of the ranks with the same row and
        column.
        """
        _, rows, columns = self.P_w.shape
        splits = list(self.weight.splits)
        splits[dim] = Balanced(splits[dim].extent, self.blocks)
        axes = dim, OUT if rows > 1 else None, IN if columns > 1 else None
        return Decomposition(self.P_w, tuple(splits), axes)

    def zero_bias(self) -> Decomposition:
        """ZeRO: each row's block of the bias is also cut over the data-parallel blocks.

        The whole bias is one line of shards: row by row, and within a row block by block.
        """
        used = self.bias
        rows, blocks = range(used.partition.shape[ROWS]), range(self.blocks)
        lengths: list[int] = []
        for start, stop in map(used.splits[0].interval, rows):
            lengths += Balanced(stop - start, self.blocks).lengths
        order = [block * len(rows) + row for row in rows for block in blocks]
        line = used.partition.create_partition_inclusive(order)
        return Decomposition(line, (Listed(tuple(lengths)),), (0,))


def grid_of_workers(P: Partition, dim: int) -> Partition:
    """Grid of data-parallel blocks of model-parallel workers, from the partition of a tensor.

    A partition of (2, 3) is two blocks of three workers: the grid (2, 3, 1) with workers as rows.

    The partition's first extent is the number of blocks, the product of the others the workers of each. The
    workers are along the dimension ``dim`` of the grid: rows for an all-gather of the input, columns for a
    reduce-scatter of the output.
    """
    # A one-dimensional tensor has features and no batch.
    blocks = P.shape[0] if P.dim > 1 else 1
    grid = [blocks, 1, 1]
    grid[dim] = prod(P.shape) // blocks
    return P.create_cartesian_topology_partition(grid)


Offer = Callable[[str], "torch.Tensor | None"]


class SplitLinear(GatherComputeScatter):
    """``y = x W^T + b`` with ``W`` and ``b`` in blocks on a grid of ranks; output in balanced shards on P_y.

    With one column it is the all-gather form, with one row the reduce-scatter form. Each call asks ``places``
    for the function that gives places for the gradients of parameters, or None. In the ZeRO forms ``matrix``
    gathers the weight from shards on the data-parallel blocks; operations for several input shapes share one.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        grid: LinearGrid,
        P_y: Partition,
        dtype: torch.dtype,
        places: Callable[[], Offer | None] | None = None,
        matrix: ShardedMatrix | None = None,
    ) -> None:
        if source.shape[-1] != grid.in_features:
            raise ShapeError(
                f"global input {source.shape} has {source.shape[-1]} features, the layer takes"
                f" {grid.in_features}"
            )
        read, made = grid.inputs(source.shape), grid.outputs(source.shape)
        owned = Decomposition.balanced(P_y, made.shape)
        super().__init__(site, source.partition.active, grid.P_w.active, owned)
        self.gather = movement_or_none(site, source, read, dtype, "gather")
        self.scatter = movement_or_none(site, made, owned, dtype, "scatter")
        self._adds_bias, self._places, self._matrix = grid.adds_bias, places, matrix
        self._shape, self._dtype = read.box(site.machine.rank).shape, dtype

    def carry_out(self, needs: GradientNeeds, x: torch.Tensor, weights: Mapping[str, Any]) -> torch.Tensor:
        """Partial outputs of this rank's block of the weight; blocking in the ZeRO forms."""
        if not x.numel():
            # An input without elements may have any shape and type.
            x = x.to(self._dtype).reshape(self._shape)
        if self._matrix is None:
            return super().carry_out(needs, x, weights)
        # Reshaped out here: torch refuses in-place changes of a view that an autograd function returns.
        rows = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
        of_weights = weights["weight"], self._bias_among(weights)
        y: torch.Tensor = _ZeroProduct.apply(rows, *of_weights, anchor(needs.any), self._matrix, needs)
        return y.view(*x.shape[:-1], y.shape[-1])

    def compute(self, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Partial outputs of this rank's block of the weight."""
        weight, bias, offer = weights["weight"], self._bias_among(weights), self._places and self._places()
        # A moved or cast weight is no leaf: its gradient is not yet the parameter's.
        if offer is not None and weight.is_leaf and (bias is None or bias.is_leaf):
            y: torch.Tensor = LinearInPlaces.apply(x, weight, bias, offer)
            return y
        return F.linear(x, weight, bias)

    def _bias_among(self, weights: Mapping[str, Any]) -> torch.Tensor | None:
        return weights.get("bias") if self._adds_bias else None


class LinearInPlaces(OperatorFunction):
    """``torch.nn.functional.linear`` whose weight gradients are written to given places, without a copy.

    Weight and bias are leaves: gradients have their type and shape. A backward calls ``offer`` once each with
    ``"weight"`` and ``"bias"``: it returns the tensor to write the gradient to, or None for new memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offer: Offer
    ) -> torch.Tensor:
        """As torch's function."""
        ctx.save_for_backward(x, weight)
        ctx.offer = offer
        return F.linear(x, weight, bias)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients; those of weight and bias in their places."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (rows, columns), batch = weight.shape, x.shape[:-1].numel()
        # Under create_graph, autograd does not allow a given place for a result.
        offer = (lambda _key: None) if torch.is_grad_enabled() else ctx.offer
        d_y = gradient.reshape(batch, rows)
        d_weight = d_bias = None
        if needs_weight:
            d_weight = torch.mm(d_y.t(), x.reshape(batch, columns).conj(), out=offer("weight"))
        if needs_bias:
            d_bias = torch.sum(d_y, 0, out=offer("bias"))
        return torch.matmul(gradient, weight.conj()) if needs_x else None, d_weight, d_bias, None


# Columns are moved in bundles, so that copies read and write runs of at least so many bytes.
_RUN_NBYTES = 256


class ShardedMatrix:
    """All-gather of the shards of a matrix, and reduce-scatter of its gradients, in stripes.

    A stripe has at most half a MiB, but at least one row, or 256 bytes of each row. The segment is staging
    memory: with D ranks in the group, each rank's segment holds ``2 (D-1)/D`` stripes to gather and, from the
    first gradient on, ``2 (D-1)/D`` to scatter, for any size of the matrix.

    ``group`` is one-dimensional, contains this rank, and has the shards in its order. ``dim`` is the
    dimension of the matrix that is cut into balanced shards; stripes cut the other dimension.
    """

    def __init__(self, site: CallSite, group: Partition, shape: tuple[int, int], dim: int) -> None:
        self.site, self.group, self.shape, self.dim = site, group, shape, dim
        # By type, and whether it scatters.
        self._movements: dict[tuple[torch.dtype, bool], Moves] = {}

    @classmethod
    def of(cls, site: CallSite, grid: LinearGrid, dim: int) -> ShardedMatrix | None:
        """Matrix of this rank's block of a weight, in shards on the data-parallel blocks; None if not cut."""
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
        """The whole matrix, in new memory; collective over the group, blocking."""
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
        # Stripes of equal height. The last one may overlap the one before: it moves some values again.
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


class _ZeroProduct(OperatorFunction):
    """``x W^T + b`` with a weight that is gathered for the product, and again for the backward.

    Only the shard is kept in between. Forward and backward are collective over the group of the matrix; the
    backward computes the gradients that any rank ``needs``.
    """

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
                # The gathered matrix is freed before its gradient is allocated.
                d_x = torch.mm(d_y, matrix.all_gather(shard).conj())
            if needs.weights:
                d_shard = matrix.reduce_scatter(torch.mm(d_y.t(), x.conj()))
            if ctx.needs_input_grad[2]:
                d_bias = d_y.sum(0)
        return d_x, d_shard, d_bias, None, None, None
