"""Distances of vectors, comparisons and others that are composed of other functions.

A composition is torch's definition of a function, written with functions that have rules. These know how to
cut, move and sum, so that nothing here mentions a rank. The price is more calls, and more tensors in the
graph, than a rule of its own would have: right for functions that a program calls once in a step.

Definitions follow torch to the edges: where it adds ``eps``, what it clamps, and what is in no gradient.
Where torch's own result depends on an order of rounding, the composition has torch's order.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.split.calls.table import rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.operands import composition
from distdl_rma.layers.split.tensor import composed


@checked_rule("norm", F.cosine_similarity)
@composition
def cosine_similarity(x1: Any, x2: Any, dim: int, eps: float) -> Any:
    """Norms and a product, summed over the ranks if the dimension is cut."""
    # As in torch: integers get the common type, while different floating-point types meet in the product.
    both = torch.result_type(x1, x2)
    x1, x2 = (x if x.is_floating_point() else x.to(both) for x in (x1, x2))
    x1, x2 = torch.broadcast_tensors(x1, x2)

    def length(x: Any) -> Any:
        found = torch.linalg.vector_norm(x, 2, dim, True)
        return found + (eps - found.detach()).clamp(min=0)

    return (x1 / length(x1) * (x2 / length(x2))).sum(dim)


@checked_rule("reduction", "equal", "allclose")
@composition
def comparison(x: Any, other: Any, **given: Any) -> bool:
    """Each rank compares its blocks; true on all ranks if it is true on each of them."""
    if given:
        return bool(torch.isclose(x, other, **given).all())
    return x.shape == other.shape and bool((x == other).all())


@checked_rule("norm", F.pairwise_distance)
@composition
def pairwise_distance(x1: Any, x2: Any, p: float, eps: float, keepdim: bool) -> Any:
    """Norms of differences, combined over the ranks if the last dimension is cut."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _unguarded(function: Any) -> Any:
    # Torch's own function, without the dispatch to overrides, which would recurse.
    guards = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    hidden = {**function.__globals__, **dict.fromkeys(guards, lambda *_: False)}
    copy = FunctionType(
        function.__code__, hidden, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Torch writes these in Python, with functions that have rules: its code is the rule.
_BY_TORCH: dict[str, list[Any]] = {
    "contraction": [F.multi_head_attention_forward],
    "loss": [F.gaussian_nll_loss, F.multilabel_soft_margin_loss, F.triplet_margin_with_distance_loss],
    "norm": [F.local_response_norm, torch.norm, torch.Tensor.norm],
    "random": [F.gumbel_softmax],
    "reduction": [F.softmin, torch.Tensor.__contains__],
    "window": [F.lp_pool1d, F.lp_pool2d, F.lp_pool3d],
}
_COPIES = {function: _unguarded(function) for functions in _BY_TORCH.values() for function in functions}
for _kind, _functions in _BY_TORCH.items():
    rule(_kind, *_functions, doc="Composed, as in torch, of functions that have rules.")(
        lambda func, args, kwargs: composed(_COPIES[func], *args, **kwargs)
    )
