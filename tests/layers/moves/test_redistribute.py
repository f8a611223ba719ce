"""Tensors cut into blocks that become tensors cut otherwise: from any partition to any other."""

import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.layers import AllGather, DistributedTranspose, ReduceScatter, Repartition
from tests.layers.sequential import shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


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


def test_views_that_are_lazily_conjugate_or_negative_move_as_what_they_mean(P_world):
    for P_x, P_y in pairs(P_world):
        z = torch.complex(torch.arange(35.0), torch.arange(35.0) + 1).reshape(7, 5)
        local = shard(P_x, z) if P_x.active else torch.zeros(0, dtype=z.dtype)
        for of in (torch.conj, lambda t: t.conj().imag):
            y = Repartition(P_x, P_y, preserve_batch=False)(of(local))
            assert torch.equal(y, shard(P_y, of(z))) if P_y.active else y.shape == (0,)


@pytest.mark.mpi(min_size=2)
def test_what_cannot_move_on_one_rank_is_refused_on_all(P_world, comm):
    P_x, P_y = (partition(P_world, range(comm.size), shape) for shape in ((comm.size, 1), (1, comm.size)))
    layer, x = Repartition(P_x, P_y), torch.ones(2, 3)
    for wrong in (x.to_sparse(), x.to("meta")):
        with pytest.raises(ShapeError, match=r"rank 1: input (has layout|is on device)"):
            layer(wrong if comm.rank == 1 else x)
    assert layer(x).shape[0] == 2 * comm.size


def test_partitions_of_different_dimensions_are_refused(P_world, comm):
    P_x = partition(P_world, range(comm.size), (comm.size, 1))
    with pytest.raises(ShapeError, match="tensor of 3 dimensions"):
        Repartition(P_x, P_x)(torch.zeros(1, 1, 1))


def scaled(grid, size):
    """A grid of a document with as many places as there are ranks at most: its largest extent shrinks."""
    grid = list(grid)
    while torch.tensor(grid).prod() > size:
        grid[grid.index(max(grid))] -= 1
    return grid


@pytest.mark.parametrize(
    "grids",
    [((5,), (3,)), ((3, 4), (4, 2)), ((3, 2, 2), (1, 2, 3)), ((1, 1, 1), (1, 3, 2)), ((1, 3, 2), (1, 1, 1))],
    ids=["1: remap 1-D", "2: remap 2-D", "3: remap 3-D", "4: scatter", "5: gather"],
)
def test_printed_example(P_world, grids):
    x_grid, y_grid = (scaled(grid, P_world.size) for grid in grids)
    P_x = partition(P_world, range(torch.tensor(x_grid).prod()), x_grid)
    last = P_world.size - int(torch.tensor(y_grid).prod())
    P_y = partition(P_world, range(last, P_world.size), y_grid)
    x = torch.arange(11 ** len(x_grid)).reshape([11] * len(x_grid))
    y = Repartition(P_x, P_y, preserve_batch=False)(shard(P_x, x))
    assert torch.equal(y, shard(P_y, x)) if P_y.active else y.shape == (0,)


def test_it_goes_by_another_name_too():
    assert DistributedTranspose is Repartition


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
