"""Running sums, sorting, medians and the like, Fourier transforms."""

import pytest
import torch

from tests.split.against_whole import block, check, grids

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


PLANE = 2, 3, 5, 6


def spectrum(shape=PLANE, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_real_transforms(P_world):
    for function in (
        torch.fft.rfft,
        lambda x: torch.fft.rfft(x, dim=2),
        torch.fft.rfft2,
        lambda x: torch.fft.rfftn(x, dim=(-2, -1), norm="ortho"),
        lambda x: torch.fft.rfftn(x, s=(4, 4)),
        torch.fft.rfftn,
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(5, 6)),
        lambda x: torch.fft.irfftn(torch.fft.rfftn(x, dim=[1, 2]), dim=[1, 2]),
        lambda x: torch.fft.ihfft(x, n=7),
    ):
        check(P_world, function, [spectrum()])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_complex_transforms(P_world):
    for function in (
        torch.fft.fft,
        lambda x: torch.fft.ifft(x, 8, 2),
        torch.fft.fft2,
        torch.fft.fftn,
        lambda x: torch.fft.ifft2(torch.fft.fft2(x)),
        lambda x: torch.fft.fftshift(x, dim=(-2, -1)),
        torch.fft.ifftshift,
        lambda x: torch.fft.hfft(x, dim=2),
    ):
        check(P_world, function, [spectrum(dtype=torch.complex128)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_an_image_alone_and_extents_below_the_number_of_ranks(P_world):
    for shape in ((5, 6), (2, 4), (1, 1, 4, 4)):
        check(P_world, torch.fft.fft2, [spectrum(shape)])
        check(P_world, lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]), [spectrum(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
def test_transforms_are_cut_as_before(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1)), spectrum())
    y = torch.fft.rfft2(x)
    assert y.decomposition.cut_dims == (2,)
    assert torch.fft.irfft2(y).decomposition is x.decomposition


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
def test_parts_of_complex_numbers(P_world):
    for function in (
        lambda x: x.real * 2 + x.imag,
        lambda x: torch.real(x) - torch.imag(x),
        torch.view_as_real,
        lambda x: torch.view_as_complex(torch.view_as_real(x) * 2),
        lambda x: x.conj() * x,
        torch.abs,
        lambda x: x.angle(),
        lambda x: torch.polar(x.abs(), x.angle()),
    ):
        check(P_world, function, [spectrum(dtype=torch.complex128)])
    check(P_world, torch.view_as_complex, [spectrum((3, 4, 2))])


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
