"""Sums over rows, whichever way they are computed."""

import pytest
import torch

from distdl_rma.ops.norm import statistics
from distdl_rma.ops.norm.statistics import row_sums, square_sums, sums_and_products

SHAPES = [(3, 4, 50, 41), (2, 3, 1, 1), (5, 0, 7), (4, 70_000), (2, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_torch_in_double_precision(shape, dtype):
    x = torch.randn(shape).to(dtype)
    last = len(shape) - 1
    for dims in ((last,), (0, last), tuple(range(1, last + 1)), (0,)):
        exact = x.double().sum(dims, keepdim=True)
        torch.testing.assert_close(row_sums(x, dims), exact, rtol=1e-5, atol=1e-2, check_dtype=True)
        squares = x.double().square().sum(dims, keepdim=True)
        torch.testing.assert_close(square_sums(x, dims), squares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_of_batch_norm_gives_the_sums_that_two_passes_give(shape, monkeypatch):
    a, b = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    last = len(shape) - 1
    for dims in ((last,), (0, last)):
        mean = torch.randn([1 if d in dims else n for d, n in enumerate(shape)], dtype=torch.float64)
        for few in (1, 1 << 40):
            monkeypatch.setattr(statistics, "_FEW", few)
            sums, products = sums_and_products(a, b, mean, dims)
            torch.testing.assert_close(sums, a.sum(dims, keepdim=True))
            torch.testing.assert_close(products, (a * (b - mean)).sum(dims, keepdim=True))
