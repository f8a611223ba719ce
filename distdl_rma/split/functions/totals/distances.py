"""Distances and similarities of vectors, split along their elements or not, and losses made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.functions.totals.losses import finished
from distdl_rma.split.operands import as_part, machine_of, on_copies
from distdl_rma.split.reducing import with_whole
from distdl_rma.split.tensor import SplitTensor, composed, refused, tensors_in


def _composition(func: Any, like: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Copies as torch does it; of split tensors by functions that have rules.
    if not any(x.is_split for x in tensors_in(args, kwargs) if isinstance(x, SplitTensor)):
        return on_copies(func, args, kwargs)
    return composed(like, *args, **kwargs)


def _cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
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


@rule("norm", F.cosine_similarity)
@refusing
def cosine_similarity(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms and a sum, over the ranks where the dimension is split."""
    return _composition(func, _cosine_similarity, args, kwargs)


def _pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@rule("norm", F.pairwise_distance)
@refusing
def pairwise_distance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms of differences, over the ranks where the last dimension is split."""
    return _composition(func, _pairwise_distance, args, kwargs)


def _word(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _cosine_embedding_loss(
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    d = target.dim()
    squares = [(x * x).sum(d) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(d) / (squares[0] * squares[1]).sqrt()
    y = torch.where(target == 1, 1 - cosine, 0) + torch.where(target == -1, (cosine - margin).clamp(min=0), 0)
    return finished(y, _word(reduction, size_average, reduce))


@rule("loss", F.cosine_embedding_loss)
@refusing
def cosine_embedding_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums over the vectors, then as losses of single elements."""
    return _composition(func, _cosine_embedding_loss, args, kwargs)


def _triplet_with_distance(
    anchor: Any,
    positive: Any,
    negative: Any,
    *,
    distance_function: Callable[[Any, Any], Any] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    if not anchor.dim() == positive.dim() == negative.dim():
        raise ShapeError("triplet_margin_loss: anchor, positive and negative must have as many dimensions")
    distance = distance_function or F.pairwise_distance
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return finished((margin + near - far).clamp(min=0), reduction)


def _triplet_margin_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    return _triplet_with_distance(
        anchor,
        positive,
        negative,
        distance_function=lambda x, y: F.pairwise_distance(x, y, p, eps),
        margin=margin,
        swap=swap,
        reduction=_word(reduction, size_average, reduce),
    )


@rule("loss", F.triplet_margin_loss, F.triplet_margin_with_distance_loss)
@refusing
def triplet_margin_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Distances, then as losses of single elements."""
    with_distance = func is F.triplet_margin_with_distance_loss
    return _composition(func, _triplet_with_distance if with_distance else _triplet_margin_loss, args, kwargs)


@rule("contraction", torch.cdist)
@refusing
def cdist(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of the first stay split, every rank gets all of those of the second that they meet."""
    given = _CDIST.bind(*args, **kwargs)
    given.apply_defaults()
    x1, x2, p, mode = given.args
    if not any(x.is_split for x in (x1, x2) if isinstance(x, SplitTensor)):
        return on_copies(func, args, kwargs)
    if not isinstance(x1, SplitTensor) or tuple(x1.shape[:-2]) != tuple(x2.shape[:-2]):
        raise refused(func, "the first tensor must be split, and both must have the same batch dimensions")
    site, last = site_of(machine_of(x1), func), x1.dim() - 1
    mine, layout = with_whole(site, x1, (last,), "vectors made whole")
    result = lay.with_splits(layout, {last: Balanced(x2.shape[-2], 1)})
    part = lay.whole(layout, (last - 1,))
    part = lay.with_splits(part, {last - 1: Balanced(x2.shape[-2], 1), last: Balanced(x2.shape[-1], 1)})
    theirs = as_part(site, x2, part, result, 1)
    return SplitTensor(func(mine, theirs, p=p, compute_mode=mode), result)


_CDIST = inspect.Signature(
    [
        inspect.Parameter("x1", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("x2", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("p", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=2.0),
        inspect.Parameter(
            "compute_mode",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default="use_mm_for_euclid_dist_if_necessary",
        ),
    ]
)
