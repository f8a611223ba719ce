"""Random linear layers of any kind, on any grids."""

import random

import torch

from tests.fuzz.twins import Pair, balanced, run, twins
from tests.layers.partitioned.random_shards import random_partition

# Kinds, and the partition that each takes by name.
KINDS = {
    "Linear": None,
    "LinearAllGather": "P_x",
    "LinearAllGatherZero": "P_x",
    "LinearReduceScatter": "P_y",
    "LinearReduceScatterZero": "P_y",
}


def check(P_world, comm, seed):
    """Compare a random linear layer with torch's; raises where they differ."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dims = rng.choice([1, 2, 2, 3, 3, 4, 5])
    kind, other = rng.choice(list(KINDS.items()))
    grids, named = [random_partition(rng, P_world, dims)], {}
    if other is None:
        grids.append(random_partition(rng, P_world, dims))
        grids.append(random_partition(rng, P_world, 3 if dims > 1 and rng.random() < 0.5 else 2))
    else:
        named[other] = rng.choice([None, random_partition(rng, P_world, dims)])
    if not kind.endswith("Zero"):
        named["weights"] = rng.choice(["replicated", "root"])
    sizes = {"in_features": rng.randint(1, 9), "out_features": rng.randint(1, 9)}
    arguments = sizes | {"bias": rng.random() < 0.7, "dtype": torch.float64}
    layer, twin = twins(rng, kind, grids, arguments, named, "Linear")
    pair = Pair(layer, twin, layer.P_x, layer.P_y, balanced(layer.P_y, keeps_batch=False), twin)
    low = 0 if rng.random() < 0.2 else 1

    def draw():
        shape = [rng.randint(low, 6), *(rng.randint(low, 3) for _ in range(dims - 2)), layer.in_features]
        return torch.randn(shape[-dims:], dtype=torch.float64)

    run(P_world, rng, pair, draw)
