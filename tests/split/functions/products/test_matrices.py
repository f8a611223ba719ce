"""Decompositions, inverses, systems of equations and products of matrices and vectors."""

import pytest
import torch

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def definite(x):
    return x @ x.mT + 4 * torch.eye(x.shape[-1], dtype=x.dtype)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.svd(x, full_matrices=False).S,
        lambda x: [part.abs() for part in torch.svd(x)],
        torch.linalg.svdvals,
        lambda x: torch.linalg.qr(x).R.abs(),
        lambda x: torch.linalg.eigh(definite(x)).eigenvalues,
        lambda x: torch.linalg.cholesky(definite(x), upper=True),
        lambda x: torch.linalg.inv(definite(x)),
        lambda x: definite(x).inverse(),
        lambda x: torch.linalg.pinv(x, rtol=1e-12),
        lambda x: definite(x).det() + torch.logdet(definite(x)),
        lambda x: tuple(torch.linalg.slogdet(x)),
        lambda x: torch.matrix_exp(x) + torch.linalg.matrix_power(x, 2),
        lambda x: torch.linalg.eigvals(x).abs().sum(-1),
    ],
)
def test_functions_of_matrices(P_world, function):
    check(P_world, function, [numbers(5, 3, 3)], atol=1e-8)
    check(P_world, function, [numbers(2, 3, 3)], atol=1e-8)
    check(P_world, function, [numbers(4, 4)], atol=1e-8)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("order", [None, -2])
def test_a_rank_without_matrices_is_in_the_graph_of_the_others(P_world, order):
    check(P_world, lambda x: torch.linalg.cond(x, order), [numbers(1, 3, 3)], atol=1e-8)


@pytest.mark.mpi
def test_systems_of_equations(P_world):
    for a, b in (((5, 3, 3), (5, 3, 2)), ((3, 3), (5, 3, 2)), ((1, 3, 3), (5, 3, 2)), ((5, 3, 3), (5, 3))):
        check(P_world, lambda x, y: torch.linalg.solve(definite(x), y), [numbers(*a)], [numbers(*b)])
        check(P_world, lambda y, x: torch.linalg.solve(definite(x), y), [numbers(*b)], [numbers(*a)])
    operands = [numbers(5, 3, 3), numbers(5, 3, 3)]
    check(P_world, lambda x, y: torch.linalg.solve(definite(x), y), operands)
    for options in ({"upper": False, "left": False}, {"upper": True, "unitriangular": True}):
        check(P_world, lambda x, y, o=options: torch.linalg.solve_triangular(definite(x), y, **o), operands)
    check(P_world, lambda x, y: torch.cholesky_solve(y, torch.linalg.cholesky(definite(x))), operands)
    x = block(P_world.create_cartesian_topology_partition((P_world.size, 1, 1)), numbers(5, 3, 3))
    with pytest.raises(UnsupportedError, match="beside the matrices"):
        torch.linalg.matrix_rank(x, torch.ones(5, dtype=torch.float64))


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:.*torch.cross")
def test_cross_products(P_world):
    for function in (torch.cross, torch.linalg.cross, lambda x, y: x.cross(y, dim=-1)):
        check(P_world, function, [numbers(4, 3, 3), numbers(4, 3, 3)])
        check(P_world, function, [numbers(4, 3, 3)], [numbers(4, 3, 3)])
    check(P_world, lambda x, y: torch.cross(x, y, dim=1), [numbers(3, 3, 5), numbers(3, 3, 1)])


@pytest.mark.mpi
def test_kronecker_products(P_world):
    for a, b in (((4, 3), (2, 5)), ((4, 3), (5,)), ((4, 3), (2, 2, 3))):
        check(P_world, torch.kron, [numbers(*a)], [numbers(*b)])
        check(P_world, lambda x, y: torch.kron(y, x), [numbers(*a)], [numbers(*b)])
    check(P_world, torch.kron, [numbers(4, 3), numbers(3, 5)])


@pytest.mark.mpi
def test_what_is_solved_may_be_named(P_world):
    b, a = numbers(2, 3, 4), numbers(2, 3, 3)

    def solved(b, a):
        a, factor = definite(a), torch.linalg.cholesky(definite(a), upper=True)
        return (
            torch.cholesky_solve(upper=True, input2=factor, input=b),
            b.cholesky_solve(factor, True),
            torch.linalg.solve(B=b, A=a),
            torch.linalg.solve_triangular(factor, B=b, upper=True),
            torch.linalg.solve_triangular(upper=True, B=b, input=factor),
        )

    check(P_world, solved, [b, a])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
def test_least_squares(P_world, driver):
    def solved(a, b):
        return tuple(torch.linalg.lstsq(a, b, driver=driver))

    for batch in ((2,), (4, 3), ()):
        check(P_world, solved, [numbers(*batch, 5, 3), numbers(*batch, 5, 2)], atol=1e-8)
        check(P_world, solved, [numbers(*batch, 5, 3)], [numbers(*batch, 5, 2)], atol=1e-8)
        check(P_world, solved, [numbers(*batch, 2, 4), numbers(*batch, 2, 3)], atol=1e-8)
    check(P_world, solved, [numbers(4, 5, 3)], [numbers(4, 5)], atol=1e-8)
    check(P_world, solved, [numbers(5, 3)], [numbers(5)], atol=1e-8)
    check(P_world, solved, [numbers(4, 5, 3)], [numbers(1, 5, 2)], atol=1e-8)
    named = [numbers(2, 5, 3), numbers(2, 5, 3)]
    check(P_world, lambda a, b: torch.linalg.lstsq(a, b=b, driver=driver).solution, named, atol=1e-8)
    if driver != "gels":
        # Not of full rank: all matrices, and some.
        for a in (torch.ones(2, 4, 3), torch.cat([torch.ones(1, 4, 3), torch.rand(3, 4, 3)])):
            check(P_world, solved, [a.double(), numbers(len(a), 4, 2).detach()], atol=1e-8)
