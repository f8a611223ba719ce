"""Embedding of split indices equals embedding of the whole."""

import pytest
import torch
from torch import nn

from distdl_rma import layers
from tests.fuzz.embedding import check
from tests.layers.sequential import agree, shard
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi


def tokens(P_world):
    """All ranks along the second dimension, that of a sequence."""
    return P_world.create_cartesian_topology_partition((1, P_world.size))


def twins(P_x, **arguments):
    torch.manual_seed(3)
    layer = layers.DistributedEmbedding(P_x, 7, 3, dtype=torch.float64, **arguments)
    arguments.pop("name", None)
    torch.manual_seed(3)
    return layer, nn.Embedding(7, 3, dtype=torch.float64, **arguments)


@over_seeds(80, each=10)
def test_random_layers_equal_the_sequential_ones(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_accumulate_over_calls(P_world, scaled):
    P_x = tokens(P_world)
    layer, module = twins(P_x, scale_grad_by_freq=scaled, padding_idx=2)
    for shape in [(2, 9), (1, 3), (4, 5)]:
        x = torch.randint(7, shape)
        module(x).square().sum().backward()
        layer(shard(P_x, x)).square().sum().backward()
    agree(layer.weight.grad, module.weight.grad)


@pytest.mark.mpi(min_size=2)
def test_root_keeps_the_weight_alone(P_world, comm):
    P_x = tokens(P_world)
    layer = layers.DistributedEmbedding(P_x, 7, 3, weights="root")
    assert layer.weight.numel() == (0 if comm.rank else 21)
    layer(shard(P_x, torch.randint(7, (2, 9)))).sum().backward()
    assert layer.weight.grad.sum() == (0 if comm.rank else 2 * 9 * 3)
