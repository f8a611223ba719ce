"""Distributed linear layers against the sequential one."""

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, ShapeError
from distdl_rma.layers import (
    DistributedLinearAllGather,
    DistributedLinearAllGatherZero,
    DistributedLinearReduceScatter,
    DistributedLinearReduceScatterZero,
)
from distdl_rma.state import gather_state_dict, load_global_state_dict
from tests.fuzz.linear import check
from tests.layers.sequential import agree, shard
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi
AG, RS = DistributedLinearAllGather, DistributedLinearReduceScatter
ZERO = [DistributedLinearAllGatherZero, DistributedLinearReduceScatterZero]
KINDS = [AG, RS, *ZERO]


@over_seeds(96, each=12)
def test_any_linear_layer_equals_the_sequential_one(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


def grid_of(P_world, dims=2):
    """Data-parallel blocks where the number of ranks allows, model-parallel workers the rest."""
    blocks = 2 if P_world.size in (2, 4) else P_world.size
    return P_world.create_cartesian_topology_partition((blocks, *[1] * (dims - 2), P_world.size // blocks))


def twins(kind, P, in_features=6, out_features=5, dtype=torch.float64, **options):
    """Distributed and sequential layer with the same weights."""
    sequential = nn.Linear(in_features, out_features, dtype=dtype)
    layer = kind(P, in_features, out_features, dtype=dtype, **options)
    load_global_state_dict(layer, sequential.state_dict())
    return layer, sequential


def check_gradients(layer, sequential):
    for key, parameter in sequential.named_parameters():
        store = layer.layouts[key]
        if store.partition.active:
            agree(getattr(layer, key).grad, parameter.grad[store.slices()], key)


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("synchronised", [True, False])
def test_training_equals_the_sequential_run(P_world, comm, synchronised, bucket_nbytes):
    line = P_world.create_cartesian_topology_partition((comm.size, 1))
    pair = grid_of(P_world)
    some = P_world.create_partition_inclusive(range(max(1, comm.size - 1)))
    few = some.create_cartesian_topology_partition((some.size, 1))
    # Replicas on all ranks, on pairs and on some ranks, in turn, and shards between them.
    kinds = [
        (AG, line, line),
        (RS, line, pair),
        (ZERO[0], pair, line),
        (RS, line, few),
        (AG, few, line),
        (ZERO[1], line, pair),
        (RS, pair, line),
    ]
    layers, twin = nn.Sequential(), nn.Sequential()
    for kind, P_x, P_y in kinds:
        first, other = (P_y, {"P_x": P_x}) if kind in (AG, ZERO[0]) else (P_x, {"P_y": P_y})
        layer, sequential = twins(kind, first, 6, 6, **other)
        layers.append(layer)
        twin.append(sequential)
    sync = GradientSync(layers, P_world, bucket_nbytes=bucket_nbytes) if synchronised else None
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (layers, twin)]
    for _ in range(3):
        x = torch.randn(7, 6, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        layers(shard(line, x)).square().sum().backward()
        twin(x).square().sum().backward()
        for layer, sequential in zip(layers, twin, strict=True):
            check_gradients(layer, sequential)
        for optimizer in optimizers:
            optimizer.step()
    if sync is not None:
        sync.close()
    for layer, sequential in zip(layers, twin, strict=True):
        for key, value in gather_state_dict(layer).items():
            torch.testing.assert_close(value, sequential.state_dict()[key], rtol=1e-10, atol=1e-10)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_input_on_one_rank_raises_the_same_error_on_all(P_world, comm, kind):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    layer = kind(P, 6, 5, name="head")
    good = torch.randn(2, 6)
    before = layer(good)
    for wrong, message in (
        (torch.zeros(2, 7), "must agree in dimension 1"),
        (torch.zeros(2, 1, 6), "tensor of 3 dimensions"),
        (torch.zeros(2, 6, dtype=torch.float64), "rank 0 passes torch.float32 but rank 1 torch.float64"),
    ):
        with pytest.raises(ShapeError, match=f"'head': .*{message}") as caught:
            layer(wrong if comm.rank == 1 else good)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert torch.equal(layer(good), before), "the layer can be used again"
    with pytest.raises(ShapeError, match=r"global input \(\d, 7\) has 7 features, the layer takes 6"):
        layer(torch.zeros(1, 7))
    with pytest.raises(ShapeError, match=r"input is torch.float64, the weights of rank 0 are torch.float32"):
        layer(torch.zeros(1, 6, dtype=torch.float64))


def test_placements_are_said_and_printed(P_world, comm):
    plane = P_world.create_cartesian_topology_partition((1, comm.size))
    assert ZERO[0](plane, 3, 4).placement == "cut" and AG(plane, 3, 4, weights="root").placement == "root"
    assert "in_features=3, out_features=4, bias=True, P_x=" in repr(ZERO[0](plane, 3, 4))
    assert "bias=True, placement='root', P_x=" in repr(AG(plane, 3, 4, placement="root"))
