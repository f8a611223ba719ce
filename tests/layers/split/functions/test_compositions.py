"""Distances and similarities of vectors."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.layers.split.against_whole import called, check, cut_along, forms, numbers, on_grids
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
# Forms beyond torch's samples.
FORMS = {
    "an integral of one": (torch.trapezoid, [(4, 1)]),
    "an integral along a cut": (lambda y, x: torch.trapz(y, x, dim=0), [(4, 5)], [(4,)]),
    "running integrals": (called(torch.cumulative_trapezoid, dx=0.5, dim=0), [(4, 5, 3)]),
    **{
        f"limited norms {p}, {dim}": (called(torch.renorm, p, dim, 1.5), [(5, 3, 4)])
        for p, dim in ((2, 0), (1, 1), (float("inf"), -1))
    },
    "distances of one batch": (torch.cdist, [(1, 5, 3)], [(2, 4, 3)]),
    "norms that are kept": (lambda x, y: F.pairwise_distance(x, y, p=1, keepdim=True), [(5, 4), (5, 4)]),
}
test_forms = forms(FORMS)
test_samples_of_torch = samples_of("compositions")


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("shape", [(4, 6, 5), (1, 6, 5), (4, 1, 5), (4, 6, 1), (6, 5), (6, 1), (5,), ()])
def test_similarities_and_distances_of_what_broadcasts(P_world, shape):
    x = numbers(4, 6, 5)
    for d in (0, 1, 2):
        check(P_world, lambda x, y, d=d: F.cosine_similarity(x, y, d), [x], [numbers(*shape)])
        check(P_world, lambda x, y, d=d: F.cosine_similarity(y, x, d), [x], [numbers(*shape)])
    check(P_world, F.pairwise_distance, [x], [numbers(*shape)])
    if len(shape) == 3:
        both = [x, numbers(*shape)]
        check(P_world, lambda x, y: F.cosine_similarity(x, y, 1) + F.cosine_similarity(y, x, -2), both)
    for dtype in (torch.float32, torch.int64):
        check(P_world, F.cosine_similarity, [x], [(9 * torch.rand(shape)).to(dtype)], atol=1e-6)


def test_whether_an_element_is_there_is_known_to_all(P_world):
    for x in on_grids(P_world, torch.arange(10).view(5, 2)):
        assert [each in x for each in (0, 9, torch.tensor(4), x[3, 1], 10)] == [True] * 4 + [False]


def test_an_integral_of_yes_and_no_is_refused_as_by_torch(P_world):
    x = cut_along(P_world, 0, torch.ones(5, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="bool is not supported"):
        torch.trapezoid(x, torch.arange(5.0))
