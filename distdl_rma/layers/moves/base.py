"""What layers that move data, and compute nothing, have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index as as_int
from typing import ClassVar, TypeVar, Unpack

import torch

from distdl_rma.errors import ArgumentError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.ops.core.autograd import GradientNeeds, deliver
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.moves.redistribute import StagedMove

M = TypeVar("M", bound=Operation)
# One grid dimension or several.
Axes = int | Iterable[int]


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


class LayerAlongAxes(MovementLayer[StagedMove]):
    """A move among the ranks of P_x that differ in some grid dimensions only: ``axes``, sorted."""

    _argument: ClassVar[str]

    def __init__(
        self,
        P_x: Partition,
        axes: Axes | None,
        keep: Axes | None,
        name: str | None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.axes = chosen_axes(type(self).__name__, P_x, self._argument, axes, keep)
        super().__init__(P_x, name=name, **callbacks)

    def extra_repr(self) -> str:
        """The partition, and the dimensions."""
        return f"P_x={self.P_x.shape}, {self._argument}={self.axes}"


def chosen_axes(kind: str, P: Partition, what: str, axes: Axes | None, keep: Axes | None) -> tuple[int, ...]:
    """Grid dimensions given themselves, or by those that are kept; sorted."""
    given = axes if keep is None else keep
    if given is None or (axes is not None and keep is not None):
        raise ArgumentError(f"{kind}: give either {what} or axes_keep, got {what}={axes}, axes_keep={keep}")
    try:
        listed = [as_int(axis) for axis in (given if isinstance(given, Iterable) else [given])]
    except TypeError as error:
        raise ArgumentError(f"{kind}: axes are integers, got {given}: {error}") from None
    for axis in listed:
        if not -P.dim <= axis < P.dim:
            raise ArgumentError(f"{kind}: axis {axis} is out of range for grid {P.shape}")
    found = {axis % P.dim for axis in listed}
    if len(found) < len(listed):
        raise ArgumentError(f"{kind}: an axis is listed more than once in {listed} for grid {P.shape}")
    return tuple(d for d in range(P.dim) if (d in found) == (keep is None))
