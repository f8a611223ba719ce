"""The grid of ranks behind every linear layer: who has which block of weight, bias, input and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition

# Dimensions of the grid: data-parallel blocks, and the rows and columns of the weight.
BLOCKS, ROWS, COLUMNS = range(3)
# Dimensions of the weight (out_features, in_features): the grid cuts them into rows and columns.
OUT, IN = range(2)


@dataclass(frozen=True)
class LinearGrid:
    """Ranks on a grid (data-parallel blocks, rows, columns) that compute with a weight of some size.

    Each data-parallel block takes a share of the batch and all of the weight. The bias is added in column
    0, once.
    """

    P_w: Partition
    in_features: int
    out_features: int

    @property
    def blocks(self) -> int:
        """Number of data-parallel blocks."""
        return self.P_w.shape[BLOCKS]

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds its block of the bias to what it computes."""
        return self.P_w.index is not None and self.P_w.index[COLUMNS] == 0

    @property
    def weight(self) -> Decomposition:
        """Block of the weight that each rank computes with."""
        _, rows, columns = self.P_w.shape
        splits = Balanced(self.out_features, rows), Balanced(self.in_features, columns)
        return Decomposition(self.P_w, splits, (None, OUT, IN))

    @property
    def bias(self) -> Decomposition:
        """Block of the bias that the ranks of column 0 compute with."""
        P_b = self.P_w.slab({COLUMNS: 0})
        return Decomposition(P_b, (Balanced(self.out_features, P_b.shape[ROWS]),), (None, OUT, None))

    def inputs(self, shape: Sequence[int]) -> Decomposition:
        """What each rank reads of an input (batch, ..., in_features): alike along the rows."""
        return self._features(shape, COLUMNS)

    def outputs(self, shape: Sequence[int]) -> Decomposition:
        """What each rank makes of that input, of (batch, ..., out_features): terms of sums along columns."""
        return self._features((*shape[:-1], self.out_features), ROWS)

    def _features(self, shape: Sequence[int], cuts: int) -> Decomposition:
        # Blocks of the batch, all of the dimensions between, and blocks of features along a grid dimension.
        splits = [Balanced(extent, 1) for extent in shape]
        axes: list[int | None] = [None] * self.P_w.dim
        for grid, axis in ((BLOCKS, 0), (cuts, len(shape) - 1)):
            if self.P_w.shape[grid] > 1:
                splits[axis], axes[grid] = Balanced(shape[axis], self.P_w.shape[grid]), axis
        return Decomposition(self.P_w, tuple(splits), tuple(axes))

    def zero_weight(self, dim: int) -> Decomposition:
        """ZeRO: the weight cut over the data-parallel blocks too, in a dimension that workers leave whole."""
        _, rows, columns = self.P_w.shape
        splits = list(self.weight.splits)
        splits[dim] = Balanced(splits[dim].extent, self.blocks)
        axes = dim, OUT if rows > 1 else None, IN if columns > 1 else None
        return Decomposition(self.P_w, tuple(splits), axes)

    def zero_bias(self) -> Decomposition:
        """ZeRO: each row's block of the bias cut again over the data-parallel blocks."""
        used = self.bias
        rows, blocks = range(used.partition.shape[ROWS]), range(self.blocks)
        lengths: list[int] = []
        for start, stop in map(used.splits[0].interval, rows):
            lengths += Balanced(stop - start, self.blocks).lengths
        order = [block * len(rows) + row for row in rows for block in blocks]
        line = used.partition.create_partition_inclusive(order)
        return Decomposition(line, (Listed(tuple(lengths)),), (0,))


def grid_of_workers(P: Partition, dim: int) -> Partition:
    """Ranks of a partition of tensors as data-parallel blocks of model-parallel workers.

    The first extent counts the blocks, the others multiplied the workers of each, who go along one dimension
    of the grid: rows for an all-gather of the input, columns for a reduce-scatter of the output.
    """
    # A tensor of one dimension has features and no batch.
    blocks = P.shape[0] if P.dim > 1 else 1
    grid = [blocks, 1, 1]
    grid[dim] = prod(P.shape) // blocks
    return P.create_cartesian_topology_partition(grid)
