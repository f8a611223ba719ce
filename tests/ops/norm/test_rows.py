"""Sums over rows, whichever way they are computed."""

import numpy as np
import pytest
import torch

from distdl_rma.ops.norm import statistics
from distdl_rma.ops.norm.statistics import Rows

SHAPES = [(3, 4, 50, 41), (2, 3, 1, 1), (5, 0, 7), (4, 70_000), (3, 2, 70_001), (2, 6), (1, 3, 20, 30)]


def some_dims(shape):
    last = len(shape) - 1
    return {(last,), (0, last), tuple(range(1, last + 1)), tuple(range(min(2, last), last + 1)), (0,), ()}


def sums_of(x, dims):
    return x.sum(dims, keepdim=True) if dims else x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_are_those_of_torch_in_double_precision(shape, dtype):
    x, y = (torch.randn(shape).to(dtype) for _ in range(2))
    for dims in some_dims(shape):
        found, wide = Rows(shape, dims), x.double()
        for other in (x, y):
            both = found.sums(x, other)
            assert both.dtype == np.float64
            assert both.shape == (2, *found.shape)
            total, products = map(torch.from_numpy, both)
            torch.testing.assert_close(total, sums_of(wide, dims), rtol=1e-5, atol=1e-2)
            exact = sums_of(wide * other.double(), dims)
            torch.testing.assert_close(products, exact, rtol=1e-6, atol=1e-6 if other is x else 1e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_do_not_depend_on_pieces_nor_on_the_place_in_memory(shape, monkeypatch):
    a, b = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    for dims in some_dims(shape):
        exact = torch.stack([sums_of(a, dims), sums_of(a * b, dims)])
        for piece in (1, 3, 8, 1 << 20):
            monkeypatch.setattr(statistics, "_PIECE", piece)
            torch.testing.assert_close(torch.from_numpy(Rows(shape, dims).sums(a, b)), exact)
        apart = a.transpose(0, -1).contiguous().transpose(0, -1)
        for other in (apart, torch._neg_view(-a)):
            torch.testing.assert_close(torch.from_numpy(Rows(shape, dims).sums(other, b)), exact)
