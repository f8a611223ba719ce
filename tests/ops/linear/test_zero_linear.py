"""Products with a weight that is kept in shards."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.linear import ShardedMatrix

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
