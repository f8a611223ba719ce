"""Layouts: how a tensor is cut over ranks, and what functions of torch do to its dimensions.

An image (batch, channel, H, W) on a grid of 2 x 2 ranks, of which the first grid dimension cuts the rows and
the second one makes copies, has the axes ``(2, None)``::

                  rows 0..3           rows 4..7
    grid      rank 0, rank 1       rank 2, rank 3          ranks 0 and 1 hold the same block


A layout is a :class:`Decomposition` in a normal form: a grid dimension of extent 1 cuts no tensor dimension,
and the ranks along a grid dimension that cuts none hold copies. Equal layouts are one object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split
from distdl_rma.geometry.partition import Partition
from distdl_rma.segments.machine import Machine

T = TypeVar("T")
# Entries that ``kept`` remembers of one kind; with more it starts again.
_MOST = 1 << 14
# Not empty once there was a layout in which some rank has no element.
LEAVING_OUT: list[bool] = []
# The tensor dimension that each grid dimension cuts; None where it makes copies.
Axes = tuple[int | None, ...]


def layout(partition: Partition, splits: Sequence[Split], axes: Axes) -> Decomposition:
    """Layout of a tensor whose dimensions are cut by ``splits``; a split of one part cuts nothing."""
    normal = [
        axis if places > 1 and axis is not None and splits[axis].parts > 1 else None
        for axis, places in zip(axes, partition.shape, strict=True)
    ]
    simple = [simplest(split) if d in normal else Balanced(split.extent, 1) for d, split in enumerate(splits)]
    key = partition, tuple(simple), tuple(normal)

    def make() -> Decomposition:
        found = Decomposition(*key)
        if found.leaves_out and not LEAVING_OUT:
            LEAVING_OUT.append(True)
        return found

    return kept(partition, "layout", key, make)


def kept(partition: Partition, what: str, key: Hashable, make: Callable[[], T]) -> T:
    """A value that follows from layouts on a partition, computed once and kept by the partition's machine."""
    # Not in a dict of this module: partitions of different machines compare equal.
    home = partition.home
    if not isinstance(home, Machine):
        return make()
    known = home.kept.setdefault(what, {})
    found: T | None = known.get(key)
    if found is None:
        if len(known) > _MOST:
            known.clear()
        found = known[key] = make()
    return found


def simplest(split: Split) -> Split:
    """An equal split in its simplest form: ``Balanced`` if the parts are balanced, otherwise ``Listed``."""
    if isinstance(split, Balanced):
        return split
    ends = [split.interval(part) for part in range(split.parts)]
    lengths = tuple(stop - start for start, stop in ends)
    balanced = Balanced(sum(lengths), len(lengths))
    return balanced if balanced.lengths == lengths else Listed(lengths)


def normal(found: Decomposition) -> Decomposition:
    """The normal form of a decomposition."""
    return layout(found.partition, found.splits, found.axes)


def replicated(partition: Partition, shape: Sequence[int]) -> Decomposition:
    """Layout in which every rank holds the whole tensor."""
    return layout(partition, [Balanced(int(n), 1) for n in shape], (None,) * partition.dim)


def balanced(partition: Partition, shape: Sequence[int], axes: Axes | None = None) -> Decomposition:
    """Layout of balanced blocks; without ``axes`` grid dimension ``d`` cuts tensor dimension ``d``."""
    axes = tuple(range(partition.dim)) if axes is None else axes
    if len(axes) != partition.dim or any(axis not in range(len(shape)) for axis in axes if axis is not None):
        raise PartitionError(
            f"a tensor of {len(shape)} dimensions on grid {partition.shape} needs for each of"
            f" {partition.dim} grid dimensions a tensor dimension or None, got {axes}"
        )
    parts = [1] * len(shape)
    for axis, places in zip(axes, partition.shape, strict=True):
        if axis is not None:
            parts[axis] = places
    return layout(partition, [Balanced(int(n), p) for n, p in zip(shape, parts, strict=True)], axes)


def whole(found: Decomposition, dims: Collection[int]) -> Decomposition:
    """The same layout with some tensor dimensions uncut: the ranks that cut them hold copies instead."""
    axes = tuple(None if axis in dims else axis for axis in found.axes)
    return layout(
        found.partition, [Balanced(s.extent, 1) if d in dims else s for d, s in enumerate(found.splits)], axes
    )


def with_splits(found: Decomposition, splits: Mapping[int, Split]) -> Decomposition:
    """The same layout with other parts in some tensor dimensions."""
    return layout(found.partition, [splits.get(d, split) for d, split in enumerate(found.splits)], found.axes)


def ending_first(found: Decomposition, others: Iterable[Decomposition]) -> Decomposition:
    """The layout itself; where ranks run in order, no part ends behind that of another operand of the call.

    So operands move to later ranks only (``layers/ops/core/order.py``): of ``x + y`` with rows cut as 3, 5
    and as 4, 4, the result is cut as 3, 5, and row 3 of ``y`` moves from the first rank to the second. The
    dimensions of ``others`` are the last ones of ``found``.
    """
    home = found.partition.home
    if not isinstance(home, Machine) or home.mailbox is None:
        return found
    splits: dict[int, Split] = {}
    for d in found.cut_dims:
        alike = [
            each.splits[at]
            for each in others
            if (at := d - len(found.shape) + len(each.shape)) >= 0
            and _grid_dim(each, at) == _grid_dim(found, d)
            and each.shape[at] == found.shape[d]
        ]
        parts = range(found.splits[d].parts)
        ends = [min(split.interval(part)[1] for split in (found.splits[d], *alike)) for part in parts]
        splits[d] = Listed(tuple(b - a for a, b in zip([0, *ends], ends, strict=False)))
    return with_splits(found, splits)


def reordered(found: Decomposition, order: Sequence[int | None]) -> Decomposition:
    """Layout of a tensor whose dimensions are ``order`` of the old ones; None is a new one of extent 1.

    Dimensions that ``order`` leaves out must be uncut.
    """
    splits = [Balanced(1, 1) if d is None else found.splits[d] for d in order]
    axes = tuple(order.index(axis) if axis is not None and axis in order else None for axis in found.axes)
    return layout(found.partition, splits, axes)


def on_grid(found: Decomposition) -> Decomposition:
    """The same blocks on a grid that has one dimension for each tensor dimension.

    Its ranks hold the same copies as this rank. So an operation on it runs once for each set of copies.
    """

    def make() -> Decomposition:
        partition, shape = found.partition, tuple(split.parts for split in found.splits)
        index = partition.index_of(partition.me)
        # Row-major in the order of the tensor's dimensions, which may differ from the grid's.
        cuts = [_grid_dim(found, d) for d in range(len(shape))]
        ranks = []
        for position in product(*map(range, shape)):
            place = list(index)
            for at, g in zip(position, cuts, strict=True):
                if g is not None:
                    place[g] = at
            ranks.append(partition.rank_at(place))
        grid = Partition(tuple(ranks), shape, partition.me, partition.home)
        return Decomposition(grid, found.splits, tuple(range(len(shape))))

    return kept(found.partition, "grid", found, make)


def owners(found: Decomposition) -> Decomposition:
    """The same layout on the first of the ranks that hold copies of each block."""
    first = dict.fromkeys(found.copied_along, 0)
    return replace(found, partition=found.partition.slab(first))


def line(found: Decomposition, grid_dims: Collection[int]) -> tuple[int, ...]:
    """Ranks that differ from this rank only in the given grid dimensions, this rank included."""
    partition, dims = found.partition, tuple(grid_dims)

    def make() -> tuple[int, ...]:
        index = partition.index_of(partition.me)
        return partition.slab({g: i for g, i in enumerate(index) if g not in dims}).ranks

    return kept(partition, "line", (partition, dims), make)


def holds(source: Decomposition, target: Decomposition) -> bool:
    """Whether on every rank the source block contains the target block, so that no data moves.

    Each dimension is whole in the source, or cut in the same way, by the same grid dimension.
    """
    return all(
        split.parts == 1 or (split == wanted and _grid_dim(source, d) == _grid_dim(target, d))
        for d, (split, wanted) in enumerate(zip(source.splits, target.splits, strict=True))
    )


def _grid_dim(found: Decomposition, d: int) -> int | None:
    return found.axes.index(d) if d in found.axes else None


def described(found: Decomposition) -> str:
    """How a tensor is cut, for messages: ``2 x 2 over dims 2, 3``."""
    dims = found.cut_dims
    if not dims:
        return "replicated"
    grid = " x ".join(str(found.splits[d].parts) for d in dims)
    return f"{grid} over dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"
