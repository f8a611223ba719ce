"""Movements under autograd."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, PartitionError, ShapeError, UnsupportedError, zero_volume_tensor
from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.geometry.split import Balanced
from distdl_rma.geometry.stencil import Window, WindowSplit
from distdl_rma.layers import DistributedConv2d, Movement, Repartition
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi


def partition(P_world, ranks, shape):
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def pairs(P_world):
    """Pairs of partitions: gather, scatter, other grids, other ranks."""
    n = P_world.size
    everyone = range(n)
    yield partition(P_world, everyone, (n, 1)), partition(P_world, everyone, (1, n))
    yield partition(P_world, everyone, (1, n)), partition(P_world, [n - 1], (1, 1))
    yield partition(P_world, [0], (1, 1)), partition(P_world, everyone, (n, 1))
    yield partition(P_world, reversed(everyone), (n, 1)), partition(P_world, everyone, (n, 1))
    if n > 1:
        yield partition(P_world, [0], (1, 1)), partition(P_world, range(1, n), (n - 1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_repartition_moves_every_dtype(P_world, dtype):
    for P_x, P_y in pairs(P_world):
        x = (torch.arange(35).reshape(7, 5) % 3).to(dtype)
        y = Repartition(P_x, P_y, preserve_batch=False)(shard(P_x, x))
        assert torch.equal(y, shard(P_y, x)) if P_y.active else y.shape == (0,)
        assert y.dtype == dtype


def test_backward_of_repartition_is_the_repartition_back(P_world):
    for P_x, P_y in pairs(P_world):
        x, gradient = torch.randn(2, 7, 5, dtype=torch.float64)
        local = shard(P_x, x).requires_grad_()
        y = Repartition(P_x, P_y)(local)
        y.backward(shard(P_y, gradient) if P_y.active else torch.zeros_like(y))
        if P_x.active:
            assert torch.equal(local.grad, shard(P_x, gradient))


def test_unbalanced_input_is_balanced(P_world, comm):
    P = partition(P_world, range(comm.size), (comm.size, 1))
    lengths = [0, 5, 1, 2][: comm.size]
    x = torch.arange(3 * sum(lengths)).reshape(-1, 3)
    blocks = Decomposition.from_local_shapes(P, {r: (n, 3) for r, n in enumerate(lengths)})
    assert torch.equal(Repartition(P, P)(x[blocks.slices()]), shard(P, x))


@pytest.mark.mpi(min_size=2)
def test_inactive_ranks_keep_the_batch_if_asked(P_world):
    P_x, P_y = partition(P_world, [0], (1, 1)), partition(P_world, [1], (1, 1))
    x = torch.ones(4, 3) if P_x.active else zero_volume_tensor(4)
    y = Repartition(P_x, P_y)(x)
    if not P_y.active:
        assert y.shape == (4, 0)
    assert y.data_ptr() != x.data_ptr() or y.numel() == 0


def test_partitions_of_different_dimensions_are_refused(P_world, comm):
    P_x = partition(P_world, range(comm.size), (comm.size, 1))
    with pytest.raises(PartitionError, match="P_x has 2 dimensions"):
        Repartition(P_x, P_world)
    with pytest.raises(ShapeError, match="tensor of 3 dimensions"):
        Repartition(P_x, P_x)(torch.zeros(1, 1, 1))


@pytest.mark.mpi(min_size=2)
def test_data_on_a_rank_outside_of_the_partition_is_refused_everywhere(P_world, comm):
    P_x, P_y = partition(P_world, [0], (1, 1)), partition(P_world, range(comm.size), (comm.size, 1))
    with pytest.raises(ShapeError, match="rank 1 is not in P_x but passes a tensor of shape"):
        Repartition(P_x, P_y)(torch.zeros(2, 2) if comm.rank < 2 else zero_volume_tensor())


def halo_movement(P_x, shape, width):
    """Own rows and `width` more on either side, zero beyond the domain."""
    own = Decomposition.balanced(P_x, shape)
    window = Window(2 * width + 1, left=width, right=width)
    rows = WindowSplit(Balanced(shape[2], P_x.shape[2]), window, shape[2])
    exchange = Exchange(P_x.me, own, own.with_splits({2: rows}))
    return Movement(Machine.of(P_x), exchange, torch.float64, "halo")


def test_fused_convolution_equals_the_composed_form(P_world, comm):
    # start, wait, convolve as three autograd operations against the one fused operation.
    P_x = partition(P_world, range(comm.size), (1, 1, comm.size, 1))
    layer = DistributedConv2d(P_x, 2, 3, 5, padding=(2, 0), dtype=torch.float64)
    x = torch.randn(1, 2, 11, 9, dtype=torch.float64)
    gradient = shard(P_x, torch.randn(1, 3, 11, 5, dtype=torch.float64))
    movement = halo_movement(P_x, x.shape, 2)
    fused, composed = (shard(P_x, x).requires_grad_() for _ in range(2))
    y_fused = layer(fused)
    flight = movement.start(composed, needs_grad=True)
    weight, bias = layer.replica.tie(layer.weight, layer.bias)
    y_composed = F.conv2d(movement.wait(flight), weight, bias)
    agree(y_fused, y_composed, "output")
    y_fused.backward(gradient)
    of_fused = layer.weight.grad.clone()
    layer.zero_grad()
    y_composed.backward(gradient)
    agree(fused.grad, composed.grad, "input gradient")
    agree(of_fused, layer.weight.grad, "weight gradient")


def test_overlap_mirrors_itself(P_world, comm):
    # Forward start, compute, wait: autograd must run wait^T, compute^T, start^T.
    P_x = partition(P_world, range(comm.size), (1, 1, comm.size, 1))
    movement = halo_movement(P_x, (1, 1, 8, 3), 1)
    order = []
    x = torch.randn(movement.forward.exchange.own.shape, dtype=torch.float64, requires_grad=True)
    flight = movement.start(x, needs_grad=True)
    middle = x * 2
    middle.register_hook(lambda _: order.append("compute"))
    y = movement.wait(flight)
    start, receive = movement.adjoint.start, movement.adjoint.receive
    movement.adjoint.start = lambda parts: (order.append("start"), start(parts))[1]
    movement.adjoint.receive = lambda epoch: (order.append("wait"), receive(epoch))[1]
    (y.sum() + middle.sum()).backward()
    assert order == ["start", "compute", "wait"]
    counts = np.asarray(x.grad)
    assert counts.min() >= 2.0


def test_second_derivatives_are_refused(P_world, comm):
    P_x = partition(P_world, range(comm.size), (comm.size, 1))
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(Repartition(P_x, P_x)(x).sum(), x, create_graph=True)
