"""Random layers beside torch's: arguments of every kind, on any grids, and inputs that fit most of them."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import DistdlError
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.ops.norm import statistics
from tests.fuzz.twins import TORCH_REFUSALS, Pair, attempt, balanced, run, twins
from tests.layers.partitioned.random_shards import random_partition
from tests.layers.partitioned.sequential import agree

CONVOLUTIONS = ["feature", "feature", "P_x", "P_y", "P_W", "general", "general", "general"]


def partitions_of_convolution(rng, P_world, dims):
    """Positional and named partitions of a layer."""
    form = rng.choice(CONVOLUTIONS)
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


def arguments_of_convolution(rng, transposed, dims):
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


def convolution(rng, P_world):
    """A convolution or transposed convolution, in any form."""
    transposed, dims = rng.random() < 0.4, rng.choice([1, 1, 2, 2, 3])
    arguments, least = arguments_of_convolution(rng, transposed, dims)
    grids, named = partitions_of_convolution(rng, P_world, dims + 2)
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


def sides(rng, dims, low, high):
    """An integer, or one per dimension."""
    if rng.random() < 0.3:
        return rng.randint(low, high)
    return tuple(rng.randint(low, high) for _ in range(dims))


def sliding(rng, dims):
    """A pool of windows that slide."""
    kernel = sides(rng, dims, 1, 5)
    arguments = {
        "kernel_size": kernel,
        "stride": rng.choice([None, sides(rng, dims, 1, 4)]),
        "padding": padding_of(rng, kernel, dims),
        "ceil_mode": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        more = {"dilation": rng.choice([1, sides(rng, dims, 1, 3)]), "return_indices": rng.random() < 0.5}
        return f"MaxPool{dims}d", arguments | more
    arguments["count_include_pad"] = rng.random() < 0.5
    if dims > 1 and rng.random() < 0.3:
        arguments["divisor_override"] = rng.choice([1, 3, -2])
    return f"AvgPool{dims}d", arguments


def padding_of(rng, kernel, dims):
    """Mostly what torch takes: at most half of the kernel."""
    kernels = (kernel,) * dims if isinstance(kernel, int) else kernel
    if rng.random() < 0.05:
        return kernels[0]
    if isinstance(kernel, int) and rng.random() < 0.5:
        return rng.randint(0, kernel // 2)
    return tuple(rng.randint(0, k // 2) for k in kernels)


def output_size(rng, dims):
    if rng.random() < 0.3:
        return rng.choice([1, 1, 2, 5])
    low = 0 if rng.random() < 0.05 else 1
    sizes = tuple(rng.randint(low, 9) for _ in range(dims))
    return tuple(rng.choice([None, size, size]) for size in sizes) if dims > 1 else sizes[0]


def adaptive(rng, dims):
    arguments = {"output_size": output_size(rng, dims)}
    if rng.random() < 0.5:
        return f"AdaptiveAvgPool{dims}d", arguments
    return f"AdaptiveMaxPool{dims}d", arguments | {"return_indices": rng.random() < 0.5}


def padding(rng, dims):
    kind = rng.choice(["Zero", "Constant", "Reflection", "Replication", "Circular"])
    low, high = rng.choice([(0, 3), (0, 6), (-2, 2), (-4, 4)])
    arguments = {"padding": rng.choice([sides(rng, 2 * dims, low, high), rng.randint(low, high)])}
    if kind == "Constant":
        arguments["value"] = rng.choice([0.0, 1.5, float("inf")])
    return f"{kind}Pad{dims}d", arguments


def upsampling(rng, dims):
    modes = ["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"]
    fitting = {1: "linear", 2: rng.choice(["bilinear", "bicubic"]), 3: "trilinear"}[dims]
    mode = rng.choice([fitting, fitting, "nearest", "nearest-exact", rng.choice(modes)])
    arguments = {"mode": mode}
    if rng.random() < 0.5:
        arguments["size"] = sides(rng, dims, 1, 12)
    else:
        scales = [0.3, 0.5, 0.7, 1.0, 1.1, 1.25, 1.5, 2.0, 2, 2.6, 3.0, rng.uniform(0.4, 3.0)]
        one, several = rng.choice(scales), tuple(rng.choice(scales) for _ in range(dims))
        arguments["scale_factor"] = rng.choice([one, several])
        arguments["recompute_scale_factor"] = rng.choice([None, True, False])
    if not mode.startswith("nearest") or rng.random() < 0.03:
        arguments["align_corners"] = rng.choice([None, True, False])
    if dims == 2 and rng.random() < 0.15:
        kept = {key: arguments[key] for key in ("size", "scale_factor") if key in arguments}
        return rng.choice(["UpsamplingNearest2d", "UpsamplingBilinear2d"]), kept
    return "Upsample", arguments


WINDOWS = [sliding, adaptive, padding, upsampling]


class Resized:
    """The sequential resizing as matrices, one per dimension, made by torch; and so its true adjoint.

    torch's own backward is not always the adjoint of its forward: for nearest neighbours it may round
    otherwise, for cubic interpolation by a factor that leaves the extent as it is, it copies.
    """

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        plain = self.module(x.detach())
        y = x
        for d in range(2, x.dim()):
            n, m = x.shape[d], plain.shape[d]
            lines = torch.eye(n, dtype=x.dtype).view(n, 1, *[1] * (d - 2), n, *[1] * (x.dim() - d - 1))
            # The others keep their single element.
            matrix = self.along(d, lines, m, x.shape).reshape(n, m)
            y = torch.tensordot(y, matrix, dims=([d], [0])).movedim(-1, d)
        agree(y.detach(), plain, "torch's forward as matrices")
        return y

    def along(self, d, lines, m, shape):
        module = self.module
        sizes = [1] * (lines.dim() - 2)
        keywords = {"mode": module.mode}
        if not module.mode.startswith("nearest"):
            keywords["align_corners"] = module.align_corners
        if module.scale_factor is None or module.recompute_scale_factor:
            sizes[d - 2] = m
            return F.interpolate(lines, size=sizes, **keywords)
        factor = module.scale_factor
        scales = [1.0] * len(sizes)
        scales[d - 2] = factor[d - 2] if isinstance(factor, tuple) else factor
        return F.interpolate(lines, scale_factor=tuple(scales), **keywords)


def may_refuse(module):
    """Whether this library refuses what torch computes."""
    if isinstance(module, nn.CircularPad1d | nn.CircularPad2d | nn.CircularPad3d):
        pairs = zip(module.padding[::2], module.padding[1::2], strict=True)
        return any(min(pair) < 0 < max(pair) for pair in pairs)
    # A window that reads nothing but padding: torch gives it an index that does not exist.
    return isinstance(module, nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d) and module.dilation != 1


def window(rng, P_world):
    """Pooling, padding or up-sampling."""
    dims = rng.choice([1, 2, 2, 3])
    kind, arguments = rng.choice(WINDOWS)(rng, dims)
    P_x = random_partition(rng, P_world, dims + 2)
    P_y = rng.choice([None, random_partition(rng, P_world, dims + 2)])
    module = getattr(nn, kind)(**arguments)

    def draw():
        shape = (rng.randint(1, 3), rng.randint(1, 4), *(rng.randint(1, 11) for _ in range(dims)))
        x = torch.randn(shape, dtype=torch.float64)
        # Often with ties, sometimes with infinities, which max pooling must rank.
        x = x.round() if rng.random() < 0.4 else x
        infinite = "MaxPool" in kind and rng.random() < 0.3
        return x.masked_fill_(torch.rand(shape) < 0.4, float("-inf")) if infinite else x

    try:
        layer, _ = twins(rng, kind, [P_x], arguments, {"P_y": P_y})
    except DistdlError:
        assert may_refuse(module) or attempt(lambda: module(draw()), TORCH_REFUSALS) is None, arguments
        return
    reference = Resized(module) if isinstance(module, nn.Upsample) else module
    target, P_y = balanced(layer.P_y, P_x == layer.P_y), layer.P_y
    # Only in three dimensions torch wants an input as large as a window without its padding.
    strict = isinstance(module, nn.AvgPool3d)
    run(P_world, rng, Pair(layer, module, P_x, P_y, target, reference, may_refuse(module), strict), draw)


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


def normalisation(rng, P_world):
    """Batch, instance, group or layer norm."""
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


# Kinds, and the partition that each takes by name.
LINEAR = {"Linear": None, "LinearAllGather": "P_x", "LinearReduceScatter": "P_y"}


def linear(rng, P_world):
    """Any of the linear layers."""
    dims = rng.choice([1, 2, 2, 3, 3, 4, 5])
    kind, other = rng.choice(list(LINEAR.items()))
    grids, named = [random_partition(rng, P_world, dims)], {}
    if other is None:
        grids.append(random_partition(rng, P_world, dims))
        grids.append(random_partition(rng, P_world, 3 if dims > 1 and rng.random() < 0.5 else 2))
    else:
        named[other] = rng.choice([None, random_partition(rng, P_world, dims)])
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


def embedding(rng, P_world):
    """Indices of words."""
    dims, rows, width = rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 4)
    arguments = {
        "num_embeddings": rows,
        "embedding_dim": width,
        "padding_idx": rng.choice([None, None, rng.randrange(rows), -1]),
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


FAMILIES = {
    "convolutions": convolution,
    "pooling": window,
    "norm": normalisation,
    "linear": linear,
    "embedding": embedding,
}


def check(P_world, comm, seed, family):
    """Compare a random layer of a family with torch's; raises where they differ."""
    torch.manual_seed(seed)
    FAMILIES[family](random.Random(seed), P_world)
