"""Distances and similarities of vectors, split along their elements or not, and losses made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.functions.totals.losses import finished
from distdl_rma.split.operands import as_part, composition, of_any_cut
from distdl_rma.split.reducing import with_whole
from distdl_rma.split.tensor import SplitTensor, refused


@rule("norm", F.cosine_similarity)
@refusing
@composition
def cosine_similarity(x1: Any, x2: Any, dim: int, eps: float) -> Any:
    """Norms and a sum, over the ranks where the dimension is split."""
    # As torch does: integers become the type of both, other types meet in the product only.
    both = torch.result_type(x1, x2)
    if not both.is_floating_point:
        raise RuntimeError(f"expected common dtype to be floating point, yet common dtype is {both}")
    x1, x2 = (x if x.is_floating_point() else x.to(both) for x in (x1, x2))
    x1, x2 = torch.broadcast_tensors(x1, x2)

    def length(x: Any) -> Any:
        found = torch.linalg.vector_norm(x, 2, dim, True)
        return found + (eps - found.detach()).clamp(min=0)

    return (x1 / length(x1) * (x2 / length(x2))).sum(dim)


@rule("norm", F.pairwise_distance)
@refusing
@composition
def pairwise_distance(x1: Any, x2: Any, p: float, eps: float, keepdim: bool) -> Any:
    """Norms of differences, over the ranks where the last dimension is split."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _word(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


@rule("loss", F.cosine_embedding_loss)
@refusing
@composition
def cosine_embedding_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float,
    size_average: bool | None,
    reduce: bool | None,
    reduction: str,
) -> Any:
    """Sums over the vectors, then as losses of single elements."""
    d = target.dim()
    squares = [(x * x).sum(d) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(d) / (squares[0] * squares[1]).sqrt()
    y = torch.where(target == 1, 1 - cosine, 0) + torch.where(target == -1, (cosine - margin).clamp(min=0), 0)
    return finished(y, _word(reduction, size_average, reduce))


@rule("loss", F.triplet_margin_loss, F.triplet_margin_with_distance_loss)
@refusing
@composition
def triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float,
    swap: bool,
    reduction: str,
    distance_function: Callable[[Any, Any], Any] | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    **norm: Any,
) -> Any:
    """Distances, then as losses of single elements."""
    if not anchor.dim() == positive.dim() == negative.dim():
        raise ShapeError("triplet_margin_loss: anchor, positive and negative must have as many dimensions")
    distance: Any = distance_function or partial(F.pairwise_distance, **norm)
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return finished((margin + near - far).clamp(min=0), _word(reduction, size_average, reduce))


@rule("contraction", torch.cdist)
@refusing
@of_any_cut
def cdist(call: Call, site: Site, x1: Any, x2: Any, p: float, compute_mode: str) -> Any:
    """Rows of the first stay split, every rank gets all of those of the second that they meet."""
    func, *_ = call
    if not isinstance(x1, SplitTensor) or tuple(x1.shape[:-2]) != tuple(x2.shape[:-2]):
        raise refused(func, "the first tensor must be split, and both must have the same batch dimensions")
    last = x1.dim() - 1
    mine, layout = with_whole(site, x1, (last,), "vectors made whole")
    result = lay.with_splits(layout, {last: Balanced(x2.shape[-2], 1)})
    part = lay.whole(layout, (last - 1,))
    part = lay.with_splits(part, {last - 1: Balanced(x2.shape[-2], 1), last: Balanced(x2.shape[-1], 1)})
    theirs = as_part(site, x2, part, result, 1)
    return SplitTensor(func(mine, theirs, p=p, compute_mode=compute_mode), result)
