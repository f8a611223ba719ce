"""Ranks outside of all partitions of a layer hold nothing, whatever they pass."""

from functools import partial

import pytest
import torch

from distdl_rma import Distribution, ShapeError
from distdl_rma.layers import (
    Concat,
    Conv,
    DistributedConvTranspose2d,
    DistributedEmbedding,
    DistributedMaxPool2d,
    InstanceNorm,
    Repartition,
)
from tests.layers.partitioned.every_layer import first
from tests.layers.partitioned.same_error import same_error

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3, 4)]

ONE = Distribution(1, 1, 1, 1)
IMAGE = (2, 3, 7, 4)


alone = partial(first, dims=4)
LAYERS = {
    "conv": lambda P: Conv(P, (2, 3, 3, 7, 4), ONE, kernel_size=1),
    "circular": lambda P: Conv(P, (2, 3, 3, 7, 4), ONE, kernel_size=3, padding=1, padding_mode="circular"),
    "norm": lambda P: InstanceNorm(P, IMAGE, ONE, affine=True),
    "norm without weights": lambda P: InstanceNorm(P, IMAGE, ONE),
    "concat": lambda P: Concat(P, (2, (3,), 7, 4), [ONE]),
    "transposed": lambda P: DistributedConvTranspose2d(alone(P), 3, 3, 1),
    "pooling": lambda P: DistributedMaxPool2d(alone(P), 1),
    "moving": lambda P: Repartition(alone(P), alone(P)),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_the_output_of_an_idle_rank_has_no_elements_and_keeps_the_shape_of_such_an_input(P_world, comm, make):
    layer, idle = make(P_world), comm.rank > 0
    x = torch.randn(IMAGE, requires_grad=True)
    y = layer(x)
    assert y.shape == ((2, 0) if idle else IMAGE)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not (idle and x.grad.any())
    for parameter in layer.parameters():
        assert parameter.grad is not None
    for shape in ((0,), (2, 0), (2, 0, 7, 4), (0, 3)):
        assert layer(torch.randn(shape if idle else IMAGE)).shape == (shape if idle else IMAGE)


@pytest.mark.parametrize(
    "make", [Repartition, lambda P_x, P_y: DistributedMaxPool2d(P_x, 1, P_y=P_y)], ids=["moving", "pooling"]
)
def test_a_rank_without_output_gets_the_batch_and_gives_its_gradient(P_world, comm, make):
    layer = make(P_world.create_cartesian_topology_partition((1, 1, comm.size, 1)), alone(P_world))
    x = torch.randn(2, 3, 7, 4, requires_grad=True)
    y = layer(x)
    assert y.shape == ((2, 3, 7 * comm.size, 4) if comm.rank == 0 else (2, 0))
    (y.sum() * 3).backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_an_input_where_none_belongs_is_refused_whatever_its_values(P_world, comm):
    P_x = first(P_world)
    P_y = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    layer = DistributedEmbedding(P_x, 7, 2 * comm.size, P_y=P_y)
    x = torch.tensor([[0, 6]] if comm.rank == 0 else [[99]])
    same_error(comm, lambda: layer(x), ShapeError, "rank 1 is not in P_x but passes")
    assert layer(x[:1] if comm.rank == 0 else x[:0]).shape == (1, 2, 2)
