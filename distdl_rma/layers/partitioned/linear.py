"""Linear layers whose weight is cut into blocks, which are replicated or kept on one rank.

All layers are one operation on a grid of workers, (data-parallel blocks, rows, columns) of the weight. With
two workers per dimension, and x cut over the same ranks::

    grid (1, 2, 1)   rows           x whole -> W0, W1            y = [W0 x, W1 x]
    DistributedLinearAllGather grid (1, 1, 2)   columns        x0 -> W0, x1 -> W1           y = W0 x0 + W1 x1
    DistributedLinearReduceScatter grid (2, 1, 1)   blocks         batch 0 -> W, batch 1 -> W   gradients of W
    summed    data parallel

Which is best follows from the sizes: the rows form moves the input, the columns form the output.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from distdl_rma.errors import PartitionError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.linear import BLOCKS, COLUMNS, ROWS, LinearGrid, SplitLinear, grid_of_workers
from distdl_rma.layers.partitioned.core.arguments import (
    OF_TENSORS,
    PlacedOptions,
    check_dims,
    placed_options,
    torchs_layer,
)
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, check_weights, source_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.partitioned.core.placement import Placement, block_placement, linear_values

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class DistributedLinear(OperatorLayer[SplitLinear], nn.Linear):
    """Linear layer whose weight is cut into blocks of rows and columns: ``y = x W^T + b``.

    Local input: this rank's shard of (batch, ..., in_features) on P_x. Local output: the balanced shard of
    (batch, ..., out_features) on P_y. P_x and P_y may cut every dimension, and be on other ranks than P_W.
    No rank holds more of the weight than its block, also during construction. Initial weights are those of
    torch from the same seed.

    Parameters
    ----------
    P_x, P_y
        Partitions of input and output, with as many dimensions as the tensor.
    P_W
        Partition of the weight, on a grid of (rows, columns), which cut output and input features; or on a
        grid of (data-parallel blocks, rows, columns), where each data-parallel block has a share of the batch
        and the whole weight. Ranks outside hold empty parameters.
    in_features, out_features, bias, device, dtype
        As in torch.
    placement
        Where data-parallel blocks keep the weight. ``"replicated"``: each has a replica, and gradients are
        summed. ``"root"``: the first block keeps it, sends it to the others in each forward, and receives
        their gradients; parameters of the others are empty. Also called ``weights``.

    Notes
    -----
    Linear document, general linear layer; requirement B6. Column 0 of P_W keeps and adds the bias.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, P_world.size))  # cuts the features
    >>> P_W = P_world.create_cartesian_topology_partition((P_world.size, 1))  # cuts the rows of the weight
    >>> layer = DistributedLinear(P_x, P_x, P_W, in_features=6, out_features=8)
    >>> layer.weight.shape, layer(shard(P_x, torch.rand(4, 6))).shape
    (torch.Size([4, 6]), torch.Size([4, 8]))
    """

    _allowed: ClassVar[tuple[str, ...]] = ("replicated", "root")
    _by_name = (*PlacedOptions.__annotations__,)
    _shown = ("in_features", "out_features", "bias")
    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]  # torch leaves the None out

    def __init__(
        self, P_x: Partition, P_y: Partition, P_W: Partition, *arguments: Any, **options: Any
    ) -> None:
        own, placement = placed_options(type(self), self._allowed, options)
        grid = _checked_grid(type(self), P_x, P_y, P_W)
        # Without memory: it would hold the whole weight on every rank.
        like = torchs_layer(type(self), *arguments, **options, memory=False)
        dtype = like.weight.dtype
        if dtype not in _DTYPES:
            raise UnsupportedError(f"{type(self).__name__}: dtype is one of {_DTYPES}, got {dtype}")
        P_w = P_W.create_cartesian_topology_partition(grid)
        super().__init__(P_x, P_y, P_w, **own)
        self.take_over(like)
        self.P_w, self.placement, self.weights = P_w, placement, placement
        rows, columns = like.weight.shape
        self.grid = LinearGrid(P_w, columns, rows)
        self.place(linear_values(columns, rows, like.bias is not None, dtype), self._placement)

    def _placement(self, key: str) -> Placement:
        pattern = self.placement if self.P_w.shape[BLOCKS] > 1 else "replicated"
        return block_placement(self.grid.weight if key == "weight" else self.grid.bias, pattern)

    def plan(self, facts: dict[int, InputFacts]) -> SplitLinear:
        """Operation for the input that the ranks form."""
        source, dtype = source_of(self.P_x, facts)
        check_weights(dtype, facts)
        placed = self.placed
        # Asked in each backward: a GradientSync may take over between two calls of the same operation.
        places = None if placed is None else lambda: placed.offered if placed.taken_over else None
        return SplitLinear(self.site, source, self.grid, self.P_y, dtype, places)


class DistributedLinearAllGather(DistributedLinear):
    """Linear layer with the output features of its weight cut over the model-parallel workers.

    The workers are the ranks of P_y. Its first extent is the number of data-parallel blocks; the product of
    its other extents is the number of model-parallel workers of each. Every worker gathers all features of
    its block of the batch and computes its block of output features. For layers with fewer input than output
    features.

    Parameters
    ----------
    P_y
        Partition of the output, with as many dimensions as the tensor.
    P_x
        Partition of the input; P_y if None.
    in_features, out_features, bias, device, dtype, placement
        As for :class:`DistributedLinear`.

    Notes
    -----
    Linear document, linear layer with all-gather; requirement B6.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_y = P_world.create_cartesian_topology_partition((1, P_world.size))  # one data-parallel block
    >>> layer = DistributedLinearAllGather(P_y, in_features=6, out_features=8)
    >>> layer.weight.shape, layer(shard(P_y, torch.rand(4, 6))).shape
    (torch.Size([4, 6]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        P_y: Partition,
        in_features: int,
        out_features: int,
        P_x: Partition | None = None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        check_dims(type(self), OF_TENSORS, P_y=P_y)
        P_w = grid_of_workers(P_y, ROWS)
        super().__init__(P_x or P_y, P_y, P_w, in_features, out_features, *arguments, **options)


class DistributedLinearReduceScatter(DistributedLinear):
    """Linear layer with the input features of its weight cut over the model-parallel workers.

    The workers are the ranks of P_x, counted as for :class:`DistributedLinearAllGather`. Every worker
    computes with its block of input features; the results are summed and scattered. For layers with fewer
    output than input features.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    P_y
        Partition of the output; P_x if None.
    in_features, out_features, bias, device, dtype, placement
        As for :class:`DistributedLinear`.

    Notes
    -----
    Linear document, linear layer with reduce-scatter; requirement B6.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, P_world.size))  # one data-parallel block
    >>> layer = DistributedLinearReduceScatter(P_x, in_features=6, out_features=8)
    >>> layer.weight.shape, layer(shard(P_x, torch.rand(4, 6))).shape
    (torch.Size([8, 3]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        P_x: Partition,
        in_features: int,
        out_features: int,
        P_y: Partition | None = None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        check_dims(type(self), OF_TENSORS, P_x=P_x)
        P_w = grid_of_workers(P_x, COLUMNS)
        super().__init__(P_x, P_y or P_x, P_w, in_features, out_features, *arguments, **options)


def _checked_grid(layer: type, P_x: Partition, P_y: Partition, P_W: Any) -> tuple[int, ...]:
    check_dims(layer, OF_TENSORS, P_x=P_x)
    check_dims(layer, (P_x.dim,), P_y=P_y)
    if not isinstance(P_W, Partition) or P_W.dim not in (2, 3):
        raise PartitionError(
            f"{layer.__name__}: P_W is a grid of (rows, columns) or (blocks, rows, columns), got {P_W}"
        )
    grid = P_W.shape if P_W.dim == 3 else (1, *P_W.shape)
    if P_x.dim == 1 and grid[BLOCKS] > 1:
        raise PartitionError(
            f"{layer.__name__}: P_W {P_W.shape} has data-parallel blocks, but P_x {P_x.shape} leaves no batch"
            " to share"
        )
    return grid
