"""Layers that are called with split tensors: blocks in, what comes out is split as the layer says."""

from types import SimpleNamespace

import pytest
import torch

from distdl_rma import PartitionError, shard
from distdl_rma.layers import (
    DistributedConcat,
    DistributedConv2d,
    DistributedConvTranspose2d,
    DistributedCrossEntropyLoss,
    DistributedInstanceNorm2d,
    DistributedMSELoss,
    Repartition,
)
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.split import SplitTensor
from distdl_rma.layers.split import layout as lay

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]
SHAPE = (2, 3, 9, 7)


@pytest.fixture
def P_x(P_world):  # noqa: N802
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))


@pytest.fixture
def x():
    return torch.randn(SHAPE, dtype=torch.float64)


class Twice(OperatorLayer):
    """A layer with several results, which notes what it gets."""

    def __init__(self, P_x, layout):
        super().__init__(P_x)
        self.layout, self.seen = layout, []

    def forward(self, *blocks, third):
        self.seen = [*blocks, third]
        return {"twice": blocks[0] * 2, "rest": [blocks[1]]}

    @property
    def _last(self):
        return SimpleNamespace(output=self.layout)


def test_blocks_go_in_and_a_split_tensor_comes_out(P_x, x):
    s, plain = shard(P_x, x), torch.ones(3)
    layer = Twice(P_x, s.decomposition)
    found = layer(s, s.to_local(), third=plain)
    assert layer.seen[0] is s.to_local() and layer.seen[2] is plain
    torch.testing.assert_close(found["twice"].full_tensor(), 2 * x)
    assert found["rest"][0].decomposition is s.decomposition


def test_layers_give_what_they_give_for_blocks(P_x, P_world, x):
    P_y = P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size))
    s = shard(P_x, x).requires_grad_()
    for layer in (
        DistributedConv2d(P_x, 3, 2, 3, padding=1, dtype=torch.float64),
        DistributedInstanceNorm2d(P_x, 3),
        Repartition(P_x, P_y),
    ):
        expected = layer(s.to_local())
        for y in (layer(s), layer(input=s)):
            assert isinstance(y, SplitTensor)
            torch.testing.assert_close(y.to_local(), expected)
            assert y.requires_grad


def test_other_arguments_of_a_call_hold_beside_split_tensors(P_x, x):
    layer = DistributedConvTranspose2d(P_x, 3, 2, 3, stride=2, dtype=torch.float64)
    s = shard(P_x, x)
    for size in ((19, 15), (20, 16)):
        y = layer(s, output_size=size)
        assert y.shape == (2, 2, *size)
        torch.testing.assert_close(y.to_local(), layer(s.to_local(), output_size=size))


def test_a_concatenation_of_split_tensors_is_split(P_x, P_world, x):
    P_y = P_world.create_cartesian_topology_partition((1, P_world.size, 1, 1))
    s, whole = shard(P_x, x).requires_grad_(), x.clone().requires_grad_()
    expected = torch.cat([whole, 2 * whole, x[:, :1]], 1)
    for P in (P_x, P_y):
        y = DistributedConcat([P_x] * 3, P)(s, 2 * s, shard(P_x, x[:, :1]).to_local())
        torch.testing.assert_close(y.full_tensor(), expected)
        assert y.requires_grad
    (y * y).sum().backward()
    (expected * expected).sum().backward()
    torch.testing.assert_close(s.grad.full_tensor(), whole.grad)


def test_losses_of_split_tensors_are_numbers_that_all_ranks_have(P_x, x):
    s, whole = shard(P_x, x).requires_grad_(), x.clone().requires_grad_()
    loss = DistributedMSELoss(P_x)(s * 2, shard(P_x, x)) + s.mean()
    expected = (2 * whole - x).square().mean() + whole.mean()
    assert isinstance(loss, SplitTensor) and not loss.is_split
    torch.testing.assert_close(loss.full_tensor(), expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(s.grad.full_tensor(), whole.grad)
    terms = DistributedMSELoss(P_x, reduction="none")(s, shard(P_x, x))
    assert isinstance(terms, SplitTensor)
    torch.testing.assert_close(terms.full_tensor(), (whole - x).square())


@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("likely", [False, True])
def test_classes_are_split_as_their_scores(P_world, x, cut, likely):
    P_x = P_world.create_cartesian_topology_partition([P_world.size if d == cut else 1 for d in range(4)])
    s, whole = shard(P_x, x).requires_grad_(), x.clone().requires_grad_()
    target, blocks = (y.softmax(1) if likely else y.argmax(1) for y in (x + 1, shard(P_x, x + 1)))
    expected = torch.nn.functional.cross_entropy(whole, target)
    loss = DistributedCrossEntropyLoss(P_x)(s, target=blocks)
    torch.testing.assert_close(loss.full_tensor(), expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(s.grad.full_tensor(), whole.grad)


@pytest.mark.mpi(min_size=2)
def test_a_tensor_that_is_cut_otherwise_is_refused(P_x, P_world, x):
    P_y = P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size))
    layer = DistributedConv2d(P_x, 3, 2, 3, padding=1, dtype=torch.float64)
    with pytest.raises(PartitionError, match=r"input 0 is split over .*, the layer takes .*redistribute\(\)"):
        layer(shard(P_y, x))
    y = layer(shard(P_y, x).redistribute(layout=lay.balanced(P_y, SHAPE, (None, None, None, 2))))
    assert y.shape == (2, 2, 9, 7)
