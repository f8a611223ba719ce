"""Random values of the geometry floor, and the movements that the documents are made of."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import strategies as st

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition

# Rank ids of the machine; no partition below has all of them, so that some rank is always left out.
RANKS = 8
MOST = RANKS - 1


def one_of(*numbers):
    """Any of the numbers alike; of a range of integers, hypothesis prefers the ends."""
    return st.sampled_from(numbers)


def grids(dim, most=MOST):
    """All grids of so many dimensions with at most so many places, those that cut most dimensions first."""
    found = [grid for grid in product(range(most, 0, -1), repeat=dim) if prod(grid) <= most]
    return sorted(found, key=lambda grid: grid.count(1))


@st.composite
def nodes(draw):
    """Number of the node of each rank."""
    return [draw(st.integers(0, 3)) for _ in range(RANKS)].__getitem__


@st.composite
def partitions(draw, dim, ranks=None, most=MOST):
    """Some ranks in any order on a random grid."""
    order = draw(st.permutations(range(RANKS))) if ranks is None else ranks
    grid = draw(st.sampled_from(grids(dim, min(most, len(order)))))
    return Partition(tuple(order[: prod(grid)]), grid, me=0)


@st.composite
def pairs_of_partitions(draw, dim, sharing):
    """Two partitions with disjoint, overlapping or identical sets of ranks."""
    order = draw(st.permutations(range(RANKS)))
    if sharing == "disjoint":
        first = draw(partitions(dim, order, most=RANKS // 2))
        return first, draw(partitions(dim, order[first.size :]))
    first = draw(partitions(dim, order))
    if sharing == "overlapping":
        others = [rank for rank in range(RANKS) if rank != first.ranks[0]]
        return first, draw(partitions(dim, [first.ranks[0], *draw(st.permutations(others))]))
    grid = draw(st.sampled_from([grid for grid in grids(dim) if prod(grid) == first.size]))
    return first, Partition(tuple(draw(st.permutations(first.ranks))), grid, me=0)


@st.composite
def splits(draw, extent, parts):
    """Balanced or any other consecutive parts, empty ones included."""
    if draw(st.booleans()):
        return Balanced(extent, parts)
    cuts = sorted(draw(one_of(*range(extent + 1))) for _ in range(parts - 1))
    return Listed(tuple(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True)))


@st.composite
def windows(draw):
    """Any stride, dilation, padding and width, also windows that skip inputs."""
    kernel, stride, dilation = draw(one_of(3, 2, 4, 1)), draw(one_of(1, 2, 3, 4)), draw(one_of(1, 2, 3))
    return Window(kernel, stride, dilation, draw(one_of(1, 0, 2, 3)), draw(one_of(1, 0, 2, 3)))


@st.composite
def extents_for(draw, window, most=12):
    """Extents into which the padded window fits."""
    least = max(1, window.span - window.left - window.right)
    return draw(one_of(*range(max(least, most), least - 1, -1)))


@st.composite
def shapes(draw, dim):
    """Shapes with extents of 0 and more."""
    return tuple(draw(one_of(3, 4, 5, 6, 7, 2, 1, 0)) for _ in range(dim))


@st.composite
def decompositions(draw, shape):
    """Any decomposition of a shape: grid dimensions cut any tensor dimension, or replicate."""
    partition = draw(partitions(draw(st.integers(1, 3))))
    choices = [*range(len(shape)), *[None] * partition.dim]
    axes = tuple(draw(st.permutations(choices))[: partition.dim])
    return Decomposition(partition, draw(cuts_along(partition, shape, axes)), axes)


@st.composite
def cuts_along(draw, partition, shape, axes):
    """Splits that fit a grid of which each dimension cuts the tensor dimension that `axes` says."""
    places = [partition.shape[axes.index(d)] if d in axes else 1 for d in range(len(shape))]
    return tuple(draw(splits(n, p)) for n, p in zip(shape, places, strict=True))


@st.composite
def unbalanced(draw, partition, shape, replicate=()):
    """What `from_local_shapes` makes of shards of any sizes."""
    axes = tuple(None if d in replicate else d for d in range(partition.dim))
    cut = Decomposition(partition, draw(cuts_along(partition, shape, axes)), axes)
    local_shapes = {rank: cut.box(rank).shape for rank in partition.ranks}
    return Decomposition.from_local_shapes(partition, local_shapes, replicate)


@st.composite
def repartitions(draw, sharing):
    """From one grid to another; unbalanced blocks in, balanced blocks out."""
    dim = draw(st.integers(1, 3))
    P_x, P_y = draw(pairs_of_partitions(dim, sharing))
    shape = draw(shapes(dim))
    return draw(unbalanced(P_x, shape)), Decomposition.balanced(P_y, shape)


@st.composite
def halos(draw):
    """From blocks of the input to what blocks of the output read; the first dimension is the batch."""
    spatial = [draw(windows()) for _ in range(draw(one_of(2, 1)))]
    batches = draw(one_of(1, 2))
    partition = draw(partitions(len(spatial), most=MOST // batches))
    partition = Partition(
        tuple(draw(st.permutations(range(RANKS))))[: batches * partition.size],
        (batches, *partition.shape),
        me=0,
    )
    extents = [draw(extents_for(window)) for window in spatial]
    source = draw(unbalanced(partition, (draw(st.integers(1, 3)), *extents)))
    reads = {}
    for d, (window, extent) in enumerate(zip(spatial, extents, strict=True), start=1):
        outputs = draw(splits(window.outputs(extent), partition.shape[d]))
        reads[d] = WindowSplit(outputs, window, extent)
    return source, source.with_splits(reads)


@st.composite
def broadcasts(draw):
    """From a grid to one that is larger in some dimensions, along which it holds copies."""
    dim = draw(st.integers(1, 3))
    order = draw(st.permutations(range(RANKS)))
    P_y = draw(partitions(dim, order))
    copied = draw(st.sets(st.integers(0, dim - 1), min_size=1))
    grid = tuple(1 if d in copied else extent for d, extent in enumerate(P_y.shape))
    P_x = Partition(tuple(draw(st.permutations(range(RANKS)))[: prod(grid)]), grid, me=0)
    source = draw(unbalanced(P_x, draw(shapes(dim))))
    return source, Decomposition(P_y, source.splits, tuple(None if d in copied else d for d in range(dim)))


@st.composite
def all_sum_reduces(draw):
    """From copies along some dimensions to the same copies."""
    partition = draw(partitions(draw(st.integers(1, 3))))
    summed = draw(st.sets(st.integers(0, partition.dim - 1), min_size=1))
    source = draw(unbalanced(partition, draw(shapes(partition.dim)), summed))
    return source, source


@st.composite
def all_gathers(draw):
    """From blocks to the whole along some dimensions."""
    partition = draw(partitions(draw(st.integers(1, 3))))
    shape = draw(shapes(partition.dim))
    gathered = draw(st.sets(st.integers(0, partition.dim - 1), min_size=1))
    kept = draw(unbalanced(partition, shape))
    axes = tuple(None if d in gathered else d for d in range(partition.dim))
    whole = tuple(Balanced(shape[d], 1) if d in gathered else split for d, split in enumerate(kept.splits))
    return kept, Decomposition(partition, whole, axes)


@st.composite
def scatters(draw):
    """From one rank, member of the target or not, to blocks."""
    dim = draw(st.integers(1, 3))
    shape = draw(shapes(dim))
    root = Partition((draw(st.integers(0, RANKS - 1)),), (1,) * dim, me=0)
    return Decomposition.balanced(root, shape), draw(unbalanced(draw(partitions(dim)), shape))


@st.composite
def anything(draw):
    """Any two decompositions of one shape: cut, replicated and seen through windows on both sides."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    ends = []
    for _ in range(2):
        end = draw(decompositions(shape))
        through = draw(st.sets(st.integers(0, len(shape) - 1)))
        ends.append(
            end.with_splits({d: WindowSplit(end.splits[d], draw(windows()), shape[d]) for d in through})
        )
    return tuple(ends)


def backwards(movements):
    """The movements with source and target swapped."""
    return movements.map(lambda ends: ends[::-1])


# Source and target decomposition of every movement in the documents.
MOVEMENTS = {
    "repartition between disjoint ranks": repartitions("disjoint"),
    "repartition between overlapping ranks": repartitions("overlapping"),
    "repartition between identical ranks": repartitions("identical"),
    "halo exchange": halos(),
    "broadcast": broadcasts(),
    "sum-reduce": backwards(broadcasts()),
    "all-sum-reduce": all_sum_reduces(),
    "all-gather": all_gathers(),
    "reduce-scatter": backwards(all_gathers()),
    "scatter": scatters(),
    "gather": backwards(scatters()),
    "anything": anything(),
}
