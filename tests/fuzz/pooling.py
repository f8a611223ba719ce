"""Random pooling, padding and up-sampling layers."""

import random

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import DistdlError
from tests.fuzz.twins import TORCH_REFUSALS, Pair, attempt, balanced, run, twins
from tests.layers.partitioned.random_shards import random_partition
from tests.layers.partitioned.sequential import agree


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


KINDS = [sliding, adaptive, padding, upsampling]


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


def check(P_world, comm, seed):
    """Compare a random layer with torch's; raises where they differ."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dims = rng.choice([1, 2, 2, 3])
    kind, arguments = rng.choice(KINDS)(rng, dims)
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
