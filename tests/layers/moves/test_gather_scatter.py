"""All-gather and reduce-scatter along dimensions of a grid."""

import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.layers import AllGather, ReduceScatter
from tests.layers.sequential import shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def grids(size):
    return [(a, size // a) for a in range(1, size + 1) if size % a == 0]


def test_all_gather_makes_dimensions_whole(P_world, comm):
    x = torch.arange(7 * 5).reshape(7, 5)
    for grid in grids(comm.size):
        P = P_world.create_cartesian_topology_partition(grid)
        rows, columns = Decomposition.balanced(P, x.shape).slices()
        local = shard(P, x)
        assert torch.equal(AllGather(P, axes_all_gather=0)(local), x[:, columns])
        assert torch.equal(AllGather(P, axes_keep=(0,))(local), x[rows])
        assert torch.equal(AllGather(P, axes_all_gather=(-1, 0))(local), x)
        assert torch.equal(AllGather(P, axes_keep=[0, 1])(local), local)


def test_all_gather_takes_uneven_and_empty_shards(P_world, comm):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    lengths = [0, 5, 1, 2][: comm.size]
    local = torch.full((lengths[comm.rank], 3), comm.rank)
    whole = torch.cat([torch.full((n, 3), rank) for rank, n in enumerate(lengths)])
    assert torch.equal(AllGather(P, axes_all_gather=0)(local), whole)


def test_reduce_scatter_sums_and_cuts(P_world, comm):
    for grid in grids(comm.size):
        P = P_world.create_cartesian_topology_partition(grid)
        x = torch.arange(7 * 5).reshape(7, 5)
        rows, columns = Decomposition.balanced(P, x.shape).slices()
        y = ReduceScatter(P, axes_reduce_scatter=0)(x[:, columns] * 10**comm.rank)
        summed = sum(10**rank for rank in P.ranks if P.index_of(rank)[1] == P.index[1])
        assert torch.equal(y, x[rows, columns] * summed)


def test_reduce_scatter_is_the_adjoint_of_all_gather(P_world, comm):
    # On balanced shards, and exactly: the data are integers.
    for grid in grids(comm.size):
        P = P_world.create_cartesian_topology_partition(grid)
        local = shard(P, torch.randint(-9, 9, (7, 5)).double()).requires_grad_()
        y = AllGather(P, axes_all_gather=1)(local)
        gradient = torch.randint(-9, 9, y.shape).double() * (comm.rank + 1)
        y.backward(gradient)
        assert torch.equal(local.grad, ReduceScatter(P, axes_reduce_scatter=1)(gradient))
        back = local.grad.clone().requires_grad_()
        whole = gradient.clone().requires_grad_()
        ReduceScatter(P, axes_reduce_scatter=1)(whole).backward(back)
        assert torch.equal(whole.grad, AllGather(P, axes_all_gather=1)(back))


@pytest.mark.mpi(min_size=2)
def test_tensors_that_do_not_form_a_grid_are_refused_on_all_ranks(P_world, comm):
    P = P_world.create_cartesian_topology_partition((comm.size, 1))
    gather, scatter = AllGather(P, 0, name="gather"), ReduceScatter(P, 0, name="scatter")
    wrong = torch.ones(2, 3 if comm.rank == 1 else 2)
    with pytest.raises(ShapeError, match="'gather': local shapes do not form a grid"):
        gather(wrong)
    with pytest.raises(ShapeError, match="'scatter': local shapes do not form a grid"):
        scatter(wrong)
    with pytest.raises(ShapeError, match="tensor of 1 dimensions"):
        gather(torch.ones(2))
    assert gather(torch.ones(1, 2)).shape == (comm.size, 2)
    assert scatter(torch.ones(comm.size, 2)).shape == (1, 2)
