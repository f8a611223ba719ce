"""Running sums, sorting, medians and the like, Fourier transforms."""

import pytest
import torch

from tests.split.against_whole import block, check, grids
from tests.split.samples import check_functions

SHAPE = 2, 3, 5, 4


def numbers(shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(4))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "totals.along", part, 4)


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


PLANE = 2, 3, 5, 6


def spectrum(shape=PLANE, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
def test_transforms_are_cut_as_before(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1)), spectrum())
    y = torch.fft.rfft2(x)
    assert y.decomposition.cut_dims == (2,)
    assert torch.fft.irfft2(y).decomposition is x.decomposition


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_a_spectral_filter_with_a_complex_parameter(P_world):
    def filtered(x, w):
        return torch.fft.irfft2(torch.fft.rfft2(x) * w, s=x.shape[-2:])

    check(P_world, filtered, [spectrum()], [spectrum((3, 5, 4), torch.complex128)])


@pytest.mark.mpi
def test_transforms_of_no_elements(P_world):
    check(P_world, lambda x: torch.fft.fft(x[:0], n=6, dim=0).real, [spectrum((3, 4))])


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
