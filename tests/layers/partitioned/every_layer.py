"""Every layer of the library, some in several forms: how it is built, and what it is called with."""

from functools import partial

import torch

from distdl_rma import layers

# In the library's list of layers, but none: from global parameters, and what layers are made of.
OTHERS = {"Concat", "Conv", "InstanceNorm", "Movement"}
_LOCAL = {1: (2, 4, 6), 2: (2, 4, 6, 5), 3: (2, 4, 6, 4, 3)}


def grid(P_world, shape, ranks=None):
    """A grid of some ranks, or of all."""
    some = P_world if ranks is None else P_world.create_partition_inclusive(ranks)
    return some.create_cartesian_topology_partition(shape)


def rows(P_world, dims=2):
    """All ranks along the first spatial dimension."""
    return grid(P_world, (1, 1, P_world.size, *(1,) * (dims - 1)))


def line(P_world):
    """All ranks along the features."""
    return grid(P_world, (1, P_world.size))


def first(P_world, dims=2):
    """The first rank alone."""
    return grid(P_world, (1,) * dims, [0])


def local(dims=2, dtype=torch.float32):
    """A rank's shard of an image."""
    return (torch.rand(_LOCAL[dims]) * 0.8 + 0.1).to(dtype)


def dense(x):
    return x.clone(memory_format=torch.contiguous_format)


def outcome(layer, inputs, lay_out=dense):
    """Output, and gradients of inputs and parameters, of a call whose gradient is laid out in a way."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    layer.zero_grad()
    y = layer(*inputs)
    if y.requires_grad:
        y.backward(lay_out(dense(torch.ones_like(y)).cumsum(-1) if y.dim() else torch.ones_like(y)))
    return [y.detach(), *(x.grad for x in inputs), *(p.grad for p in layer.parameters())]


# Arguments behind the partition of layers of images of one to three dimensions.
_OF_IMAGES = {
    "Conv{}d replicated": "4, 3, 3, padding=1",
    "ConvTranspose{}d replicated": "4, 3, 3, padding=1",
    **{f"{mode}Pad{{}}d": "1" for mode in ("Circular", "Reflection", "Replication", "Zero")},
    "ConstantPad{}d": "1, 0.5",
    **{f"{kind}Pool{{}}d": "3, 2, 1" for kind in ("Avg", "Max")},
    **{f"Adaptive{kind}Pool{{}}d": "3" for kind in ("Avg", "Max")},
    "InstanceNorm{}d": "4, affine=True, track_running_stats=True",
    "BatchNorm{}d": "4",
}
# All arguments of layers of images of two dimensions.
_OF_PICTURES = {
    "Conv2d root": "rows2, 4, 3, 3, padding=1, weights='root'",
    "ConvTranspose2d root": "rows2, 4, 3, 3, padding=1, weights='root'",
    "Conv2d": "rows2, 4, 3, 3, padding=1, padding_mode='circular'",
    "GroupNorm": "rows2, 2, 4",
    "LayerNorm": "rows2, (5,)",
    "RMSNorm": "rows2, (5,)",
    "Upsample": "rows2, scale_factor=2, mode='bicubic'",
    "UpsamplingBilinear2d": "rows2, scale_factor=2",
    "UpsamplingNearest2d": "rows2, scale_factor=2",
}
_LOSSES = ["L1", "MSE", "SmoothL1", "Huber", "BCE", "BCEWithLogits", "PoissonNLL", "KLDiv"]
_CLASSES = "torch.rand(5, 3), torch.arange(5) % 3"
_WORDS = "torch.randint(0, 7, (2, 3)),"
_ROWS, _WIDER = "torch.rand(5, 3),", "torch.rand(5, 4),"
# Calls of layers, and the arguments of their calls.
_CALLS = {
    **{
        f"Distributed{name.format(d)}": (f"rows{d}, {arguments}", f"local({d}),")
        for name, arguments in _OF_IMAGES.items()
        for d in (1, 2, 3)
    },
    **{f"Distributed{name}": (arguments, "local(),") for name, arguments in _OF_PICTURES.items()},
    **{f"Distributed{name}Loss": ("rows2", "local(), local()") for name in _LOSSES},
    # Channels split over the ranks, weights on all of them.
    "DistributedConv2d of split channels": (
        "channels, channels, channels, 2 * n, 2 * n, 3, padding=1",
        "torch.rand(2, 2, 6, 5),",
    ),
    "HaloExchange": ("rows2, ((1, 1), (1, 0))", "local(),"),
    "DistributedConcat": ("[rows2, rows2], samples", "local(), local()"),
    "DistributedEmbedding": ("line, 7, 3", _WORDS),
    "DistributedEmbedding root": ("line, 7, 3, weights='root'", _WORDS),
    "DistributedLinear": ("line, line, line, 3 * n, 8", _ROWS),
    **{f"DistributedLinear{way}": ("line, 3 * n, 8", _ROWS) for way in ("AllGather", "ReduceScatter")},
    "AllGather": ("line, [1]", _WIDER),
    "ReduceScatter": ("line, [1]", _WIDER),
    "AllSumReduce": ("line, [1]", _ROWS),
    "Repartition": ("blocks, line", _ROWS),
    "DistributedTranspose": ("blocks, line", _ROWS),
    "Broadcast": ("first, blocks", "torch.rand(5, 3) if first.active else torch.empty(0),"),
    "SumReduce": ("blocks, first", _ROWS),
    # Classes whole, or split over the ranks.
    **{
        f"Distributed{name}Loss of {'split' if grid == 'line' else 'whole'} classes": (grid, _CLASSES)
        for name in ("CrossEntropy", "NLL")
        for grid in ("blocks", "line")
    },
}
_CALLS["DistributedKLDivLoss"] = ("rows2, reduction='batchmean'", "local(), local()")


def _made(name, P_world):
    n = P_world.size
    grids = {"channels": (1, n, 1, 1), "samples": (n, 1, 1, 1), "blocks": (n, 1)}
    names = {key: grid(P_world, shape) for key, shape in grids.items()}
    names |= {f"rows{d}": rows(P_world, d) for d in _LOCAL} | {"line": line(P_world), "first": first(P_world)}
    names |= {"torch": torch, "local": local, "n": n}
    kind, (arguments, inputs) = getattr(layers, name.partition(" ")[0]), _CALLS[name]
    layer = eval(f"kind({arguments})", names | {"kind": kind})
    return layer, eval(f"({inputs})", names)


# Name to a function that builds the layer, on all ranks alike, and gives its local inputs.
EVERY_LAYER = {name: partial(_made, name) for name in _CALLS}
