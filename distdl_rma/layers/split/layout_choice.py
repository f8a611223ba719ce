"""Choose another layout when a dimension cannot stay cut as it is: local, with equal results on all ranks.

Pure arithmetic of layouts: no tensor, no message, no torch. Rules in ``functions`` ask for a layout, then
move their tensors to it. Each choice has the same order of preference:

1. The cut stays, at the same ends.
2. The cut stays in its dimension, at the nearest ends that fit (``fitted``): elements near the ends move.
3. Another dimension is cut (``cut_other_dims``): every element moves once, and memory stays divided.
4. Ranks hold copies: memory for the whole tensor on each.

Ranks compare nothing, so a choice depends on layouts and extents only, and breaks ties by the number of a
dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import gcd, prod

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split, lengths_of
from distdl_rma.layers.split import layout as lay


def scaled(split: Split, up: int, down: int) -> Split:
    """Parts of a dimension after every part's length changed by the factor ``up / down``.

    For example lengths (2, 4) become (6, 12) by 3 / 1, as where each element is repeated three times.
    """
    return lay.simplest(Listed(tuple(n * up // down for n in lengths_of(split))))


def fitted(split: Split, unit: int) -> Split | None:
    """Parts that end at multiples of ``unit``, close to the given ends; None if there are too few units.

    For example parts (11, 10) become (14, 7) for ``unit=7``. If rounding the ends would leave a part empty,
    all parts are balanced instead.
    """
    if all(n % unit == 0 for n in lengths_of(split)):
        return split
    if split.extent // unit < split.parts:
        return None
    ends = [(2 * split.interval(part)[1] + unit) // (2 * unit) * unit for part in range(split.parts)]
    found = Listed(tuple(b - a for a, b in zip([0, *ends], ends, strict=False)))
    if min(found.lengths):
        return lay.simplest(found)
    return scaled(Balanced(split.extent // unit, split.parts), unit, 1)


def cut_other_dims(found: Decomposition, dims: Collection[int], never: Collection[int] = ()) -> Decomposition:
    """Layout with some dimensions uncut: other dimensions are cut instead, or copies made if none is left.

    The longest uncut dimension is taken, the first of several equal ones, but none of ``never``. If it is
    shorter than the number of ranks, some have no elements, which still needs less memory than copies.
    """
    splits, axes = list(found.splits), list(found.axes)
    for g, axis in enumerate(found.axes):
        if axis is None or axis not in dims:
            continue
        splits[axis], axes[g] = Balanced(splits[axis].extent, 1), None
        free = [d for d in range(len(splits)) if not (d in dims or d in never or d in axes)]
        longest = max(free, key=lambda d: splits[d].extent, default=None)
        if longest is not None and splits[longest].extent > 1:
            splits[longest], axes[g] = Balanced(splits[longest].extent, found.partition.shape[g]), longest
    return lay.layout(found.partition, splits, tuple(axes))


def multiples(found: Decomposition, units: dict[int, int]) -> Decomposition:
    """Layout whose parts of some dimensions end at multiples of a unit, or that cuts others instead."""
    fits = {d: fitted(found.splits[d], unit) for d, unit in units.items() if d in found.axes}
    found = lay.with_splits(found, {d: split for d, split in fits.items() if split is not None})
    return cut_other_dims(found, [d for d, split in fits.items() if split is None], tuple(units))


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of dimensions of two shapes with equal products; without dimensions of extent 1.

    For example (2, 3, 4) and (6, 2, 2): dimensions 0 and 1 become 0, dimension 2 becomes 1 and 2. A reshape
    acts on each group by itself, so that a cut in one group has no effect on the others.
    """
    left, right = ([d for d, n in enumerate(shape) if n != 1] for shape in (old, new))
    found, i, j = [], 0, 0
    while i < len(left):
        a, b = [left[i]], [right[j]]
        p, q = old[left[i]], new[right[j]]
        i, j = i + 1, j + 1
        while p != q:
            if p < q:
                a.append(left[i])
                p, i = p * old[left[i]], i + 1
            else:
                b.append(right[j])
                q, j = q * new[right[j]], j + 1
        found.append((a, b))
    return found


def reshaped(found: Decomposition, shape: Sequence[int]) -> tuple[Decomposition, Decomposition]:
    """Layout that a tensor needs so that each block can be reshaped by itself, and layout of the result.

    The reshape turns groups of old dimensions into groups of new ones. Only the first dimension of a group
    may be cut, and only at ends that are also ends in the first new dimension. A cut that fits stays. A cut
    of a first dimension with other ends moves to the closest ends that fit. A cut of another dimension moves
    to the first dimension of its group, or else to the longest that may be cut. Otherwise ranks hold copies.
    """
    partition, old = found.partition, found.shape
    if 0 in old:
        return lay.replicated(partition, old), lay.replicated(partition, shape)
    units: dict[int, int] = {}
    becomes: dict[int, tuple[int, int, int]] = {}
    first: dict[int, int] = {}
    for a, b in groups(old, shape):
        ahead, behind = prod(old[d] for d in a[1:]), prod(shape[d] for d in b[1:])
        # The first old dimension may be cut at multiples of so many elements.
        units[a[0]] = behind // gcd(ahead, behind)
        becomes[a[0]] = b[0], ahead, behind
        first |= dict.fromkeys(a, a[0])
    splits: list[Split] = [Balanced(n, 1) for n in old]
    axes: list[int | None] = [None] * partition.dim
    for g, axis in enumerate(found.axes):
        if axis in units and (fits := fitted(found.splits[axis], units[axis])):
            splits[axis], axes[g] = fits, axis
    for g, axis in enumerate(found.axes):
        if axis is None or axes[g] is not None:
            continue
        parts = partition.shape[g]
        free = [d for d, unit in units.items() if d not in axes and old[d] // unit >= parts]
        if free:
            to = max(free, key=lambda d: (d == first.get(axis), old[d] // units[d]))
            axes[g], splits[to] = to, scaled(Balanced(old[to] // units[to], parts), units[to], 1)
    result: list[Split] = [Balanced(n, 1) for n in shape]
    for d in axes:
        if d is not None:
            to, ahead, behind = becomes[d]
            result[to] = scaled(splits[d], ahead, behind)
    source = lay.layout(partition, splits, tuple(axes))
    return source, lay.layout(
        partition, result, tuple(None if d is None else becomes[d][0] for d in source.axes)
    )


def sliced(split: Split, start: int, stop: int, step: int) -> tuple[Split, tuple[tuple[int, int], ...]]:
    """Parts of a slice, and for each part the bounds of the slice in the block: its start and stop there.

    For example the slice 1:8:3 has the elements 1, 4 and 7. Of parts (4, 4), the first has one of them, from
    its place 1 on, and the second has two, from its place 0 on.
    """
    within = []
    for part in range(split.parts):
        a, b = split.interval(part)
        ahead = max(0, -(-(a - start) // step))
        low = start + ahead * step
        high = max(low, min(b, stop))
        # Where a part has no element of the slice, the rest of the slice may begin behind the part.
        within.append((min(low, b) - a, max(min(low, b), high if high <= b else b) - a))
    kept = Listed(tuple(-(-(high - low) // step) for low, high in within))
    return lay.simplest(kept) if split.parts > 1 else Balanced(kept.extent, 1), tuple(within)


def joined(extents: Iterable[int], at: int, split: Split) -> Split:
    """Parts of a concatenation whose tensor ``at`` is cut by ``split``.

    Few elements before or behind that tensor join the first and the last part, so that no block moves.
    """
    before = behind = 0
    for number, extent in enumerate(extents):
        before, behind = before + extent * (number < at), behind + extent * (number > at)
    parts = list(lengths_of(split))
    if 4 * (before + behind) <= min(parts):
        parts[0] += before
        parts[-1] += behind
        return lay.simplest(Listed(tuple(parts)))
    return Balanced(before + behind + split.extent, split.parts)
