"""Operators of windows on inputs whose decomposition is known: no layer, and no message to agree on it."""

import torch

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import Agreed
from tests.layers.random_shards import cut
from tests.layers.sequential import agree


def rows(P_world, dims=1):
    """All ranks along the first spatial dimension."""
    return P_world.create_cartesian_topology_partition((1, 1, P_world.size, *(1,) * (dims - 1)))


def operation_on(P_x, kind, options, shape, dtype=torch.float64, P_y=None):
    """An operator for balanced shards of a global shape, and who has them."""
    source = Decomposition.balanced(P_x, shape)
    return kind(CallSite(Machine.of(P_x), "window"), source, P_y or P_x, dtype, options), source


def equals_sequential(P_x, kind, options, x, reference, P_y=None):
    """Compare output and gradient of an operator with those of a function of the whole; returns it."""
    operation, source = operation_on(P_x, kind, options, x.shape, x.dtype, P_y)
    operation.connect()
    whole = x.clone().requires_grad_()
    expected = reference(whole)
    d_y = torch.randn_like(expected)
    expected.backward(d_y)
    local = cut(source, x).requires_grad_()
    settled, needs = Agreed(operation, GradientNeeds(True, False)).settle()
    y = settled(needs, local)
    target = operation.output
    assert target.shape == expected.shape
    if target.partition.active:
        agree(y.detach(), cut(target, expected), "output")
    y.backward(cut(target, d_y) if target.partition.active else torch.zeros_like(y))
    if source.partition.active:
        agree(local.grad, cut(source, whole.grad), "gradient")
    return operation
