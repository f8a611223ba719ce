"""Products with a weight that is kept in shards."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.linear import IN, OUT, LinearGrid, ShardedMatrix, SplitLinear

pytestmark = pytest.mark.mpi


def site(P_world):
    return CallSite(Machine.of(P_world), "zero")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int32])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (0, 4), (700, 900)])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_is_the_transpose_of_all_gather(P_world, comm, dtype, shape, dim):
    line = P_world.create_cartesian_topology_partition((comm.size,))
    matrix = ShardedMatrix(site(P_world), line, shape, dim)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype) % 1000
    grid = [1, 1]
    grid[dim] = comm.size
    mine = Decomposition.balanced(P_world.create_cartesian_topology_partition(grid), shape).slices()
    assert torch.equal(matrix.all_gather(whole[mine]), whole)
    terms = whole * (comm.rank + 1)
    assert torch.equal(matrix.reduce_scatter(terms), (whole * sum(range(1, comm.size + 1)))[mine])


@pytest.mark.parametrize("cuts", [OUT, IN])
def test_a_product_with_a_sharded_weight_equals_that_with_the_whole_one(P_world, comm, cuts):
    grid = LinearGrid(P_world.create_cartesian_topology_partition((comm.size, 1, 1)), 6, 5)
    rows = P_world.create_cartesian_topology_partition((comm.size, 1))
    matrix = ShardedMatrix.of(site(P_world), grid, cuts)
    assert (matrix is None) == (comm.size == 1)
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    source, store = Decomposition.balanced(rows, x.shape), grid.zero_weight(cuts)
    operation = SplitLinear(site(P_world), source, grid, rows, torch.float64, matrix=matrix)
    shard = weight[store.slices()].clone().requires_grad_()
    local = x[source.slices()].clone().requires_grad_()
    out = operation(GradientNeeds(True, True), local, weight=shard)
    weight.requires_grad_()
    x.requires_grad_()
    y = F.linear(x, weight)
    torch.testing.assert_close(out, y[operation.output.slices()])
    y.square().sum().backward()
    out.square().sum().backward()
    torch.testing.assert_close(shard.grad, weight.grad[store.slices()])
    torch.testing.assert_close(local.grad, x.grad[source.slices()])
