"""Random search over the linear layers: anything that they take, against the sequential torch layer."""

import random

import torch
from torch import nn

from distdl_rma import zero_volume_tensor
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import (
    DistributedLinear,
    DistributedLinearAllGather,
    DistributedLinearAllGatherZero,
    DistributedLinearReduceScatter,
    DistributedLinearReduceScatterZero,
)
from tests.layers.sequential import agree

KINDS = {
    DistributedLinear: None,
    DistributedLinearAllGather: "P_x",
    DistributedLinearAllGatherZero: "P_x",
    DistributedLinearReduceScatter: "P_y",
    DistributedLinearReduceScatterZero: "P_y",
}
ZERO = (DistributedLinearAllGatherZero, DistributedLinearReduceScatterZero)


def random_grid(rng, P_world, dims):
    """Some ranks in some order on some grid."""
    ranks = rng.sample(range(P_world.size), rng.randint(1, P_world.size))
    grid = [1] * dims
    rest = len(ranks)
    for divisor in (2, 2, 3):
        if rest % divisor == 0:
            grid[rng.randrange(dims)] *= divisor
            rest //= divisor
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(grid)


def random_layer(rng, P_world, dims):
    """A layer of any kind, and its sequential twin from the same seed."""
    kind, other = rng.choice(list(KINDS.items()))
    in_features, out_features = rng.randint(1, 9), rng.randint(1, 9)
    options = {"bias": rng.random() < 0.7, "dtype": torch.float64}
    if kind not in ZERO:
        options["weights"] = rng.choice(["replicated", "root"])
    P = random_grid(rng, P_world, dims)
    if other is None:
        P_y = random_grid(rng, P_world, dims)
        P_W = random_grid(rng, P_world, 3 if dims > 1 and rng.random() < 0.5 else 2)
        arguments = (P, P_y, P_W, in_features, out_features)
    else:
        arguments = (P, in_features, out_features)
        options[other] = rng.choice([None, random_grid(rng, P_world, dims)])
    seed = rng.randrange(1000)
    torch.manual_seed(seed)
    layer = kind(*arguments, **options)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    sequential = nn.Linear(in_features, out_features, bias=options["bias"], dtype=torch.float64)
    assert torch.equal(state, torch.get_rng_state()), "the generator is where the sequential layer leaves it"
    return layer, sequential


def random_cut(rng, P, shape):
    """Who owns what of an input: balanced, or any lengths that form a grid."""
    if rng.random() < 0.5:
        return Decomposition.balanced(P, shape)
    lengths = []
    for extent, parts in zip(shape, P.shape, strict=True):
        ends = sorted(rng.randint(0, extent) for _ in range(parts - 1))
        lengths.append([b - a for a, b in zip([0, *ends], [*ends, extent], strict=True)])
    shapes = {r: [n[i] for n, i in zip(lengths, P.index_of(r), strict=True)] for r in P.ranks}
    return Decomposition.from_local_shapes(P, shapes)


def part(store, whole):
    """This rank's part of a global tensor."""
    return whole[store.slices()] if store.partition.active else whole.new_empty(0)


def compare(rng, layer, sequential, x):
    """One step of both on a global input; gradients accumulate from step to step."""
    rank = layer.machine.rank
    source = random_cut(rng, layer.P_x, x.shape)
    target = Decomposition.balanced(layer.P_y, (*x.shape[:-1], layer.out_features))
    needing = rng.choice([[], layer.machine.ranks, rng.sample(layer.machine.ranks, 1)])
    x.requires_grad_()
    y = sequential(x)
    gradient = torch.randn(y.shape, dtype=y.dtype)
    nothing = zero_volume_tensor(rng.choice([None, 3]))
    mine = part(source, x) if layer.P_x.active else nothing
    local = mine.detach().clone().requires_grad_(rank in needing)
    with torch.set_grad_enabled(rng.random() < 0.9):
        out = layer(local)
        recording = torch.is_grad_enabled()
    agree(out, part(target, y.detach()) if layer.P_y.active else torch.empty_like(out), "output")
    members = set(needing) & set(layer.members)
    trained = any(p.requires_grad for p in sequential.parameters())
    asked = recording and bool(trained or members)
    assert out.requires_grad == (asked if rank in layer.members else recording)
    if not asked:
        return
    y.backward(gradient)
    if out.requires_grad:
        out.backward(part(target, gradient) if layer.P_y.active else torch.zeros_like(out))
    if rank in needing and layer.P_x.active:
        agree(local.grad, part(source, x.grad), "input gradient")


def check(P_world, comm, seed):
    """Raise if a random linear layer differs from the sequential one; collective."""
    rng = random.Random(seed)
    dims = rng.choice([1, 2, 2, 3, 3, 4, 5])
    layer, sequential = random_layer(rng, P_world, dims)
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == dict(sequential.named_parameters()).keys()
    stores = {key: place.store for key, place in layer.placed.placements.items()}
    for key, parameter in sequential.named_parameters():
        assert torch.equal(parameters[key], part(stores[key], parameter)), f"initial {key}"
    for key, parameter in sequential.named_parameters():
        trained = rng.random() < 0.85
        for twin in (parameter, parameters[key]):
            twin.requires_grad_(trained)
    low = 0 if rng.random() < 0.2 else 1
    for _ in range(rng.randint(1, 3)):
        shape = [rng.randint(low, 6), *(rng.randint(low, 3) for _ in range(dims - 2)), layer.in_features]
        compare(rng, layer, sequential, torch.randn(shape[-dims:], dtype=torch.float64))
    for key, parameter in sequential.named_parameters():
        expected = parameter.grad
        if expected is None or not parameters[key].numel():
            continue
        agree(parameters[key].grad, part(stores[key], expected), f"gradient of {key}")
