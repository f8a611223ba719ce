"""Tables that indices are looked up in: the result is cut as the indices are, the table is whole.

Not the table is cut, since each rank may look up any row: it would have to ask others for rows that it learns
of only at run time. Its gradient is summed over the ranks, as for any weight that meets different blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.split.calls.signatures import named
from distdl_rma.layers.split.calls.site import summed_elsewhere
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.operands import as_whole, on_whole_tensors, site_for
from distdl_rma.layers.split.plain_operands import contributes
from distdl_rma.layers.split.reduction_axes import laid_out
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, composed, refused


@checked_rule("contraction", "embedding")
def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank looks up its indices in the whole table; the result is cut as the indices are."""
    if func is torch.embedding:
        # It takes the table first.
        x, padding, *others = named(func, args, kwargs).values()
        return composed(F.embedding, x, args[0], None if padding < 0 else padding, None, 2.0, *others)
    x, (weight, padding, most, _, by_frequency, sparse) = args[0], named(func, args, kwargs).values()
    if most is not None or by_frequency:
        raise refused(func, "max_norm and scale_grad_by_freq depend on what all ranks look up")
    if not isinstance(x, SplitTensor) or not x.is_split:
        if isinstance(weight, SplitTensor) and weight.is_split:
            weight = composed(SplitTensor.redistribute, weight)
        return on_whole_tensors(func, (x, weight, padding), {"sparse": bool(sparse)})
    site, layout = site_for(func, x), x._layout
    needs = sparse and torch.is_grad_enabled() and weight.requires_grad
    if needs and not (isinstance(weight, SplitTensor) or contributes(weight) or summed_elsewhere()):
        raise refused(func, "the ranks do not sum sparse gradients of a plain table; use sparse=False")
    table = as_whole(site, weight, layout, "weight")
    y = func(checked_block(x), table, padding, sparse=bool(sparse))
    return SplitTensor(y, laid_out(layout, [*range(len(layout.shape)), None], y))
