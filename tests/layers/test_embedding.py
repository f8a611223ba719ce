"""Embedding of split indices equals embedding of the whole."""

import pytest
import torch
from torch import nn

from distdl_rma import (
    ArgumentError,
    GradientSync,
    PartitionError,
    ShapeError,
    UnsupportedError,
    layers,
    zero_volume_tensor,
)
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


def test_a_gradient_sync_takes_over(P_world):
    P_x = tokens(P_world)
    layer, module = twins(P_x)
    x = torch.randint(7, (2, 9))
    sync = GradientSync(layer, P_world)
    layer(shard(P_x, x)).square().sum().backward()
    module(x).square().sum().backward()
    agree(layer.weight.grad, module.weight.grad)
    sync.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_shorter_types(P_world, dtype):
    P_x = tokens(P_world)
    torch.manual_seed(3)
    layer = layers.DistributedEmbedding(P_x, 7, 3, dtype=dtype)
    torch.manual_seed(3)
    module = nn.Embedding(7, 3, dtype=dtype)
    x = torch.randint(7, (2, 6))
    y, expected = layer(shard(P_x, x)), module(x)
    assert y.dtype == dtype
    assert torch.equal(y, expected[:, shard_of(P_x, 6)])
    (expected * 0.5).sum().backward()
    (y * 0.5).sum().backward()
    torch.testing.assert_close(layer.weight.grad, module.weight.grad, rtol=0, atol=0)


def shard_of(P_x, n):
    return slice(*(sum(len(part) for part in torch.arange(n).tensor_split(P_x.size)[:i]) for i in at(P_x)))


def at(P_x):
    return P_x.rank, P_x.rank + 1


@pytest.mark.mpi(min_size=2)
def test_root_keeps_the_weight_alone(P_world, comm):
    P_x = tokens(P_world)
    layer = layers.DistributedEmbedding(P_x, 7, 3, weights="root")
    assert layer.weight.numel() == (0 if comm.rank else 21)
    layer(shard(P_x, torch.randint(7, (2, 9)))).sum().backward()
    assert layer.weight.grad.sum() == (0 if comm.rank else 2 * 9 * 3)


@pytest.mark.mpi(min_size=2)
def test_idle_ranks_know_the_weight_and_its_gradient(P_world):
    P_x = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1))
    layer, module = twins(P_x)
    x = torch.randint(7, (2, 4))
    y = layer(x if P_x.active else zero_volume_tensor(2, torch.int64))
    y.sum().backward()
    module(x).sum().backward()
    agree(layer.weight.grad, module.weight.grad)


def test_one_wrong_input_raises_on_all_ranks_and_leaves_the_layer_usable(P_world, comm):
    P_x = tokens(P_world)
    layer, module = twins(P_x, name="words")
    x = torch.randint(7, (2, 9))
    with pytest.raises(ShapeError, match="'words': indices are"):
        layer(shard(P_x, x).float())
    wrong = shard(P_x, x)[0] if comm.rank == comm.size - 1 else shard(P_x, x)
    with pytest.raises(ShapeError, match=f"'words': rank {comm.size - 1} has a tensor of 1 dimensions"):
        layer(wrong)
    y = layer(shard(P_x, x))
    agree(y, module(x)[:, shard_of(P_x, 9)].detach().requires_grad_())


def test_what_cannot_be_exact_is_refused(P_world):
    P_x = tokens(P_world)
    with pytest.raises(UnsupportedError, match="DistributedEmbedding: sparse"):
        layers.DistributedEmbedding(P_x, 3, 2, sparse=True)
    with pytest.raises(UnsupportedError, match=r"DistributedEmbedding: max_norm=1\.0"):
        layers.DistributedEmbedding(P_x, 3, 2, max_norm=1.0)
    with pytest.raises(
        ArgumentError, match="DistributedEmbedding: Padding_idx must be within num_embeddings"
    ):
        layers.DistributedEmbedding(P_x, 3, 2, padding_idx=3)
    with pytest.raises(PartitionError, match="P_y has 2 dimensions"):
        layers.DistributedEmbedding(P_x, 3, 2, P_y=P_x)


def test_a_layer_is_an_embedding_of_torch_and_is_initialised_as_one(P_world):
    layer, module = twins(tokens(P_world), padding_idx=2)
    assert isinstance(layer, nn.Embedding)
    assert (layer.placement, layer.weights) == ("replicated", "replicated")
    for twin in (layer, module):
        torch.manual_seed(5)
        twin.reset_parameters()
    agree(layer.weight.detach(), module.weight.detach())
