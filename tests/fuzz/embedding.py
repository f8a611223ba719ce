"""Random embeddings against the sequential torch layer."""

import random

import torch
from torch import nn

from distdl_rma import layers
from tests.layers.random_shards import cut, cut_balanced, random_blocks, random_partition
from tests.layers.sequential import agree


def arguments_of(rng):
    rows, width = rng.randint(1, 9), rng.randint(1, 4)
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
    return arguments


def twins(rng, P_world, P_x, P_y, arguments, weights):
    """The layer and its sequential twin, from the same seed."""
    seed = rng.randrange(1000)
    torch.manual_seed(seed)
    given = arguments.get("_weight")
    own = arguments | ({} if given is None else {"_weight": given.clone()})
    layer = layers.DistributedEmbedding(P_x, **own, P_y=P_y, weights=weights)
    torch.manual_seed(seed)
    return layer, nn.Embedding(**arguments)


def check(P_world, comm, seed):
    """Compare a random layer, called for one to three random inputs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dims = rng.randint(1, 3)
    arguments = arguments_of(rng)
    P_x = random_partition(rng, P_world, dims)
    P_y = rng.choice([None, random_partition(rng, P_world, dims + 1)])
    weights = rng.choice(["replicated", "root"])
    layer, module = twins(rng, P_world, P_x, P_y, arguments, weights)
    what = f"seed {seed}: {arguments} {P_x.ranks} {P_x.shape} {P_y and (P_y.ranks, P_y.shape)} {weights}"
    for _ in range(rng.randint(1, 3)):
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 6) for _ in range(dims))
        x = torch.randint(arguments["num_embeddings"], shape, dtype=rng.choice([torch.int64, torch.int32]))
        compare(rng, layer, module, P_x, P_y, x, f"{what} {shape}")
    if arguments["_freeze"]:
        return
    keeps = weights == "replicated" or P_x.me == P_x.ranks[0]
    agree(layer.weight.grad, module.weight.grad if keeps else torch.zeros(0, dtype=torch.float64), what)


def compare(rng, layer, module, P_x, P_y, x, what):
    expected = module(x)
    blocks = random_blocks(rng, P_x, x.shape)
    y = layer(cut(blocks, x))
    gradient = torch.randn_like(expected)
    if P_y is not None:
        own, mine = P_y.active, cut_balanced(P_y, gradient)
        part = cut_balanced(P_y, expected)
    else:
        own, mine = P_x.active, gradient[blocks.slices()] if P_x.active else None
        part = expected[blocks.slices()] if P_x.active else None
    if own:
        agree(y.detach(), part.detach(), what)
    else:
        assert y.numel() == 0, what
    if module.weight.requires_grad:
        expected.backward(gradient)
        y.backward(mine.reshape(y.shape) if own else torch.zeros_like(y))
