"""Losses of parts of tensors: what a part adds to the loss, to the divisor of a mean, and to cut rows.

A loss of whole tensors is a sum of terms, and a mean divides it by a number that is a sum too. So each rank
computes both for its part, and one allreduce is all that the ranks exchange::

                 rank 0       rank 1       rank 2
    terms       1.5 + 0.5      0.25      0.5 + 0.25      their sum is 3
    divisor         2     +      1    +      2           their sum is 5, and the mean is 3 / 5

Where ranks have different classes of a row, a term needs all scores of the row, since a probability is a
share of it. They then exchange two numbers for each row, and no scores: see ``class_terms``.

The rules of split tensors use these functions, and loss layers call these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.autograd import OperatorFunction, as_step, first_derivative

# Gathers the numbers that ranks sharing rows have for these rows.
Gathered = Callable[[torch.Tensor], torch.Tensor]
Weight = torch.Tensor | None
# Arguments that torch has replaced by ``reduction``.
LEGACY = "size_average", "reduce"


def divisor_of(reduction: str, shape: Sequence[int]) -> int:
    """What the terms of a tensor of this shape, one for each element, are divided by; 1 for a sum.

    For a mean the divisors of all parts add up to that of the whole. For ``"batchmean"`` only those of parts
    with different rows do: count each row on one of the ranks that have parts of it.
    """
    return prod(shape) if reduction == "mean" else shape[0] if reduction == "batchmean" and shape else 1


def divisor_of_classes(target: torch.Tensor, weight: Weight, ignore_index: int) -> torch.Tensor:
    """What a mean over these class indices is divided by: the number, or the weights, of those that count."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    # Of the same shape for all targets: their weights, or 0.
    return weight[target.where(counted, 0).long()].where(counted, 0).sum(dtype=torch.float64)


def has_indices(function: Any, floating: bool) -> bool:
    """Whether a target, of floating point or not, has class indices; else it has probabilities."""
    return function is F.nll_loss or not floating


def class_terms(
    function: Any,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: Weight,
    layout: Decomposition,
    dim: int,
    gathered: Gathered,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """This rank's classes' contributions to the terms of ``cross_entropy`` or ``nll_loss``, one for each row.

    Their sum over the ranks that share rows is the loss of the rows. ``x`` is the block of scores, with
    classes along ``dim``; the target has indices, equal on these ranks, or probabilities of this rank's
    classes. ``gathered`` returns the two numbers for each row of all these ranks. ``given`` are the other
    arguments, such as ``ignore_index``. Blocking in the forward, local in the backward.

    Both losses are sums over classes of a share and a score. So a target of class 2 in a row of which this
    rank has classes 2 and 3 is the shares (1, 0) here and zeros elsewhere; smoothing and weights change the
    shares alone.

    A target that fits no class raises torch's error, but only after the ranks have gathered: the others may
    have no such target, and would wait.
    """
    ignore_index, label_smoothing = given["ignore_index"], given.get("label_smoothing", 0.0)
    start, stop = layout.box(layout.partition.me).bounds[dim]
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    read, counted = None, None
    even = label_smoothing / layout.shape[dim]
    if has_indices(function, target.is_floating_point()):
        indices = target.unsqueeze(dim)
        counted = indices != ignore_index
        chosen = counted & (indices == torch.arange(start, stop, device=x.device).view(shape))
        share = chosen.to(x.dtype)
        # As in torch, ignored rows are not read, and of others only the chosen class.
        read = counted if label_smoothing else chosen
        if label_smoothing:
            share = (1 - label_smoothing) * share + even * counted.to(x.dtype)
    else:
        share = target.to(x.dtype) * (1 - label_smoothing) + even
    if weight is not None:
        share = share * weight[start:stop].view(shape)
    terms: torch.Tensor
    if function is F.nll_loss:
        products = share * x
        terms = -(products if read is None else torch.where(read, products, 0)).sum(dim)
    else:
        terms = _CrossEntropy.apply(x, share, dim, read, counted, gathered)
    _check_targets(function, x.new_zeros(1, layout.shape[dim]), target, weight, given)
    return terms


@as_step
def _check_targets(
    function: Any, row: torch.Tensor, target: torch.Tensor, weight: Weight, given: Mapping[str, Any]
) -> None:
    # torch's function checks a target against all classes, and no rank has the scores of all. So it gets one
    # row of zeros, with an invalid target if there is one.
    if target.is_floating_point():
        few = row.to(target.dtype)
    else:
        wrong = (target != given["ignore_index"]) & ((target < 0) | (target >= row.numel()))
        few = (target[wrong] if bool(wrong.any()) else target).flatten()[:1]
    weight = None if weight is None else weight.detach().to(row.dtype)
    function(row[: len(few)], few, reduction="sum", weight=weight, **given)


class _CrossEntropy(OperatorFunction):
    # Terms of cross entropies by this rank's classes, from the share of each class in its row.
    #
    # With s for the share and x for the score of a class, and L = log(sum(exp(x))) over all classes of the
    # row, a term is sum(s * (L - x)), and its slope in x is sum(s) * exp(x - L) - s. So a rank needs L and
    # sum(s) of the whole row: the two numbers that the ranks gather, and keep for the backward.
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
