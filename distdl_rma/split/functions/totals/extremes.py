"""Largest and smallest elements, and where they are: of the blocks, then of what the ranks found."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.split.functions.elements.pointwise import pointwise
from distdl_rma.split.moves import reduced
from distdl_rma.split.operands import on_copies
from distdl_rma.split.reducing import Along, arguments
from distdl_rma.split.table import rule
from distdl_rma.split.tensor import SplitTensor, tensors_in


class _Shared(OperatorFunction):
    # The extreme of all ranks; its gradient goes to all elements that are equal to it, in equal parts.
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, extreme: torch.Tensor, along: Along, nan_too: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, extreme)
        ctx.site, ctx.ranks, ctx.dims, ctx.nan_too = along.site, along.ranks, along.dims, nan_too
        ctx.machine = along.site.machine
        return extreme.clone()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, extreme = ctx.saved_tensors
        equal = x == extreme
        if ctx.nan_too:
            equal = equal | (x.isnan() & extreme.isnan())
        count = equal.sum(ctx.dims, keepdim=True)
        count = reduced(ctx.site, count, ctx.ranks, what="gradient, equal elements")
        # Where nothing equals what is not a number, neither is the gradient: as in torch.
        share = torch.where(equal, gradient / count, 0) if ctx.nan_too else equal * gradient / count
        return share, None, None, None


def _extreme(along: Along, largest: bool, keepdim: bool, nan_too: bool) -> SplitTensor:
    function = torch.amax if largest else torch.amin

    def f(y: torch.Tensor) -> torch.Tensor:
        return function(y, along.dims, True)

    x = along.local
    along.local = x.detach()
    y = f(along.together(along.partial(f, x.dtype), "results of ranks"))
    along.local = x
    if x.requires_grad and torch.is_grad_enabled():
        y = _Shared.apply(x, y, along, nan_too)
    return along.result(y, keepdim)


@rule("reduction", "amax", "amin", "aminmax")
def extremes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the blocks, then over the ranks; equal elements share the gradient, on whatever rank they are."""
    given = arguments(func, args, kwargs, dim=None, keepdim=False)
    if not given["input"].is_split:
        return on_copies(func, args, kwargs)
    along = Along.of(func, given["input"], given["dim"])
    if func.__name__ != "aminmax":
        return _extreme(along, func.__name__ == "amax", given["keepdim"], False)
    low, high = (_extreme(along, largest, given["keepdim"], False) for largest in (False, True))
    return torch.return_types.aminmax((low, high))


@rule("reduction", "max", "min")
def largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements; along a dimension with the first of the indices; of two tensors for each element."""
    if len(tensors_in(args, kwargs)) > 1:
        return pointwise(torch.maximum if func.__name__ == "max" else torch.minimum, *_two(args, kwargs))
    given = arguments(func, args, kwargs, dim=None, keepdim=False)
    x, is_max = given["input"], func.__name__ == "max"
    if not x.is_split:
        return on_copies(func, args, kwargs)
    along = Along.of(func, x, given["dim"])
    if given["dim"] is None:
        return _extreme(along, is_max, False, True)
    values, indices = _with_index(along, is_max)
    found = along.result(values, given["keepdim"]), along.result(indices, given["keepdim"])
    return getattr(torch.return_types, func.__name__)(found)


def _two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*args, *(x for x in kwargs.values() if x is not None)), {}


def _with_index(along: Along, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # The value along one dimension, differentiable, and its index in the whole.
    function: Any = torch.max if largest else torch.min
    (d,) = along.dims
    start = along.layout.box(along.layout.partition.me).bounds[d][0]
    if not along.local.shape[d]:
        values = along.partial(lambda y: y, along.local.dtype)
        indices = torch.empty(values.shape, dtype=torch.int64)
    else:
        values, indices = function(along.local, d, True)
        indices = indices + start
    if along.cut:
        values, rank = function(along.together(values, "values of ranks"), d, True)
        indices = along.together(indices, "indices of ranks").gather(d, rank)
    return values, indices


@rule("reduction", "argmax", "argmin")
def index_of_largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index in the whole, of the first of equal elements; without a dimension that among all elements."""
    given = arguments(func, args, kwargs, dim=None, keepdim=False)
    x, largest = given["input"], func.__name__ == "argmax"
    if not x.is_split:
        return on_copies(func, args, kwargs)
    along = Along.of(func, x, given["dim"])
    along.local = along.local.detach()
    if given["dim"] is not None:
        return along.result(_with_index(along, largest)[1], given["keepdim"])
    local, shape = along.local, along.layout.shape

    def best(y: torch.Tensor) -> torch.Tensor:
        return (y.argmax() if largest else y.argmin()).view((1,) * len(shape))

    found = along.partial(best, torch.int64)
    value = found.to(local.dtype)
    if found.numel():
        places = torch.unravel_index(found.reshape(()), local.shape)
        value = local[places].view(found.shape)
        index = torch.zeros((), dtype=torch.int64)
        for at, (start, _), n in zip(
            places, along.layout.box(along.layout.partition.me).bounds, shape, strict=True
        ):
            index = index * n + at + start
        found = index.view(found.shape)
    indices = along.together(found, "indices of ranks").flatten()
    values = along.together(value, "values of ranks").flatten()
    # Of equal ones the first in the order of the whole counts, which need not be that of the ranks.
    indices, order = indices.sort()
    return along.result(indices[best(values[order]).flatten()].view((1,) * len(shape)), given["keepdim"])
