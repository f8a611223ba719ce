"""Parts of tensors that are written to: each rank writes its piece, of what all of them know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Split
from distdl_rma.split import cuts
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.site import site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.functions.elements.pointwise import pointwise
from distdl_rma.split.functions.places.indexing import (
    along_one,
    basic,
    by_index,
    chosen_layout,
    from_whole,
    indexed,
    is_index,
    numbered,
    one_each,
)
from distdl_rma.split.functions.places.masks import is_mask
from distdl_rma.split.functions.places.shapes import frozen, uncut, whole_along
from distdl_rma.split.moves import redistributed
from distdl_rma.split.operands import as_part, common_partition, machine_of, on_copies, part_for
from distdl_rma.split.tensor import SplitTensor, become_split, composed, local_of, refused, tensors_in

_T: Any = torch.Tensor
_REMEDY = "build the tensor by torch.cat, torch.where or F.pad instead"


@rule("movement", _T.__setitem__)
def set_item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Each rank writes its piece; a plain tensor that is written a split one to becomes split.

    What is a copy of moved elements is not written to.
    """
    x, index, value = args
    given = numbered(index)
    if not isinstance(x, SplitTensor):
        become_split(func, x, _layout_to_write(func, x, given, value))
    given = one_each(len(x._layout.shape), given)
    if x._copy_of is not None:
        raise refused(func, f"it writes what was moved from another rank; {_REMEDY}")
    if any(is_index(each) for each in given):
        _write_chosen(func, x, given, value)
        return
    cut, behind = lay.cut_dims(x._layout), len([each for each in given if not isinstance(each, int)])
    dim = 0
    for at, each in enumerate(given):
        behind -= not isinstance(each, int)
        if isinstance(each, int) and dim in cut:
            # Of a cut dimension an interval of one element, which one rank has.
            extent = x._layout.shape[dim]
            if not -extent <= each < extent:
                raise IndexError(f"index {each} is out of bounds for dimension {dim} with size {extent}")
            given[at] = slice(each % extent, each % extent + 1)
            if isinstance(value, torch.Tensor) and len(frozen(value)) > behind:
                value = composed(torch.unsqueeze, value, -1 - behind)
            behind += 1
        dim += each is not None
    part = indexed(_T.__getitem__, (x, tuple(given)), {})
    pointwise(_T.copy_ if isinstance(value, torch.Tensor) else _T.fill_, (part, value), {})


def _layout_to_write(func: Any, x: torch.Tensor, given: Sequence[Any], value: Any) -> Decomposition:
    # Blocks of a plain tensor, for what is written to it to stay where it is.
    masks = [each for each in given if isinstance(each, SplitTensor) and is_mask(each)]
    partition = common_partition(func, tensors_in(list(given), value))
    axes: list[int | None] = [None] * partition.dim
    splits: list[Split] = [Balanced(n, 1) for n in x.shape]
    dims: list[int | None]
    if any(is_index(each) for each in given):
        mask = masks[0] if masks and given[0] is masks[0] else None
        layout = None if mask is None else mask._layout
        dims = list(range(x.dim()))
    else:
        dims, dim = [], 0
        for each in one_each(x.dim(), given):
            if not isinstance(each, int):
                dims.append(None if each is None else dim)
            dim += each is not None
        layout = value._layout if isinstance(value, SplitTensor) else None
        if layout is not None:
            dims = dims[len(dims) - len(layout.shape) :]
    if layout is not None:
        for g, axis in enumerate(layout.axes):
            to = None if axis is None else dims[axis]
            if axis is None or to is None or to in axes:
                continue
            same = layout.shape[axis] == x.shape[to]
            splits[to] = layout.splits[axis] if same else Balanced(x.shape[to], layout.splits[axis].parts)
            axes[g] = to
    return lay.layout(partition, splits, tuple(axes))


def _write_chosen(func: Any, x: SplitTensor, given: Sequence[Any], value: Any) -> None:
    # By masks and tensors of indices.
    single = not isinstance(value, torch.Tensor) or not frozen(value)
    masks = [each for each in given if is_index(each)]
    mask = torch.as_tensor(masks[0]) if not isinstance(masks[0], torch.Tensor) else masks[0]
    if single and len(masks) == 1 and is_mask(mask) and given[0] is masks[0]:
        rest = len(x._layout.shape) - len(frozen(mask))
        if frozen(mask) != x._layout.shape[: len(frozen(mask))]:
            raise IndexError(
                f"the mask has the global shape {frozen(mask)}, what it writes to {x._layout.shape}"
            )
        wide = composed(torch.reshape, mask, (*frozen(mask), *(1,) * rest))
        pointwise(_T.masked_fill_, (x, wide.bool(), value), {})
        return
    part, chosen = basic(func, x, given)
    if part._copy_of is not None or any(
        isinstance(each, SplitTensor) and each.is_split for each in chosen.values()
    ):
        raise refused(func, f"it writes where only ranks with blocks of the indices know; {_REMEDY}")
    dims, index = from_whole(part, chosen)
    site = site_of(machine_of(x), func)
    local, layout = whole_along(site, part, dims)
    result = chosen_layout(layout, dims, local[index])
    if isinstance(value, torch.Tensor):
        value = as_part(site, value, part_for(frozen(value), result), result, 1)
    if layout is not part._layout:
        local = local.clone()
    local[index] = value
    if layout is not part._layout:
        local_of(part).copy_(redistributed(site, local, layout, part._layout, "result"))


@rule("refused", *"index_put index_put_ masked_scatter masked_scatter_ put_ put".split())
def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Writes to places that only the indices tell."""
    if not any(x.is_split for x in (*args, *kwargs.values()) if isinstance(x, SplitTensor)):
        return on_copies(func, args, kwargs)
    raise refused(func, f"it writes by indices or a mask; {_REMEDY}")


@rule("movement", *"scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_".split())
def by_index_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computed as without the underscore, and copied into each rank's block; a plain tensor becomes split."""
    x = args[0]
    split = [each for each in (*args, *kwargs.values()) if isinstance(each, SplitTensor)]
    if not isinstance(x, SplitTensor):
        become_split(func, x, _as_indices(func, x, split[0], args[1] if len(args) > 1 else kwargs["dim"]))
    if x._copy_of is not None:
        raise refused(func, f"it writes what is on another rank; {_REMEDY}")
    handler = by_index if func.__name__.startswith("scatter") else along_one
    y = handler(getattr(_T, func.__name__[:-1]), args, kwargs)
    local = redistributed(site_of(machine_of(x), func), y._local, y._layout, x._layout, "result")
    local_of(x).copy_(local)
    return x


def _as_indices(func: Any, x: torch.Tensor, index: SplitTensor, dim: int) -> Decomposition:
    # Blocks of a plain tensor beside those of indices, or of what is written.
    if x.dim() != len(index._layout.shape):
        return lay.replicated(index._layout.partition, x.shape)
    uneven = {dim % x.dim(), *(d for d, n in enumerate(x.shape) if n != index._layout.shape[d])}
    return uncut(cuts.elsewhere(index._layout, tuple(uneven)), {d: x.shape[d] for d in uneven})
