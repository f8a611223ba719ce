"""Sums over rows, whichever way they are computed."""

import pytest
import torch

from distdl_rma.ops.norm import statistics
from distdl_rma.ops.norm.statistics import Rows

SHAPES = [(3, 4, 50, 41), (2, 3, 1, 1), (5, 0, 7), (4, 70_000), (3, 2, 70_001), (2, 6), (1, 3, 20, 30)]


def some_dims(shape):
    last = len(shape) - 1
    return {(last,), (0, last), tuple(range(1, last + 1)), tuple(range(min(2, last), last + 1)), (0,)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_torch_in_double_precision(shape, dtype):
    x = torch.randn(shape).to(dtype)
    for dims in some_dims(shape):
        found, wide = Rows(shape, dims), x.double()
        exact = wide.sum(dims, keepdim=True)
        torch.testing.assert_close(torch.from_numpy(found.sums(x)).double(), exact, rtol=1e-5, atol=1e-2)
        squares = wide.square().sum(dims, keepdim=True)
        torch.testing.assert_close(torch.from_numpy(found.squares(x)).double(), squares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_of_batch_norm_gives_the_sums_that_two_passes_give(shape, monkeypatch):
    a, b = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    for dims in some_dims(shape):
        mean = torch.randn([1 if d in dims else n for d, n in enumerate(shape)], dtype=torch.float64)
        for few in (1, 1 << 40):
            monkeypatch.setattr(statistics, "_FEW", few)
            sums, products = map(torch.from_numpy, Rows(shape, dims).products(a, b, mean))
            torch.testing.assert_close(sums, a.sum(dims, keepdim=True))
            torch.testing.assert_close(products, (a * (b - mean)).sum(dims, keepdim=True))
