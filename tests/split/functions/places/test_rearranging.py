"""Elements of split tensors in other places."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.split.against_whole import check


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_pixels(P_world):
    check(P_world, lambda x: F.pixel_shuffle(x, 2), [numbers(2, 12, 5, 3)])
    check(P_world, lambda x: F.pixel_unshuffle(x, downscale_factor=2), [numbers(2, 3, 6, 10)])
    check(P_world, lambda x: F.pixel_unshuffle(x, 3), [numbers(2, 2, 9, 3)])


@pytest.mark.mpi
def test_pixels_of_nothing_stay(P_world):
    # Torch itself cannot differentiate it.
    check(P_world, lambda x: F.pixel_unshuffle(x[:, :, :0], 2), [numbers(3, 2, 1, 2)], gradients=False)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_diagonals(P_world):
    check(P_world, torch.diag, [numbers(4, 7)])
    check(P_world, lambda x: torch.diag(x, 2), [numbers(7, 4)])
    check(P_world, lambda x: torch.diag(x, -1), [numbers(5)])
    check(P_world, torch.diagflat, [numbers(3, 2)])
    check(P_world, torch.diag_embed, [numbers(3, 5)])
    check(P_world, lambda x: torch.diag_embed(x, 1, dim1=0, dim2=2), [numbers(3, 5)])
