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
from distdl_rma.layers.state import gather_state_dict, load_global_state_dict
from tests.fuzz.linear import check
from tests.layers.partitioned.random_shards import cut
from tests.layers.partitioned.sequential import agree, shard
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi
AG, RS = DistributedLinearAllGather, DistributedLinearReduceScatter
ZERO = [DistributedLinearAllGatherZero, DistributedLinearReduceScatterZero]


@over_seeds(96, each=12)
def test_any_linear_layer_equals_the_sequential_one(P_world, comm, seeds):
    check_each(check, P_world, comm, seeds)


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("synchronised", [True, False])
def test_training_equals_the_sequential_run(P_world, comm, synchronised, bucket_nbytes):
    line = P_world.create_cartesian_topology_partition((comm.size, 1))
    # Data-parallel blocks where the number of ranks allows, model-parallel workers the rest.
    blocks = 2 if comm.size in (2, 4) else comm.size
    pair = P_world.create_cartesian_topology_partition((blocks, comm.size // blocks))
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
        layers.append(kind(first, 6, 6, dtype=torch.float64, **other))
        twin.append(nn.Linear(6, 6, dtype=torch.float64))
        load_global_state_dict(layers[-1], twin[-1].state_dict())
    sync = GradientSync(layers, P_world, bucket_nbytes=bucket_nbytes) if synchronised else None
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (layers, twin)]
    for _ in range(3):
        x = torch.randn(7, 6, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        layers(shard(line, x)).square().sum().backward()
        twin(x).square().sum().backward()
        for layer, sequential in zip(layers, twin, strict=True):
            for key, parameter in sequential.named_parameters():
                if layer.layouts[key].partition.active:
                    agree(getattr(layer, key).grad, cut(layer.layouts[key], parameter.grad), key)
        for optimizer in optimizers:
            optimizer.step()
    if sync is not None:
        sync.close()
    for layer, sequential in zip(layers, twin, strict=True):
        for key, value in gather_state_dict(layer).items():
            torch.testing.assert_close(value, sequential.state_dict()[key], rtol=1e-10, atol=1e-10)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [AG, RS, *ZERO])
def test_features_and_types_are_those_of_the_weights(P_world, comm, kind):
    layer = kind(P_world.create_cartesian_topology_partition((comm.size, 1)), 6, 5)
    with pytest.raises(ShapeError, match=r"global input \(\d, 7\) has 7 features, the layer takes 6"):
        layer(torch.zeros(1, 7))
    with pytest.raises(ShapeError, match=r"input is torch.float64, the weights of rank 0 are torch.float32"):
        layer(torch.zeros(1, 6, dtype=torch.float64))
