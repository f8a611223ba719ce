"""All-gather and reduce-scatter along dimensions of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.moves.along_axes import Axes, LayerAlongAxes
from distdl_rma.ops.moves.redistribute import all_gather, reduce_scatter
from distdl_rma.ops.moves.staged import StagedMove


class AllGather(LayerAlongAxes):
    """Every rank gets what all ranks have that differ from it in some grid dimensions only.

    A tensor that P_x cuts along all grid dimensions becomes one that it cuts along the others only. Local
    output: whole along the gathered dimensions. The adjoint sums and scatters, along the cuts of the input.

    Parameters
    ----------
    P_x
        Partition of input and output, with as many dimensions as the tensor.
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
