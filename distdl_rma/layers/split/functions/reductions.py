"""Reductions: of blocks first, then over the ranks; results have torch's dtypes.

Every rule here has three steps. Only the second one sends data, and only if a reduced dimension is cut:

    rank 0   block --torch's function--> partial --.
                                                   +--> result, the same on all ranks of the line
    rank 1   block --torch's function--> partial --'

The *line* are the ranks whose blocks contribute to the same results (:class:`Along`); all other cuts stay.
The families differ in how they combine partial results, and hence in their gradients:

- *Sums* (``sum``, ``mean``, ``var``, norms of order 0): an allreduce, whose backward hands the gradient on
  (``all_sum``): the gradient of an element does not depend on other elements.
- *Of the whole* (``logsumexp``, ``prod``, norms): every rank gets all partial results and reduces these.
  Differentiating through a partial result would be wrong where it overflows and the whole does not. So the
  gradient is written down here, from the element and the whole result (:class:`_OfWhole`).
- *Extremes* (``max``, ``amin``): an allreduce of integers that are ordered like the numbers. MPI does not
  say what the maximum of a NaN is, and a short float would need a type of its own; integers have one order.

Partial results are in the longer dtype of ``sum_dtype`` and are rounded once, at the end, as torch's kernels
do within a block. ``softmax`` is here too, since it needs a reduction over the same line.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distdl_rma.layers.checks.user_frames import warn_user
from distdl_rma.layers.dtypes import BIT_WORDS, sum_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.functions.pointwise import pointwise
from distdl_rma.layers.split.operands import of_any_cut, of_cut, on_whole_tensors
from distdl_rma.layers.split.redistribution import reduced
from distdl_rma.layers.split.reduction_axes import Along, OnBlock, computed
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, composed
from distdl_rma.segments.machine import Machine


def summed_dtype(x: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Dtype of a sum in torch."""
    own = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    return own if dtype is None else dtype


@checked_rule("reduction", "sum", "nansum", "mean", "nanmean", "count_nonzero")
@of_cut()
def sums(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool = False, dtype: Any = None) -> Any:
    """Each rank sums its block, short types in a longer one; ranks sum the results."""
    name = call[0].__name__
    along = Along.of(site, x, dim)
    local, dims = along.local, along.dims
    if name == "count_nonzero":
        return along.result(along.summed((local != 0).sum(dims, keepdim=True)), keepdim)
    values = local if dtype is None else local.to(dtype)
    dtype = summed_dtype(local, dtype)
    # A sum of bools is whether any is true.
    wide = torch.int64 if dtype is torch.bool else sum_dtype(dtype)
    y = along.summed((torch.nansum if name.startswith("nan") else torch.sum)(values, dims, True, dtype=wide))
    if name == "mean":
        y = y / along.count
    if name == "nanmean":
        y = y / along.summed(values.isnan().logical_not().sum(dims, keepdim=True))
    return along.result(y.to(dtype), keepdim)


@checked_rule("reduction", "any", "all")
@of_cut()
def truth(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool) -> Any:
    """Each rank reduces its block, then all ranks."""
    func, *_ = call
    if isinstance(dim, (tuple, list)) and not dim:
        # Unlike for sums, an empty list means each element.
        return SplitTensor(func(checked_block(x), ()), x._layout)
    along = Along.of(site, x, dim)
    y = func(along.local, along.dims, keepdim=True)
    if along.cut:
        y = reduced(site, y, along.ranks, "max" if func.__name__ == "any" else "min")
    return along.result(y, keepdim)


# The gradient of a block, from the gradient of the whole result, the block and the whole result.
Slope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _OfWhole(OperatorFunction):
    # A result of the blocks of all ranks, which the caller has computed. The gradient is torch's for the
    # whole: partial results of a block are no part of it, since they may be infinite or NaN where the whole
    # is not. A slope that waits for other ranks needs ``machine``, to which an error in it is reported.
    # Slopes hold tensors of their call.
    is_step = False

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, result: torch.Tensor, slope: Slope, machine: Machine | None = None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, result)
        ctx.slope, ctx.machine = slope, machine
        return result.clone()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.slope(gradient, *ctx.saved_tensors), None, None, None


def of_whole(along: Along, reduce: OnBlock, slope: Slope) -> torch.Tensor:
    """Reduce the blocks, then the ranks' results; the gradient is ``slope(gradient, block, result)``.

    If no reduced dimension is cut, it is torch's of the block, with all further derivatives.
    """
    y: torch.Tensor
    if not along.cut:
        y = reduce(along.local)
        return y
    with torch.no_grad():
        result = reduce(along.together(computed(reduce, along.local), "results of ranks"))
    y = _OfWhole.apply(along.local, result, slope)
    return y


@checked_rule("reduction", "logsumexp")
@of_cut()
def logsumexp(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool) -> Any:
    """Each rank reduces its block; every rank gets all results and reduces these."""
    along = Along.of(site, x, dim)
    exact = along.local.dtype.is_floating_point or along.local.dtype.is_complex
    dtype = along.local.dtype if exact else torch.get_default_dtype()
    # A short dtype would round twice, and the gradient is an exponential of the rounded result.
    along.local = along.local.to(sum_dtype(dtype))
    y = of_whole(
        along, lambda y: torch.logsumexp(y, along.dims, True), lambda g, x, y: g * (x - y).exp().conj()
    )
    return along.result(y.to(dtype), keepdim)


@checked_rule("reduction", "prod")
@of_cut()
def product(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool, dtype: Any = None) -> Any:
    """Each rank multiplies its elements; every rank gets the whole tensor if the dimension is cut."""
    along = Along.of(site, x, dim)
    if along.cut:
        return on_whole_tensors(*call)
    dtype = summed_dtype(along.local, dtype)
    y = along.local.to(sum_dtype(dtype))
    # Torch multiplies along one dimension only.
    for d in along.dims:
        y = y.prod(d, keepdim=True)
    return along.result(y.to(dtype), keepdim)


@checked_rule("reduction", "var", "std", "var_mean", "std_mean")
@of_cut(uncut=True)
def variance(
    call: Call, site: Site, x: SplitTensor, dim: Any, unbiased: Any, keepdim: bool, correction: Any
) -> Any:
    """Ranks sum the mean first, then squared distances from it."""
    # Not sums of x and of x * x in one message: their difference loses all digits where the mean is large.
    func, *_ = call
    # The second positional argument is the dimensions, or ``unbiased``.
    if isinstance(dim, bool):
        passed = call[1][2:]
        dim, unbiased, keepdim = None, dim, passed[0] if passed else keepdim
    if correction is None:
        correction = 1 if "correction" in call[2] or unbiased else 0
    along = Along.of(site, x, dim)
    dtype, dims, cut, fails = along.local.dtype, along.dims, along.cut, correction >= along.count

    if fails:
        # As in torch, results and gradients are infinite or NaN, with a warning.
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = on_whole_tensors(*call)
        for each in warned:
            warn_user(str(each.message), each.category)
        return found
    if not cut:
        found = computed(lambda x: func(x, dim, correction=correction, keepdim=True), along.local)
        return mapped(lambda each: along.result(each, keepdim), found)
    values = along.local.to(sum_dtype(dtype))
    mean = along.summed(values.sum(dims, keepdim=True)) / along.count
    degrees, centre, is_std = along.count - correction, mean.detach(), func.__name__.startswith("std")
    with torch.no_grad():
        y = along.summed((values - centre).abs().square().sum(dims, keepdim=True))
        y = y / torch.tensor(degrees, dtype=y.dtype)

    def slope(gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        by_variance = torch.where(y == 0, 0, gradient / (2 * y)) if is_std else gradient
        return torch.mul(2 / degrees * by_variance, x - centre)

    y = _OfWhole.apply(values, y.sqrt() if is_std else y, slope)
    found = along.result(y.to(dtype.to_real()), keepdim)
    return (found, along.result(mean.to(dtype), keepdim)) if func.__name__.endswith("_mean") else found


def _slope_of_norm(order: float, gradient: torch.Tensor, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    # For finite orders but 0. At zero, where there is no slope, torch says zero.
    if order == 1:
        return gradient * x.sgn()
    if order == 2:
        return gradient * torch.where(norm == 0, 0, x / norm)
    powers = x.sgn() * x.abs() ** (order - 1)
    if order < 1:
        return torch.where(x == 0, 0, powers) * gradient * norm ** (1 - order)
    return powers * torch.where(norm == 0, 0, gradient / norm ** (order - 1))


@checked_rule("norm", "vector_norm")
@of_cut()
def vector_norm(
    call: Call, site: Site, x: SplitTensor, ord: Any, dim: Any, keepdim: bool, dtype: torch.dtype | None
) -> Any:
    """Each rank computes the norm of its block, of any order; ranks combine these norms."""
    x = x if dtype is None else composed(torch.Tensor.to, x, dtype)
    order, found = float(ord), x.dtype.to_real()
    along = Along.of(site, x, dim)
    if abs(order) == torch.inf and along.cut:
        return _extreme(Along.of(site, composed(torch.abs, x), dim), order > 0, keepdim, True, True)
    along.local = along.local.to(sum_dtype(x.dtype))
    if order == 0:
        counts = torch.linalg.vector_norm(along.local, 0, along.dims, True)
        return along.result(along.summed(counts).to(found), keepdim)
    slope = partial(_slope_of_norm, order)
    y = of_whole(along, lambda y: torch.linalg.vector_norm(y, order, along.dims, True), slope)
    return along.result(y.to(found), keepdim)


@checked_rule("norm", torch.linalg.norm, torch.linalg.matrix_norm, "dist")
@of_any_cut
def norm(call: Call, site: Site, x: Any, **given: Any) -> Any:
    """Ranks combine norms of their blocks; other norms of matrices are of the whole tensor, on every rank."""
    func, *_ = call
    vector_norm = torch.linalg.vector_norm
    if 0 in x.shape:
        return on_whole_tensors(*call)
    if func.__name__ == "dist":
        return composed(vector_norm, composed(torch.sub, x, given["other"]), given["p"])
    order, dim, keepdim, dtype = (given[name] for name in ("ord", "dim", "keepdim", "dtype"))
    if dim is None and order is not None:
        dim = tuple(range(x.dim()))
    as_vector = order is None or not (isinstance(dim, (tuple, list)) and len(dim) == 2)
    if as_vector or order == "fro":
        return composed(vector_norm, x, 2 if order in (None, "fro") else order, dim, keepdim, dtype=dtype)
    return on_whole_tensors(*call)


class _Softmax(OperatorFunction):
    # Softmax, or its logarithm, over one cut dimension. A rank's largest element m and sum of exponentials s,
    # relative to m, are enough: with M = max(m), the whole sum is that of s * exp(m - M). Both travel in one
    # message, side by side along the dimension; a block without elements sends nothing.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, along: Along, log: bool) -> torch.Tensor:
        (d,) = along.dims
        if x.shape[d]:
            most = x.amax(d, True)
            # A row of -inf gives NaN, as in torch.
            local = torch.cat([most, (x - most).exp().sum(d, keepdim=True)], d)
        else:
            local = x
        pairs = along.together(local, "maxima and sums", 2).unflatten(d, (-1, 2))
        tops, sums = pairs.unbind(d + 1)
        most = tops.amax(d, True)
        # A rank with only -inf adds nothing.
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


@checked_rule("reduction", "softmax", "log_softmax")
@of_cut(empty=False)
def softmax(
    call: Call, site: Site, x: SplitTensor, dim: int | None, dtype: torch.dtype | None, **_stack: Any
) -> Any:
    """If the dimension is cut, ranks exchange their largest elements and sums in one message."""
    func, *_ = call
    # Torch's default, if the user names no dimension.
    dim = dim if dim is not None else 0 if x.dim() in (0, 1, 3) else 1
    along = Along.of(site, x, dim)
    if not along.cut:
        return SplitTensor(func(*(along.local, along.dims[0]), dtype=dtype), along.layout)
    log = func.__name__.endswith("log_softmax")
    local = along.local if dtype is None else along.local.to(dtype)
    wide, along.local = local.to(sum_dtype(local.dtype)), local.detach()
    y: torch.Tensor = _Softmax.apply(wide, along, log)
    return SplitTensor(y.to(local.dtype), along.layout)


def _of_ranks(along: Along, y: torch.Tensor, largest: bool) -> torch.Tensor:
    # The extreme over the ranks, outside of autograd, by integers in the order of the numbers. The bits of a
    # positive float, read as an integer, grow with it. Those of a negative one fall: all bits but the sign
    # are inverted. So -0.0 is below 0.0. NaN is the best of all: as in torch, it wins.
    dtype, floats = y.dtype, y.is_floating_point()
    kind = BIT_WORDS[dtype.itemsize][0] if floats else torch.int64
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    best, worst = (high, low) if largest else (low, high)
    if floats:
        words = y.view(kind)
        keys = torch.where(y.isnan(), best, torch.where(words < 0, words ^ high, words))
    else:
        keys = y.to(kind)
    if not y.numel():
        # That of a block without elements.
        keys = keys.new_full([1 if d in along.dims else n for d, n in enumerate(y.shape)], worst)
    keys = reduced(along.site, keys, along.ranks, "max" if largest else "min", "extreme")
    return torch.where(keys < 0, keys ^ high, keys).view(dtype) if floats else keys.to(dtype)


def _extreme(along: Along, largest: bool, keepdim: bool, nan_too: bool, multiplies: bool) -> SplitTensor:
    # All elements that are equal to the extreme share its gradient, those of other ranks too. Functions of
    # torch differ in two ways: whether a NaN equals the result NaN, and whether a gradient that is NaN (as
    # where no element equals the result) is multiplied by 0 for the other elements, or not read.
    function, dims, site, ranks = torch.amax if largest else torch.amin, along.dims, along.site, along.ranks
    if not along.cut:
        return along.result(function(along.local, dims, True), keepdim)
    partial_result = computed(lambda x: function(x, dims, True), along.local.detach())
    y = _of_ranks(along, partial_result, largest)

    def slope(gradient: torch.Tensor, x: torch.Tensor, extreme: torch.Tensor) -> torch.Tensor:
        equal = x == extreme
        if nan_too and x.is_floating_point():
            equal = equal | (x.isnan() & extreme.isnan())
        count = reduced(site, equal.sum(dims, keepdim=True), ranks, what="gradient, equal elements")
        share = gradient / count
        return share * equal if multiplies else torch.where(equal, share, 0)

    return along.result(_OfWhole.apply(along.local, y, slope, site.machine), keepdim)


@checked_rule("reduction", "amax", "amin", "aminmax")
@of_cut()
def extremes(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool) -> Any:
    """Each rank reduces its block, then all ranks; equal elements of all ranks share the gradient."""
    along, name = Along.of(site, x, dim), call[0].__name__
    if name != "aminmax":
        return _extreme(along, name == "amax", keepdim, False, True)
    low, high = (_extreme(along, largest, keepdim, False, True) for largest in (False, True))
    return torch.return_types.aminmax((low, high))


@checked_rule("reduction", "max", "min")
@of_any_cut
def largest(call: Call, site: Site, x: Any, dim: Any, keepdim: bool, other: Any) -> Any:
    """Of all elements, along a dimension with the first index, or of two tensors elementwise."""
    name, both = call[0].__name__, tensors_in(x, dim, other)
    if len(both) > 1:
        return pointwise(torch.maximum if name == "max" else torch.minimum, tuple(both), {})
    along = Along.of(site, x, dim)
    if dim is None:
        return _extreme(along, name == "max", False, True, False)
    values, indices = _with_index(along, name == "max")
    return getattr(torch.return_types, name)((along.result(values, keepdim), along.result(indices, keepdim)))


def _with_index(along: Along, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # The extreme along one dimension, differentiable, and its global index: the first of equal ones is on the
    # first of the ranks that have one.
    function: Any = torch.max if largest else torch.min
    (d,) = along.dims
    values, indices = computed(lambda x: function(x, d, True), along.local)
    if not along.cut:
        return values, indices
    indices = indices + along.layout.own_box.bounds[d][0]
    values, ranks = function(along.together(values, "extremes"), d, True)
    return values, along.together(indices, "indices").gather(d, ranks)


@checked_rule("reduction", "argmax", "argmin")
@of_cut()
def index_of_largest(call: Call, site: Site, x: SplitTensor, dim: Any, keepdim: bool) -> Any:
    """Global index of the first of equal elements; without a dimension, among all elements."""
    if dim is None:
        y = composed(call[0], composed(torch.reshape, x, (-1,)), 0)
        return composed(torch.reshape, y, (1,) * x.dim()) if keepdim else y
    largest, along = call[0].__name__ == "argmax", Along.of(site, x, dim)
    along.local = along.local.detach()
    return along.result(_with_index(along, largest)[1], keepdim)
