"""Finite differences and diagonals against torch."""

import pytest
import torch

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_gradient(P_world):
    check(P_world, torch.gradient, [numbers(4, 7)])
    check(P_world, lambda x: torch.gradient(x, dim=-1, spacing=0.5, edge_order=2), [numbers(3, 7)])
    check(P_world, lambda x: torch.gradient(x, spacing=(2.0, 0.3), dim=(2, 1)), [numbers(2, 3, 5)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_diagonals(P_world):
    check(P_world, torch.diag, [numbers(4, 7)])
    check(P_world, lambda x: torch.diag(x, 2), [numbers(7, 4)])
    check(P_world, lambda x: torch.diag(x, -1), [numbers(5)])
    check(P_world, torch.diagflat, [numbers(3, 2)])
    check(P_world, torch.diag_embed, [numbers(3, 5)])
    check(P_world, lambda x: torch.diag_embed(x, 1, dim1=0, dim2=2), [numbers(3, 5)])


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_coordinates_are_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    x = block(P_x, numbers(4, 3))
    with pytest.raises(UnsupportedError, match="coordinates"):
        torch.gradient(x, spacing=(torch.arange(4.0), torch.arange(3.0)))


@pytest.mark.mpi
def test_integrals(P_world):
    for dim in range(-1, 3):
        check(P_world, lambda y, d=dim: torch.trapezoid(y, dx=0.5, dim=d), [numbers(4, 5, 3)])
        check(P_world, lambda y, x, d=dim: torch.trapz(y, x, dim=d), [numbers(4, 5, 3), numbers(4, 5, 3)])
        x = numbers((4, 5, 3)[dim])
        check(P_world, lambda y, x, d=dim: torch.trapezoid(y, x, dim=d), [numbers(4, 5, 3)], [x])
        check(P_world, lambda y, d=dim: torch.cumulative_trapezoid(y, dx=0.5, dim=d), [numbers(4, 5, 3)])
        check(P_world, lambda y, x, d=dim: torch.cumulative_trapezoid(y, x, dim=d), [numbers(4, 5, 3)] * 2)
        check(P_world, lambda y, x, d=dim: torch.cumulative_trapezoid(y, x, dim=d), [numbers(4, 5, 3)], [x])
    for function in (torch.trapezoid, torch.cumulative_trapezoid):
        check(P_world, function, [numbers(4, 1)])
        check(P_world, function, [numbers(2, 2)])
        check(P_world, function, [torch.arange(12).view(4, 3)], gradients=False)


@pytest.mark.mpi
def test_a_spacing_of_none_is_one(P_world):
    check(P_world, lambda x: torch.gradient(x, spacing=None, dim=None, edge_order=1), [numbers(4, 7)])


@pytest.mark.mpi
def test_a_gradient_of_a_plain_tensor_by_split_coordinates(P_world):
    at = torch.arange(7.0, dtype=torch.float64) ** 2
    check(P_world, lambda at, x: torch.gradient(x, spacing=[at], dim=1), [at], [numbers(4, 7)])
