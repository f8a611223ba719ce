"""Sliding windows, pooled where the outputs will be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ShapeError
from distdl_rma.geometry.halo import Stencil
from distdl_rma.ops.windows import (
    AvgPooling,
    AvgPoolOptions,
    MaxPooling,
    MaxPoolOptions,
    argmax_windows,
    flat_index,
    gather_at,
    outer_product,
)
from tests.layers.random_shards import cut
from tests.ops.windows.known_input import equals_sequential, operation_on, rows

THREES = Stencil.of((3, 3), (2, 2), (1, 1), ((1, 1), (1, 1)), True)


def test_divisors_are_products_over_the_dimensions():
    assert torch.equal(
        outer_product([[1, 2], [3, 5, 7]], torch.float32), torch.tensor([[3.0, 5, 7], [6, 10, 14]])
    )
    assert outer_product([[1, 2], []], torch.float64).shape == (2, 0)


@pytest.mark.mpi
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("divisor", [None, 5])
def test_averages_are_those_of_the_whole(P_world, include, divisor):
    def reference(x):
        return F.avg_pool2d(x, 3, 2, 1, True, include, divisor)

    x = torch.randn(2, 3, 10, 7, dtype=torch.float64)
    equals_sequential(rows(P_world, 2), AvgPooling, AvgPoolOptions(THREES, include, divisor), x, reference)


@pytest.mark.mpi
def test_largest_elements_are_those_of_the_whole_and_so_are_their_places(P_world):
    x = torch.randint(0, 3, (2, 3, 10, 7)).double()
    x[0, 0] = float("-inf")
    _, index = F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True)
    operation = equals_sequential(
        rows(P_world, 2),
        MaxPooling,
        MaxPoolOptions(THREES, True),
        x,
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    )
    y = torch.empty(operation.box.shape)
    assert torch.equal(operation.take_indices(y), cut(operation.output, index))
    assert not operation.take_indices(y).any(), "they are taken once"


@pytest.mark.mpi
def test_windows_must_fit_and_read_something(P_world):
    large = Stencil.of((4, 4), (1, 1), (1, 1), ((0, 0), (0, 0)))
    with pytest.raises(ShapeError, match=r"global input \(3, 9\) is too small for kernel \(4, 4\)"):
        operation_on(rows(P_world, 2), AvgPooling, AvgPoolOptions(large), (1, 1, 3, 9))
    wide = Stencil.of((2,), (1,), (2,), ((1, 1),))
    with pytest.raises(ShapeError, match="output 0 of 1 reads nothing but padding of the global input"):
        operation_on(rows(P_world), MaxPooling, MaxPoolOptions(wide), (1, 1, 1))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_coordinates_are_those_of_torchs_indices(kernel, stride, dilation, seed):
    torch.manual_seed(seed)
    x = torch.randint(0, 4, (2, 3, 7, 6)).double()
    expected, index = F.max_pool2d(x, kernel, stride, 0, dilation, return_indices=True)
    found = argmax_windows(x, [kernel] * 2, [stride] * 2, [dilation] * 2)
    assert torch.equal(flat_index(found, x.shape[2:]), index)
    assert torch.equal(gather_at(x, found), expected)


def test_the_first_of_equal_elements_counts_and_nan_above_all():
    x = torch.tensor([1.0, 1.0, float("inf"), float("nan"), 5.0, 5.0]).view(1, 1, -1)
    (found,) = argmax_windows(x, [2], [2], [1])
    assert found.flatten().tolist() == [0, 3, 4]


def test_the_gradient_of_an_element_that_wins_twice_is_summed():
    x = torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64).view(1, 1, -1).requires_grad_()
    gather_at(x, argmax_windows(x, [2], [1], [1])).sum().backward()
    assert x.grad.flatten().tolist() == [0.0, 2.0, 0.0]
