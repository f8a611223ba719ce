"""Groups of ranks: those of a node, and those of grids that belong together in a broadcast or a sum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import product

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.partition import Partition

# Rank ids, group by group.
Groups = tuple[tuple[int, ...], ...]


def grouped(ranks: Iterable[int], key: Callable[[int], object]) -> Groups:
    """Ranks with the same key, such as the number of their node; groups and ranks in the order given."""
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return tuple(map(tuple, groups.values()))


def leaders(groups: Groups, root: int) -> tuple[int, ...]:
    """One rank of each group: the root where it is a member, the first one elsewhere."""
    return tuple(root if root in group else group[0] for group in groups)


def share_holders(nodes: Groups) -> Groups:
    """Ranks of each node that work on a share of a vector each: as many as the smallest node has.

    The n-th ones of all nodes have the same share.
    """
    shares = min(map(len, nodes))
    return tuple(node[:shares] for node in nodes)


def transposed(partition: Partition) -> Partition:
    """The same ranks on the transposed grid: who was at (i, j, k) is at (k, j, i)."""
    indices = product(*map(range, reversed(partition.shape)))
    ranks = tuple(partition.rank_at(index[::-1]) for index in indices)
    return Partition(ranks, partition.shape[::-1], partition.me, partition.home)


def groups_onto(many: Partition, few: Partition, transpose_many: bool, transpose_few: bool) -> Groups:
    """Ranks of ``many`` that belong to each rank of ``few``, in the order of ``few.ranks``.

    The grid of ``few`` is extended to the left with ones; then each of its dimensions is as large as that
    of ``many``, or 1. A transposition comes first. Within a group the ranks are in the order of ``many``.
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
    """Ranks that differ in the given grid dimensions only, in the order of the partition."""

    def elsewhere(rank: int) -> tuple[int, ...]:
        return tuple(i for d, i in enumerate(partition.index_of(rank)) if d not in axes)

    return grouped(partition.ranks, elsewhere)


def _shown(partition: Partition, flipped: bool) -> str:
    return f"{partition.shape} transposed to {partition.shape[::-1]}" if flipped else f"{partition.shape}"
