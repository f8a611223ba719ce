"""Decompositions: which box of a global tensor each rank of a partition owns or needs.

A tensor of 6 x 8 on a grid of 2 x 2 ranks, cut in rows by the first grid dimension; the second replicates::

    splits = (Balanced(6, 2), Balanced(8, 1))        grid       tensor
    axes   = (0, None)                               0 1        rows 0 to 2 on ranks 0 and 1
              |    grid dimension 1 cuts nothing     2 3        rows 3 to 5 on ranks 2 and 3
              grid dimension 0 cuts tensor dimension 0

With ``axes = (1, 0)`` the grid is laid on the tensor transposed; with ``(None, None)`` all ranks have all.
What a rank owns and what it needs are both decompositions, and an ``Exchange`` is made of the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index as as_int

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.intervals import Balanced, Listed, Split, meeting
from distdl_rma.geometry.partition import Partition


@dataclass(frozen=True)
class Decomposition:
    """Which box of a global tensor each rank of a partition owns (or needs).

    All parts of tensors come from here; ``intervals`` cuts each dimension. A box is a product of one interval
    per tensor dimension and is computed by arithmetic, so that planning on one rank does not look at all
    other ranks.

    Parameters
    ----------
    partition
        The ranks.
    splits
        One per tensor dimension: how it is split.
    axes
        One per grid dimension: the tensor dimension that it splits, or None if the grid dimension
        replicates (all its ranks hold the same).

    Examples
    --------
    >>> P_x = Partition(ranks=(0, 1, 2), shape=(3, 1), me=1)
    >>> blocks = Decomposition.balanced(P_x, (7, 6))
    >>> blocks.box(1)
    Box(bounds=((3, 5), (0, 6)))
    >>> Decomposition.from_local_shapes(P_x, {0: (1, 6), 1: (4, 6), 2: (2, 6)}).box(1)
    Box(bounds=((1, 5), (0, 6)))
    """

    partition: Partition
    splits: tuple[Split, ...]
    axes: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != self.partition.dim:
            raise PartitionError(f"grid {self.partition.shape} takes one axis a dimension, got {self.axes}")
        cut = [axis for axis in self.axes if axis is not None]
        if len(set(cut)) != len(cut) or not set(cut) <= set(range(len(self.splits))):
            raise PartitionError(
                f"axes {self.axes} must name each of {len(self.splits)} tensor dimensions at most once"
            )
        for d, split in enumerate(self.splits):
            places = self.partition.shape[self.axes.index(d)] if d in self.axes else 1
            if split.parts != places:
                raise PartitionError(
                    f"tensor dimension {d} is cut into {split.parts} parts but grid"
                    f" {self.partition.shape} has {places} places for it"
                )

    @classmethod
    def balanced(
        cls, partition: Partition, shape: Sequence[int], replicate: Collection[int] = ()
    ) -> Decomposition:
        """Balanced blocks; the grid has the tensor's dimensions, and replicates along ``replicate``."""
        if partition.dim != len(shape):
            raise PartitionError(
                f"grid {partition.shape} has {partition.dim} dimensions but tensor shape {tuple(shape)}"
                f" has {len(shape)}"
            )
        axes = tuple(None if d in replicate else d for d in range(partition.dim))
        parts = tuple(1 if d in replicate else partition.shape[d] for d in range(partition.dim))
        return cls(partition, tuple(Balanced(as_int(n), p) for n, p in zip(shape, parts, strict=True)), axes)

    @classmethod
    def replicated(cls, partition: Partition, shape: Sequence[int]) -> Decomposition:
        """Every rank holds the whole tensor, for a grid of any number of dimensions."""
        return cls(partition, tuple(Balanced(as_int(n), 1) for n in shape), (None,) * partition.dim)

    @classmethod
    def from_local_shapes(
        cls, partition: Partition, shapes: Mapping[int, Sequence[int]], replicate: Collection[int] = ()
    ) -> Decomposition:
        """Blocks of the given local shapes, by rank id; ``replicate`` as for :meth:`balanced`.

        ``ShapeError`` if two ranks with the same index in a grid dimension differ in its extent; names both.
        """
        first_seen: dict[tuple[int, int], int] = {}
        lengths = [[0] * (1 if d in replicate else p) for d, p in enumerate(partition.shape)]
        for rank in partition.ranks:
            if rank not in shapes:
                raise ShapeError(f"rank {rank} of the partition has no local shape")
            shape, index = tuple(as_int(n) for n in shapes[rank]), partition.index_of(rank)
            if len(shape) != partition.dim:
                raise ShapeError(
                    f"rank {rank} has a tensor of {len(shape)} dimensions, shape {shape}, but grid"
                    f" {partition.shape} needs {partition.dim}"
                )
            for d, extent in enumerate(shape):
                place = 0 if d in replicate else index[d]
                witness = first_seen.setdefault((d, place), rank)
                if witness == rank:
                    lengths[d][place] = extent
                elif lengths[d][place] != extent:
                    raise ShapeError(
                        f"local shapes do not form a grid {partition.shape}: rank {witness} has"
                        f" {tuple(shapes[witness])} and rank {rank} has {shape}, which must agree in"
                        f" dimension {d}"
                    )
        axes = tuple(None if d in replicate else d for d in range(partition.dim))
        return cls(partition, tuple(_simplest(tuple(parts)) for parts in lengths), axes)

    def __hash__(self) -> int:
        """Cached: every call looks up state by decomposition."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.partition, self.splits, self.axes))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(split.extent for split in self.splits)

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """Tensor dimensions that grid dimensions split, ascending."""
        return tuple(sorted(axis for axis in self.axes if axis is not None))

    @cached_property
    def copied_along(self) -> tuple[int, ...]:
        """Grid dimensions of extent above 1 along which ranks hold replicas."""
        places = zip(self.axes, self.partition.shape, strict=True)
        return tuple(g for g, (axis, n) in enumerate(places) if axis is None and n > 1)

    @cached_property
    def leaves_out(self) -> bool:
        """Whether some rank has an empty box although the tensor has elements.

        Some functions of torch refuse a block without elements, so rules look at such tensors first.
        """
        lengths = (split.interval(part) for split in self.splits for part in range(split.parts))
        return 0 not in self.shape and any(start == stop for start, stop in lengths)

    @cached_property
    def _grid_dims(self) -> tuple[int | None, ...]:
        return tuple(self.axes.index(d) if d in self.axes else None for d in range(len(self.splits)))

    def box(self, rank: int) -> Box:
        """Box of a rank id; an empty box at the origin for ranks outside of the partition."""
        if rank not in self.partition:
            return Box(((0, 0),) * len(self.splits))
        index = self.partition.index_of(rank)
        return Box(
            tuple(
                split.interval(0 if grid is None else index[grid])
                for split, grid in zip(self.splits, self._grid_dims, strict=True)
            )
        )

    @cached_property
    def own_box(self) -> Box:
        """Box of this process."""
        return self.box(self.partition.me)

    def holders(self, rank: int) -> tuple[int, ...]:
        """Ranks with the same box as ``rank``, itself included; none if it is outside of the partition."""
        if rank not in self.partition:
            return ()
        index = self.partition.index_of(rank)
        return self.partition.slab({d: i for d, i in enumerate(index) if self.axes[d] is not None}).ranks

    def slices(self, rank: int | None = None) -> tuple[slice, ...]:
        """Slices that select a rank's shard in the global tensor; of this process if None."""
        return self.box(self.partition.me if rank is None else rank).slices(Box.of_shape(self.shape))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield ranks whose box meets ``box``, row-major, each with the intersection.

        Looks for the parts of each dimension alone: the time grows with the ranks that are found, not with
        all ranks of the partition.
        """
        ranges = [range(extent) for extent in self.partition.shape]
        for split, grid, bounds in zip(self.splits, self._grid_dims, box.bounds, strict=True):
            parts = meeting(split, *bounds)
            if grid is not None:
                ranges[grid] = parts
            elif not parts:
                return
        for rank in self.partition.ranks_in(ranges):
            common = self.box(rank) & box
            if not common.empty:
                yield rank, common

    def one_copy(self) -> Decomposition:
        """The same boxes without replicas: each box only on the first of the ranks that hold it."""
        spare = {grid: 0 for grid, axis in enumerate(self.axes) if axis is None}
        return replace(self, partition=self.partition.slab(spare))

    def with_splits(self, splits: Mapping[int, Split]) -> Decomposition:
        """Decomposition with the splits of some tensor dimensions replaced."""
        return replace(self, splits=tuple(splits.get(d, split) for d, split in enumerate(self.splits)))


def _simplest(lengths: tuple[int, ...]) -> Split:
    # Balanced lengths become the balanced split, so that equal decompositions compare equal.
    balanced = Balanced(sum(lengths), len(lengths))
    return balanced if balanced.lengths == lengths else Listed(lengths)
