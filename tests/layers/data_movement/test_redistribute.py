"""Tensors cut into blocks that become tensors cut otherwise: from any partition to any other."""

import pytest
import torch

from distdl_rma.layers import DistributedTranspose, Repartition
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
