"""Attention: a rank computes its queries, heads and samples, with all keys.

Attention is a contraction (``contractions.py``) in which keys and features must be whole: each row of weights
is normalised over all keys. So rows, heads and samples may be cut, and a rank gets all keys and values for
its rows. It uses its rows of the mask; a causal mask becomes an explicit one there, since torch's begins at
the first row of the block:

    whole, causal    rank 0, rows 0 and 1    rank 1, rows 2 and 3
    x . . .          x . . .                 x x x .
    x x . .          x x . .                 x x x x
    x x x .
    x x x x
"""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.functions.contractions import prepared, product_of
from distdl_rma.layers.split.operands import of_any_cut, on_whole_tensors
from distdl_rma.layers.split.tensor import SplitTensor, composed, refused


@checked_rule("contraction", "scaled_dot_product_attention")
@of_any_cut
def attention(call: Call, site: Site, query: Any, key: Any, value: Any, **given: Any) -> Any:
    """Each rank computes its queries, heads and samples with all keys, and uses its rows of the mask."""
    func, q, k, v = call[0], query, key, value
    if not q.shape[-1]:
        # Without features all products are zero.
        return on_whole_tensors(*call)
    mask, dropout_p, causal, scale, enable_gqa = given.values()
    operands = [q, k, v] if mask is None else [q, k, v, mask]
    heads = q.shape[-3] if q.dim() > 2 else 1
    if enable_gqa and k.shape[-3] != heads:
        k, v = (composed(torch.repeat_interleave, x, heads // x.shape[-3], -3) for x in (k, v))
        operands[1:3] = k, v
    if dropout_p:
        return composed(_with_dropout, q, k, v, mask, dropout_p, causal, scale)
    batch = [list(range(2 - x.dim(), 0)) for x in operands]
    ends = (("row", "in"), ("key", "in"), ("key", "out"), ("row", "key"))
    labels = [[*names, *own] for names, own in zip(batch, ends, strict=False)]
    longest = max(batch[:3], key=len)
    # Rows of attention weights need all keys, and all features of a product.
    _, work, blocks = prepared(func, operands, labels, [*longest, "row", "out"], ("key", "in"))
    rows, keys = q.shape[-2], k.shape[-2]
    first, stop = work.result.own_box.bounds[-2]
    if causal and stop - first != rows:
        if mask is not None:
            raise refused(func, "attn_mask and is_causal do not go together, as in torch")
        # This rank's rows of the triangle.
        square = torch.ones(stop - first, keys, dtype=torch.bool, device=blocks[0].device)
        blocks, causal = [*blocks, square.tril(first)], False
    compute = partial(func, is_causal=bool(causal), scale=scale)
    return SplitTensor(product_of(compute, operands, blocks, work.result), work.result)


def _with_dropout(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: Any, scale: Any) -> Any:
    # Of functions that have rules, among them dropout.
    weights = q @ k.transpose(-2, -1) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        weights = weights + mask
    return F.dropout(weights.softmax(-1), dropout) @ v
