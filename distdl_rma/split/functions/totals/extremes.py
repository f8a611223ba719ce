"""Largest and smallest elements, and where they are: of the blocks, then of what the ranks found."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.split.calls.refusals import checked_rule
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call
from distdl_rma.split.functions.elements.pointwise import pointwise
from distdl_rma.split.moves import reduced
from distdl_rma.split.operands import of_cut
from distdl_rma.split.reducing import Along
from distdl_rma.split.tensor import SplitTensor, tensors_in

# Whole numbers in the order of numbers of as many bits; what is not a number is beyond all others.
_KEYS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_NOWHERE = torch.iinfo(torch.int64).max


def _keys(x: torch.Tensor, largest: bool) -> torch.Tensor:
    kind = _KEYS.get(x.dtype)
    if kind is None:
        return x
    bounds = torch.iinfo(kind)
    words = x.view(kind)
    keys = torch.where(words < 0, words ^ bounds.max, words)
    return torch.where(x.isnan(), bounds.max if largest else bounds.min, keys)


def _numbers(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _KEYS:
        return keys
    return torch.where(keys < 0, keys ^ torch.iinfo(keys.dtype).max, keys).view(dtype)


def _worst(dtype: torch.dtype, largest: bool) -> float:
    # What is no more than any other; of whole numbers where a block has nothing.
    if dtype.is_floating_point:
        return -torch.inf if largest else torch.inf
    if dtype is torch.bool:
        return not largest
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _of_ranks(along: Along, y: torch.Tensor, largest: bool) -> torch.Tensor:
    # Of what the ranks found, outside of autograd: a vector of results, however many ranks there are.
    if not along.cut:
        return y.detach()
    keys = reduced(
        along.site, _keys(y.detach(), largest), along.ranks, "max" if largest else "min", "extreme"
    )
    return _numbers(keys, y.dtype)


def _is_extreme(x: torch.Tensor, extreme: torch.Tensor) -> torch.Tensor:
    equal = x == extreme
    return equal | (x.isnan() & extreme.isnan()) if x.is_floating_point() else equal


def _nothing(along: Along, largest: bool) -> torch.Tensor | None:
    # In the place of what a block without elements has, in its graph; None where it has some.
    local, dims = along.local, along.dims
    if not along.count or local.dtype.is_complex or all(local.shape[d] for d in dims):
        return None
    nothing = local.sum(dims, keepdim=True)
    return (nothing * 0 + _worst(local.dtype, largest)).to(local.dtype)


class _Chosen(OperatorFunction):
    # The extreme of all ranks; its gradient goes to the rank whose element it is.
    @staticmethod
    def forward(ctx: Any, _own: torch.Tensor, extreme: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mine)
        return extreme.clone()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (mine,) = ctx.saved_tensors
        return gradient.where(mine, 0), None, None


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
        equal = _is_extreme(x, extreme) if ctx.nan_too else x == extreme
        count = equal.sum(ctx.dims, keepdim=True)
        count = reduced(ctx.site, count, ctx.ranks, what="gradient, equal elements")
        # Where nothing equals what is not a number, neither is the gradient: as in torch.
        share = torch.where(equal, gradient / count, 0) if ctx.nan_too else equal * gradient / count
        return share, None, None, None


def _extreme(along: Along, largest: bool, keepdim: bool, nan_too: bool) -> SplitTensor:
    function = torch.amax if largest else torch.amin
    x = along.local
    found = _nothing(along, largest)
    y = _of_ranks(along, function(x.detach(), along.dims, True) if found is None else found, largest)
    if x.requires_grad and torch.is_grad_enabled():
        y = _Shared.apply(x, y, along, nan_too)
    return along.result(y, keepdim)


@checked_rule("reduction", "amax", "amin", "aminmax")
@of_cut()
def extremes(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool) -> Any:
    """Of the blocks, then over the ranks; equal elements share the gradient, on whatever rank they are."""
    along, name = Along.of(site, x, dim), call[0].__name__
    if name != "aminmax":
        return _extreme(along, name == "amax", keepdim, False)
    low, high = (_extreme(along, largest, keepdim, False) for largest in (False, True))
    return torch.return_types.aminmax((low, high))


@checked_rule("reduction", "max", "min")
def largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of all elements; along a dimension with the first of the indices; of two tensors for each element."""
    if len(tensors_in(args, kwargs)) > 1:
        both = (*args, *(x for x in kwargs.values() if x is not None))
        return pointwise(torch.maximum if func.__name__ == "max" else torch.minimum, both, {})
    return _largest(func, args, kwargs)


@of_cut()
def _largest(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool, other: Any) -> Any:
    along, name = Along.of(site, x, dim), call[0].__name__
    if dim is None:
        return _extreme(along, name == "max", False, True)
    values, indices = _with_index(along, name == "max")
    return getattr(torch.return_types, name)((along.result(values, keepdim), along.result(indices, keepdim)))


def _with_index(along: Along, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # The value along one dimension, differentiable, and its index in the whole.
    function: Any = torch.max if largest else torch.min
    (d,) = along.dims
    values = _nothing(along, largest)
    if values is None:
        values, indices = function(along.local, d, True)
        indices = indices + along.layout.box(along.layout.partition.me).bounds[d][0]
    else:
        indices = torch.full(values.shape, _NOWHERE)
    if not along.cut:
        return values, indices
    extreme, first = _first(along, values, indices, largest)
    if values.requires_grad and torch.is_grad_enabled():
        extreme = _Chosen.apply(values, extreme, indices == first)
    return extreme, first


def _first(
    along: Along, values: torch.Tensor, indices: torch.Tensor, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # The extreme of all ranks, and the first of the indices where it is.
    extreme = _of_ranks(along, values, largest)
    indices = indices.where(_is_extreme(values.detach(), extreme), _NOWHERE)
    return extreme, reduced(along.site, indices, along.ranks, "min", "first index")


@checked_rule("reduction", "argmax", "argmin")
@of_cut()
def index_of_largest(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool) -> Any:
    """Index in the whole, of the first of equal elements; without a dimension that among all elements."""
    largest, along = call[0].__name__ == "argmax", Along.of(site, x, dim)
    along.local = along.local.detach()
    if dim is not None:
        return along.result(_with_index(along, largest)[1], keepdim)
    local, shape = along.local, along.layout.shape
    value, index = _nothing(along, largest), torch.tensor(_NOWHERE)
    if value is None:
        found = local.argmax() if largest else local.argmin()
        places = torch.unravel_index(found, local.shape)
        value, index = local[places].view((1,) * len(shape)), torch.tensor(0)
        bounds = along.layout.box(along.layout.partition.me).bounds
        for at, (start, _), n in zip(places, bounds, shape, strict=True):
            index = index * n + at + start
    # Of equal ones the first in the order of the whole counts, which need not be that of the ranks.
    index = index.view((1,) * len(shape))
    return along.result(_first(along, value, index, largest)[1] if along.cut else index, keepdim)
