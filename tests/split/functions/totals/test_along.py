"""Running sums, sorting, medians and the like, Fourier transforms."""

import pytest
import torch

from tests.split.against_whole import block, check, grids
from tests.split.samples import check_functions

SHAPE = 2, 3, 5, 4


def numbers(shape=SHAPE, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def filtered(x, w):
    return torch.fft.irfft2(torch.fft.rfft2(x) * w, s=x.shape[-2:])


# Forms beyond torch's samples: the function, what is split, and what is plain beside it.
FORMS = {
    "a quantile of all": lambda: (lambda x: x.quantile(0.2, keepdim=True), [numbers()]),
    "a vector in order": lambda: (lambda x: x.sort().values, [numbers((7,))]),
    "indices in order": lambda: (lambda x: torch.sort(x, stable=True, dim=2).indices, [numbers()]),
    "a sum of whole numbers": lambda: (lambda x: x.cumsum(2), [torch.randint(0, 2, SHAPE).bool()]),
    "numbers that occur": lambda: (
        lambda x: torch.unique(x, return_counts=True),
        [torch.randint(0, 5, SHAPE)],
    ),
    "no elements": lambda: (lambda x: torch.logcumsumexp(x, 1), [numbers((4, 0, 3))]),
    "none in order": lambda: (lambda x: x.sort(1)[0], [numbers((4, 0, 3))]),
    "a transform of none": lambda: (lambda x: torch.fft.fft(x[:0], n=6, dim=0).real, [numbers((3, 4))]),
    "fewer rows than ranks": lambda: (torch.fft.fft2, [numbers((1, 1, 4, 4))]),
    "a spectral filter": lambda: (filtered, [numbers((2, 3, 5, 6))], [numbers((3, 5, 4), torch.complex128)]),
}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("name", FORMS)
def test_forms(P_world, name):
    check(P_world, *FORMS[name]())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(4))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "totals.along", part, 4)


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
def test_transforms_are_cut_as_before(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1)), numbers((2, 3, 5, 6)))
    y = torch.fft.rfft2(x)
    assert y.decomposition.cut_dims == (2,)
    assert torch.fft.irfft2(y).decomposition is x.decomposition


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("replicated", [True, False])
def test_the_gradient_of_which_quantiles_are_asked_for(P_world, replicated):
    whole = numbers()
    weight = torch.randn(2, *whole.shape[:-1], dtype=torch.float64)
    alone, mine = (torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True) for _ in range(2))
    (torch.quantile(whole.detach(), alone, -1) * weight).sum().backward()
    for grid in grids(whole.dim(), P_world.size):
        P_x = P_world.create_cartesian_topology_partition(grid)
        x, mine.grad = block(P_x, whole.detach()), None
        q = x.sum() * 0 + mine if replicated else mine
        (torch.quantile(x, q, -1) * weight).sum().backward()
        torch.testing.assert_close(mine.grad, alone.grad)
