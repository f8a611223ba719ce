"""Blocks that become other blocks, between known decompositions."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite, movements_through
from distdl_rma.ops.moves import StagedMove, all_gather, reduce_scatter, repartition

pytestmark = pytest.mark.mpi

NEEDS = GradientNeeds(True, False)


def rows_and_columns(P_world):
    n = P_world.size
    return (P_world.create_cartesian_topology_partition(shape) for shape in ((n, 1), (1, n)))


def moved(operation, x, source, needs=NEEDS):
    """The result, compared with what its decomposition says of the global ``x``."""
    y = operation(needs, x[source.slices()])
    assert torch.equal(y, x[operation.output.slices()])
    return y


def test_results_are_where_their_decomposition_says(P_world):
    site, (rows, columns) = CallSite(Machine.of(P_world), "move"), rows_and_columns(P_world)
    x = torch.arange(35.0, requires_grad=True).reshape(7, 5)
    source = Decomposition.balanced(rows, x.shape)
    there = repartition(site, source, columns, x.dtype)
    moved(there, x, source)
    moved(repartition(CallSite(site.machine, "back"), there.output, rows, x.dtype), x, there.output)
    whole = all_gather(site, source, [0], x.dtype)
    assert moved(whole, x, source).shape == x.shape


def test_scattering_sums_and_is_the_adjoint_of_gathering(P_world, comm):
    site, (rows, _) = CallSite(Machine.of(P_world), "scatter"), rows_and_columns(P_world)
    source = Decomposition.balanced(rows, (7, 5), replicate=[0])
    operation = reduce_scatter(site, source, [0], torch.float64)
    x = torch.arange(35.0, dtype=torch.float64).reshape(7, 5).requires_grad_()
    y = operation(NEEDS, x)
    assert torch.equal(y, comm.size * x[operation.output.slices()])
    gradient = torch.arange(35.0, dtype=torch.float64).reshape(7, 5)
    y.backward(gradient[operation.output.slices()])
    assert torch.equal(x.grad, gradient)


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
