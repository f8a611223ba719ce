"""What layers that move data, and compute nothing, have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, Unpack

import torch

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.ops.core.autograd import GradientNeeds, deliver
from distdl_rma.ops.core.operation import Operation

M = TypeVar("M", bound=Operation)


class MovementLayer(OperatorLayer[M]):
    """A layer that moves data from P_x to P_y; ``preserve_batch`` as of :class:`Repartition`."""

    def __init__(
        self,
        P_x: Partition | Sequence[Partition],
        P_y: Partition | None = None,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, P_y, name=name, **callbacks)
        self.preserve_batch = preserve_batch

    def extra_repr(self) -> str:
        """The partitions, and what else the layer was built with."""
        return f"P_x={self.P_x.shape}, P_y={self.P_y.shape}"

    def built_with(self) -> str:
        """As of every layer, with the ranks, which are not the same for all grids of one shape."""
        return f"{[P.ranks for P in (*self.P_xs, self.P_y)]}, {super().built_with()}"

    def stand_aside(self, x: torch.Tensor, others: Iterable[torch.Tensor] = ()) -> torch.Tensor:
        """As of every layer, without the batch size where the results of others lack it."""
        y = super().stand_aside(x, others)
        return y if self.preserve_batch or not x.numel() else y.flatten()

    def leave(self, y: torch.Tensor, x: torch.Tensor, needs: GradientNeeds) -> torch.Tensor:
        """Result as the caller gets it; in a graph already if any rank's is."""
        return deliver(y, self.P_y.active, x.shape[0] if self.preserve_batch and x.dim() else None)
