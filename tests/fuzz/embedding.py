"""Random embeddings."""

import random

import torch

from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Balanced
from tests.fuzz.twins import Pair, balanced, run, twins
from tests.layers.partitioned.random_shards import random_partition


def check(P_world, comm, seed):
    """Compare a random embedding with torch's; raises where they differ."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dims, rows, width = rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 4)
    arguments = {
        "num_embeddings": rows,
        "embedding_dim": width,
        "padding_idx": rng.choice([None, None, rng.randrange(rows), -1]),
        "scale_grad_by_freq": rng.random() < 0.4,
        "_freeze": rng.random() < 0.1,
        "dtype": torch.float64,
    }
    if rng.random() < 0.3:
        arguments["_weight"] = torch.randn(rows, width, dtype=torch.float64)
    P_x = random_partition(rng, P_world, dims)
    P_y = rng.choice([None, random_partition(rng, P_world, dims + 1)])
    named = {"P_y": P_y, "weights": rng.choice(["replicated", "root"])}
    layer, twin = twins(rng, "Embedding", [P_x], arguments, named)

    def beside(blocks, shape):
        return Decomposition(layer.P_y, (*blocks.splits, Balanced(width, 1)), tuple(range(dims + 1)))

    def draw():
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 6) for _ in range(dims))
        return torch.randint(rows, shape, dtype=rng.choice([torch.int64, torch.int32]))

    target = beside if P_y is None else balanced(P_y, keeps_batch=False)
    run(P_world, rng, Pair(layer, twin, P_x, layer.P_y, target, twin), draw)
