"""The layers Repartition, AllGather, ReduceScatter: tensors in blocks that become tensors cut otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.moves.base import Axes, LayerAlongAxes, MovementLayer
from distdl_rma.ops.moves.redistribute import StagedMove, all_gather, reduce_scatter, repartition


class Repartition(MovementLayer[StagedMove]):
    """Move a tensor from one Cartesian partition to another; the result is balanced.

    As of all layers that only move data, a rank's result is memory of its own, also where it is its input.
    The adjoint moves gradients back to where the input came from.

    Parameters
    ----------
    P_x, P_y
        Input and output partition, with as many dimensions as the tensor.
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).

    Notes
    -----
    Repartition document; requirement B5.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        if P_x.dim != P_y.dim:
            raise PartitionError(
                f"{type(self).__name__}: P_x has {P_x.dim} dimensions {P_x.shape} but P_y has {P_y.dim}"
                f" {P_y.shape}"
            )
        super().__init__(P_x, P_y, preserve_batch, name=name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Blocks as they are to balanced ones."""
        source, dtype = source_of(self.P_x, facts)
        return repartition(self.site, source, self.P_y, dtype)


# The name by which this movement is known as well.
DistributedTranspose = Repartition


class AllGather(LayerAlongAxes):
    """Every rank gets what all ranks have that differ from it in some grid dimensions only.

    A tensor that P_x cuts along all grid dimensions becomes one that it cuts along the others only. Local
    output: whole along the gathered dimensions. The adjoint sums and scatters, along the cuts of the input.
    Flat vectors are gathered, without gradients, by the collective :class:`distdl_rma.segments.Allgather`.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_all_gather
        Dimensions to gather along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.

    Notes
    -----
    Requirement B4.
    """

    _argument = "axes_all_gather"

    def __init__(
        self,
        P_x: Partition,
        axes_all_gather: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, axes_all_gather, axes_keep, name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Blocks to blocks that are whole along the gathered dimensions."""
        source, dtype = source_of(self.P_x, facts)
        return all_gather(self.site, source, self.axes, dtype)


class ReduceScatter(LayerAlongAxes):
    """Sum what ranks have that differ in some grid dimensions only, and cut the sum along these.

    Local input: whole along the scattered dimensions, equal in shape on the ranks that are summed. Local
    output: the balanced share of the sum, taken in the order of the partition. The adjoint gathers. Of flat
    vectors, without gradients: the collective :class:`distdl_rma.segments.Reducescatter`.

    Parameters
    ----------
    P_x
        Partition of input and output.
    axes_reduce_scatter
        Dimensions to sum and cut along, one or several; negative ones count from the end.
    axes_keep
        Instead of these, all the others.

    Notes
    -----
    Requirement B4.
    """

    _argument = "axes_reduce_scatter"

    def __init__(
        self,
        P_x: Partition,
        axes_reduce_scatter: Axes | None = None,
        axes_keep: Axes | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, axes_reduce_scatter, axes_keep, name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Copies along the scattered dimensions to balanced blocks."""
        source, dtype = source_of(self.P_x, facts, replicate=self.axes)
        return reduce_scatter(self.site, source, self.axes, dtype)

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """Whole along the scattered dimensions."""
        return Decomposition.balanced(P_x, shape, self.axes)
