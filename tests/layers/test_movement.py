"""Movements under autograd."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.geometry.split import Balanced
from distdl_rma.geometry.stencil import Window, WindowSplit
from distdl_rma.layers import DistributedConv2d, Movement
from tests.layers.sequential import agree, shard

pytestmark = pytest.mark.mpi


def partition(P_world, ranks, shape):
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


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
