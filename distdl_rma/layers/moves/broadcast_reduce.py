"""Broadcast and sum-reduction between partitions, and the sum along the dimensions of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Unpack

import torch

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.rank_groups import groups_onto
from distdl_rma.layers.core.agreement import InputFacts, input_dtype
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.moves.base import Axes, LayerAlongAxes, MovementLayer
from distdl_rma.ops.moves.broadcast_reduce import Subtensors, all_sum_reduce, broadcast, sum_reduce
from distdl_rma.ops.moves.redistribute import StagedMove


class _OfSubtensors(MovementLayer[StagedMove]):
    # Dimensions of P_x along which subtensors are summed.
    axes: tuple[int, ...] = ()

    def subtensors(self, facts: dict[int, InputFacts]) -> tuple[Subtensors, torch.dtype]:
        """Subtensors as blocks of one tensor, or their shapes if they form none; and their type."""
        P_x, dtype = self.P_x, input_dtype(self.P_x, facts)
        shapes = {rank: facts[rank].shape for rank in P_x.ranks}
        one = all(extent == 1 or d in self.axes for d, extent in enumerate(P_x.shape))
        if one and len(set(shapes.values())) == 1:
            return Decomposition.replicated(P_x, shapes[P_x.ranks[0]]), dtype
        try:
            return Decomposition.from_local_shapes(P_x, shapes, self.axes), dtype
        except ShapeError:
            # Subtensors may have any shape, whatever the grids are.
            return shapes, dtype

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """Subtensors of this shape."""
        return Decomposition.replicated(P_x, shape)


class _Between(_OfSubtensors):
    # Groups of ranks on one side, one rank each on the other.
    _operation: ClassVar[Callable[..., StagedMove]]

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
        sums = self._operation is sum_reduce
        sides = (P_x, transpose_src), (P_y, transpose_dest)
        (P_many, flip_many), (P_few, flip_few) = sides if sums else sides[::-1]
        try:
            first, *_ = groups_onto(P_many, P_few, flip_many, flip_few)
        except PartitionError as error:
            raise PartitionError(f"{type(self).__name__}: {error}") from None
        super().__init__(P_x, P_y, preserve_batch, name=name, **callbacks)
        if sums:
            # Ranks of the first group differ in these from the first rank of P_x.
            self.axes = tuple(sorted({d for r in first for d, i in enumerate(P_x.index_of(r)) if i}))

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Groups of ranks to one rank each, or one rank each to groups."""
        source, dtype = self.subtensors(facts)
        flips = self.transpose_src, self.transpose_dest
        return self._operation(self.site, source, self.P_x, self.P_y, dtype, flips)

    def extra_repr(self) -> str:
        """The partitions, and which of them is transposed."""
        flips = f"transpose_src={self.transpose_src}, transpose_dest={self.transpose_dest}"
        return f"{super().extra_repr()}, {flips}"


class SumReduce(_Between):
    """Sum subtensors from P_x to P_y, along the dimensions in which the grid of P_y is 1.

    The grid of P_y is extended to the left with ones; then each dimension equals that of P_x, or is 1.
    Subtensors that are summed are equal in shape; else they may have any shape, whatever the grids are.
    The sum is taken in the order of P_x, the same from run to run; that of short types in float32. Over
    several nodes the sums of the nodes are taken first. The adjoint is :class:`Broadcast`.

    Parameters
    ----------
    P_x, P_y
        Input and output partition.
    transpose_src, transpose_dest
        Whether the grid of P_x, or P_y, is transposed before: who is at (i, j) counts as at (j, i).
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).

    Notes
    -----
    Sum-reduce document; requirement B3.
    """

    _operation = staticmethod(sum_reduce)


class Broadcast(_Between):
    """Copy subtensors from P_x to P_y, along the dimensions in which the grid of P_x is 1.

    The grid of P_x is extended to the left with ones; then each dimension equals that of P_y, or is 1.
    Subtensors may have any shape, whatever the grids are. Over several nodes each node gets one copy, which
    is handed on there. The adjoint is :class:`SumReduce`: gradients are summed in the order of P_y.

    Parameters
    ----------
    P_x, P_y, transpose_src, transpose_dest, preserve_batch
        As for :class:`SumReduce`.

    Notes
    -----
    Sum-reduce document, read from its end; requirement B3.
    """

    _operation = staticmethod(broadcast)


class AllSumReduce(_OfSubtensors, LayerAlongAxes):
    """Sum the subtensors of ranks that differ in some grid dimensions only; each of them gets the sum.

    Subtensors that are summed are equal in shape; else they may have any shape, whatever the grid is. The
    result is bitwise the same on the ranks that share it and from run to run. The layer is its own adjoint.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_reduce
        Grid dimensions to sum along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.

    Notes
    -----
    Requirement B4.
    """

    _argument = "axes_reduce"

    def __init__(
        self,
        P_x: Partition,
        axes_reduce: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        LayerAlongAxes.__init__(self, P_x, axes_reduce, axes_keep, name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Groups of ranks to themselves."""
        source, dtype = self.subtensors(facts)
        return all_sum_reduce(self.site, source, self.P_x, self.axes, dtype)
