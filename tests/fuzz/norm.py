"""Random normalisation layers."""

import random

import pytest
import torch

from distdl_rma.layers.ops.norm import statistics
from tests.fuzz.twins import Pair, run, twins
from tests.layers.partitioned.random_shards import random_partition

# The gradient of two values that almost agree is known to |x| / eps roundings only, in torch and here alike.
EPS = (1e-3, 1e-2)


def channel_case(rng):
    """Batch or instance norm: kind, arguments, number of dimensions, and extents that are fixed."""
    kind, space = rng.choice(["BatchNorm", "InstanceNorm"]), rng.choice([1, 1, 2, 2, 3])
    lead = 1 if rng.random() < 0.2 and (kind == "InstanceNorm" or space == 1) else 2
    arguments = {
        "num_features": rng.randint(1, 5),
        "momentum": rng.choice([0.1, 0.7, 1.0, None]),
        "affine": rng.random() < 0.6,
        "track_running_stats": rng.random() < 0.6,
    }
    at = lead - 1 if kind == "InstanceNorm" else 1
    return f"{kind}{space}d", arguments, space + lead, {at: arguments["num_features"]}


def group_case(rng):
    groups, dims = rng.randint(1, 4), rng.randint(2, 5)
    channels = groups * rng.randint(1, 4)
    arguments = {"num_groups": groups, "num_channels": channels, "affine": rng.random() < 0.7}
    return "GroupNorm", arguments, dims, {1: channels}


def layer_case(rng):
    kind, dims = rng.choice(["LayerNorm", "LayerNorm", "RMSNorm"]), rng.randint(1, 4)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, dims)))
    given = shape[0] if len(shape) == 1 and rng.random() < 0.5 else shape
    arguments = {"normalized_shape": given, "elementwise_affine": rng.random() < 0.7}
    if kind == "LayerNorm":
        arguments["bias"] = rng.random() < 0.7
    return kind, arguments, dims, {dims - len(shape) + d: n for d, n in enumerate(shape)}


def check(P_world, comm, seed):
    """Compare a random normalisation with torch's; raises where they differ."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind, arguments, dims, fixed = rng.choice([channel_case, channel_case, group_case, layer_case])(rng)
    arguments |= {"eps": rng.choice(EPS), "dtype": torch.float64}
    P_x = random_partition(rng, P_world, dims)
    layer, twin = twins(rng, kind, [P_x], arguments, {"placement": rng.choice(["cut", "cut", "replicated"])})
    smallest = 0 if "Instance" not in kind and rng.random() < 0.05 else 1

    def draw():
        shape = [fixed.get(d, rng.randint(1, 7)) for d in range(dims)]
        if 0 not in fixed:
            shape[0] = rng.randint(smallest, 4)
        return torch.randn(shape, dtype=torch.float64) * rng.choice([1.0, 10.0]) + rng.choice([0.0, 5.0])

    # A group norm cannot always know what torch refuses.
    less = kind == "GroupNorm" and P_x.shape[0] > 1
    pair = Pair(layer, twin, P_x, P_x, lambda blocks, shape: blocks, twin, refuses_less=less)
    limit = statistics._ROUND_NBYTES
    with pytest.MonkeyPatch.context() as patch:
        # Some as if their messages were large.
        patch.setattr(statistics, "_ROUND_NBYTES", rng.choice([limit, limit, 64, 0]))
        run(P_world, rng, pair, draw)
