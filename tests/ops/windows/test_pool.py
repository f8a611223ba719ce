"""Sliding windows, pooled where the outputs will be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ShapeError
from distdl_rma.ops.windows import argmax_windows, extents_to_pool, flat_index, gather_at, outer_product


def test_there_must_be_something_to_pool():
    assert extents_to_pool((0, 2, 3, 4)) == (3, 4)
    with pytest.raises(ShapeError, match=r"the global input \(1, 2, 0, 4\) has no elements to pool"):
        extents_to_pool((1, 2, 0, 4))


def test_divisors_are_products_over_the_dimensions():
    assert torch.equal(
        outer_product([[1, 2], [3, 5, 7]], torch.float32), torch.tensor([[3.0, 5, 7], [6, 10, 14]])
    )
    assert outer_product([[1, 2], []], torch.float64).shape == (2, 0)


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
