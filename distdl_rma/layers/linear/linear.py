"""Distributed linear layers whose ranks keep blocks of the weight."""

from __future__ import annotations

from math import prod
from operator import index as as_int
from typing import SupportsIndex, Unpack

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan, ExchangingLayer
from distdl_rma.layers.core.initial_weights import linear_values
from distdl_rma.layers.core.layer import source_of
from distdl_rma.layers.core.placement import Placement
from distdl_rma.layers.core.plan_cache import InputFacts
from distdl_rma.ops.linear.linear_function import linear_function
from distdl_rma.ops.movement import movement_or_none

_WEIGHTS = ("replicated", "root")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Dimensions of the grid of those that compute, and of the weight.
_BLOCKS, _ROWS, _COLUMNS = range(3)
_OUT, _IN = range(2)


class DistributedLinear(ExchangingLayer):
    """Linear layer whose weight is cut into blocks of rows and columns: ``y = x W^T + b``.

    Local input: this rank's shard of a global tensor (batch, ..., in_features) on P_x, of any size that
    forms a grid with the others'. Local output: the balanced shard of (batch, ..., out_features) on P_y.
    P_x and P_y may cut every dimension, and be on other ranks than P_W. The numbers are those of the
    sequential torch layer, up to rounding, initial weights from the same seed included; no rank ever holds
    more of the weight than its block. Collective to construct over the machine; a call involves the ranks
    of the three partitions and blocks until this rank has what it needs.

    Parameters
    ----------
    P_x, P_y
        Partitions of input and output, with as many dimensions as the tensor.
    P_W
        Partition of the weight, on a grid of (rows, columns), that is of blocks of output and of input
        features; or of (data-parallel blocks, rows, columns), where each first index takes a share of the
        batch and all of the weight.
    in_features, out_features, bias, device, dtype
        As in torch. Tensors live on the CPU.
    weights
        What data-parallel blocks do with the weight. ``"replicated"``: each keeps a copy, gradients are
        summed. ``"root"``: the first one keeps it and sends it to the others in each forward, gradients
        travel back; the others' parameters are empty.
    name
        For messages.

    Raises
    ------
    PartitionError
        If the partitions do not fit together.
    ShapeError
        If numbers of features are none, or ``weights`` is unknown. In a call, if the input does not fit.
    UnsupportedError
        If device or dtype cannot be served.

    Notes
    -----
    Linear document, general linear layer; requirement B6. The bias lives on column 0 of the weight's grid
    and is added there, once. Ranks outside of P_W hold empty parameters.
    """

    _casts = True
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_W: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str = "replicated",
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind = type(self).__name__
        grid = _checked_grid(kind, P_x, P_y, P_W)
        _check_numbers(kind, in_features, out_features, weights)
        _check_elements(kind, device, dtype)
        P_w = P_W.create_cartesian_topology_partition(grid)
        super().__init__(P_x, P_y, P_w, name=name, **callbacks)
        self.P_w = P_w
        self.in_features, self.out_features = as_int(in_features), as_int(out_features)
        self.weights = weights
        self.place(linear_values(self.in_features, self.out_features, bias, dtype), self._placements(bias))
        index = P_w.index
        self.adds_bias = bias and index is not None and index[_COLUMNS] == 0

    def used_weight(self, P: Partition | None = None) -> Decomposition:
        """Block of the weight that each rank computes with; as kept by the ranks ``P`` of P_w if given."""
        splits = (
            Balanced(self.out_features, self.P_w.shape[_ROWS]),
            Balanced(self.in_features, self.P_w.shape[_COLUMNS]),
        )
        return Decomposition(self.P_w if P is None else P, splits, (None, _OUT, _IN))

    def used_bias(self, P: Partition | None = None) -> Decomposition:
        """Block of the bias that the ranks of column 0 compute with; of the ranks ``P`` of P_w if given."""
        P_b = (self.P_w if P is None else P).slab({_COLUMNS: 0})
        return Decomposition(P_b, (Balanced(self.out_features, P_b.shape[_ROWS]),), (None, _OUT, None))

    def _placements(self, bias: bool) -> dict[str, Placement]:
        weight, offset = self.used_weight(), self.used_bias()
        placed = Placement(weight), Placement(offset)
        if self.weights == "root" and self.P_w.shape[_BLOCKS] > 1:
            root = self.P_w.slab({_BLOCKS: 0})
            placed = Placement(self.used_weight(root), weight), Placement(self.used_bias(root), offset)
        return dict(zip(("weight", "bias") if bias else ("weight",), placed, strict=False))

    def plan(self, facts: dict[int, InputFacts]) -> CallPlan:
        """Who reads which block of x, and who has which partial sum of y."""
        source, dtype = source_of(self.P_x, facts)
        if source.shape[-1] != self.in_features:
            raise ShapeError(
                f"global input {source.shape} has {source.shape[-1]} features, the layer takes"
                f" {self.in_features}"
            )
        for rank, fact in facts.items():
            if fact.weights != dtype:
                raise ShapeError(f"input is {dtype}, the weights of rank {rank} are {fact.weights}")
        outputs = (*source.shape[:-1], self.out_features)
        read, made = self._blocks(source.shape, _COLUMNS), self._blocks(outputs, _ROWS)
        owned = Decomposition.balanced(self.P_y, outputs)
        return CallPlan(
            movement_or_none(self.site, source, read, dtype, "gather"),
            movement_or_none(self.site, made, owned, dtype, "scatter"),
            shape=read.box(self.machine.rank).shape,
            dtype=dtype,
        )

    def _blocks(self, shape: tuple[int, ...], features: int) -> Decomposition:
        # Blocks of the batch, all of the dimensions between, and blocks of features along one dimension of
        # the grid; along the other one inputs are copied, and partial outputs summed.
        splits = [Balanced(extent, 1) for extent in shape]
        axes: list[int | None] = [None] * self.P_w.dim
        for grid, axis in ((_BLOCKS, 0), (features, len(shape) - 1)):
            if self.P_w.shape[grid] > 1:
                splits[axis], axes[grid] = Balanced(shape[axis], self.P_w.shape[grid]), axis
        return Decomposition(self.P_w, tuple(splits), tuple(axes))

    def compute(self, flow: CallPlan, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Partial outputs of this rank's block of the weight."""
        x, weight = self.block_of(flow, x), weights["weight"]
        bias = weights["bias"] if self.adds_bias else None
        # Gradients of copies that were moved or cast here are on their way to the parameter, not its own.
        own = weight is self.weight and (bias is None or bias is self.bias)
        if own and self.placed is not None and self.placed.taken_over:
            return linear_function(x, weight, bias, self.placed.offered)
        return F.linear(x, weight, bias)

    @staticmethod
    def block_of(flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """What this rank computes with; a tensor without elements in the shape and type that it must have."""
        return x if x.numel() else x.to(flow.facts["dtype"]).reshape(flow.facts["shape"])

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        shapes = f"P_x={self.P_x.shape}, P_y={self.P_y.shape}, P_w={self.P_w.shape}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, weights={self.weights!r}, {shapes}"
        )


class DistributedLinearAllGather(DistributedLinear):
    """Linear layer with the output features of its weight cut over the model-parallel workers.

    The workers are the ranks of P_y: its first extent counts the data-parallel blocks, the others
    multiplied the model-parallel workers of each. Every worker gathers all features of its block of the
    batch and computes its block of output features. For fewer input than output features.

    Parameters
    ----------
    P_y
        Partition of the output, with as many dimensions as the tensor.
    in_features, out_features, bias, device, dtype, weights, name
        As for :class:`DistributedLinear`.
    P_x
        Partition of the input; P_y if None.

    Raises
    ------
    PartitionError, ShapeError, UnsupportedError
        As for :class:`DistributedLinear`.

    Notes
    -----
    Linear document, linear layer with all-gather; requirement B6. Local and global shapes, and who takes
    part in what, as for :class:`DistributedLinear`.
    """

    def __init__(
        self,
        P_y: Partition,
        in_features: int,
        out_features: int,
        P_x: Partition | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str = "replicated",
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        P_w = workers(type(self).__name__, P_y, _ROWS)
        P_x = P_y if P_x is None else P_x
        super().__init__(
            P_x,
            P_y,
            P_w,
            in_features,
            out_features,
            bias,
            device,
            dtype,
            weights=weights,
            name=name,
            **callbacks,
        )


class DistributedLinearReduceScatter(DistributedLinear):
    """Linear layer with the input features of its weight cut over the model-parallel workers.

    The workers are the ranks of P_x: its first extent counts the data-parallel blocks, the others
    multiplied the model-parallel workers of each. Every worker computes with its block of input features;
    the results are summed and scattered. For fewer output than input features.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    in_features, out_features, bias, device, dtype, weights, name
        As for :class:`DistributedLinear`.
    P_y
        Partition of the output; P_x if None.

    Raises
    ------
    PartitionError, ShapeError, UnsupportedError
        As for :class:`DistributedLinear`.

    Notes
    -----
    Linear document, linear layer with reduce-scatter; requirement B6. Local and global shapes, and who
    takes part in what, as for :class:`DistributedLinear`.
    """

    def __init__(
        self,
        P_x: Partition,
        in_features: int,
        out_features: int,
        P_y: Partition | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str = "replicated",
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        P_w = workers(type(self).__name__, P_x, _COLUMNS)
        P_y = P_x if P_y is None else P_y
        super().__init__(
            P_x,
            P_y,
            P_w,
            in_features,
            out_features,
            bias,
            device,
            dtype,
            weights=weights,
            name=name,
            **callbacks,
        )


def workers(kind: str, P: Partition, dim: int) -> Partition:
    """Ranks of a partition as data-parallel blocks of model-parallel workers along one dimension of P_w."""
    _check_partition(kind, "the first argument", P)
    if P.dim == 0:
        raise PartitionError(f"{kind}: a partition has as many dimensions as the tensor, got {P.shape}")
    # A tensor of one dimension has features and no batch.
    blocks = P.shape[0] if P.dim > 1 else 1
    grid = [blocks, 1, 1]
    grid[dim] = prod(P.shape) // blocks
    return P.create_cartesian_topology_partition(grid)


def _checked_grid(kind: str, P_x: Partition, P_y: Partition, P_W: Partition) -> tuple[int, ...]:
    for name, P in (("P_x", P_x), ("P_y", P_y), ("P_W", P_W)):
        _check_partition(kind, name, P)
    if P_x.dim != P_y.dim or P_x.dim == 0:
        raise PartitionError(
            f"{kind}: P_x {P_x.shape} and P_y {P_y.shape} must both have as many dimensions as the tensor"
        )
    if P_W.dim not in (2, 3):
        raise PartitionError(
            f"{kind}: P_W is a grid of (rows, columns) or (blocks, rows, columns), got {P_W.shape}"
        )
    grid = P_W.shape if P_W.dim == 3 else (1, *P_W.shape)
    if P_x.dim == 1 and grid[_BLOCKS] > 1:
        raise PartitionError(
            f"{kind}: P_W {P_W.shape} has data-parallel blocks, but P_x {P_x.shape} leaves no batch to share"
        )
    return grid


def _check_partition(kind: str, name: str, P: object) -> None:
    if not isinstance(P, Partition):
        raise PartitionError(f"{kind}: {name} is a partition, got {P!r}")


def _check_numbers(kind: str, in_features: object, out_features: object, weights: str) -> None:
    for name, count in (("in_features", in_features), ("out_features", out_features)):
        if not isinstance(count, SupportsIndex) or as_int(count) < 0:
            raise ShapeError(f"{kind}: {name} is a number of features, at least 0, got {count!r}")
    if weights not in _WEIGHTS:
        raise ShapeError(f"{kind}: weights is one of {_WEIGHTS}, got {weights!r}")


def _check_elements(kind: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise UnsupportedError(f"{kind}: tensors live on the CPU, got device {device!r}")
    if dtype is not None and dtype not in _DTYPES:
        raise UnsupportedError(f"{kind}: dtype is one of {_DTYPES}, got {dtype}")
