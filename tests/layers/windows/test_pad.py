"""Padding of split tensors equals padding of the whole; random ones are in the search over pooling."""

import re

import pytest
import torch
from torch import nn

from distdl_rma import ShapeError, layers
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi

KINDS = {"Zero": (), "Constant": (2.5,), "Reflection": (), "Replication": (), "Circular": ()}
kinds = pytest.mark.parametrize("kind", KINDS)


def rows(P_world):
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


def twins(kind, P_x, padding, **more):
    name = f"{kind}Pad2d"
    layer = getattr(layers, f"Distributed{name}")(P_x, padding, *KINDS[kind], **more)
    return layer, getattr(nn, name)(padding, *KINDS[kind])


@kinds
def test_the_adjoint_is_exact_on_integers(P_world, comm, kind):
    P_x = rows(P_world)
    layer, _ = twins(kind, P_x, (1, 2, 4, 3))
    x = shard(P_x, torch.randint(-9, 9, (1, 2, 6, 5)).double()).requires_grad_()
    y = layer(x)
    g = torch.randint(-9, 9, y.shape).double()
    y.backward(g)
    # A constant padding adds a constant: that of an input of zeros.
    constant = layer(torch.zeros_like(x)).detach()
    there = float(((y.detach() - constant) * g).sum())
    assert comm.allreduce(there) == comm.allreduce(float((x.detach() * x.grad).sum()))


@kinds
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64, torch.bool],
)
def test_elements_of_any_type_keep_their_bits(P_world, kind, dtype):
    P_x = rows(P_world)
    layer, module = twins(kind, P_x, 3)
    x = (torch.randn(1, 2, 5, 6) * 4).to(dtype)
    copies = module if dtype != torch.bool else lambda x: module(x.to(torch.uint8)).to(dtype)
    assert torch.equal(layer(shard(P_x, x)), shard(P_x, copies(x)))


def test_result_is_memory_of_its_own(P_world):
    P_x = rows(P_world)
    x = shard(P_x, torch.randn(1, 1, 4, 4))
    y = layers.DistributedZeroPad2d(P_x, 0)(x)
    assert torch.equal(x, y)
    assert x.numel() == 0 or x.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("padding", [(0, 0, 3, 0), (0, 0, 0, 3)])
def test_padding_wider_than_the_input_is_refused(P_world, padding):
    P_x = rows(P_world)
    layer = layers.DistributedReflectionPad2d(P_x, padding, name="mirror")
    with pytest.raises(ShapeError, match="'mirror': padding mode 'reflect' needs padding smaller than"):
        layer(shard(P_x, torch.zeros(1, 1, 3, 9)))


# Torch refuses to crop more than there is: some kinds crop before they pad, some need an element afterwards.
TOO_MUCH = {
    "Zero": [(0, 0, -3, -3), (-5, 5, 0, 0), (0, 0, 5, -5)],
    "Constant": [(0, 0, -5, 5)],
    "Reflection": [(-3, -3, 0, 0), (-2, -2, -2, -2)],
    "Replication": [(0, 0, -3, -3), (-2, -2, -2, -2)],
    "Circular": [(-3, -3, 0, 0)],
}
ALL_OF_IT = {
    "Zero": [(-2, -2, -2, -2)],
    "Constant": [(-1, -3, -4, 0)],
    "Reflection": [(0, 0, -2, -2)],
    "Replication": [(-2, -2, 0, 0), (-5, 5, 0, 0)],
    "Circular": [(-2, -2, -2, -2)],
}


@kinds
def test_more_than_there_is_cannot_be_cropped(P_world, kind):
    P_x, x = rows(P_world), torch.randn(1, 1, 4, 4)
    for padding in TOO_MUCH[kind]:
        layer, module = twins(kind, P_x, padding)
        with pytest.raises(RuntimeError):
            module(x)
        said = rf"padding {re.escape(str(padding))} leaves .* of the global input \(4, 4\)"
        with pytest.raises(ShapeError, match=said):
            layer(shard(P_x, x))
    for padding in ALL_OF_IT[kind]:
        layer, module = twins(kind, P_x, padding)
        assert torch.equal(layer(shard(P_x, x)), shard(P_x, module(x))), padding


def test_images_of_one_rank_that_lie_on_each_other_are_summed(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size))
    P_y = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1, 1, 1))
    # Half of the rows twice: as many elements as there are, all from one rank.
    padding = (0, P_world.size, -1, -1)
    x = torch.randn(3, 4, 4, P_world.size, dtype=torch.float64, requires_grad=True)
    expected = nn.CircularPad2d(padding)(x)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    local = shard(P_x, x).requires_grad_()
    y = layers.DistributedCircularPad2d(P_x, padding, P_y=P_y)(local)
    if P_y.active:
        agree(y, expected)
    y.backward(gradient if P_y.active else torch.zeros_like(y))
    agree(local.grad, shard(P_x, x.grad), "gradient")
