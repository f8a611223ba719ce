"""All-gather and reduce-scatter along dimensions of a grid."""

from __future__ import annotations

from typing import Unpack

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced, Split
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import source_of
from distdl_rma.layers.core.movement_layer import MovementLayer, MovementPlan
from distdl_rma.layers.core.plan_cache import InputFacts
from distdl_rma.ops.grid_axes import Axes, chosen_axes
from distdl_rma.ops.movement import movements_through


class AllGather(MovementLayer):
    """Every rank gets what all ranks have that differ from it in some grid dimensions only.

    A tensor that P_x cuts along all grid dimensions becomes one that it cuts along the others only. Local
    input: a shard of any size that forms a grid with the others. Local output: whole along the gathered
    dimensions. The adjoint sums and scatters, along the cuts of the input.

    Parameters
    ----------
    P_x
        Partition of input and output, with as many dimensions as the tensor.
    axes_all_gather
        Dimensions to gather along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.
    name
        For messages.

    Raises
    ------
    PartitionError
        If not exactly one of the two is given, or a dimension is out of range or listed twice.
    ShapeError
        In a call, on all its ranks: local shapes do not form a grid, or two ranks pass different types.

    Notes
    -----
    Requirement B4.
    """

    def __init__(
        self,
        P_x: Partition,
        axes_all_gather: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.axes = chosen_axes(type(self).__name__, P_x, "axes_all_gather", axes_all_gather, axes_keep)
        super().__init__(P_x, P_x, name=name, **callbacks)

    def extra_repr(self) -> str:
        """The partition, and the gathered dimensions."""
        return f"P_x={self.P_x.shape}, axes_all_gather={self.axes}"

    def plan(self, facts: dict[int, InputFacts]) -> MovementPlan:
        """Blocks to blocks that are whole along the gathered dimensions."""
        source, dtype = source_of(self.P_x, facts)
        whole: dict[int, Split] = {d: Balanced(source.shape[d], 1) for d in self.axes}
        splits = tuple(whole.get(d, split) for d, split in enumerate(source.splits))
        axes = tuple(None if d in self.axes else d for d in range(self.P_x.dim))
        target = Decomposition(self.P_x, splits, axes)
        return MovementPlan(movements_through(self.site, [(source, target)], dtype), dtype)


class ReduceScatter(MovementLayer):
    """Sum what ranks have that differ in some grid dimensions only, and cut the sum along these.

    Local input: whole along the scattered dimensions, equal in shape on the ranks that are summed. Local
    output: the balanced share of the sum. The sum is taken in the order of the partition. The adjoint
    gathers.

    Parameters
    ----------
    P_x
        Partition of input and output, with as many dimensions as the tensor.
    axes_reduce_scatter
        Dimensions to sum and cut along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.
    name
        For messages.

    Raises
    ------
    PartitionError
        If not exactly one of the two is given, or a dimension is out of range or listed twice.
    ShapeError
        In a call, on all its ranks: local shapes do not form a grid, or two ranks pass different types.

    Notes
    -----
    Requirement B4.
    """

    def __init__(
        self,
        P_x: Partition,
        axes_reduce_scatter: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind = type(self).__name__
        self.axes = chosen_axes(kind, P_x, "axes_reduce_scatter", axes_reduce_scatter, axes_keep)
        super().__init__(P_x, P_x, name=name, **callbacks)

    def extra_repr(self) -> str:
        """The partition, and the scattered dimensions."""
        return f"P_x={self.P_x.shape}, axes_reduce_scatter={self.axes}"

    def plan(self, facts: dict[int, InputFacts]) -> MovementPlan:
        """Copies along the scattered dimensions to balanced blocks."""
        source, dtype = source_of(self.P_x, facts, replicate=self.axes)
        cut: dict[int, Split] = {d: Balanced(source.shape[d], self.P_x.shape[d]) for d in self.axes}
        splits = tuple(cut.get(d, split) for d, split in enumerate(source.splits))
        target = Decomposition(self.P_x, splits, tuple(range(self.P_x.dim)))
        return MovementPlan(movements_through(self.site, [(source, target)], dtype), dtype)
