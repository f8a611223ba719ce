"""Softmax over split and unsplit dimensions."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.split.against_whole import check

SHAPE = 2, 3, 5, 4


def numbers(shape=SHAPE):
    return (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("dim", range(-4, 4))
@pytest.mark.parametrize(
    "function",
    [
        F.softmax,
        F.log_softmax,
        F.softmin,
        torch.softmax,
        torch.Tensor.log_softmax,
        torch.special.softmax,
        torch.special.log_softmax,
    ],
)
def test_over_any_dimension(P_world, function, dim):
    check(P_world, lambda x: function(x, dim), [numbers()])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_empty_blocks_and_large_numbers(P_world):
    check(P_world, lambda x: (x * 1000).softmax(1), [numbers((2, 2, 3))])
    check(P_world, lambda x: (x * 1000).log_softmax(2), [numbers((2, 2, 1))])
    check(P_world, lambda x: x.softmax(0), [numbers((5,))])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_masked_scores(P_world):
    scores = numbers((3, 7, 6)).detach()
    scores[:, :, 3:] = -torch.inf
    scores[0, 2] = -torch.inf
    for dim in (1, 2):
        check(P_world, lambda x, dim=dim: x.softmax(dim), [scores], gradients=False)
    usable = numbers((3, 7, 6))
    mask = torch.rand(3, 7, 6) > 0.5
    mask[:, 0], mask[:, :, 0] = True, True
    for dim in (1, 2):
        check(P_world, lambda x, m, dim=dim: torch.where(m, x, -torch.inf).softmax(dim), [usable], [mask])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_types(P_world):
    x = torch.randn(SHAPE)
    for dtype in (torch.float32, torch.float64):
        check(P_world, lambda x, dtype=dtype: F.softmax(x, 2, dtype=dtype), [x], atol=1e-6)
    for dim in (2, 3):
        check(P_world, lambda x, dim=dim: x.half().log_softmax(dim), [x], gradients=False, atol=1e-2)
        check(P_world, lambda x, dim=dim: torch.softmax(x.bfloat16(), dim), [x], gradients=False, atol=1e-2)


@pytest.mark.mpi
def test_without_a_dimension_as_modules_have_it(P_world):
    check(P_world, torch.nn.Softmax2d(), [numbers()])
    check(P_world, torch.nn.LogSoftmax(dim=2), [numbers()])
    check(P_world, torch.nn.Softmin(dim=3), [numbers()])


@pytest.mark.mpi
def test_of_no_elements(P_world):
    check(P_world, lambda x: torch.softmax(x, -1), [torch.randn(0, dtype=torch.float64, requires_grad=True)])
