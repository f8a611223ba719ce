"""Distributed linear layers whose weight is also cut over the data-parallel workers."""

from __future__ import annotations

from functools import cached_property
from typing import Unpack

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced, Listed
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan
from distdl_rma.layers.core.placement import Placement
from distdl_rma.layers.linear.linear import DistributedLinear, workers
from distdl_rma.ops.autograd import GradientNeeds
from distdl_rma.ops.linear.zero_shards import Shards, sharded_linear

_BLOCKS, _ROWS, _COLUMNS = range(3)
_OUT, _IN = range(2)


class _ZeroLinear(DistributedLinear):
    # Which dimension of the weight the data-parallel workers cut: the one that the others leave whole.
    _cut = _IN

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        name: str | None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(
            P_x, P_y, P_w, in_features, out_features, bias, device, dtype, name=name, **callbacks
        )
        self.weights = "sharded"

    @cached_property
    def _shards(self) -> Shards | None:
        index, blocks = self.P_w.index, self.P_w.shape[_BLOCKS]
        if index is None or blocks == 1:
            return None
        group = self.P_w.slab({_ROWS: index[_ROWS], _COLUMNS: index[_COLUMNS]})
        line = group.create_cartesian_topology_partition([blocks])
        height, width = self.used_weight().box(self.machine.rank).shape
        return Shards(self.machine, line, (height, width), self._cut, f"{self.name} (weight)")

    @property
    def nbytes_staged(self) -> int:
        """Bytes of segment that this rank holds to gather the weight and to scatter its gradient."""
        return 0 if self._shards is None else self._shards.nbytes_staged

    def _placements(self, bias: bool) -> dict[str, Placement]:
        blocks, rows, columns = self.P_w.shape
        if blocks == 1:
            return super()._placements(bias)
        whole = self.used_weight()
        splits = list(whole.splits)
        splits[self._cut] = Balanced(whole.shape[self._cut], blocks)
        axes = self._cut, _OUT if rows > 1 else None, _IN if columns > 1 else None
        placed = {"weight": Placement(Decomposition(self.P_w, tuple(splits), axes))}
        if bias:
            placed["bias"] = Placement(self._kept_bias(), self.used_bias())
        return placed

    def _kept_bias(self) -> Decomposition:
        # Each row's block of the bias cut again over the data-parallel workers.
        used = self.used_bias()
        blocks, rows, _ = used.partition.shape
        order = [d * rows + r for r in range(rows) for d in range(blocks)]
        lengths: list[int] = []
        for r in range(rows):
            start, stop = used.splits[0].interval(r)
            part = Balanced(stop - start, blocks)
            lengths += [end - begin for begin, end in map(part.interval, range(blocks))]
        line = used.partition.create_partition_inclusive(order)
        return Decomposition(line, (Listed(tuple(lengths)),), (0,))

    def carry_out(
        self, flow: CallPlan, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor
    ) -> torch.Tensor:
        """Partial outputs of a block of the weight that is gathered for it."""
        if self._shards is None:
            return super().carry_out(flow, needs, x, **weights)
        bias = weights["bias"] if self.adds_bias else None
        return sharded_linear(self._shards, needs, self.block_of(flow, x), weights["weight"], bias)


class DistributedLinearAllGatherZero(_ZeroLinear):
    """Linear layer with all-gather whose weight is also cut over the data-parallel workers.

    As :class:`DistributedLinearAllGather`, but each worker keeps only a share of its rows of the weight: the
    data-parallel workers cut the input features, and each worker's block of the bias. A forward gathers the
    rows, computes, and lets go of them; a backward gathers them again and reduce-scatters their gradient.

    Parameters
    ----------
    P_y
        Partition of the output, with as many dimensions as the tensor.
    in_features, out_features, bias, device, dtype, name
        As for :class:`DistributedLinear`.
    P_x
        Partition of the input; P_y if None.

    Raises
    ------
    PartitionError, ShapeError, UnsupportedError
        As for :class:`DistributedLinear`.

    Notes
    -----
    Linear document, fully-sharded data parallelism; requirement B6.
    """

    _cut = _IN

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
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        P_w = workers(type(self).__name__, P_y, _ROWS)
        P_x = P_y if P_x is None else P_x
        super().__init__(P_x, P_y, P_w, in_features, out_features, bias, device, dtype, name, **callbacks)


class DistributedLinearReduceScatterZero(_ZeroLinear):
    """Linear layer with reduce-scatter whose weight is also cut over the data-parallel workers.

    As :class:`DistributedLinearReduceScatter`, but each worker keeps only a share of its columns of the
    weight: the data-parallel workers cut the output features, of the bias too. A forward gathers the
    columns, computes, and lets go of them; a backward gathers them again and reduce-scatters their gradient.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions as the tensor.
    in_features, out_features, bias, device, dtype, name
        As for :class:`DistributedLinear`.
    P_y
        Partition of the output; P_x if None.

    Raises
    ------
    PartitionError, ShapeError, UnsupportedError
        As for :class:`DistributedLinear`.

    Notes
    -----
    Linear document, fully-sharded data parallelism; requirement B6.
    """

    _cut = _OUT

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
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        P_w = workers(type(self).__name__, P_x, _COLUMNS)
        P_y = P_x if P_y is None else P_y
        super().__init__(P_x, P_y, P_w, in_features, out_features, bias, device, dtype, name, **callbacks)
