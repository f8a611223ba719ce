"""Sums over some dimensions of a local tensor, in float64 where it matters and fast where it does not."""

from __future__ import annotations

from math import prod

import torch

# Rows of up to so many elements may be added one after the other.
_SHORT = 1 << 16
# Below so many elements a call of the kernel costs more than another pass.
_FEW = 1 << 12


def row_sums(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Sum over some dimensions, which are kept with extent 1; in float64."""
    outer = _outer(x, dims)
    if outer == x.dim():
        return x.sum(dims, keepdim=True, dtype=torch.float64)
    # Summing is exact enough in the type of the data, pairwise as torch does it, and ten times as fast.
    return _rest(x.sum(tuple(range(outer, x.dim())), keepdim=True).to(torch.float64), dims, outer)


def square_sums(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Sum of squares over some dimensions, which are kept with extent 1; in float64."""
    outer = _outer(x, dims)
    if outer == x.dim() or not 0 < prod(x.shape[outer:]) <= _SHORT:
        return row_sums(x.square(), dims)
    norms = torch.linalg.vector_norm(x, 2, tuple(range(outer, x.dim())), keepdim=True)
    return _rest(norms.to(torch.float64).square_(), dims, outer)


def sums_and_products(
    a: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of ``a`` and of ``a * (b - mean)`` over some dimensions, kept with extent 1; in float64.

    ``a`` and ``b`` are of one shape, to which ``mean`` broadcasts, of extent 1 in ``dims``.
    """
    outer = _outer(a, dims)
    rows, length = prod(a.shape[:outer]), prod(a.shape[outer:])
    # The kernel takes rows of one element for another layout, and is wrong there.
    if length < 2 or a.numel() < _FEW:
        return row_sums(a, dims), row_sums(a * (b - mean), dims)
    # The trailing ones by the kernel of batch norm: one pass, without a tensor of products.
    flat = mean.expand(*a.shape[:outer], *mean.shape[outer:]).reshape(rows)
    one, mask = torch.ones_like(flat), (False, True, True)
    in_rows = (t.reshape(1, rows, length) for t in (a, b))
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        *in_rows, None, None, None, flat, one, True, 0.0, mask
    )
    shape = (*a.shape[:outer], *(1,) * (a.dim() - outer))
    products = _rest(products.to(torch.float64).view(shape), dims, outer)
    if length > _SHORT:
        return row_sums(a, dims), products
    return _rest(sums.to(torch.float64).view(shape), dims, outer), products


def _rest(rows: torch.Tensor, dims: tuple[int, ...], outer: int) -> torch.Tensor:
    # What is left to sum over, once the trailing dimensions are done.
    before = tuple(d for d in dims if d < outer)
    return rows.sum(before, keepdim=True) if before else rows


def _outer(x: torch.Tensor, dims: tuple[int, ...]) -> int:
    # Number of dimensions before those at the end that are all summed over.
    outer = x.dim()
    while outer and outer - 1 in dims:
        outer -= 1
    return outer
