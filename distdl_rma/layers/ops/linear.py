"""Linear layers whose weight is in blocks on a grid of ranks.

A weight on 2 x 2 workers, rows are output features, columns input features::

                    x, features 0..3   x, features 4..7
                          |                  |
    y, features 0..3   rank 0    --sum--  rank 1         each rank reads the features of its column, and
    y, features 4..7   rank 2    --sum--  rank 3         makes a partial output of its row

``gather`` brings the features of the columns, ``scatter`` sums the partial outputs along the rows. With one
column nothing is summed (all-gather form), with one row each rank reads its features only (reduce-scatter
form). Several data-parallel blocks are copies of this picture, each with a share of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import OperatorFunction, uncompiled
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.staged import movement_or_none

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
    for the function that gives places for the gradients of parameters, or None.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        grid: LinearGrid,
        P_y: Partition,
        dtype: torch.dtype,
        places: Callable[[], Offer | None] | None = None,
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
        self._adds_bias, self._places = grid.bias.partition.active, places
        self._shape, self._dtype = read.box(site.machine.rank).shape, dtype

    def compute(self, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Partial outputs of this rank's block of the weight."""
        if not x.numel():
            # An input without elements may have any shape and type.
            x = x.to(self._dtype).reshape(self._shape)
        weight, offer = weights["weight"], self._places and self._places()
        bias = weights.get("bias") if self._adds_bias else None
        # A moved or cast weight is no leaf: its gradient is not yet the parameter's.
        if offer is not None and weight.is_leaf and (bias is None or bias.is_leaf):
            return LinearInPlaces.apply(x, weight, bias, offer)
        return F.linear(x, weight, bias)


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
