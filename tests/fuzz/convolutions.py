"""Random convolutions and transposed convolutions, in any form, against the sequential torch layers."""

import random
from contextlib import nullcontext

import torch
from torch import nn

from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.layers import (
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from tests.layers.sequential import agree

PAIRS = {
    (False, 1): (DistributedConv1d, nn.Conv1d),
    (False, 2): (DistributedConv2d, nn.Conv2d),
    (False, 3): (DistributedConv3d, nn.Conv3d),
    (True, 1): (DistributedConvTranspose1d, nn.ConvTranspose1d),
    (True, 2): (DistributedConvTranspose2d, nn.ConvTranspose2d),
    (True, 3): (DistributedConvTranspose3d, nn.ConvTranspose3d),
}
FORMS = ["feature", "feature", "P_x", "P_y", "P_W", "general", "general", "general"]


def partition(rng, P_world, dims, whole=()):
    """Some ranks in random order on a random grid; dimensions that stay whole have one block."""
    count = rng.randint(max(1, P_world.size // 2), P_world.size)
    shape = [1] * dims
    free = [d for d in range(dims) if d not in whole]
    rest, factor = count, 2
    while rest > 1:
        while rest % factor:
            factor += 1
        shape[rng.choice(free)] *= factor
        rest //= factor
    ranks = rng.sample(range(P_world.size), count)
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def partitions(rng, P_world, dims):
    """Positional and named partitions of a layer; P_y as it holds; whether the batch stays in place."""
    form = rng.choice(FORMS)
    P_x = partition(rng, P_world, dims, whole=(1,) if form == "feature" else ())
    P_y, P_W = partition(rng, P_world, dims), partition(rng, P_world, dims)
    if rng.random() < 0.15:
        P_y = P_x
    if rng.random() < 0.15 and P_x.shape[:2] == (1, 1):
        P_W = P_x
    if form in ("feature", "P_x"):
        return (P_x,), {}, P_x
    if form == "P_y":
        return ((P_x, P_y), {}, P_y) if rng.random() < 0.5 else ((P_x,), {"P_y": P_y}, P_y)
    if form == "P_W":
        return (P_x,), {rng.choice(["P_W", "P_w"]): P_W}, P_x
    return (P_x, P_y, P_W), {}, P_y


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


def cuts(rng, extent, parts):
    """A random split, balanced or not, with empty parts now and then."""
    if rng.random() < 0.5:
        return Balanced(extent, parts)
    ends = sorted(rng.randint(0, extent) for _ in range(parts - 1))
    return Listed(tuple(b - a for a, b in zip([0, *ends], [*ends, extent], strict=True)))


def cut(blocks, tensor):
    """This rank's block of a global tensor, in memory of its own."""
    if not blocks.partition.active:
        return tensor.new_empty(0)
    return tensor[blocks.slices()].detach().clone()


def check(P_world, comm, seed):
    """Compare one random layer with torch's, over a few calls; raises where they differ."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    transposed, dims = rng.random() < 0.4, rng.choice([1, 1, 2, 2, 3])
    arguments, least = arguments_of(rng, transposed, dims)
    given, named, P_y = partitions(rng, P_world, dims + 2)
    pattern = rng.choice(["replicated", "root"])
    distributed, sequential_kind = PAIRS[transposed, dims]
    torch.manual_seed(seed)
    layer = distributed(*given, **named, **arguments, weights=pattern)
    torch.manual_seed(seed)
    sequential = sequential_kind(**arguments)
    for key in rng.sample(["weight", "bias"], rng.choice([0, 0, 0, 1, 2])):
        for net in (layer, sequential):
            if getattr(net, key) is not None:
                getattr(net, key).requires_grad_(False)
    on_workers = given[0] == P_y and layer.P_W is None
    frozen = [key for key, parameter in sequential.named_parameters() if not parameter.requires_grad]
    case = (seed, transposed, given, named, arguments, pattern, frozen)
    for _ in range(rng.choice([1, 2])):
        shape = (
            rng.choice([0, 1, 2, 3, 4, 5]),
            arguments["in_channels"],
            *(n + rng.randint(0, 7) for n in least),
        )
        one_call(rng, comm, layer, sequential, given[0], P_y, shape, transposed, on_workers, case)


def one_call(rng, comm, layer, sequential, P_x, P_y, shape, transposed, on_workers, case):
    case = (*case, shape)
    x = torch.randn(shape, dtype=torch.float64)
    needing = rng.choice([set(range(comm.size)), set(range(comm.size)), set(), {rng.randrange(comm.size)}])
    needing &= set(P_x.ranks)
    blocks = Decomposition(
        P_x, tuple(cuts(rng, n, p) for n, p in zip(shape, P_x.shape, strict=True)), tuple(range(len(shape)))
    )
    options = {}
    if transposed and rng.random() < 0.3:
        windows = layer.options.stencil.windows
        size = [(n - 1) * w.stride + w.span - 2 * w.left for n, w in zip(shape[2:], windows, strict=True)]
        size = [n + rng.randrange(w.stride) for n, w in zip(size, windows, strict=True)]
        if min(size) > 0:
            options = {"output_size": [*rng.choice([(), (shape[0], layer.out_channels)]), *size]}
    learning = rng.random() < 0.9
    with nullcontext() if learning else torch.no_grad():
        x.requires_grad_(bool(needing))
        y = sequential(x, **options)
        local = cut(blocks, x).requires_grad_(comm.rank in needing)
        out = layer(local, **options)
    target = Decomposition.balanced(P_y, y.shape)
    if on_workers:
        target = target.with_splits({0: blocks.splits[0]})
    if P_y.active:
        agree(out, cut(target, y), f"output {case}")
    else:
        assert out.numel() == 0, case
    if not (learning and y.requires_grad):
        assert not out.requires_grad or (learning and comm.rank not in layer.members), case
        return
    gradient = torch.randn_like(y)
    for net in (layer, sequential):
        net.zero_grad()
    y.backward(gradient)
    # Of a batch that stays where it is, other blocks may need a gradient than this one.
    assert out.requires_grad or on_workers or not out.numel(), case
    if out.requires_grad:
        out.backward(cut(target, gradient) if P_y.active else torch.zeros_like(out))
    if comm.rank in needing and P_x.active:
        agree(local.grad, cut(blocks, x.grad), f"input gradient {case}")
    for key, parameter in sequential.named_parameters():
        store = layer.placed.placements[key].store
        if parameter.requires_grad and store.partition.active:
            agree(getattr(layer, key).grad, parameter.grad[store.slices()], f"{key} gradient {case}")
