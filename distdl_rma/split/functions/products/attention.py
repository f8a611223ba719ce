"""Attention: queries stay where they are, keys and values are whole on all ranks that attend to them."""

from __future__ import annotations

from functools import partial
from math import sqrt
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.functions.places.shapes import frozen
from distdl_rma.split.functions.products.contractions import prepared, product_of
from distdl_rma.split.operands import of_any_cut
from distdl_rma.split.tensor import SplitTensor, composed, refused


@rule("contraction", "scaled_dot_product_attention")
@refusing
@of_any_cut
def attention(
    call: Call,
    site: Site,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: Any,
    enable_gqa: bool,
) -> Any:
    """Each rank attends from its queries, heads and samples to all keys; masks are those of its rows."""
    func, q, k, v, mask, causal = call[0], query, key, value, attn_mask, is_causal
    operands = [q, k, v] if mask is None else [q, k, v, mask]
    heads = frozen(q)[-3] if len(frozen(q)) > 2 else 1
    if enable_gqa and frozen(k)[-3] != heads:
        k, v = (composed(torch.repeat_interleave, x, heads // frozen(x)[-3], -3) for x in (k, v))
        operands[1:3] = k, v
    if not frozen(q)[-1]:
        # Without features all keys are alike, as with one that is zero.
        (q, k), scale = (composed(F.pad, x, (0, 1)) for x in (q, k)), 1.0
        operands[:2] = q, k
    if dropout_p:
        return _with_dropout(q, k, v, mask, dropout_p, causal, scale)
    batch = [list(range(2 - len(frozen(x)), 0)) for x in operands]
    ends = (("row", "in"), ("key", "in"), ("key", "out"), ("row", "key"))
    labels = [[*names, *own] for names, own in zip(batch, ends, strict=False)]
    longest = max(batch[:3], key=len)
    # Rows of the weights need all keys, and all of what makes a product.
    _, work, blocks = prepared(func, operands, labels, [*longest, "row", "out"], ("key", "in"))
    rows, keys = frozen(q)[-2], frozen(k)[-2]
    first, stop = work.result.box(work.result.partition.me).bounds[-2]
    if causal and stop - first != rows:
        if mask is not None:
            raise refused(func, "attn_mask and is_causal do not go together, as in torch")
        # Of the triangle these rows.
        blocks, causal = [*blocks, torch.ones(stop - first, keys, dtype=torch.bool).tril(first)], False
    compute = partial(func, is_causal=bool(causal), scale=scale)
    return SplitTensor(product_of(compute, operands, blocks, work.result), work.result)


def _with_dropout(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: Any, scale: Any) -> Any:
    # Made of functions that have rules, among them dropout.
    rows, keys = frozen(q)[-2], frozen(k)[-2]
    weights = composed(torch.matmul, q, composed(torch.transpose, k, -2, -1))
    weights = composed(torch.mul, weights, 1 / sqrt(frozen(q)[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(rows, keys, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        weights = composed(torch.masked_fill, weights, composed(torch.logical_not, mask), float("-inf"))
    elif mask is not None:
        weights = composed(torch.add, weights, mask)
    weights = composed(F.dropout, composed(F.softmax, weights, -1), dropout)
    return composed(torch.matmul, weights, v)


def _unguarded(function: Any) -> Any:
    # Torch's own composition, which would hand itself over once more.
    hidden = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(
        function.__code__, hidden, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_MULTI_HEAD = _unguarded(F.multi_head_attention_forward)


@rule("contraction", F.multi_head_attention_forward)
def multi_head_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Made of functions that have rules: products, views, attention."""
    return composed(_MULTI_HEAD, *args, **kwargs)
