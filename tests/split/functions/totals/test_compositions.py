"""Distances and similarities of vectors, differences of neighbours."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check
from tests.split.samples import check_functions


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# Forms beyond torch's samples: the function, what is split, and what is plain beside it.
FORMS = {
    "a spacing of none": lambda: (
        lambda x: torch.gradient(x, spacing=None, dim=None, edge_order=1),
        [numbers(4, 7)],
    ),
    "split coordinates": lambda: (
        lambda at, x: torch.gradient(x, spacing=[at], dim=1),
        [torch.arange(7.0, dtype=torch.float64) ** 2],
        [numbers(4, 7)],
    ),
    "an integral of one": lambda: (torch.trapezoid, [numbers(4, 1)]),
    "an integral along a cut": lambda: (lambda y, x: torch.trapz(y, x, dim=0), [numbers(4, 5)], [numbers(4)]),
    "running integrals": lambda: (lambda y: torch.cumulative_trapezoid(y, dx=0.5, dim=0), [numbers(4, 5, 3)]),
    "norms that are kept": lambda: (
        lambda x, y: F.pairwise_distance(x, y, p=1, keepdim=True),
        [numbers(5, 4), numbers(5, 4)],
    ),
}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("name", FORMS)
def test_forms(P_world, name):
    check(P_world, *FORMS[name]())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_samples_of_torch(P_world):
    check_functions(P_world, "totals.compositions")


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("shape", [(4, 6, 5), (1, 6, 5), (4, 1, 5), (4, 6, 1), (6, 5), (6, 1), (5,), ()])
def test_similarities_and_distances_of_what_broadcasts(P_world, shape):
    for dim in (0, 1, 2):
        check(
            P_world, lambda x, y, d=dim: F.cosine_similarity(x, y, d), [numbers(4, 6, 5)], [numbers(*shape)]
        )
        check(
            P_world, lambda x, y, d=dim: F.cosine_similarity(y, x, d), [numbers(4, 6, 5)], [numbers(*shape)]
        )
    check(P_world, F.pairwise_distance, [numbers(4, 6, 5)], [numbers(*shape)])
    if len(shape) == 3:
        operands = [numbers(4, 6, 5), numbers(*shape)]
        check(P_world, lambda x, y: F.cosine_similarity(x, y, 1) + F.cosine_similarity(y, x, -2), operands)
    for dtype in (torch.float32, torch.int64):
        short = (9 * torch.rand(shape)).to(dtype)
        check(P_world, F.cosine_similarity, [numbers(4, 6, 5)], [short], atol=1e-6)


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_batches_that_differ_are_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    with pytest.raises(UnsupportedError, match="batch"):
        torch.cdist(block(P_x, numbers(1, 5, 3)), numbers(2, 5, 3))


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_coordinates_are_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    x = block(P_x, numbers(4, 3))
    with pytest.raises(UnsupportedError, match="coordinates"):
        torch.gradient(x, spacing=(torch.arange(4.0), torch.arange(3.0)))
