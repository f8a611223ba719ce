"""Random convolutions and transposed convolutions, in any form."""

import random

import torch

from tests.fuzz.twins import Pair, balanced, run, twins
from tests.layers.partitioned.random_shards import random_partition

FORMS = ["feature", "feature", "P_x", "P_y", "P_W", "general", "general", "general"]


def partitions(rng, P_world, dims):
    """Positional and named partitions of a layer."""
    form = rng.choice(FORMS)
    P_x = random_partition(rng, P_world, dims, whole=(1,) if form == "feature" else ())
    P_y, P_W = random_partition(rng, P_world, dims), random_partition(rng, P_world, dims)
    if rng.random() < 0.15:
        P_y = P_x
    if rng.random() < 0.15 and P_x.shape[:2] == (1, 1):
        P_W = P_x
    if form in ("feature", "P_x"):
        return (P_x,), {}
    if form == "P_y":
        return ((P_x, P_y), {}) if rng.random() < 0.5 else ((P_x,), {"P_y": P_y})
    if form == "P_W":
        return (P_x,), {rng.choice(["P_W", "P_w"]): P_W}
    return (P_x, P_y, P_W), {}


def arguments_of(rng, transposed, dims):
    """Random arguments of torch's layer, and the smallest input that they fit."""
    kernel, stride, dilation = ([rng.randint(1, high) for _ in range(dims)] for high in (4, 3, 3))
    groups = rng.choice([1, 1, 2, 3, 4])
    arguments = {
        "in_channels": groups * rng.randint(1, 3),
        "out_channels": groups * rng.randint(1, 3),
        "kernel_size": tuple(kernel),
        "stride": tuple(stride),
        "dilation": tuple(dilation),
        "groups": groups,
        "bias": rng.random() < 0.6,
        "dtype": torch.float64,
    }
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    padding = [rng.randint(0, 3) for _ in range(dims)]
    if transposed:
        arguments["padding"] = tuple(padding)
        arguments["output_padding"] = tuple(
            rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)
        )
        slack = zip(padding, spans, arguments["output_padding"], stride, strict=True)
        return arguments, [max(1, 1 - (s + o - 1 - 2 * p) // t) for p, s, o, t in slack]
    arguments["padding_mode"] = mode = rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    named = rng.choice([None, None, None, "same", "valid"])
    if named == "same":
        arguments |= {"stride": 1}
        padding = [s // 2 for s in spans]
    arguments["padding"] = named or tuple(padding)
    most = [0 if named == "valid" else p for p in padding]
    least = {"zeros": 1, "replicate": 1, "reflect": 1 + max(most), "circular": max(1, *most)}[mode]
    return arguments, [max(least, s - 2 * p) for s, p in zip(spans, most, strict=True)]


def check(P_world, comm, seed):
    """Compare a random convolution with torch's; raises where they differ."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    transposed, dims = rng.random() < 0.4, rng.choice([1, 1, 2, 2, 3])
    arguments, least = arguments_of(rng, transposed, dims)
    grids, named = partitions(rng, P_world, dims + 2)
    named["weights"] = rng.choice(["replicated", "root"])
    layer, twin = twins(rng, f"Conv{'Transpose' * transposed}{dims}d", grids, arguments, named)
    stays = layer.P_x == layer.P_y and layer.P_W is None

    def draw():
        extents = (n + rng.randint(0, 7) for n in least)
        return torch.randn(rng.randint(0, 5), layer.in_channels, *extents, dtype=torch.float64)

    def output_size(x):
        windows = layer.options.stencil.windows
        least = [(n - 1) * w.stride + w.span - 2 * w.left for n, w in zip(x.shape[2:], windows, strict=True)]
        size = [n + rng.randrange(w.stride) for n, w in zip(least, windows, strict=True)]
        if rng.random() < 0.7 or min(size) < 1:
            return None
        return [*rng.choice([(), (len(x), layer.out_channels)]), *size]

    pair = Pair(layer, twin, layer.P_x, layer.P_y, balanced(layer.P_y, stays), twin)
    run(P_world, rng, pair, draw, **({"output_size": output_size} if transposed else {}))
