"""Random partitions and random, uneven shards."""

from itertools import pairwise

from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Listed


def random_partition(rng, P_world, dims, whole=()):
    """Some ranks in any order on a random grid that cuts no dimension of ``whole``."""
    count = rng.randint(1, P_world.size)
    ranks = rng.sample(range(P_world.size), count)
    grid, free = [1] * dims, [d for d in range(dims) if d not in whole]
    for prime in (2, 2, 3):
        if count % prime == 0:
            grid[rng.choice(free)] *= prime
            count //= prime
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(grid)


def random_blocks(rng, P, shape):
    """Blocks of a global shape: balanced, or cut anywhere, empty ones included."""
    if rng.random() < 0.5:
        return Decomposition.balanced(P, shape)
    splits = {}
    for d, (n, parts) in enumerate(zip(shape, P.shape, strict=True)):
        cuts = [0, *sorted(rng.randint(0, n) for _ in range(parts - 1)), n]
        splits[d] = Listed(tuple(b - a for a, b in pairwise(cuts)))
    return Decomposition.balanced(P, shape).with_splits(splits)


def cut(blocks, tensor):
    """This rank's part of a global tensor, in memory of its own; empty outside of the partition."""
    return tensor[blocks.slices()].detach().clone() if blocks.partition.active else tensor.new_empty(0)


def cut_balanced(P, tensor):
    """This rank's balanced part of a global tensor."""
    return cut(Decomposition.balanced(P, tensor.shape), tensor) if P.active else tensor.new_empty(0)
