"""Elements where a mask says so."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.signatures import named
from distdl_rma.split.calls.site import Site, site_of
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.functions.elements.pointwise import pointwise
from distdl_rma.split.functions.places.shapes import (
    broadcast,
    frozen,
    reshape,
    uncut,
)
from distdl_rma.split.moves import reduced
from distdl_rma.split.operands import any_cut, as_part, machine_of, of_cut, on_copies
from distdl_rma.split.tensor import SplitTensor, composed, local_of


def is_mask(each: Any) -> bool:
    """Whether it is a mask."""
    return isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)


def by_mask(func: Any, x: Any, mask: Any, at: int = 0) -> SplitTensor:
    """Elements where a mask says so, in the order of the whole: ranks with blocks of it tell how many."""
    shape = frozen(x)
    covered = shape[at : at + mask.dim()]
    if frozen(mask) != covered:
        raise IndexError(f"the mask has the global shape {frozen(mask)}, what it chooses from {covered}")
    site = site_of(machine_of(x if isinstance(x, SplitTensor) else mask), func)
    if not isinstance(x, SplitTensor):
        # Cut as the mask.
        dims = range(at, at + mask.dim())
        order = [d - at if d in dims else None for d in range(len(shape))]
        extents = {d: n for d, n in enumerate(shape) if d not in dims}
        result = uncut(lay.reordered(mask._layout, order), extents)
        x = SplitTensor(as_part(site, x, result, result), result)
    flat = reshape(x, (*shape[:at], prod(covered), *shape[at + mask.dim() :]))
    layout = flat._layout
    along = lay.reordered(lay.whole(layout, [d for d in range(len(layout.shape)) if d != at]), [at])
    mask = reshape(mask, (-1,)) if isinstance(mask, SplitTensor) else mask.reshape(-1)
    here = as_part(site, mask, along, along, 1).bool()
    y = local_of(flat)[(slice(None),) * at + (here,)]
    return SplitTensor(y, lay.with_splits(layout, {at: _told(site, layout, at, y.shape[at])}))


def _told(site: Site, layout: Decomposition, at: int, count: int) -> Split:
    # How a dimension is cut of which each rank keeps so many elements of its block: ranks tell each other.
    counts = torch.zeros(layout.splits[at].parts, dtype=torch.int64)
    part, ranks = 0, lay.line(layout, ())
    if at in layout.axes:
        grid_dim = layout.axes.index(at)
        ranks = lay.line(layout, (grid_dim,))
        part = (layout.partition.index or ())[grid_dim]
    counts[part] = count
    if len(ranks) > 1:
        counts = reduced(site, counts, ranks, "sum", "elements of a mask")
    lengths = tuple(counts.tolist())
    return lay.simplest(Listed(lengths)) if len(lengths) > 1 else Balanced(lengths[0], 1)


@rule("movement", "nonzero", "argwhere")
@refusing
@of_cut()
def nonzero(call: Call, site: Site, x: SplitTensor, as_tuple: bool = False) -> Any:
    """Places of elements, cut in their order: ranks tell each other how many they have."""
    flat = reshape(x, (-1,))
    layout = flat._layout
    start, _ = layout.box(layout.partition.me).bounds[0]
    number = local_of(flat).nonzero()[:, 0] + start
    layout = lay.with_splits(layout, {0: _told(site, layout, 0, len(number))})
    places = []
    for n in reversed(frozen(x)):
        places.append(number % n)
        number = number // n
    if as_tuple:
        return tuple(SplitTensor(each, layout) for each in reversed(places))
    rows = lay.reordered(layout, [0, None])
    return SplitTensor(torch.stack(places[::-1], 1), uncut(rows, {1: len(places)}))


@rule("pointwise", "where")
def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As every function of single elements; of a condition alone the places, as ``nonzero`` has them."""
    if len(args) + len(kwargs) == 1:
        return composed(torch.nonzero, *args, *kwargs.values(), as_tuple=True)
    return pointwise(func, args, kwargs)


@rule("movement", "masked_select")
@refusing
def masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements where a mask says so, cut in their order: ranks tell each other how many they have."""
    x, mask = args[0], named(func, args, kwargs)["mask"]
    if not any_cut(x, mask):
        return on_copies(func, args, kwargs)
    x, mask = broadcast(torch.broadcast_tensors, (x, mask), {})
    return by_mask(func, x, mask)
