"""Losses: terms of the blocks, then sums over the ranks; targets are whole, or cut like the input.

Operands of other layouts move first, so that each rank has the same part of all; only the sum then exchanges
data::

    F.mse_loss(x, y)    x, y cut alike      func(x block, y block)  ->  sum  ->  allreduce  ->  / count
                        else                as_blocks, then the same
                        of other shapes     broadcast, then as a call on its own
    F.cross_entropy     rows cut            as above, for rows of all classes
                        classes cut         ``class_terms``: two numbers for each row, no scores

Every rank gets the value, so the result is replicated. Its gradient is handed on as it is by the sum over
ranks (``layers/split/redistribution.py``): each rank computes the gradient of its block alone, without a
message.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.checks.user_frames import warn_user
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.losses import LEGACY, class_terms, divisor_of, divisor_of_classes
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import named, tensors_in
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule, raise_as_torch
from distdl_rma.layers.split.functions.shapes import uncut
from distdl_rma.layers.split.operands import (
    as_blocks,
    as_part,
    as_whole,
    common_layout,
    of_any_cut,
    on_whole_tensors,
    site_for,
)
from distdl_rma.layers.split.redistribution import all_sum
from distdl_rma.layers.split.reduction_axes import Along
from distdl_rma.layers.split.tensor import SplitTensor, any_cut, checked_block, composed


def _reduced(
    site: Site,
    y: torch.Tensor,
    layout: Decomposition,
    reduction: str,
    count: float | torch.Tensor,
    dtype: torch.dtype | None = None,
) -> SplitTensor:
    # Reduces the terms of the blocks over all ranks. A count that is a number is that of the whole tensor;
    # one that is a tensor is this block's, and is summed too.
    if reduction == "none":
        return SplitTensor(y, layout)
    # Ranks along other grid dimensions hold copies, whose terms count once.
    cut = [g for g, axis in enumerate(layout.axes) if axis is not None]
    total, dtype = y.sum(dtype=sum_dtype(y.dtype)) if y.dim() else y, dtype or y.dtype
    if reduction != "sum" and isinstance(count, torch.Tensor):
        # One allreduce for both.
        summands = torch.stack([total, count.to(total.dtype)])
        constant = total.requires_grad and not count.requires_grad
        total, count = all_sum(site, summands, layout, cut).unbind()
        # The gradient of a constant count would make that of the terms no constant: see ``_AllSum``.
        count = count.detach() if constant else count
    else:
        total = all_sum(site, total, layout, cut)
    total = total if reduction == "sum" else total / count
    return SplitTensor(total.to(dtype), lay.replicated(layout.partition, ()))


def _on_block(reduction: str, x: torch.Tensor) -> str:
    # What torch's function does with its block. Short dtypes are summed in a longer one, after the function,
    # as torch sums a whole tensor: a sum in 16 bits would be rounded once on each rank.
    return "none" if reduction == "none" or sum_dtype(x.dtype) != x.dtype else "sum"


# Losses of single elements. What they need of other elements is their sum alone, so that any cut is as good.
_POINTWISE = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.kl_div),
    *(F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.soft_margin_loss),
    *(F.hinge_embedding_loss, F.margin_ranking_loss),
)
# Torch broadcasts their operands, and warns.
_BROADCASTING = F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss


@rule("loss", *_POINTWISE, errors="own")
def pointwise_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank computes the terms of its block; their sum and count are those of the whole tensor."""
    if func is F.l1_loss and kwargs.get("weight") is None:
        kwargs = {**kwargs, "weight": _weight_not_handed_on()}
    warned = raise_as_torch(func, args, kwargs)
    x, given = args[0], named(func, args, kwargs)
    given["reduction"] = reduction = _reduction_of(given)
    broadcasts = func in _BROADCASTING and x.shape != given["target"].shape
    if not (broadcasts or any_cut(args, kwargs)):
        return on_whole_tensors(func, (x,), given)
    for each in warned:
        warn_user(*each)
    if broadcasts:
        # Of split operands of other shapes, and of whole ones: two functions, each with its own rule.
        return composed(_broadcast_loss, func, x, **given)
    operands = tensors_in(x, given)
    result = common_layout(func, operands)
    site = site_for(func, *operands)
    x, given = as_blocks(site, (x, given), result)
    y = func(x, **{**given, "reduction": _on_block(reduction, x)})
    count: Any = divisor_of(reduction, result.shape)
    if reduction == "mean" and func in (F.mse_loss, F.l1_loss) and given.get("weight") is not None:
        count = given["weight"].sum()
    return _reduced(site, y, result, reduction, count)


def _broadcast_loss(
    func: Any, input: Any, target: Any, reduction: str, weight: Any = None, **others: Any
) -> Any:
    # As torch composes it for equal shapes. A mean is divided by the sum of weights before broadcasting: that
    # of the weights as given, whatever the number of terms that each one is broadcast to.
    operands = torch.broadcast_tensors(input, target)
    if weight is None:
        return func(*operands, reduction=reduction, **others)
    terms = func(*operands, reduction="none", **others) * weight
    if reduction == "mean" and func is not F.huber_loss:
        return terms.sum() / weight.sum()
    return terms if reduction == "none" else terms.sum() if reduction == "sum" else terms.mean()


def _weight_not_handed_on() -> torch.Tensor | None:
    # Torch does not pass this function's weight to overrides: without it, a weighted loss would be that of
    # equal weights, in silence. The call of the user's function is still on the stack, and has the argument.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("weight")


@checked_rule("loss", F.cross_entropy, F.nll_loss)
@of_any_cut
def class_loss(call: Call, site: Site, x: Any, target: Any, weight: Any, **given: Any) -> Any:
    """Each rank computes the terms of its block; if classes are cut, ranks sum the exponentials.

    The mean is divided by the number, or by the weights, of all targets that are not ignored.
    """
    # With scores of layout (rows, classes), rows is the layout of what has no classes: targets and terms.
    func, reduction = call[0], _reduction_of(given)
    dim = 0 if len(shape := x.shape) == 1 else 1
    if not any_cut(x, target) or not shape[dim]:
        return on_whole_tensors(*call)
    # Without the call of ``has_indices``.
    of_indices = func is F.nll_loss or not target.is_floating_point()
    if not (of_indices or isinstance(x, SplitTensor)):
        layout = common_layout(func, [x, target])
        x = SplitTensor(as_part(site, x, layout, layout), layout)
    elif of_indices and isinstance(target, SplitTensor) and not any_cut(x):
        # Scores get the cut of the targets, rather than targets the whole: less is computed on each rank.
        order, rows = list(range(target.dim())), target._layout
        wide = lay.reordered(rows, [*order[:dim], None, *order[dim:]])
        layout = uncut(wide, {dim: x.shape[dim]})
        x = SplitTensor(as_part(site, x, layout, layout), layout)
    layout, scores, dtype = x._layout, checked_block(x), None
    rows = lay.reordered(lay.whole(layout, (dim,)), [d for d in range(len(layout.shape)) if d != dim])
    weight = None if weight is None else as_whole(site, weight, layout, "weight")
    truth = as_part(site, target, rows if of_indices else layout, layout, 1)
    along = Along(site, scores, layout, (dim,))
    if along.cut:
        # Scores stay where they are: this rank adds what its classes contribute to the terms of its rows.
        dtype, exact = scores.dtype, scores.to(sum_dtype(scores.dtype))
        gathered = partial(along.together, what="sums over classes", each=2)
        y = class_terms(func, exact, truth, weight, layout, dim, gathered, given)
        y = along.summed(y).to(dtype) if reduction == "none" else y
    else:
        extra = {} if weight is None else {"weight": weight}
        y = func(scores, truth, **extra, **given, reduction=_on_block(reduction, scores))
    if reduction == "none":
        return SplitTensor(y, rows)
    count: Any = math.prod(rows.shape)
    if of_indices and reduction == "mean":
        count = divisor_of_classes(truth, weight, given["ignore_index"])
        if along.ranks[0] != layout.partition.me:
            # Only the first of the ranks that share rows counts them; others add nothing.
            count = torch.zeros_like(count)
    return _reduced(site, y, layout, reduction, count, dtype)


def _reduction_of(given: dict[str, Any]) -> str:
    # Removes the reduction from the arguments, also in its deprecated forms, which torch still takes: with
    # size_average=False it is "sum", with reduce=False "none".
    reduction: str = given.pop("reduction")
    average, reduce = (given.pop(name, None) for name in LEGACY)
    if average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if average is False else "mean"
