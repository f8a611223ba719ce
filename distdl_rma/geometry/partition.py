"""Ranks on a Cartesian grid.

A grid of 2 x 3 ranks of a machine of eight, without ranks 0 and 5. ``me`` is rank 3::

    Partition(ranks=(1, 2, 3, 4, 6, 7), shape=(2, 3), me=3)

                   column 0   1   2
    row 0                 1   2   3      rank id 3: position 2 (``rank``), index (0, 2)
    row 1                 4   6   7      rank id 5: no member, holds the same value all the same

Three numbers name a place, and only the rank id is the same in all partitions: so plans, links and errors
name rank ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, product
from math import prod
from operator import index as as_int
from typing import Any, Protocol, TypeVar

from distdl_rma.errors import DistdlError, PartitionError, ShapeError

T = TypeVar("T")
K = TypeVar("K")
# Rank ids, group by group.
Groups = tuple[tuple[int, ...], ...]


class Home(Protocol):
    """Owner of a partition's ranks, such as a machine; geometry only stores it."""

    def close(self) -> None:
        """Release the owner's resources; idempotent."""


@dataclass(frozen=True)
class Partition:
    """Ranks of a machine on a Cartesian grid, in row-major order.

    A value without a communicator: every rank, member or not, can hold it, compare it and compute with it.
    Two partitions are equal if they put the same ranks on the same grid. Partitions are the ``P_x``, ``P_y``
    and ``P_w`` of all layer documents.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))  # cuts the rows
    >>> P_x
    Partition(ranks=(0, 1), shape=(1, 1, 2, 1), me=0)
    >>> P_x.rank, P_x.index
    (0, (0, 0, 0, 0))
    """

    # Rank ids of the machine, unique, in row-major order of the grid; and the extents of the grid.
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    # Rank id of this process; need not be a member. Its position in the partition is ``rank``.
    me: int = field(compare=False)
    # The machine of the ranks, if there is one.
    home: Home | None = field(default=None, compare=False, repr=False)
    # Object that ``deactivate`` closes, if the creation opened one, as ``MPIPartition`` does.
    opened: Home | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if any(extent < 1 for extent in self.shape):
            raise PartitionError(f"every extent of a grid must be at least 1, got {self.shape}")
        if prod(self.shape) != len(self.ranks):
            raise PartitionError(
                f"partition has {_ranks(len(self.ranks))} but grid {self.shape} needs {prod(self.shape)}"
            )
        if len(set(self.ranks)) != len(self.ranks):
            twice = next(rank for i, rank in enumerate(self.ranks) if rank in self.ranks[:i])
            raise PartitionError(f"rank {twice} is listed more than once in {self.ranks}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def dim(self) -> int:
        """Number of dimensions of the grid."""
        return len(self.shape)

    @property
    def active(self) -> bool:
        """Whether this process is a member."""
        return self.me in self

    def __contains__(self, rank: object) -> bool:
        """Whether a rank id is a member."""
        return rank in self._positions

    @property
    def rank(self) -> int | None:
        """Position of this process in the partition, row-major; None if it is not a member.

        Not a rank id: that is ``me``, which is the same in all partitions, and which errors name. Both differ
        if a partition lacks some ranks, or has them in another order.
        """
        return self._positions.get(self.me)

    @property
    def index(self) -> tuple[int, ...] | None:
        """Grid index of this process; None if it is not a member."""
        return self.index_of(self.me) if self.active else None

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def index_of(self, rank: int) -> tuple[int, ...]:
        """Grid index of a rank id; ``PartitionError`` if it is no member."""
        if rank not in self:
            raise PartitionError(f"rank {rank} is not in the partition of ranks {self.ranks}")
        remainder, index = self._positions[rank], []
        for extent in reversed(self.shape):
            remainder, i = divmod(remainder, extent)
            index.append(i)
        return tuple(reversed(index))

    def rank_at(self, index: Sequence[int]) -> int:
        """Rank id at a grid index; ``PartitionError`` if the index is outside of the grid."""
        position = 0
        for i, extent in zip(index, self.shape, strict=True):
            if not 0 <= i < extent:
                raise PartitionError(f"index {tuple(index)} is outside of grid {self.shape}")
            position = position * extent + i
        return self.ranks[position]

    def ranks_in(self, ranges: Sequence[range]) -> Iterator[int]:
        """Rank ids of a box of grid indices, row-major."""
        return (self.rank_at(index) for index in product(*ranges))

    def create_partition_inclusive(self, ranks: Iterable[int]) -> Partition:
        """One-dimensional partition of the members at some positions, in the given order; local.

        ``PartitionError`` if a position is no integer, out of range or listed twice.
        """
        positions = integers(ranks, "ranks of a partition")
        for position in positions:
            if not 0 <= position < self.size:
                raise PartitionError(
                    f"position {position} is none of a partition of {_ranks(self.size)}, which has"
                    f" positions 0 to {self.size - 1}"
                )
        if not positions:
            raise PartitionError("a partition needs at least one rank, got none")
        return Partition(tuple(self.ranks[p] for p in positions), (len(positions),), self.me, self.home)

    def create_cartesian_topology_partition(self, shape: Iterable[int]) -> Partition:
        """Same ranks on a Cartesian grid of the given shape, row-major; local.

        ``PartitionError`` if the grid has more or fewer places than ranks, or an extent is no integer.
        """
        return Partition(self.ranks, integers(shape, "extents of a grid"), self.me, self.home)

    def slab(self, fixed: dict[int, int]) -> Partition:
        """Members whose grid index has the given values in some dimensions, which keep extent 1."""
        ranges = [range(n) for n in self.shape]
        for d, i in fixed.items():
            ranges[d] = range(i, i + 1)
        return Partition(tuple(self.ranks_in(ranges)), tuple(map(len, ranges)), self.me, self.home)

    def deactivate(self) -> None:
        """Close the machine that was opened for this partition; idempotent. The partition itself stays valid.

        ``MPIPartition`` opens the machine of a communicator, or uses it if it is open. Deactivating the last
        partition that it returned closes the machine, collectively over its ranks; deactivating others is
        local. A partition made from another one opened nothing, and deactivating it does nothing.
        ``ExchangeTimeout`` if the machine is closed and not all ranks close it in time: the call can be
        repeated.
        """
        if self.opened is not None:
            self.opened.close()


def integers(numbers: Iterable[Any], what: str) -> tuple[int, ...]:
    """Convert integers of any type to a tuple of int; ``PartitionError`` about ``what`` if not possible."""
    try:
        return tuple(as_int(number) for number in numbers)
    except TypeError:
        raise PartitionError(f"{what} must be integers, got {numbers!r}") from None


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def grouped(ranks: Iterable[int], key: Callable[[int], object]) -> Groups:
    """Group ranks by key, such as the number of their node; groups and ranks keep the given order."""
    return tuple(map(tuple, by_key(ranks, key).values()))


def by_key(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by key; keys, and the items of each, keep the given order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def alike(values: Mapping[int, T], text: str, error: type[DistdlError] = ShapeError) -> T:
    """The value of all ranks; an error if two ranks, which the text has with their values, differ.

    Examples
    --------
    >>> alike({0: 3, 2: 3}, "rank {} has {} but rank {} {}")
    3
    """
    (first, expected), *others = values.items()
    for rank, value in others:
        if value != expected:
            raise error(text.format(first, expected, rank, value))
    return expected


def leaders(groups: Groups, root: int) -> tuple[int, ...]:
    """One rank of each group: the root if it is a member, else the first."""
    return tuple(root if root in group else group[0] for group in groups)


def share_holders(nodes: Groups) -> Groups:
    """Ranks of each node that each work on a share of a vector: as many as the smallest node has ranks.

    The n-th ranks of all nodes work on the same share. With nodes (0, 1, 2) and (3, 4) these are (0, 1) and
    (3, 4): two shares, since rank 2 would have no counterpart for a third one.
    """
    shares = min(map(len, nodes))
    return tuple(node[:shares] for node in nodes)


def transposed(partition: Partition) -> Partition:
    """The same ranks on the transposed grid: the rank at (i, j, k) moves to (k, j, i)."""
    ranks = sorted(partition.ranks, key=lambda rank: partition.index_of(rank)[::-1])
    return Partition(tuple(ranks), partition.shape[::-1], partition.me, partition.home)


def groups_onto(many: Partition, few: Partition, transpose_many: bool, transpose_few: bool) -> Groups:
    """Ranks of ``many`` that belong to each rank of ``few``, in the order of ``few.ranks``.

    The grid of ``few`` is extended to the left with ones; then each of its dimensions must equal that of
    ``many`` or be 1. Transpositions come first. Within a group, ranks are in the order of ``many``.
    ``PartitionError`` if the grids do not fit together. Sum-reduce document, reduction rules; requirement B3.
    """
    above = transposed(many) if transpose_many else many
    below = transposed(few) if transpose_few else few
    missing = above.dim - below.dim
    extended = (1,) * missing + below.shape
    if missing < 0 or any(b not in (a, 1) for a, b in zip(above.shape, extended, strict=True)):
        raise PartitionError(
            f"grids {_shown(many, transpose_many)} and {_shown(few, transpose_few)} do not fit together:"
            f" aligned at the right, each dimension of the second must be equal to that of the first, or 1"
        )
    groups: dict[int, list[int]] = {rank: [] for rank in few.ranks}
    for rank in many.ranks:
        index = above.index_of(rank)[missing:]
        place = tuple(0 if extent == 1 else i for i, extent in zip(index, below.shape, strict=True))
        groups[below.rank_at(place)].append(rank)
    return tuple(map(tuple, groups.values()))


def groups_along(partition: Partition, axes: Collection[int]) -> Groups:
    """Groups of ranks that differ only in the given grid dimensions, in the order of the partition."""

    def elsewhere(rank: int) -> tuple[int, ...]:
        return tuple(i for d, i in enumerate(partition.index_of(rank)) if d not in axes)

    return grouped(partition.ranks, elsewhere)


def spans(ranks: Iterable[int], between: str = ", ") -> str:
    """Ranks in ascending order as text: ``0-3, 7``.

    For messages, and for lines of a limited length (``segments/waiting/meeting.py``), which read them back.
    """
    # Along consecutive ranks, rank minus position stays the same.
    runs = groupby(enumerate(sorted(ranks)), lambda place: place[1] - place[0])
    ends = ([rank for _, rank in run] for _, run in runs)
    return between.join(str(a) if not more else f"{a}-{more[-1]}" for a, *more in ends)


def _shown(partition: Partition, flipped: bool) -> str:
    return f"{partition.shape} transposed to {partition.shape[::-1]}" if flipped else f"{partition.shape}"
