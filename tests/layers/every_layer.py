"""Every layer of the library, some in several forms: how it is built, and what it is called with."""

import torch

from distdl_rma import layers

# In the library's list of layers, but none: from global parameters, and what layers are made of.
OTHERS = {"Concat", "Conv", "InstanceNorm", "Movement"}
_LOCAL = {1: (2, 4, 6), 2: (2, 4, 6, 5), 3: (2, 4, 6, 4, 3)}
_CHANNELS = 4


def rows(P_world, dims=2):
    """All ranks along the first spatial dimension."""
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, *(1,) * (dims - 1)))


def line(P_world):
    """All ranks along the features."""
    return P_world.create_cartesian_topology_partition((1, P_world.size))


def first(P_world):
    """The first rank alone, on a grid of two dimensions."""
    return P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1))


def local(dims=2, dtype=torch.float32):
    """A rank's shard of an image."""
    return (torch.rand(_LOCAL[dims]) * 0.8 + 0.1).to(dtype)


def _images(name, *arguments, dims=(1, 2, 3), **options):
    # A family of layers of images, one for each number of spatial dimensions.
    for d in dims:
        kind = getattr(layers, f"{name}{d}d")

        def make(P_world, kind=kind, d=d):
            return kind(rows(P_world, d), *arguments, **options), (local(d),)

        yield f"{name}{d}d", make


def _image(name, *arguments, **options):
    def make(P_world):
        return getattr(layers, name)(rows(P_world), *arguments, **options), (local(),)

    yield name, make


def _losses(name, **options):
    def make(P_world):
        return getattr(layers, name)(rows(P_world), **options), (local(), local())

    yield name, make


def _classes(name, split):
    # Classes whole, or split over the ranks.
    def make(P_world):
        P_x = line(P_world) if split else P_world.create_cartesian_topology_partition((P_world.size, 1))
        return getattr(layers, name)(P_x), (torch.rand(5, 3), torch.arange(5) % 3)

    yield f"{name} of {'split' if split else 'whole'} classes", make


def _vectors(name, make_layer, shape=(5, 3)):
    def make(P_world):
        return make_layer(getattr(layers, name), P_world), (torch.rand(shape),)

    yield name, make


def _two(P_world):
    return P_world.create_cartesian_topology_partition((P_world.size, 1)), line(P_world)


def _embedding(name, **options):
    def make(P_world):
        P_x = P_world.create_cartesian_topology_partition((1, P_world.size))
        return layers.DistributedEmbedding(P_x, 7, 3, **options), (torch.randint(0, 7, (2, 3)),)

    yield name, make


def _concat():
    def make(P_world):
        P_x = rows(P_world)
        P_y = P_world.create_cartesian_topology_partition((P_world.size, 1, 1, 1))
        return layers.DistributedConcat([P_x, P_x], P_y), (local(), local())

    yield "DistributedConcat", make


def _general(name):
    # Channels split over the ranks, weights on all of them.
    def make(P_world):
        n = P_world.size
        P_x, P_W = (P_world.create_cartesian_topology_partition(s) for s in ((1, n, 1, 1), (1, n, 1, 1)))
        return getattr(layers, name)(P_x, P_x, P_W, 2 * n, 2 * n, 3, padding=1), (torch.rand(2, 2, 6, 5),)

    yield f"{name} of split channels", make


def _few(name):
    def make(P_world):
        P_all = P_world.create_cartesian_topology_partition((P_world.size, 1))
        P_x, P_y = (P_all, first(P_world)) if name == "SumReduce" else (first(P_world), P_all)
        x = torch.rand(5, 3) if P_x.active else torch.empty(0)
        return getattr(layers, name)(P_x, P_y), (x,)

    yield name, make


def _all():
    for weights in ("replicated", "root"):
        for name in ("DistributedConv", "DistributedConvTranspose"):
            dims = (1, 2, 3) if weights == "replicated" else (2,)
            for key, make in _images(name, _CHANNELS, 3, 3, padding=1, dims=dims, weights=weights):
                yield f"{key} {weights}", make
    yield from _general("DistributedConv2d")
    yield from _image("DistributedConv2d", _CHANNELS, 3, 3, padding=1, padding_mode="circular")
    for mode in ("Circular", "Constant", "Reflection", "Replication", "Zero"):
        yield from _images(f"Distributed{mode}Pad", 1, *((0.5,) if mode == "Constant" else ()))
    for kind in ("Avg", "Max"):
        yield from _images(f"Distributed{kind}Pool", 3, 2, 1)
        yield from _images(f"DistributedAdaptive{kind}Pool", 3)
    yield from _images("DistributedInstanceNorm", _CHANNELS, affine=True, track_running_stats=True)
    yield from _images("DistributedBatchNorm", _CHANNELS)
    yield from _image("DistributedGroupNorm", 2, _CHANNELS)
    for name in ("DistributedLayerNorm", "DistributedRMSNorm"):
        yield from _image(name, (5,))
    yield from _image("DistributedUpsample", scale_factor=2, mode="bicubic")
    yield from _image("DistributedUpsamplingBilinear2d", scale_factor=2)
    yield from _image("DistributedUpsamplingNearest2d", scale_factor=2)
    yield from _image("HaloExchange", ((1, 1), (1, 0)))
    yield from _concat()
    for options in ({}, {"weights": "root"}, {"scale_grad_by_freq": True}):
        yield from _embedding(f"DistributedEmbedding {options}", **options)
    yield from _vectors("DistributedLinear", lambda kind, P: kind(line(P), line(P), line(P), 3 * P.size, 8))
    for way in ("AllGather", "ReduceScatter"):
        yield from _vectors(f"DistributedLinear{way}", lambda kind, P: kind(line(P), 3 * P.size, 8))
        yield from _vectors(f"DistributedLinear{way}Zero", lambda kind, P: kind(_two(P)[0], 3, 8))
        yield from _vectors(way, lambda kind, P: kind(line(P), [1]), (5, 4))
    for name in ("Repartition", "DistributedTranspose"):
        yield from _vectors(name, lambda kind, P: kind(*_two(P)))
    yield from _vectors("AllSumReduce", lambda kind, P: kind(line(P), [1]))
    yield from _few("Broadcast")
    yield from _few("SumReduce")
    for name in ("L1", "MSE", "SmoothL1", "Huber", "BCE", "BCEWithLogits", "PoissonNLL"):
        yield from _losses(f"Distributed{name}Loss")
    yield from _losses("DistributedKLDivLoss", reduction="batchmean")
    for name in ("DistributedCrossEntropyLoss", "DistributedNLLLoss"):
        for split in (False, True):
            yield from _classes(name, split)


# Name to a function that builds the layer, on all ranks alike, and gives its local inputs.
EVERY_LAYER = {}
for _name, _make in _all():
    EVERY_LAYER[_name if _name not in EVERY_LAYER else f"{_name}, another form"] = _make
