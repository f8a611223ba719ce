"""Broadcast and sum-reduction between partitions, and along the dimensions of one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Unpack

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.rank_groups import Groups, groups_along, groups_onto
from distdl_rma.geometry.trees import Stage, all_reduction, broadcast, reduction
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import input_dtype
from distdl_rma.layers.core.movement_layer import MovementLayer, MovementPlan
from distdl_rma.layers.core.plan_cache import InputFacts
from distdl_rma.ops.grid_axes import Axes, chosen_axes
from distdl_rma.ops.movement import movements_through
from distdl_rma.ops.tensors import sum_dtype

# Movements for groups whose vectors have so many elements, given the node of a rank.
_Stages = Callable[[list[int], Callable[[int], int]], list[Stage]]


def _move(
    layer: MovementLayer, facts: dict[int, InputFacts], givers: Groups, takers: Groups, stages: _Stages
) -> MovementPlan:
    # Givers and takers are the ranks that have, and that get, the subtensor of each group.
    dtype = input_dtype(layer.P_x, facts)
    shapes = [_common_shape(group, facts) for group in givers]
    rank = layer.machine.rank
    mine = next((shape for group, shape in zip(takers, shapes, strict=True) if rank in group), (0,))
    nodes = layer.machine.segments.segment.nodes
    node_of = {member: number for number, node in enumerate(nodes) for member in node}
    found = stages([prod(shape) for shape in shapes], node_of.__getitem__)
    # Where sums are summed again, short types travel in a longer one: they are rounded once, at the end.
    sums = len(found) > (2 if givers is takers else 1)
    movements = movements_through(layer.site, found, sum_dtype(dtype) if sums else dtype)
    return MovementPlan(movements, dtype, flat=mine)


def _common_shape(group: tuple[int, ...], facts: dict[int, InputFacts]) -> tuple[int, ...]:
    first, *others = group
    for rank in others:
        if facts[rank].shape != facts[first].shape:
            raise ShapeError(
                f"subtensors that are summed must be equal in shape: rank {first} passes"
                f" {facts[first].shape} but rank {rank} {facts[rank].shape}"
            )
    return facts[first].shape


class _Between(MovementLayer):
    """What sum-reduction and broadcast share: groups of ranks on one side, one rank each on the other."""

    _sums = True

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.transpose_src, self.transpose_dest = transpose_src, transpose_dest
        sides = (P_x, transpose_src), (P_y, transpose_dest)
        (P_many, flip_many), (P_few, flip_few) = sides if self._sums else sides[::-1]
        try:
            self._groups = groups_onto(P_many, P_few, flip_many, flip_few)
        except PartitionError as error:
            raise PartitionError(f"{type(self).__name__}: {error}") from None
        super().__init__(P_x, P_y, preserve_batch, name=name, **callbacks)

    def extra_repr(self) -> str:
        """The partitions, and which of them is transposed."""
        flips = f"transpose_src={self.transpose_src}, transpose_dest={self.transpose_dest}"
        return f"{super().extra_repr()}, {flips}"


class SumReduce(_Between):
    """Sum subtensors from P_x to P_y, along the dimensions in which the grid of P_y is 1.

    The grid of P_y is extended to the left with ones; then each dimension equals that of P_x, or is 1.
    Subtensors that are summed are equal in shape; else they may have any shape, whatever the grids are.
    The sum is taken in the order of P_x, the same from run to run; that of short types in float32. A
    rank's result is memory of its own, also where it is its input. The adjoint is :class:`Broadcast`.

    Collective to construct over the machine; a call involves the ranks of both partitions and blocks.
    Over several nodes the sums of the nodes are taken first.

    Parameters
    ----------
    P_x, P_y
        Input and output partition; a rank may be in one, both or none.
    transpose_src, transpose_dest
        Whether the grid of P_x, or P_y, is transposed before: who is at (i, j) counts as at (j, i).
    preserve_batch
        Whether outputs without elements keep the batch size of the input, as shape (b, 0).
    name
        For messages.

    Raises
    ------
    PartitionError
        If the grids do not fit together.
    ShapeError
        In a call, on all its ranks: subtensors that are summed differ in shape, two ranks pass different
        types, or a rank outside of P_x passes elements.

    Notes
    -----
    Sum-reduce document; requirement B3.
    """

    def plan(self, facts: dict[int, InputFacts]) -> MovementPlan:
        """Groups of ranks to one rank each."""
        roots, rank = self.P_y.ranks, self.machine.rank
        return _move(
            self,
            facts,
            self._groups,
            tuple((root,) for root in roots),
            lambda lengths, node_of: reduction(self._groups, roots, lengths, node_of, rank),
        )


class Broadcast(_Between):
    """Copy subtensors from P_x to P_y, along the dimensions in which the grid of P_x is 1.

    The grid of P_x is extended to the left with ones; then each dimension equals that of P_y, or is 1.
    Subtensors may have any shape, whatever the grids are. A rank's result is memory of its own, also where
    it is its input. The adjoint is :class:`SumReduce`: gradients are summed in the order of P_y.

    Collective to construct over the machine; a call involves the ranks of both partitions and blocks.
    Over several nodes each node gets one copy, which is handed on there.

    Parameters
    ----------
    P_x, P_y
        Input and output partition; a rank may be in one, both or none.
    transpose_src, transpose_dest
        Whether the grid of P_x, or P_y, is transposed before: who is at (i, j) counts as at (j, i).
    preserve_batch
        Whether outputs without elements keep the batch size of the input, as shape (b, 0).
    name
        For messages.

    Raises
    ------
    PartitionError
        If the grids do not fit together.
    ShapeError
        In a call, on all its ranks: two ranks pass different types, or a rank outside of P_x passes
        elements.

    Notes
    -----
    Sum-reduce document, read from its end; requirement B3.
    """

    _sums = False

    def plan(self, facts: dict[int, InputFacts]) -> MovementPlan:
        """One rank each to groups of ranks."""
        roots, rank = self.P_x.ranks, self.machine.rank
        return _move(
            self,
            facts,
            tuple((root,) for root in roots),
            self._groups,
            lambda lengths, node_of: broadcast(roots, self._groups, lengths, node_of, rank),
        )


class AllSumReduce(MovementLayer):
    """Sum the subtensors of ranks that differ in some grid dimensions only; each of them gets the sum.

    Subtensors that are summed are equal in shape; else they may have any shape, whatever the grid is. The
    result is bitwise the same on the ranks that share it and from run to run, and memory of its own. The
    layer is its own adjoint.

    Collective to construct over the machine; a call involves the ranks of P_x and blocks.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_reduce
        Grid dimensions to sum along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.
    name
        For messages.

    Raises
    ------
    PartitionError
        If not exactly one of the two is given, or a dimension is out of range or listed twice.
    ShapeError
        In a call, on all its ranks: subtensors that are summed differ in shape, or two ranks pass
        different types.

    Notes
    -----
    Requirement B4.
    """

    def __init__(
        self,
        P_x: Partition,
        axes_reduce: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.axes = chosen_axes(type(self).__name__, P_x, "axes_reduce", axes_reduce, axes_keep)
        self._groups = groups_along(P_x, self.axes)
        super().__init__(P_x, P_x, name=name, **callbacks)

    def extra_repr(self) -> str:
        """The partition, and the summed dimensions."""
        return f"P_x={self.P_x.shape}, axes_reduce={self.axes}"

    def plan(self, facts: dict[int, InputFacts]) -> MovementPlan:
        """Groups of ranks to themselves."""
        groups, rank = self._groups, self.machine.rank
        return _move(
            self,
            facts,
            groups,
            groups,
            lambda lengths, node_of: all_reduction(groups, lengths, node_of, rank),
        )
