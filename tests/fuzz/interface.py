"""Random layers from global parameters, on permuted machines, against the sequential torch layers."""

import random
from functools import partial
from math import prod

import torch

from distdl_rma import Distribution
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import Concat, Conv, InstanceNorm
from tests.layers.partitioned.sequential import CONV, NORM, agree
from tests.layers.partitioned.twins import Cat, step_of_both

DTYPE = torch.float64


def counts(rng, size, dims):
    """Random instances, of which there are at most ``size``."""
    found = [1] * dims
    for _ in range(rng.randint(0, 4)):
        d = rng.randrange(dims)
        if prod(found) // found[d] * (found[d] + 1) <= size:
            found[d] += 1
    return found


def random_distribution(rng, size, space):
    """Instances, tight or in any box of strides that the inequalities permit."""
    shape = counts(rng, size, space + 2)
    if rng.random() < 0.3:
        return Distribution(*shape)
    for _ in range(50):
        box = counts(rng, size, 3)
        distribution = Distribution(*shape, strides=box)
        if all(prod(shape[2 - d :]) <= prod(box[2 - d :]) for d in range(3)):
            return distribution
    return Distribution(*shape)


def part(P, tensor):
    """This rank's balanced part of a global tensor; on idle ranks none, in one of its shapes."""
    if P.active:
        return tensor[Decomposition.balanced(P, tensor.shape).slices()].detach().clone()
    return tensor.new_empty((0,) if tensor.shape[-1] % 2 else (tensor.shape[0], 0))


def shapes_of(rng, lead):
    return [*lead, *(rng.randint(4, 9) for _ in range(rng.choice([1, 2, 2, 3])))]


def random_conv(rng, world):
    batch, groups = rng.randint(1, 4), rng.choice([1, 1, 2])
    channels, filters, *space = shapes_of(rng, [groups * rng.randint(1, 3), groups * rng.randint(1, 3)])
    inputs = random_distribution(rng, world.size, len(space))
    output = rng.choice([None, *(random_distribution(rng, world.size, len(space)) for _ in range(3))])
    arguments = {
        "kernel_size": tuple(rng.randint(1, 3) for _ in space),
        "stride": rng.randint(1, 2),
        "padding": rng.randint(0, 1),
        "groups": groups,
        "bias": rng.random() < 0.6,
        "padding_mode": rng.choice(["zeros", "zeros", "circular", "replicate"]),
        "dtype": DTYPE,
    }
    layer = Conv(world, (batch, channels, filters, *space), inputs, output, **arguments)
    module = CONV[len(space)](channels, filters, **arguments)
    return layer, module, [inputs], output, [(batch, channels, *space)]


def random_norm(rng, world):
    batch, channels, *space = shapes_of(rng, [rng.randint(1, 4), rng.randint(1, 5)])
    distribution = random_distribution(rng, world.size, len(space))
    arguments = {
        "eps": 1e-2,
        "affine": rng.random() < 0.6,
        "track_running_stats": rng.random() < 0.3,
        "dtype": DTYPE,
    }
    layer = InstanceNorm(world, (batch, channels, *space), distribution, **arguments)
    module = NORM[len(space)](channels, **arguments)
    return layer, module, [distribution], None, [(batch, channels, *space)]


def random_concat(rng, world):
    batch, *space = shapes_of(rng, [rng.randint(1, 4)])
    channels = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    inputs = [random_distribution(rng, world.size, len(space)) for _ in channels]
    if rng.random() < 0.2:
        inputs = [inputs[0]] * len(channels)
    output = rng.choice([None, random_distribution(rng, world.size, len(space))])
    layer = Concat(world, (batch, channels, *space), inputs, output, dtype=DTYPE)
    return layer, Cat(), inputs, output, [(batch, c, *space) for c in channels]


def check(P_world, comm, seed):
    """Compare one random layer with torch's: sizes before the first call, outputs, gradients."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    # A machine of its own would cost more than the layer: the list M is what counts.
    world = P_world.create_partition_inclusive(rng.sample(range(P_world.size), P_world.size))
    layer, module, inputs, output, shapes = rng.choice([random_conv, random_norm, random_concat])(rng, world)
    what = f"seed {seed}: {layer} M = {world.ranks}, {inputs} to {output}, {shapes}"
    for key, parameter in module.named_parameters():
        store = layer.placed.placements[key].store
        getattr(layer, key).data.copy_(parameter.detach()[store.slices()] if store.partition.active else 0)
    P_xs, P_y = [d.on(world) for d in inputs], (inputs[0] if output is None else output).on(world)
    sizes = layer.get_sizeof_input_tensor(), layer.get_sizeof_output_tensor(), layer.get_sizeof_norm()
    if rng.random() < 0.4:
        layer.connect()
    compare(layer, module, P_xs, P_y, shapes, what)
    agreed = layer.get_sizeof_input_tensor(), layer.get_sizeof_output_tensor(), layer.get_sizeof_norm()
    assert sizes == agreed, f"{what}: {sizes} announced, {agreed} seen"
    if rng.random() < 0.5:
        # A smaller last batch.
        compare(layer, module, P_xs, P_y, [(1, *shape[1:]) for shape in shapes], f"{what}, again")
        if rng.random() < 0.5:
            layer.connect()
            compare(layer, module, P_xs, P_y, shapes, f"{what}, connected again")


def compare(layer, module, P_xs, P_y, shapes, what):
    """Output and gradients of one call on random inputs."""
    xs = [torch.randn(shape, dtype=DTYPE) for shape in shapes]
    parts = [partial(part, P) for P in P_xs]

    def same(mine, expected, each):
        agree(mine, expected, f"{what}: {each}")

    step_of_both(layer, module, xs, parts, partial(part, P_y), same=same)
