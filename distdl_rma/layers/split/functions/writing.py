"""Writing into parts of tensors: each rank writes into its block.

``x[index] = value`` is read like an index on the right (``indexing.py``), up to a *view* of the block that
shows what is written. Writing there must reach ``x`` itself, so nothing may have moved on the way:

    numbers, in cut dimensions   become an interval of extent 1, which one rank has (``_staying``); the value
                                 gets a dimension of extent 1 there (``_beside``)
    slices, other numbers        a view of the block, then ``copy_`` by the rule of functions of elements
    a mask, one value            ``masked_fill_``
    masks, indices               torch writes where the chosen dimensions are whole; the result moves back

A plain tensor in which a split value is written becomes split, as the same object, if no other tensor shows
its memory (``become_split``); buffers and views stay plain and get the whole value on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.ops.core.tensors import no_autocast
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.calls.table import RULES, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule, raise_as_torch
from distdl_rma.layers.split.functions.indexing import (
    basic,
    chosen_layout,
    chosen_order,
    from_whole,
    is_mask,
    numbered,
    one_each,
    place_of,
)
from distdl_rma.layers.split.functions.pointwise import changed_plain, pointwise, without_gradient
from distdl_rma.layers.split.operands import as_part, common_partition, cut_by_largest, part_for, site_for
from distdl_rma.layers.split.redistribution import redistributed
from distdl_rma.layers.split.reduction_axes import with_whole
from distdl_rma.layers.split.tensor import (
    SplitTensor,
    any_cut,
    become_split,
    checked_block,
    composed,
    must_stay_plain,
    refused,
)
from distdl_rma.layers.split.views import begin_change, end_change

_T: Any = torch.Tensor
_REMEDY = "build the tensor by torch.cat, torch.where or F.pad instead"


@rule("movement", _T.__setitem__, errors="own")
def set_item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank writes its block; a plain tensor, but no buffer, becomes split by a split one.

    Buffers and views stay plain: all ranks write the whole value, which has no gradient. Copies of moved
    elements are refused.
    """
    x, index, value = args
    given = numbered(index)
    # The values of a split mask decide how many elements it selects.
    decided = isinstance(value, torch.Tensor) and value.numel() != 1
    if not (decided and any(any_cut(each) and is_mask(each) for each in given)) and (
        lay.LEAVING_OUT or any(isinstance(each, torch.Tensor) for each in given)
    ):
        raise_as_torch(func, (x, tuple(given), value), kwargs)
    if not isinstance(x, SplitTensor):
        if must_stay_plain(x) and without_gradient(x, value):
            return changed_plain(func, args, kwargs)
        become_split(func, x, _layout_to_write(func, x, given, value))
    begin_change(func, x, f"it writes what was moved from another rank; {_REMEDY}")
    given, ones = _staying(x, given)
    part, chosen = basic(func, x, given)
    if chosen:
        _write_chosen(func, part, chosen, ones, value)
    elif isinstance(value, torch.Tensor):
        dims = range(len(part._layout.shape))
        value = _beside(value, [d for d in dims if d not in ones], dims, ones)
        pointwise(_T.copy_, (part, value), {})
    else:
        pointwise(_T.fill_, (part, value), {})
    return end_change(x)


def _staying(x: SplitTensor, given: Sequence[Any]) -> tuple[list[Any], list[int]]:
    # Replaces numbers in cut dimensions by intervals, which one rank has; returns these dimensions too.
    parts, cut = one_each(len(x._layout.shape), given), x._layout.cut_dims
    stays = [isinstance(each, int) and dim in cut for each, dim, _ in parts]
    found = list[Any]()
    for (each, dim, _), stay in zip(parts, stays, strict=True):
        place = place_of(x, dim, each) if stay else 0
        found.append(slice(place, place + 1) if stay else each)
    places = zip(one_each(len(x._layout.shape), found), stays, strict=True)
    return found, [at for (_, _, at), stay in places if stay]


def _beside(
    value: torch.Tensor, dims: Sequence[int | None], wanted: Sequence[int | None], ones: Sequence[int]
) -> torch.Tensor:
    # Reshapes a value for ``dims`` to broadcast to ``wanted``, with ``ones`` inserted; None keeps its order.
    shape, count = tuple(value.shape), len(dims)
    if not ones and len(shape) <= count:
        return value
    # Torch ignores superfluous leading dimensions of extent 1.
    value = composed(torch.reshape, value, (1,) * (count - len(shape)) + shape[max(0, len(shape) - count) :])
    unnamed = (at for at, d in enumerate(dims) if d is None)
    order = [next(unnamed) if d is None else dims.index(d) for d in wanted if d not in ones]
    value = composed(torch.permute, value, order)
    for at, d in enumerate(wanted):
        if d in ones:
            value = composed(torch.unsqueeze, value, at)
    return value


def _layout_to_write(func: Any, x: torch.Tensor, given: Sequence[Any], value: Any) -> Decomposition:
    # Layout for a plain tensor that becomes split, in which the written values need not move.
    partition = common_partition(func, tensors_in(list(given), value))
    dims: list[Any]
    if any(isinstance(each, torch.Tensor) for each in given):
        first = given[0]
        layout = first._layout if isinstance(first, SplitTensor) and is_mask(first) else None
        dims = list(range(x.dim()))
    else:
        parts = one_each(x.dim(), given)
        dims = [None if each is None else dim for each, dim, _ in parts if not isinstance(each, int)]
        layout = value._layout if isinstance(value, SplitTensor) else None
        if layout is not None:
            dims = (len(layout.shape) * [None] + dims)[-len(layout.shape) :]
    if layout is None:
        return lay.replicated(partition, x.shape)
    # Parts of a dimension that is written in part have the ends of balanced ones.
    splits = {
        axis: Balanced(x.shape[to], layout.splits[axis].parts)
        for axis, (n, to) in enumerate(zip(layout.shape, dims, strict=False))
        if to is not None and n != x.shape[to]
    }
    return cut_by_largest(partition, x.shape, [lay.with_splits(layout, splits)], [dims], (None,))


def _write_chosen(
    func: Any, part: SplitTensor, chosen: dict[int, torch.Tensor], ones: Sequence[int], value: Any
) -> None:
    # Writes by masks and tensors of indices.
    (at, mask), *others = chosen.items()
    if is_mask(mask) and not others:
        shape, whole = tuple(mask.shape), part._layout.shape
        if shape != whole[at : at + len(shape)]:
            raise IndexError(f"the mask has the global shape {shape}, what it writes to {whole[at:]}")
        wide = composed(torch.reshape, mask, (*shape, *(1,) * (len(whole) - at - len(shape))))
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            value = composed(torch.reshape, value, ()) if isinstance(value, torch.Tensor) else value
            pointwise(_T.masked_fill_, (part, wide, value), {})
            return
    site = site_for(func, part)
    dims, index = from_whole(site, part, chosen)
    local, layout = with_whole(site, part, dims)
    if isinstance(value, torch.Tensor):
        before = local[index]
        result = chosen_layout(layout, dims, before)
        kept = [d for d in range(len(layout.shape)) if d not in dims]
        wide = before.dim() - len(kept)
        named = chosen_order([d for d in kept if d not in ones], dims, wide)
        value = _beside(value, named, chosen_order(kept, dims, wide), ones)
        value = as_part(site, value, part_for(value.shape, result), result, 1)
    if layout is not part._layout:
        local = local.clone()
    local[index] = value
    if layout is not part._layout:
        checked_block(part).copy_(redistributed(site, local, layout, part._layout, "result"))


@checked_rule(
    "movement",
    *"scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ triu_ tril_".split(),
    *"cumsum_ cumprod_ renorm_ addmm_ addmv_ addbmm_ baddbmm_ addr_".split(),
)
def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes the form without the underscore and writes the blocks; a plain tensor becomes split."""
    x, without = args[0], getattr(_T, func.__name__[:-1])
    if isinstance(x, SplitTensor):
        begin_change(func, x, f"it writes what is on another rank; {_REMEDY}")
    # The form without the underscore is exact for every layout, so this one has no rule of its own: it costs
    # a copy of the block. The backward needs the tensor unchanged.
    kept = isinstance(x, SplitTensor) and torch.is_grad_enabled() and x._local.requires_grad
    before = SplitTensor(checked_block(x).clone(), x._layout) if kept else x
    # Autocast does not apply to in-place forms.
    with no_autocast():
        y = RULES[without].handler(without, (before, *args[1:]), kwargs)
    if x.shape != y._layout.shape:
        raise refused(func, f"it changes the shape of the tensor itself to {y._layout.shape}")
    if not isinstance(x, SplitTensor) and not (must_stay_plain(x) and without_gradient(x, y)):
        become_split(func, x, y._layout)
    return pointwise(_T.copy_, (x, y), {})
