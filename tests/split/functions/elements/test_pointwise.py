"""Functions of single elements."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.split.against_whole import check

SHAPE = 2, 3, 5, 4
UNARY = [
    torch.relu,
    torch.tanh,
    F.gelu,
    F.silu,
    F.hardswish,
    torch.Tensor.square,
    lambda x: x.clamp(-0.5, 0.5),
    lambda x: -x,
]
BINARY = [
    torch.add,
    torch.mul,
    lambda x, y: x / (y * y + 1),
    lambda x, y: torch.where(x > 0, x, y),
    torch.maximum,
    torch.lerp,
]
BESIDE = [SHAPE, (3, 1, 1), (1, 1, 5, 4), (4,), (2, 1, 1, 1), ()]


def numbers(shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.mpi
@pytest.mark.parametrize("function", UNARY)
def test_of_one(P_world, function):
    check(P_world, function, [numbers(SHAPE)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("extent", [1, 5])
def test_comparisons_write_whole_numbers_whatever_needs_a_gradient(P_world, extent):
    def written(x, y):
        found = [x.clone().greater_(y), x.bool().eq_(y), x.clone().copy_(y), x.clone().logical_and_(y)]
        return [each.detach() for each in found]

    y = torch.ones(extent, 2, requires_grad=True)
    check(P_world, written, [torch.arange(extent * 2).view(extent, 2), y], gradients=False)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("function", BINARY[:-1])
def test_of_two_split_ones_and_beside_plain_ones(P_world, function):
    check(P_world, function, [numbers(SHAPE), numbers(SHAPE)])
    for shape in BESIDE:
        check(P_world, function, [numbers(SHAPE)], [numbers(shape)])


@pytest.mark.mpi
def test_in_place(P_world):
    check(P_world, lambda x, y: x.clone().add_(1).mul_(y).relu_(), [numbers(SHAPE), numbers(SHAPE)])


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 3])
def test_prelu(P_world, count):
    check(P_world, F.prelu, [numbers(SHAPE)], [numbers((count,))])
    check(P_world, lambda w, x: F.prelu(weight=w, input=x), [numbers((count,))], [numbers(SHAPE)])


@pytest.mark.mpi
def test_prelu_of_numbers_and_vectors(P_world):
    check(P_world, lambda w, x: F.prelu(x, w), [numbers((1,))], [numbers(())])
    check(P_world, lambda x: F.prelu(x.sum(), x.mean()), [numbers((5,))])
    check(P_world, F.prelu, [numbers((5,))], [numbers(())])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_tensors_that_are_cut_otherwise_move(P_world):
    def moved(x, y):
        return x * (y.redistribute(None, None, None, 0) if hasattr(y, "redistribute") else y) + 1

    size = P_world.size
    check(
        P_world,
        moved,
        [numbers((4, 3, 5, 4)), numbers((4, 3, 5, 4))],
        only=[(1, 1, 1, size), (1, 1, size, 1)],
    )


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_copies_beside_blocks(P_world):
    def gated(x, y):
        gate = y.redistribute() if hasattr(y, "redistribute") else y
        return x * gate.sigmoid()

    check(P_world, gated, [numbers(SHAPE), numbers((2, 3, 1, 1))])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_elements_are_compared_with_all_of_others(P_world):
    x, bounds = numbers(SHAPE).detach(), torch.linspace(-1, 1, 7, dtype=torch.float64)
    for function in (
        torch.bucketize,
        lambda x, b: torch.bucketize(x, boundaries=b, right=True, out_int32=True),
        lambda x, b: torch.bucketize(0.3, b),
        lambda x, b: torch.isin((3 * x).round(), (b * 3).round()),
        lambda x, b: torch.isin(elements=x, test_elements=b[:2], invert=True),
    ):
        check(P_world, function, [x], [bounds], gradients=False)
    check(P_world, lambda x, y: torch.isin(x, y[:1] * 1.0), [x, x.clone()], gradients=False)
    check(P_world, lambda x: torch.isin(x, 0.0), [x], gradients=False)


@pytest.mark.mpi
def test_a_gradient_that_torch_has_no_memory_for_is_zeros(P_world):
    check(P_world, torch.sgn, [torch.randn(4, 3, dtype=torch.float64).requires_grad_()])
