"""Largest and smallest elements."""

import copy

import pytest
import torch

from distdl_rma import Machine, shard
from tests.split.against_whole import check

SHAPE = 2, 3, 5, 4


def ties(shape=SHAPE):
    return torch.randint(0, 3, shape).double().requires_grad_()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 2, 2)])
def test_values_and_gradients_with_ties(P_world, shape):
    for function in (
        torch.max,
        torch.min,
        torch.amax,
        lambda x: x.amin((2, 3)),
        lambda x: torch.amax(x, dim=-1, keepdim=True),
        lambda x: torch.amax(x, (0, 2, 3)),
        torch.aminmax,
        lambda x: x.aminmax(dim=2, keepdim=True),
        lambda x: x.amax((2, 3), True) - x,
    ):
        check(P_world, function, [ties(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 2, 2)])
def test_along_a_dimension_with_indices(P_world, dim, shape):
    check(P_world, lambda x: tuple(x.max(dim)), [ties(shape)])
    check(P_world, lambda x: x.min(dim=dim, keepdim=True).values, [ties(shape)])
    check(P_world, lambda x: torch.max(x, dim).indices, [ties(shape)])
    check(P_world, lambda x: x.argmax(dim), [ties(shape)])
    check(P_world, lambda x: x.argmin(dim, keepdim=True), [ties(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 2, 2), (3, 2), (5,)])
def test_an_index_among_all_elements(P_world, shape):
    for _ in range(4):
        check(P_world, torch.argmax, [ties(shape)])
        check(P_world, lambda x: x.argmin(keepdim=True), [ties(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", [(0, 0, 1, 1), (1, 2, 4, 3)])
def test_not_a_number(P_world, where):
    x = torch.randn(SHAPE, dtype=torch.float64)
    x[where] = torch.nan
    for function in (
        torch.max,
        torch.min,
        torch.argmax,
        lambda x: tuple(x.max(2)),
        lambda x: tuple(x.min(3)),
    ):
        check(P_world, function, [x.clone().requires_grad_()])
    check(P_world, lambda x: x.amax((2, 3)), [x.requires_grad_()])


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16])
def test_other_types(P_world, dtype):
    x = torch.randint(0, 2, SHAPE).to(dtype)
    for function in (torch.max, torch.amin, lambda x: tuple(x.max(2)), lambda x: x.amax(3)):
        check(P_world, function, [x], gradients=False)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_where_all_or_some_blocks_have_only_what_is_no_more_than_nothing(P_world):
    x = torch.full((2, 3, 4), -torch.inf, dtype=torch.float64)
    for given in (x, -x, x.clone().index_fill_(1, torch.tensor(1), -0.0)):
        for function in (torch.amax, torch.amin, torch.argmax, lambda x: tuple(x.min(1))):
            check(P_world, function, [given.clone().requires_grad_()])
    least = torch.full((2, 3, 4), torch.iinfo(torch.int32).min, dtype=torch.int32)
    for given in (least, least - 1):
        for function in (torch.amax, torch.amin, torch.argmin, lambda x: tuple(x.max(2))):
            check(P_world, function, [given], gradients=False)


@pytest.mark.mpi(min_size=3)
@pytest.mark.sizes(3, 4)
def test_what_moves_does_not_grow_with_the_ranks(P_world, comm):
    x = shard(P_world.create_cartesian_topology_partition((comm.size, 1)), torch.randn(8, 1 << 16))
    counters = Machine.of(P_world).segments.counters
    before = copy.copy(counters)
    x.amax(0)
    moved = counters.bytes_put - before.bytes_put + counters.bytes_got - before.bytes_got
    assert 0 < moved < 2 * 4 * x.shape[1]


@pytest.mark.mpi
def test_of_two_tensors(P_world):
    check(P_world, torch.max, [ties(), torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)])
    check(P_world, lambda x, y: x.min(other=y), [ties()], [torch.randn(5, 4, dtype=torch.float64)])
