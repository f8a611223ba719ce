"""Softmax over split and unsplit dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.dtypes import sum_dtype
from distdl_rma.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.moves import reduced
from distdl_rma.split.operands import of_cut
from distdl_rma.split.reducing import Along
from distdl_rma.split.tensor import SplitTensor, composed


class _Softmax(OperatorFunction):
    # Softmax, or its logarithm, over one dimension that is cut.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: Along, log: bool) -> torch.Tensor:
        (d,) = along.dims
        if x.shape[d]:
            most = x.amax(d, True)
            # Of a row of -inf nothing is left, as in torch.
            local = torch.cat([most, (x - most).exp().sum(d, keepdim=True)], d)
        else:
            local = x
        pairs = along.together(local, "maxima and sums", 2).unflatten(d, (-1, 2))
        tops, sums = pairs.unbind(d + 1)
        most = tops.amax(d, True)
        # What is -inf on one rank is nothing beside the others.
        total = torch.where(tops == -torch.inf, 0, sums * (tops - most).exp()).sum(d, keepdim=True)
        total = torch.where(most == -torch.inf, torch.nan, total)
        y: torch.Tensor = x - most - total.log() if log else (x - most).exp() / total
        ctx.save_for_backward(y)
        ctx.site, ctx.ranks, ctx.dims, ctx.log = along.site, along.ranks, along.dims, log
        ctx.machine = along.site.machine
        return y

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        weighted = gradient if ctx.log else gradient * y
        total = weighted.sum(ctx.dims, keepdim=True)
        total = reduced(ctx.site, total, ctx.ranks, what="gradient, sums")
        return (gradient - y.exp() * total if ctx.log else weighted - y * total), None, None


@rule("reduction", "softmax", "log_softmax", "softmin")
@refusing
@of_cut(empty=False)
def softmax(
    call: Call,
    site: Site,
    x: SplitTensor,
    dim: int | None,
    dtype: torch.dtype | None,
    _stacklevel: int = 0,
) -> Any:
    """Over a split dimension with the largest elements and sums of all ranks, in one message."""
    func, *_ = call
    # What torch chooses where a user does not.
    dim = dim if dim is not None else 0 if x.dim() in (0, 1, 3) else 1
    if func is F.softmin:
        return composed(torch.softmax, composed(torch.neg, x), dim, dtype=dtype)
    along = Along.of(site, x, dim)
    if not along.cut:
        return SplitTensor(func(*(along.local, along.dims[0]), dtype=dtype), along.layout)
    log = func.__name__.endswith("log_softmax")
    local = along.local if dtype is None else along.local.to(dtype)
    wide, along.local = local.to(sum_dtype(local.dtype)), local.detach()
    y: torch.Tensor = _Softmax.apply(wide, along, log)
    return SplitTensor(y.to(local.dtype), along.layout)
