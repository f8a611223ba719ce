"""Layers without parameters whose outputs read a part of the input: pooling, padding, up-sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from distdl_rma.errors import PartitionError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.gather_compute_scatter import CallPlan, ExchangingLayer
from distdl_rma.layers.core.layer import source_of
from distdl_rma.layers.core.plan_cache import InputFacts


class WindowLayer(ExchangingLayer):
    """Layer on (batch, channel, *spatial) whose outputs are computed where they will be.

    Subclasses give ``route``, which plans for one global input, and ``local``, which computes a rank's
    outputs. A route's facts hold ``box``, the rank's outputs, and ``dtype``.

    Parameters
    ----------
    P_x, P_y
        Partitions of input and output, with as many dimensions as the tensors; P_y is P_x if None.
    dims
        Number of spatial dimensions.
    name
        For messages.

    Raises
    ------
    PartitionError
        If a partition does not fit the dimensions.
    """

    _dims = 0
    _inexact = True  # whether elements must be floating point numbers

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None,
        dims: int | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        P_y = P_x if P_y is None else P_y
        dims = type(self)._dims if dims is None else dims
        for label, partition in (("P_x", P_x), ("P_y", P_y)):
            if partition.dim != LEADING + dims:
                raise PartitionError(
                    f"{type(self).__name__}: {label} has {partition.dim} dimensions {partition.shape}, the"
                    f" tensor has {LEADING + dims}"
                )
        super().__init__(P_x, P_y, self._workers(P_x, P_y), name=name, **callbacks)
        self._dims = dims

    def _workers(self, P_x: Partition, P_y: Partition) -> Partition:
        return P_y

    def plan(self, facts: dict[int, InputFacts]) -> CallPlan:
        """Route for the global input that the ranks form."""
        source, dtype = source_of(self.P_x, facts)
        if self._inexact and not dtype.is_floating_point:
            raise UnsupportedError(f"the input is {dtype}; only floating point numbers are supported")
        return self.route(source, dtype)

    def route(self, source: Decomposition, dtype: torch.dtype) -> CallPlan:
        """Plan for an input; alike on all ranks, errors included."""
        raise NotImplementedError

    def compute(self, flow: CallPlan, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local outputs; those without elements come from no computation."""
        box = flow.facts["box"]
        if not box.empty:
            return self.local(flow, x)
        y = x.new_zeros(box.shape, dtype=flow.facts["dtype"])
        return y + x.sum().to(y.dtype) if x.requires_grad else y

    def local(self, flow: CallPlan, x: torch.Tensor) -> torch.Tensor:
        """Outputs of this rank from the inputs that they read."""
        raise NotImplementedError

    def balanced(self, source: Decomposition, extents: Sequence[int]) -> Decomposition:
        """Outputs of the given spatial extents, balanced over P_y; on P_x itself the batch stays as it is."""
        outputs = Decomposition.balanced(self.P_y, (*source.shape[:LEADING], *extents))
        return outputs.with_splits({0: source.splits[0]}) if self.P_y == self.P_x else outputs

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"P_x={self.P_x.shape}, P_y={self.P_y.shape}"
