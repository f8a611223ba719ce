"""Distances and similarities of vectors, differences of neighbours."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_similarities_and_distances(P_world):
    for function in (
        F.cosine_similarity,
        lambda x, y: F.cosine_similarity(x, y, dim=-1, eps=1e-3),
        F.pairwise_distance,
        lambda x, y: F.pairwise_distance(x, y, p=1, keepdim=True),
        torch.nn.PairwiseDistance(p=3),
    ):
        check(P_world, function, [numbers(5, 4), numbers(5, 4)])
        check(P_world, function, [numbers(5, 4)], [numbers(5, 4)])


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
@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_losses_of_pairs_and_triplets(P_world, reduction):
    target = torch.tensor([1, -1, 1, 1, -1])
    check(
        P_world,
        lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.1, reduction=reduction),
        [numbers(5, 4), numbers(5, 4)],
        [target],
    )
    three = [numbers(5, 4), numbers(5, 4), numbers(5, 4)]
    check(P_world, lambda *x: F.triplet_margin_loss(*x, swap=True, reduction=reduction), three)
    check(P_world, lambda *x: F.triplet_margin_with_distance_loss(*x, margin=0.5, reduction=reduction), three)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_distances_of_all_pairs(P_world):
    for p in (1.0, 2.0, 3.0):
        check(P_world, lambda x, y, p=p: torch.cdist(x, y, p), [numbers(2, 5, 3)], [numbers(2, 4, 3)])
        check(P_world, lambda x, y, p=p: torch.cdist(x, y, p=p), [numbers(2, 5, 3), numbers(2, 5, 3)])


@pytest.mark.mpi
@pytest.mark.sizes(2)
def test_batches_that_differ_are_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    with pytest.raises(UnsupportedError, match="batch"):
        torch.cdist(block(P_x, numbers(1, 5, 3)), numbers(2, 5, 3))


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_gradient(P_world):
    check(P_world, torch.gradient, [numbers(4, 7)])
    check(P_world, lambda x: torch.gradient(x, dim=-1, spacing=0.5, edge_order=2), [numbers(3, 7)])
    check(P_world, lambda x: torch.gradient(x, spacing=(2.0, 0.3), dim=(2, 1)), [numbers(2, 3, 5)])


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
