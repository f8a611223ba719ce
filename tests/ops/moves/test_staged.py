"""Movements that follow one another."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite, movements_through
from distdl_rma.ops.moves.staged import StagedMove

pytestmark = pytest.mark.mpi


def test_stages_there_and_back_are_the_identity_and_so_is_their_backward(P_world):
    rows, columns = (
        Decomposition.balanced(P_world.create_cartesian_topology_partition(shape), (7, 5))
        for shape in ((P_world.size, 1), (1, P_world.size))
    )
    site = CallSite(Machine.of(P_world), "to and fro")
    movements = movements_through(site, [(rows, columns), (columns, rows)], torch.float64)
    operation = StagedMove(movements, torch.float32, rows)
    operation.connect()
    x = torch.arange(35.0).reshape(7, 5)[rows.slices()].requires_grad_()
    y = operation(GradientNeeds(True, False), x)
    assert y.dtype == torch.float32 and torch.equal(y, x)
    y.backward(2 * x.detach())
    assert torch.equal(x.grad, 2 * x)


def test_vectors_get_their_shape_back(P_world):
    line = Decomposition.balanced(P_world.create_cartesian_topology_partition((P_world.size,)), (12,))
    count = line.box(P_world.me).volume
    site = CallSite(Machine.of(P_world), "flat")
    operation = StagedMove(
        movements_through(site, [(line, line)], torch.int64), torch.int64, None, (1, count)
    )
    x = torch.arange(count)
    y = operation(GradientNeeds(False, False), x[:, None])
    assert torch.equal(y, x[None]) and y.data_ptr() != x.data_ptr()
