"""Fourier transforms and complex numbers."""

import pytest
import torch

from distdl_rma.split import layout as lay
from tests.split.against_whole import block, check

SHAPE = 2, 3, 5, 6


def numbers(shape=SHAPE, dtype=torch.float64):
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
        check(P_world, function, [numbers()])


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
        check(P_world, function, [numbers(dtype=torch.complex128)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_an_image_alone_and_extents_below_the_number_of_ranks(P_world):
    for shape in ((5, 6), (2, 4), (1, 1, 4, 4)):
        check(P_world, torch.fft.fft2, [numbers(shape)])
        check(P_world, lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]), [numbers(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
def test_results_are_cut_as_before(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1)), numbers())
    y = torch.fft.rfft2(x)
    assert lay.cut_dims(y.decomposition) == (2,)
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
        check(P_world, function, [numbers(dtype=torch.complex128)])
    check(P_world, torch.view_as_complex, [numbers((3, 4, 2))])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_a_spectral_filter_with_a_complex_parameter(P_world):
    def filtered(x, w):
        return torch.fft.irfft2(torch.fft.rfft2(x) * w, s=x.shape[-2:])

    check(P_world, filtered, [numbers()], [numbers((3, 5, 4), torch.complex128)])


@pytest.mark.mpi
def test_of_no_elements(P_world):
    check(P_world, lambda x: torch.fft.fft(x[:0], n=6, dim=0).real, [numbers((3, 4))])
