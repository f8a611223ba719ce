"""Running sums, sorting, medians and the like."""

import pytest
import torch

from tests.split.against_whole import check

SHAPE = 2, 3, 5, 4


def numbers(shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("dim", range(-1, 3))
def test_running_sums(P_world, dim):
    for shape in (SHAPE, (2, 1, 2, 2)):
        check(P_world, lambda x: x.cumsum(dim), [numbers(shape)])
    check(P_world, lambda x: torch.cumsum(x, dim=dim, dtype=torch.float64), [torch.randint(0, 5, SHAPE)])
    check(P_world, lambda x: x.cumsum(dim), [torch.randint(0, 2, SHAPE).bool()], gradients=False)


@pytest.mark.mpi
@pytest.mark.sizes(1, 3, 4)
@pytest.mark.parametrize("dim", [1, 2, -1])
def test_other_running_results_and_sorting(P_world, dim):
    for function in (
        lambda x: x.cumprod(dim),
        lambda x: x.logcumsumexp(dim),
        lambda x: tuple(x.cummax(dim)),
        lambda x: tuple(torch.sort(x, dim=dim, descending=True)),
        lambda x: x.sort(dim).values,
        lambda x: torch.sort(x, stable=True, dim=dim).indices,
        lambda x: x.argsort(dim),
        torch.msort,
        lambda x: tuple(x.topk(2, dim)),
        lambda x: tuple(torch.kthvalue(x, 2, dim, True)),
        lambda x: x.median(dim).values,
        lambda x: x.median(dim, keepdim=True).values,
        lambda x: torch.quantile(x, 0.3, dim),
        lambda x: torch.quantile(x, torch.tensor([0.2, 0.6], dtype=torch.float64), dim, keepdim=True),
        lambda x: x.diff(dim=dim),
    ):
        check(P_world, function, [numbers()])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_of_all_elements(P_world):
    for function in (
        torch.median,
        torch.nanmedian,
        lambda x: x.quantile(0.7),
        lambda x: x.quantile(0.2, keepdim=True),
    ):
        check(P_world, function, [numbers()])
    check(P_world, lambda x: x.sort().values, [numbers((7,))])
    check(P_world, lambda x: x.mode(-1).values, [torch.randint(0, 3, SHAPE)], gradients=False)
    for function in (
        torch.unique,
        lambda x: torch.unique(x, return_counts=True),
        lambda x: torch.histc(x.double(), 4),
    ):
        check(P_world, function, [torch.randint(0, 5, SHAPE)], gradients=False)
    check(P_world, torch.bincount, [torch.randint(0, 5, (7,))], gradients=False)


@pytest.mark.mpi
def test_along_a_dimension_without_elements(P_world):
    check(P_world, lambda x: torch.logcumsumexp(x, 1), [numbers((4, 0, 3))])
    check(P_world, lambda x: x.sort(1)[0], [numbers((4, 0, 3))])


@pytest.mark.mpi
@pytest.mark.filterwarnings("ignore:.*non-contiguous")
def test_places_in_order(P_world):
    x, y = numbers((4, 5)).detach(), numbers((4, 5)).detach()
    check(P_world, lambda x, s: torch.searchsorted(s, x, right=True), [x], [y[0].sort().values])
    check(P_world, lambda x, s: torch.searchsorted(s.sort().values, x, out_int32=True), [x, y])
    check(P_world, lambda x, s: torch.searchsorted(s, x[:, :3]), [x], [y.sort().values])
    check(P_world, lambda s: torch.searchsorted(s.sort().values, 0.1), [x[0]])
