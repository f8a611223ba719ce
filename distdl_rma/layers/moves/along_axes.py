"""What layers that work along some dimensions of one grid have in common."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as as_int
from typing import ClassVar, Unpack

from distdl_rma.errors import ArgumentError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.moves.base import MovementLayer
from distdl_rma.ops.moves.staged import StagedMove

# One grid dimension or several.
Axes = int | Iterable[int]


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
    if (axes is None) == (keep is None):
        raise ArgumentError(f"{kind}: give either {what} or axes_keep, got {what}={axes}, axes_keep={keep}")
    given = axes if keep is None else keep
    try:
        listed = [as_int(axis) for axis in (given if isinstance(given, Iterable) else [given])]  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentError(f"{kind}: axes are integers, got {given}: {error}") from None
    for axis in listed:
        if not -P.dim <= axis < P.dim:
            raise ArgumentError(f"{kind}: axis {axis} is out of range for grid {P.shape}")
    found = {axis % P.dim for axis in listed}
    if len(found) < len(listed):
        raise ArgumentError(f"{kind}: an axis is listed more than once in {listed} for grid {P.shape}")
    return tuple(d for d in range(P.dim) if (d in found) == (keep is None))
