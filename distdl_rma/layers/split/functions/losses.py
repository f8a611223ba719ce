"""Losses: terms of the blocks, then sums over the ranks; targets are whole, or cut like the input."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.checks.arguments import SCALAR_TYPES
from distdl_rma.layers.checks.user_frames import warn_user
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import named, tensors_in
from distdl_rma.layers.split.calls.site import Site, site_of
from distdl_rma.layers.split.calls.table import Call, name_of, rule
from distdl_rma.layers.split.calls.torch_errors import Warned, checked_rule, raise_as_torch
from distdl_rma.layers.split.functions.shapes import frozen, uncut
from distdl_rma.layers.split.operands import (
    as_blocks,
    as_part,
    as_whole,
    common_layout,
    composition,
    machine_of,
    of_any_cut,
    on_whole_tensors,
    site_for,
)
from distdl_rma.layers.split.redistribution import all_sum, summed
from distdl_rma.layers.split.reduction_axes import Along, with_whole
from distdl_rma.layers.split.tensor import SplitTensor, any_cut, checked_block, composed, refused

# Gathers the numbers that ranks sharing rows have for these rows.
Gathered = Callable[[torch.Tensor], torch.Tensor]
Weight = torch.Tensor | None


def _reduced(
    site: Site,
    y: torch.Tensor,
    layout: Decomposition,
    reduction: str,
    count: float | torch.Tensor,
    dtype: torch.dtype | None = None,
) -> SplitTensor:
    # Reduces the terms of the blocks over all ranks; a count that is a tensor is this block's.
    if reduction == "none":
        return SplitTensor(y, layout)
    cut = tuple(g for g, axis in enumerate(layout.axes) if axis is not None)
    total, dtype = y.sum(dtype=sum_dtype(y.dtype)), dtype or y.dtype
    if reduction != "sum" and isinstance(count, torch.Tensor):
        # One allreduce for both.
        total, count = all_sum(site, torch.stack([total, count.to(total.dtype)]), layout, cut).unbind()
    else:
        total = all_sum(site, total, layout, cut)
    total = total if reduction == "sum" else total / count
    return SplitTensor(total.to(dtype), lay.replicated(layout.partition, ()))


def _on_block(reduction: str, x: torch.Tensor) -> str:
    # Short dtypes are summed in a longer one.
    return "none" if reduction == "none" or sum_dtype(x.dtype) != x.dtype else "sum"


# Losses of single elements.
_POINTWISE = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.kl_div),
    *(F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.soft_margin_loss),
    *(F.hinge_embedding_loss, F.margin_ranking_loss),
)
# Their weights have the input's shape; the mean of the first two is divided by the weights' sum.
_OF_WEIGHTED_MEAN = F.mse_loss, F.l1_loss, F.huber_loss
_LEGACY = "size_average", "reduce"
# Torch broadcasts their operands, and warns.
_BROADCASTING = *_OF_WEIGHTED_MEAN, F.smooth_l1_loss


class _OneLayout(NamedTuple):
    # What a loss needs for operands with one layout, for given dtypes and arguments.
    warned: Sequence[Warned]
    how: str  # the reduction of the blocks
    divisor: int | None  # of a mean
    ranks: tuple[int, ...]
    layout: Decomposition  # of the result


def _planned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OneLayout:
    warned, x = raise_as_torch(func, args, kwargs), args[0]
    layout, reduction = x._layout, kwargs.get("reduction", "mean")
    ranks = lay.line(layout, [g for g, axis in enumerate(layout.axes) if axis is not None])
    counts = {"mean": math.prod(layout.shape), "batchmean": layout.shape[0]}
    if reduction != "none":
        layout = lay.replicated(layout.partition, ())
    return _OneLayout(warned, _on_block(reduction, x._local), counts.get(reduction), ranks, layout)


def _of_one_layout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitTensor | None:
    # Only the sum exchanges data. None if layouts differ, or an argument is no number or text.
    layout, blocks, key = None, [], [func, *kwargs.values()]
    for x in args:
        if not isinstance(x, SplitTensor) or (layout is not None and x._layout is not layout):
            return None
        layout = x._layout
        block = checked_block(x)
        blocks.append(block)
        key.append(block.dtype)
    for name, value in kwargs.items():
        if value.__class__ not in SCALAR_TYPES or (name in _LEGACY and value is not None):
            return None
    if layout is None or not layout.cut_dims:
        return None
    plan = lay.kept(layout.partition, "loss", (layout, *key, *kwargs), lambda: _planned(func, args, kwargs))
    for each in plan.warned:
        warn_user(*each)
    y = func(*blocks, **{**kwargs, "reduction": plan.how})
    if plan.layout is layout:
        return SplitTensor(y, layout)
    total = y if plan.how == "sum" else y.sum(dtype=sum_dtype(y.dtype))
    if len(plan.ranks) > 1:
        total = summed(site_of(machine_of(args[0]), func), total, plan.ranks)
    if plan.divisor is not None:
        total = total / plan.divisor
    return SplitTensor(total if total.dtype is y.dtype else total.to(y.dtype), plan.layout)


@rule("loss", *_POINTWISE, errors="own")
def pointwise_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank computes the terms of its block; their sum and count are those of the whole tensor."""
    if func is F.l1_loss and kwargs.get("weight") is None:
        kwargs = {**kwargs, "weight": _weight_not_handed_on()}
    found = _of_one_layout(func, args, kwargs)
    if found is not None:
        return found
    warned = raise_as_torch(func, args, kwargs)
    x, given = args[0], named(func, args, kwargs)
    given["reduction"] = reduction = _reduction_of(given)
    broadcasts = func in _BROADCASTING and frozen(x) != frozen(given["target"])
    if not (broadcasts or any_cut(args, kwargs)):
        return on_whole_tensors(func, (x,), given)
    for each in warned:
        warn_user(*each)
    if broadcasts:
        return composed(_broadcast_loss, func, x, **given)
    operands = tensors_in(x, given)
    result = common_layout(func, operands)
    site = site_for(func, *operands)
    x, given = as_blocks(site, (x, given), result)
    y = func(x, **{**given, "reduction": _on_block(reduction, x)})
    count: Any = math.prod(result.shape)
    if reduction == "batchmean":
        count = result.shape[0]
    elif reduction == "mean" and func in (F.mse_loss, F.l1_loss) and given.get("weight") is not None:
        count = given["weight"].sum()
    return _reduced(site, y, result, reduction, count)


def _broadcast_loss(
    func: Any, input: Any, target: Any, reduction: str, weight: Any = None, **others: Any
) -> Any:
    # As torch composes it for equal shapes. A mean is divided by the sum of weights before broadcasting.
    operands = torch.broadcast_tensors(input, target)
    if weight is None:
        return func(*operands, reduction=reduction, **others)
    terms = func(*operands, reduction="none", **others) * weight
    if reduction == "mean" and func is not F.huber_loss:
        return terms.sum() / weight.sum()
    return finished(terms, reduction=reduction)


def _weight_not_handed_on() -> torch.Tensor | None:
    # Torch does not pass this function's weight to overrides.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


@checked_rule("loss", F.gaussian_nll_loss)
@composition
def gaussian_nll_loss(x: Any, target: Any, var: Any, full: bool, eps: float, reduction: str) -> Any:
    """As losses of single elements; negative variances raise an error on all ranks."""
    variance = torch.full_like(x, var) if not isinstance(var, torch.Tensor) else var
    if variance.shape != x.shape and x.shape[:-1] == variance.shape:
        variance = variance.unsqueeze(-1)
    if variance.shape not in (x.shape, (*x.shape[:-1], 1)):
        raise ValueError("var is of incorrect size")
    if bool((variance < 0).any()):
        raise ValueError("var has negative entry/entries")
    with torch.no_grad():
        floor = (eps - variance).clamp(min=0)
    variance = variance + floor
    y = 0.5 * (torch.log(variance) + (x - target) ** 2 / variance)
    if full:
        y = y + 0.5 * math.log(2 * math.pi)
    return finished(y, reduction=reduction)


@checked_rule("loss", F.cross_entropy, F.nll_loss)
@of_any_cut
def class_loss(call: Call, site: Site, x: Any, target: Any, weight: Any, **given: Any) -> Any:
    """Each rank computes the terms of its block; if classes are cut, ranks sum the exponentials.

    The mean is divided by the number, or by the weights, of all targets that are not ignored.
    """
    func, reduction = call[0], _reduction_of(given)
    dim = 0 if len(shape := x.shape) == 1 else 1
    if not any_cut(x, target) or not shape[dim]:
        return on_whole_tensors(*call)
    of_indices = not _of_probabilities(func, target)
    if not (of_indices or isinstance(x, SplitTensor)):
        layout = common_layout(func, [x, target])
        x = SplitTensor(as_part(site, x, layout, layout), layout)
    elif of_indices and isinstance(target, SplitTensor) and not any_cut(x):
        # Scores get the cut of the targets; classes are whole.
        order, rows = list(range(target.dim())), target._layout
        wide = lay.reordered(rows, [*order[:dim], None, *order[dim:]])
        layout = uncut(wide, {dim: x.shape[dim]})
        x = SplitTensor(as_part(site, x, layout, layout), layout)
    layout = x._layout
    rows = lay.reordered(lay.whole(layout, (dim,)), [d for d in range(len(layout.shape)) if d != dim])
    weight = None if weight is None else as_whole(site, weight, layout, "weight")
    if dim in layout.axes:
        return _over_split_classes(func, site, x, target, weight, rows, dim, given, reduction)
    scores = checked_block(x)
    truth = as_part(site, target, rows if of_indices else layout, rows, 1)
    extra = {} if weight is None else {"weight": weight}
    y = func(scores, truth, **extra, **given, reduction=_on_block(reduction, scores))
    return _reduced(site, y, rows, reduction, _count(truth, weight, given, rows, of_indices))


def _of_probabilities(func: Any, target: torch.Tensor) -> bool:
    return target.is_floating_point() and func is F.cross_entropy


def _count(
    truth: torch.Tensor, weight: Weight, given: Mapping[str, Any], rows: Decomposition, of_indices: bool
) -> float | torch.Tensor:
    if not of_indices:
        return math.prod(rows.shape)
    counted = truth != given["ignore_index"]
    if weight is None:
        return torch.sum(counted)
    return torch.sum(weight[torch.where(counted, truth, 0).long()] * counted)


class _CrossEntropy(OperatorFunction):
    # Terms of cross entropies by this rank's classes, from the share of each class in its row.
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        share: torch.Tensor,
        dim: int,
        read: Weight,
        counted: Weight,
        gathered: Gathered,
    ) -> torch.Tensor:
        # A block without classes has no place in the gathered tensor.
        mine = torch.cat([x.logsumexp(dim, True), share.sum(dim, True)], dim) if x.shape[dim] else x
        logs, shares = gathered(mine).unflatten(dim, (-1, 2)).unbind(dim + 1)
        whole = logs.logsumexp(dim, True)
        # As in torch, the logarithms of all shares of a row with an infinite score are NaN.
        whole = torch.where(whole == torch.inf, torch.nan, whole)
        ctx.save_for_backward(x, share, whole, shares.sum(dim, True), counted)
        ctx.dim = dim
        terms = share * (whole - x)
        return (terms if read is None else torch.where(read, terms, 0)).sum(dim)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # All ranks of a row have its gradient, so this is local.
        x, share, whole, total, counted = ctx.saved_tensors
        gradient, away = gradient.unsqueeze(ctx.dim), whole - x
        of_share = gradient * away if ctx.needs_input_grad[1] else None
        slope = total * (-away).exp() - share
        of_x = gradient * slope
        if counted is not None:
            # Ignored rows get zeros, also in a mean over no row.
            of_x = torch.where(counted | (slope != 0), of_x, 0)
        return of_x, of_share, None, None, None, None


def class_terms(
    func: Any,
    x: torch.Tensor,
    truth: torch.Tensor,
    weight: torch.Tensor | None,
    layout: Decomposition,
    dim: int,
    gathered: Gathered,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """This rank's classes' contributions to the terms of ``cross_entropy`` or ``nll_loss``, one for each row.

    Their sum over the ranks that share rows is the loss of the rows. ``x`` is the block of scores, with
    classes along ``dim``; ``truth`` are indices, equal on these ranks, or probabilities of this rank's
    classes. ``gathered`` returns the two numbers for each row of all these ranks. Blocking in the forward,
    local in the backward.
    """
    start, stop = layout.box(layout.partition.me).bounds[dim]
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    of_indices, read, counted = not _of_probabilities(func, truth), None, None
    even = label_smoothing / layout.shape[dim]
    if of_indices:
        truth = truth.unsqueeze(dim)
        counted = truth != ignore_index
        chosen = counted & (truth == torch.arange(start, stop).view(shape))
        share = chosen.to(x.dtype)
        # As in torch, ignored rows are not read, and of others only the chosen class.
        read = counted if label_smoothing else chosen
        if label_smoothing:
            share = (1 - label_smoothing) * share + even * counted.to(x.dtype)
    else:
        share = truth.to(x.dtype) * (1 - label_smoothing) + even
    if weight is not None:
        share = share * weight[start:stop].view(shape)
    if func is F.nll_loss:
        products = share * x
        return -(products if read is None else torch.where(read, products, 0)).sum(dim)
    terms: torch.Tensor = _CrossEntropy.apply(x, share, dim, read, counted, gathered)
    return terms


def _over_split_classes(
    func: Any,
    site: Site,
    x: SplitTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    rows: Decomposition,
    dim: int,
    given: Mapping[str, Any],
    reduction: str,
) -> SplitTensor:
    # Scores stay cut: each rank adds the terms of its classes.
    layout, scores = x._layout, checked_block(x)
    wide = scores.to(sum_dtype(scores.dtype))
    along, of_indices = Along(site, wide, layout, (dim,)), not _of_probabilities(func, target)
    truth = as_part(site, target, rows if of_indices else layout, layout, 1)
    classes = layout.shape[dim]
    if of_indices and bool(((truth != given["ignore_index"]) & ((truth < 0) | (truth >= classes))).any()):
        raise IndexError(f"{name_of(func)}: a target is not among {classes} classes")
    gathered = partial(along.together, what="sums over classes", each=2)
    terms = class_terms(func, wide, truth, weight, layout, dim, gathered, **given)
    if reduction == "none":
        return SplitTensor(all_sum(site, terms, layout, along.cut).to(scores.dtype), rows)
    count = _count(truth, weight, given, rows, of_indices)
    if isinstance(count, torch.Tensor) and layout.partition.index_of(layout.partition.me)[along.cut[0]]:
        # Only the first of the ranks that share rows counts them.
        count = torch.zeros_like(count)
    return _reduced(site, terms, layout, reduction, count, scores.dtype)


@checked_rule("loss", F.multi_margin_loss, F.multilabel_margin_loss)
@of_any_cut
def margin_loss(call: Call, site: Site, x: Any, target: Any, weight: Any = None, **given: Any) -> Any:
    """Each rank computes the terms of its rows, whose classes become whole."""
    func, reduction = call[0], _reduction_of(given)
    if not isinstance(x, SplitTensor):
        raise refused(func, "the target is split and the input is not")
    dim = x.dim() - 1
    scores, layout = with_whole(site, x, (dim,), "classes made whole")
    rows = lay.reordered(layout, range(dim))
    part = rows if target.dim() < x.dim() else uncut(layout, {dim: target.shape[dim]})
    truth = as_part(site, target, part, layout, 1)
    extra = {} if weight is None else {"weight": as_whole(site, weight, layout, "weight")}
    y = func(scores, truth, **extra, **given, reduction="none")
    return _reduced(site, y, rows, reduction, math.prod(rows.shape))


@checked_rule("loss", F.multilabel_soft_margin_loss)
@composition
def multilabel_soft_margin_loss(x: Any, target: Any, weight: Any, **how: Any) -> Any:
    """Functions of single elements, a mean over the classes and a mean over the rows."""
    y = -(target * F.logsigmoid(x) + (1 - target) * F.logsigmoid(-x))
    return finished((y if weight is None else y * weight).mean(-1), **how)


def finished(y: Any, **how: Any) -> Any:
    """Terms of a loss, reduced as the user's arguments say."""
    reduction = _reduction_of(how)
    return y if reduction == "none" else y.sum() if reduction == "sum" else y.mean()


def _reduction_of(given: dict[str, Any]) -> str:
    # Removes the reduction from the arguments, also in its deprecated forms.
    reduction: str = given.pop("reduction")
    average, reduce = (given.pop(name, None) for name in _LEGACY)
    if average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if average is False else "mean"
