"""Grid of the ranks that compute a convolution, and the options of a convolution.

Six workers that cut 4 output channels in two and 3 rows of space in three, (1, 2, 1, 3, 1)::

                        space
    out-channel    rank 0   rank 1   rank 2        rows 0 and 1 of the weight
                   rank 3   rank 4   rank 5        rows 2 and 3

Ranks of a column read the same input box; ranks of a row use the same block of the weight. If the in-channel
dimension of the grid is cut too, ranks along it have different channels of the input and columns of the
weight, and partial outputs of the same box, which are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil, each_dim
from distdl_rma.geometry.intervals import Balanced, Grouped, Split, lengths_of
from distdl_rma.geometry.partition import Partition

# Halos are convolved apart if a block has at least so many bytes per side, and its halo less than this share.
_NBYTES_PER_SIDE = 1 << 20
_WIDE_HALO = 0.1
# Grid dimensions of the ranks that compute; the spatial ones follow.
BATCH, OUT, IN = 0, 1, 2
_SPACE = 3


@dataclass(frozen=True)
class WorkerGrid:
    """The ranks that compute a convolution, on a grid (batch, out-channel, in-channel, *spatial).

    ``weight`` is the weight's global shape. The grid dimension ``rows`` cuts its first dimension: ``OUT`` for
    a convolution, ``IN`` for a transposed one. The other channel dimension of the grid cuts the weight's
    second dimension, the channels within a group.
    """

    grid: Partition
    rows: int
    groups: int
    weight: tuple[int, ...]

    @property
    def channels(self) -> tuple[int, int]:
        """Global channels of the input and of the output."""
        rows, columns = self.weight[0], self.weight[1] * self.groups
        return (columns, rows) if self.rows == OUT else (rows, columns)

    @property
    def columns(self) -> int:
        """Grid dimension that cuts the second dimension of the weight."""
        return OUT + IN - self.rows

    def blocks(self, row_split: Split | None = None) -> Decomposition:
        """Block of the weight that each rank computes with."""
        rows = Balanced(self.weight[0], self.grid.shape[self.rows]) if row_split is None else row_split
        columns = Balanced(self.weight[1], self.grid.shape[self.columns])
        kernel = (Balanced(n, 1) for n in self.weight[2:])
        return Decomposition(self.grid, (rows, columns, *kernel), self._axes({self.rows: 0, self.columns: 1}))

    def by_rows(self, batch: Split, space: Sequence[Split], row_split: Split | None = None) -> Decomposition:
        """Decomposition of the tensor whose channels are the weight's rows; replicated along the columns."""
        return self._tensor(batch, self.blocks(row_split).splits[0], self.rows, space)

    def by_columns(
        self, batch: Split, space: Sequence[Split], row_split: Split | None = None
    ) -> Decomposition:
        """Decomposition of the other tensor: by columns, or with groups all channels of a rank's groups."""
        blocks = self.blocks(row_split)
        if self.groups == 1:
            return self._tensor(batch, blocks.splits[1], self.columns, space)
        channels = Grouped(blocks.splits[0], self.weight[0] // self.groups, self.weight[1])
        return self._tensor(batch, channels, self.rows, space)

    def bias(self, channels: int) -> Decomposition:
        """Blocks of the bias, on the ranks of the first in-channel block."""
        slab = self.grid.slab({IN: 0})
        return Decomposition(slab, (Balanced(channels, slab.shape[OUT]),), self._axes({OUT: 0}))

    def runs(self, block: Box) -> list[tuple[slice, slice, int]]:
        """Convolutions of a block of the weight: channels of the input, rows of the block, groups of each."""
        (start, stop), (low, high) = block.bounds[:2]
        size, width, found = self.weight[0] // self.groups, high - low, []
        for a, b, groups in group_runs(start, stop, size):
            rows, first = slice(a - start, b - start), (a // size - start // size) * width
            found.append((rows if self.rows == IN else slice(first, first + groups * width), rows, groups))
        return found

    def _tensor(self, batch: Split, channels: Split, by: int, space: Sequence[Split]) -> Decomposition:
        spatial = {_SPACE + d: LEADING + d for d in range(len(space))}
        return Decomposition(self.grid, (batch, channels, *space), self._axes({BATCH: 0, by: 1, **spatial}))

    def _axes(self, cuts: dict[int, int]) -> tuple[int | None, ...]:
        return tuple(cuts.get(d) for d in range(self.grid.dim))


@dataclass(frozen=True)
class ConvolutionOptions:
    """Options of a convolution that do not depend on its input.

    ``on_workers``: the workers are the partition of the output, or of the input of a transposed convolution;
    the batch then keeps the input's cut. ``overlaps``: movement overlaps computation; needs ``can_overlap``.
    ``joins``: for small blocks or wide halos, a rank convolves its block and halo at once, in one tensor.
    """

    stencil: Stencil
    workers: WorkerGrid
    padding_mode: str = "zeros"
    on_workers: bool = False
    overlaps: bool = True
    joins: bool = False


def options_of(
    given: Mapping[str, Any],
    weight: tuple[int, ...],
    P_x: Partition,
    P_y: Partition,
    rows: int,
    P_W: Partition | None = None,
) -> ConvolutionOptions:
    """Options from torch's arguments by name: those of a function, or the attributes of torch's module.

    ``weight`` is the shape of the weight, and ``rows`` the grid dimension that cuts its first dimension.
    Without P_W the ranks of P_y compute, or those of P_x in a transposed convolution.
    """
    kernel, mode, padding = weight[LEADING:], given.get("padding_mode", "zeros"), given["padding"]
    stride, dilation = (each_dim(given[key], len(kernel)) for key in ("stride", "dilation"))
    if padding == "same":
        spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = tuple((span // 2, span - span // 2) for span in spans)
    else:
        sides = tuple((n, n) for n in each_dim(0 if padding == "valid" else padding, len(kernel)))
    stencil = Stencil.of(kernel, stride, dilation, sides)
    workers = WorkerGrid(
        grid_of_workers(P_W, P_y if rows == OUT else P_x, rows), rows, given["groups"], weight
    )
    on_workers = P_W is None and (rows == IN or P_y == P_x)
    return ConvolutionOptions(stencil, workers, mode, on_workers, can_overlap(stencil, mode, workers, P_x))


def grid_of_workers(P_W: Partition | None, default: Partition, channels: int) -> Partition:
    """Ranks that compute, on a grid (batch, out-channel, in-channel, *spatial).

    Without P_W the ranks of ``default``; its channel dimension becomes the grid dimension ``channels``.
    """
    if P_W is not None:
        return P_W.create_cartesian_topology_partition((1, *P_W.shape))
    batch, count, *space = default.shape
    both = [count if d == channels else 1 for d in (OUT, IN)]
    return default.create_cartesian_topology_partition((batch, *both, *space))


def can_overlap(stencil: Stencil, padding_mode: str, workers: WorkerGrid, P_x: Partition) -> bool:
    """Whether a convolution is a sum over disjoint boxes of its input, each times a box of the weight.

    Then own data can be convolved while the halo travels.

    It is not where padding repeats elements of the input, nor where several ranks share the channels of
    groups: each rank then reads strided channels.
    """
    padded = any(window.left or window.right for window in stencil.windows)
    channels = (P_x.shape[1], *workers.grid.shape[1:3])
    return (padding_mode == "zeros" or not padded) and (workers.groups == 1 or max(channels) == 1)


def overlap_pays(stencil: Stencil, source: Decomposition, itemsize: int) -> bool:
    """Whether it is faster to convolve halos apart, and own data while the halos travel.

    Otherwise one convolution of own data and halo takes less time. For a small block, several calls cost more
    than to copy the block next to its halo; with a wide halo, most of the computation is in the strips. All
    ranks get the same answer, for the largest block.
    """
    longest = [max(lengths_of(split)) for split in source.splits]
    cut = [
        (window, n, split.parts)
        for window, n, split in zip(stencil.windows, longest[LEADING:], source.splits[LEADING:], strict=True)
        if split.parts > 1 and window.span > 1
    ]
    # Sides of an inner block with a halo, and the size of the halo relative to the block.
    sides = sum(min(2, parts - 1) for *_, parts in cut)
    beyond = sum((window.span - 1) / max(1, n) for window, n, _ in cut)
    return prod(longest) * itemsize >= max(1, sides) * _NBYTES_PER_SIDE and beyond < _WIDE_HALO


def reads_sides(stencil: Stencil, source: Decomposition) -> bool:
    """Whether windows reach over the ends of blocks, so that there are halos."""
    cuts = zip(stencil.windows, source.splits[LEADING:], strict=True)
    return any(split.parts > 1 and window.span > 1 for window, split in cuts)


def channels_out(workers: WorkerGrid, source: Decomposition) -> int:
    """Channels of the output; ``ShapeError`` if the input has wrong channels, or no elements in space."""
    channels, found = workers.channels
    if source.shape[1] != channels:
        raise ShapeError(f"input has {source.shape[1]} channels, the layer takes {channels}")
    if 0 in source.shape[LEADING:]:
        raise ShapeError(f"the global input {source.shape} has no elements in space")
    return found


def group_runs(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Start, stop and number of groups of each run: whole groups of ``size`` channels, or part of one.

    torch convolves any number of whole groups in one call, a part of a group in a call of its own. Channels 1
    to 7 in groups of 3 are a part, a whole group and a part: (1, 3, 1), (3, 6, 1), (6, 8, 1).
    """
    while start < stop:
        whole_groups = (stop - start) // size if start % size == 0 else 0
        end = start + whole_groups * size if whole_groups else min(stop, start // size * size + size)
        yield start, end, max(1, whole_groups)
        start = end
