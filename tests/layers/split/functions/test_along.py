"""Running sums, sorting, medians and the like, Fourier transforms."""

from functools import partial

import pytest
import torch

from tests.layers.split.against_whole import called, cut_along, forms, numbers, on_grids
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
SHAPE = 2, 3, 5, 4
SQUARES = torch.arange(7.0, dtype=torch.float64) ** 2
TRUTHS = partial(torch.randint, 0, 2, SHAPE, dtype=torch.bool)


def filtered(x, w):
    return torch.fft.irfft2(torch.fft.rfft2(x) * w, s=x.shape[-2:])


# Forms beyond torch's samples.
FORMS = {
    "a quantile of all": (called(torch.quantile, 0.2, keepdim=True), [SHAPE]),
    "a vector in order": (lambda x: x.sort().values, [(7,)]),
    "indices in order": (lambda x: torch.sort(x, stable=True, dim=2).indices, [SHAPE]),
    "a sum of whole numbers": (called(torch.cumsum, 2), [TRUTHS]),
    "numbers that occur": (called(torch.unique, return_counts=True), [partial(torch.randint, 0, 5, SHAPE)]),
    "medians of none": (lambda x: (x[:0].median(), x[x > 9].nanmedian(), x[:0].median(1)[0]), [SHAPE[:2]]),
    "no elements": (called(torch.logcumsumexp, 1), [(4, 0, 3)]),
    "products of no truth values": (called(torch.masked.cumprod, 0), [torch.ones(4, 0, 3, dtype=torch.bool)]),
    "none in order": (lambda x: x.sort(1)[0], [(4, 0, 3)]),
    "a transform of none": (lambda x: torch.fft.fft(x[:0], n=6, dim=0).real, [(3, 4)]),
    "fewer rows than ranks": (torch.fft.fft2, [(1, 1, 4, 4)]),
    "slopes by a spacing of none": (called(torch.gradient, spacing=None, dim=None, edge_order=1), [(4, 7)]),
    "slopes by coordinates": (lambda x: torch.gradient(x, spacing=(SQUARES[:4], SQUARES)), [(4, 7)]),
    "slopes by split coordinates": (
        lambda at, x: torch.gradient(x, spacing=[at], dim=1),
        [SQUARES],
        [(4, 7)],
    ),
    "a spectral filter": (filtered, [(2, 3, 5, 6)], [partial(numbers, 3, 5, 4, dtype=torch.complex128)]),
}
test_forms = forms(FORMS)
test_samples_of_torch = samples_of("along", 4)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_transforms_are_cut_as_before(P_world):
    x = cut_along(P_world, 2, numbers(2, 3, 5, 6))
    y = torch.fft.rfft2(x)
    assert y.decomposition.cut_dims == (2,)
    assert torch.fft.irfft2(y).decomposition is x.decomposition


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("replicated", [True, False])
def test_the_gradient_of_which_quantiles_are_asked_for(P_world, replicated):
    whole = numbers(*SHAPE)
    weight = torch.randn(2, *whole.shape[:-1], dtype=torch.float64)
    alone, mine = (torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True) for _ in range(2))
    (torch.quantile(whole.detach(), alone, -1) * weight).sum().backward()
    for x in on_grids(P_world, whole.detach()):
        mine.grad = None
        q = x.sum() * 0 + mine if replicated else mine
        (torch.quantile(x, q, -1) * weight).sum().backward()
        torch.testing.assert_close(mine.grad, alone.grad)
