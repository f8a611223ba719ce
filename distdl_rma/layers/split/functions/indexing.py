"""Indexing by numbers, slices, masks and tensors of indices.

``x[2, 1:7, mask]`` is read once (``numbered``, ``one_each``) and applied in the order of cost:

    slices     each rank slices its block; no data moves                          ``_cut_out``
    numbers    the rank with the element sends it to all ranks of its line        ``_one``
    None       a new dimension of extent 1                                        ``_with_new``
    tensors    what is left: indices or masks, by dimension of the result         ``_chosen``

Where a tensor of indices points is known only when the program runs. So the dimensions that it chooses from
become whole: another dimension is cut instead (``with_whole``). Then each rank takes its part of the result,
and all ranks raise the same error for an index out of range. Every rank gets all of the indices. Those of a
first dimension alone stay split: the tensor is gathered, and the result is cut like the indices, as in a
lookup in a table.

A mask alone keeps its elements where they are: each rank selects from its block. The result is cut into
intervals of other lengths, which the ranks exchange (``_exchanged_split``): the one layout in this package
that depends on values. The elements of the mask's dimensions are in row-major order, so these dimensions are
joined to one first, with the cut that a ``reshape`` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split
from distdl_rma.layers.ops.core.autograd import as_step
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split import layout_choice
from distdl_rma.layers.split.calls.signatures import named
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.functions.pointwise import pointwise
from distdl_rma.layers.split.functions.shapes import broadcast, on_shape, reshape, uncut
from distdl_rma.layers.split.operands import (
    as_part,
    as_whole,
    block_of,
    common_partition,
    composition,
    cut_by_largest,
    everywhere_of,
    of_any_cut,
    of_cut,
    on_whole_tensors,
    part_for,
    site_for,
)
from distdl_rma.layers.split.redistribution import redistributed, reduced
from distdl_rma.layers.split.reduction_axes import laid_out, positive, with_whole
from distdl_rma.layers.split.tensor import SplitTensor, any_cut, checked_block, composed, refused
from distdl_rma.layers.split.views import seen_of, strides_of

_T: Any = torch.Tensor


def narrowed(x: SplitTensor, dim: int, start: int, length: int) -> SplitTensor:
    """An interval of a dimension; each rank keeps its elements of it."""
    return _cut_out(x, ((dim, start, start + length, 1),))


def _cut_out(x: SplitTensor, slices: tuple[tuple[int, int, int, int], ...]) -> SplitTensor:
    # Slices of some dimensions, given as dimension, start, stop and step. Parts of the result are what is
    # left of the parts, also if a rank keeps nothing: a balanced result would have to move.
    splits: dict[int, Split] = {}
    place, local = x._layout.partition.index or (), [slice(None)] * len(x._layout.shape)
    whole = local.copy()
    for dim, start, stop, step in slices:
        splits[dim], within = layout_choice.sliced(x._layout.splits[dim], start, stop, step)
        part = place[x._layout.axes.index(dim)] if dim in x._layout.axes else 0
        local[dim], whole[dim] = slice(*within[part], step), slice(start, stop, step)
    strides = strides_of(x, lambda memory: memory[tuple(whole)])
    return seen_of(x, checked_block(x)[tuple(local)], lay.with_splits(x._layout, splits), strides)


def _one(func: Any, x: SplitTensor, dim: int, at: int) -> SplitTensor:
    # One element of a dimension, for all ranks along it. As an interval of extent 1 it lies on one rank; with
    # the dimension whole it is on all. So sending it is a redistribution, whose gradient is known.
    at, moved = place_of(x, dim, at), dim in x._layout.axes
    if moved:
        x = _cut_out(x, ((dim, at, at + 1, 1),))
        target = lay.whole(x._layout, (dim,))
        what = f"element of dim {dim}"
        local, at = redistributed(site_for(func, x), checked_block(x), x._layout, target, what), 0
    else:
        local, target = checked_block(x), x._layout
    layout, strides = _of_elements(x, target, dim)
    return seen_of(x, local.select(dim, at), layout, strides, moved)


def place_of(x: SplitTensor, dim: int, at: int) -> int:
    """An index of a dimension, counted from 0; ``IndexError`` with torch's text if there is no such place."""
    extent = x._layout.shape[dim]
    if not -extent <= at < extent:
        raise IndexError(f"index {at} is out of bounds for dimension {dim} with size {extent}")
    return at % extent


def _of_elements(x: SplitTensor, target: Decomposition, dim: int) -> tuple[Decomposition, Any]:
    # Layout and strides of an element of a dimension that is whole in ``target``.
    layout = lay.reordered(target, [d for d in range(len(target.shape)) if d != dim])
    return layout, strides_of(x, lambda memory: memory.select(dim, 0)) if x._layout.shape[dim] else None


@rule("movement", "narrow", "select")
def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank takes its part of the interval; a single element of a cut dimension is sent to all."""
    x, given = args[0], named(func, args, kwargs)
    if not isinstance(x, SplitTensor):
        raise refused(func, "where it begins is on many ranks")
    dim = given["dim"]
    if func.__name__.startswith("select"):
        on_shape(x).select(dim, 0)
        return _one(func, x, dim % len(x._layout.shape), int(given["index"]))
    # Torch refuses numbers of other types.
    length = func(on_shape(x), dim, *map(block_of, (given["start"], given["length"]))).shape[dim]
    dim, start = dim % len(x._layout.shape), int(given["start"])
    return narrowed(x, dim, start % x._layout.shape[dim] if start < 0 else start, length)


@rule("movement", "unbind", _T.__iter__)
def unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All elements of a dimension; if it is cut, each element is sent to all ranks."""
    x, dim = args[0], named(func, args, kwargs).get("dim", 0)
    on_shape(x).unbind(dim)
    dim %= len(x._layout.shape)
    local, layout = with_whole(site_for(func, x), x, [dim])
    result, strides = _of_elements(x, layout, dim)
    found = tuple(seen_of(x, each, result, strides, layout is not x._layout) for each in local.unbind(dim))
    return iter(found) if func is _T.__iter__ else found


def _read(each: Any) -> Any:
    # Tensors for arrays, lists, ranges and bools; Python's numbers for tensors of one integer.
    if isinstance(each, bool):
        return torch.tensor(each)
    if isinstance(each, (list, range, tuple)) and not hasattr(each, "__index__"):
        each = np.asarray(each) if len(each) else np.zeros(0, np.int64)
    if isinstance(each, np.ndarray):
        each = torch.as_tensor(each)
    if isinstance(each, torch.Tensor):
        if each.dim() or is_mask(each):
            return each
        if each.is_floating_point() or each.is_complex():
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        return int(each._local if isinstance(each, SplitTensor) else each)
    return int(each) if hasattr(each, "__index__") else each


@rule("movement", _T.__getitem__)
def indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank slices its block; a single element of a cut dimension is sent to all ranks.

    Tensors of indices and masks choose from uncut dimensions: if one is cut, another one is cut instead.
    """
    x, index = args
    given = numbered(index)
    if not isinstance(x, SplitTensor):
        return _looked_up(func, x, given)
    y, chosen = basic(func, x, given)
    return _chosen(func, y, chosen) if chosen else y


def numbered(index: Any) -> list[Any]:
    """The parts of an index: slices, Python's numbers, tensors, None and Ellipsis.

    For example ``[np.int64(2), slice(1, 7), [0, 3]]`` becomes ``[2, slice(1, 7), torch.tensor([0, 3])]``.
    """
    if isinstance(index, list) and any(isinstance(each, (slice, torch.Tensor)) for each in index):
        # As in torch, a list of these is a tuple.
        index = tuple(index)
    return [_read(each) for each in (index if isinstance(index, tuple) else (index,))]


def one_each(ndim: int, given: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Parts of an index for all dimensions, each with its dimension of the tensor and of the result.

    Slices stand for Ellipsis. A mask is for several dimensions, None for a new one, and a number leaves none
    in the result. For example ``[2, ..., None]`` of a tensor of 3 dimensions becomes
    ``[(2, 0, 0), (slice(None), 1, 0), (slice(None), 2, 1), (None, 3, 2)]``.
    """
    spent = sum(each.dim() if is_mask(each) else not (each is None or each is Ellipsis) for each in given)
    if spent > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    found, dim, at, beyond = list[tuple[Any, int, int]](), 0, 0, False
    # As in torch, every Ellipsis stands for ``ndim - spent`` dimensions, or for those left if they are fewer.
    # One more at the end stands for those that the index does not name.
    for each in (*given, Ellipsis):
        wide = ndim - spent if each is Ellipsis else each.dim() if is_mask(each) else int(each is not None)
        beyond = beyond or wide > ndim - dim
        if beyond and not (each is Ellipsis or isinstance(each, slice)):
            raise IndexError(f"too many indices for tensor of dimension {ndim}")
        if each is Ellipsis:
            wide = min(wide, ndim - dim)
            found += zip([slice(None)] * wide, range(dim, dim + wide), range(at, at + wide), strict=True)
            dim, at = dim + wide, at + wide
        elif dim + wide <= ndim:
            found.append((each, dim, at))
            dim, at = dim + wide, at + (0 if each.__class__ is int else wide or 1)
    return found


def _with_new(x: SplitTensor, news: Sequence[int]) -> SplitTensor:
    # With new dimensions at these places.
    order: list[int | None] = list(range(len(x._layout.shape)))
    for at in news:
        order.insert(at, None)
    index = tuple(None if d is None else slice(None) for d in order)
    strides = strides_of(x, lambda memory: memory[index])
    return seen_of(x, checked_block(x)[index], lay.reordered(x._layout, order), strides)


def basic(func: Any, x: SplitTensor, given: Sequence[Any]) -> tuple[SplitTensor, dict[int, torch.Tensor]]:
    """Applies numbers, slices and None; also returns the tensors of indices, by dimension of the result.

    The order matters: slices first, since they move nothing and leave less to move; numbers from the last
    dimension on, so that the dimensions before keep their numbers; new dimensions at the end.
    """
    chosen: dict[int, torch.Tensor] = {}
    slices, numbers, news = [], [], []
    for each, dim, at in one_each(len(x._layout.shape), given):
        if each is None:
            news.append(at)
        elif isinstance(each, int):
            numbers.append((dim, each))
        elif isinstance(each, slice):
            slices += _bounds(each, dim, x._layout.shape[dim])
        elif is_mask(each) and not each.dim():
            # Selects all of a new dimension, or nothing.
            news.append(at)
            mask = block_of(each)
            chosen[at] = mask.new_zeros(int(mask), dtype=torch.int64)
        elif isinstance(each, torch.Tensor):
            chosen[at] = each
        else:
            raise TypeError(f"{type(each).__name__} is no index of a tensor")
    y = _cut_out(x, tuple(slices))
    for dim, number in reversed(numbers):
        y = _one(func, y, dim, number)
    return _with_new(y, news) if news else y, chosen


def _bounds(given: slice, dim: int, extent: int) -> list[tuple[int, int, int, int]]:
    # A slice as dimension, start, stop and step; empty for a whole dimension.
    start, stop, step = given.indices(extent)
    if step < 1:
        raise ValueError("step must be greater than zero")
    return [] if (start, stop, step) == (0, extent, 1) else [(dim, start, max(start, stop), step)]


def _chosen(func: Any, x: SplitTensor, chosen: dict[int, torch.Tensor]) -> SplitTensor:
    # Elements by tensors of indices or masks.
    masks = {at: each for at, each in chosen.items() if is_mask(each)}
    if len(chosen) == len(masks) == 1:
        ((at, mask),) = masks.items()
        covered = range(at, at + mask.dim())
        if (isinstance(mask, SplitTensor) and mask.is_split) or set(covered) & set(x._layout.cut_dims):
            return by_mask(func, x, mask, at)
    if list(chosen) == [0] and any_cut(chosen[0]):
        return by_rows(func, x, chosen[0])
    site = site_for(func, x)
    dims, index = from_whole(site, x, chosen)
    local, layout = with_whole(site, x, dims)
    # The chosen dimensions are whole, so all ranks raise the same error for an index out of range.
    y = local[index]
    return SplitTensor(y, chosen_layout(layout, dims, y))


def from_whole(
    site: Site, x: SplitTensor, chosen: dict[int, torch.Tensor]
) -> tuple[list[int], tuple[Any, ...]]:
    """The dimensions that tensors of indices choose from, and the index for a block with these whole.

    Blocking if indices are cut: every rank gets all of them.
    """
    whole = {at: _everywhere(site, each, at) for at, each in chosen.items()}
    dims = [d for at, each in whole.items() for d in range(at, at + (each.dim() if is_mask(each) else 1))]
    found: list[Any] = []
    for d in range(len(x._layout.shape)):
        if d in whole:
            found.append(whole[d])
        elif d not in dims:
            found.append(slice(None))
    return dims, tuple(found)


def _everywhere(site: Site, index: Any, at: int) -> Any:
    return everywhere_of(site, index, f"indices {at}") if isinstance(index, SplitTensor) else index


def chosen_order(kept: Sequence[int], dims: Sequence[int], wide: int) -> list[int | None]:
    """Dimensions of a result of indexing: those ``kept``, and None for ``wide`` chosen ones.

    The chosen ones replace the first of ``dims``, or come first if others lie between ``dims``. This is
    numpy's rule: ``x[:, i, j]`` has the chosen dimension second, ``x[i, :, j]`` has it first.
    """
    between = any(dims[0] < d < dims[-1] for d in kept) if dims else False
    ahead = 0 if between or not dims else sum(d < dims[0] for d in kept)
    return [*kept[:ahead], *(None,) * wide, *kept[ahead:]]


def chosen_layout(layout: Decomposition, dims: Sequence[int], y: torch.Tensor) -> Decomposition:
    """Layout of a result that tensors of indices choose from dimensions ``dims`` of blocks."""
    kept = [d for d in range(len(layout.shape)) if d not in dims]
    order = chosen_order(kept, dims, y.dim() - len(kept))
    return laid_out(layout, order, y)


def by_rows(func: Any, x: torch.Tensor, index: Any) -> SplitTensor:
    """Elements of the first dimension of ``x``, which all ranks get whole; cut like the split indices."""
    layout = index._layout
    whole = as_whole(site_for(func, index), x, layout, "chosen from")
    y = whole[checked_block(index)]
    return SplitTensor(y, laid_out(layout, [*range(len(layout.shape)), *(None,) * (whole.dim() - 1)], y))


def _looked_up(func: Any, x: torch.Tensor, given: Sequence[Any]) -> Any:
    # Indexes a plain tensor by split indices.
    first, *others = given
    if not any_cut(given) or any(each not in (Ellipsis, slice(None)) for each in others):
        return on_whole_tensors(func, (x, tuple(given)), {})
    return by_mask(func, x, first) if is_mask(first) else by_rows(func, x, first)


@checked_rule("movement", "take")
@composition
def taken(x: Any, index: Any) -> Any:
    """Elements of the flattened tensor, as by indexing with a tensor."""
    return x.reshape(-1)[index]


@checked_rule("movement", "index_select")
@of_any_cut
def index_select(call: Call, site: Site, x: Any, dim: int, index: Any) -> Any:
    """Elements by indices, which every rank gets; a cut dimension becomes whole."""
    if any_cut(index) and x.dim() and dim in (0, -x.dim()):
        return by_rows(call[0], x, index)
    if not (isinstance(x, SplitTensor) and x.dim()):
        return on_whole_tensors(*call)
    dim = positive(dim, x.dim())
    local, layout = with_whole(site, x, [dim])
    y = local.index_select(dim, _everywhere(site, index, 0))
    return SplitTensor(y, uncut(layout, {dim: y.shape[dim]}))


@checked_rule("movement", *"gather take_along_dim scatter scatter_add scatter_reduce".split())
@of_any_cut
def by_index(call: Call, site: Site, x: Any, dim: int | None, **given: Any) -> Any:
    """Elements of a dimension, which becomes whole; the other dimensions, and the indices, stay cut."""
    name = call[0].__name__
    index = given["indices" if name == "take_along_dim" else "index"]
    source = next((given[key] for key in ("src", "value") if given.get(key) is not None), None)
    beside = isinstance(source, torch.Tensor) and source.dim()
    operands = [x, index, source] if beside else [x, index]
    if dim is None or any(each.dim() != x.dim() for each in operands):
        # Torch also takes a scalar beside vectors, and indices without elements.
        return on_whole_tensors(*call)
    dim = positive(dim, x.dim())
    # Dimensions of equal extents are cut like the largest split operand.
    extents, every = [tuple(each.shape) for each in operands], range(x.dim())
    uneven = [d for d in every if d == dim or len({shape[d] for shape in extents}) > 1]
    split = [each._layout for each in operands if isinstance(each, SplitTensor)]
    moved = [layout_choice.cut_other_dims(layout, uneven) for layout in split]
    work = cut_by_largest(
        common_partition(call[0], operands), extents[0], moved, [every] * len(moved), uneven
    )

    def part(at: int, each: torch.Tensor) -> torch.Tensor:
        shape = tuple(each.shape)
        wanted = uncut(work, {d: shape[d] for d in uneven}) if shape else part_for((), work)
        return as_part(site, each, wanted, work, at)

    local, where = part(0, x), part(1, index)
    if source is None:
        y = local.gather(dim, where) if name == "gather" else torch.take_along_dim(local, where, dim)
        return SplitTensor(y, uncut(work, {d: y.shape[d] for d in uneven}))
    value = part(2, source) if isinstance(source, torch.Tensor) else source
    more = {key: given[key] for key in ("reduce", "include_self") if given.get(key) is not None}
    y = getattr(_T, name)(local, dim, where, value, **more)
    return SplitTensor(y, uncut(work, {d: y.shape[d] for d in uneven}))


# It checks the classes in each replay.
_encoded = as_step(torch.nn.functional.one_hot)


@rule("movement", "one_hot")
@of_cut(uncut=True)
def one_hot(call: Call, site: Site, x: SplitTensor, num_classes: int) -> Any:
    """Each rank encodes its block; without a number of classes ranks find the largest class."""
    local, layout = checked_block(x), x._layout
    if num_classes == -1:
        num_classes = int(composed(torch.max, x)._local) + 1
    y = _encoded(local, num_classes)
    return SplitTensor(y, laid_out(layout, [*range(len(layout.shape)), None], y))


def is_mask(each: Any) -> bool:
    """Whether an index is a mask."""
    return isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)


def by_mask(func: Any, x: Any, mask: Any, at: int = 0) -> SplitTensor:
    """Elements that a mask selects, in the order of the whole; blocking: ranks exchange their numbers.

    The mask covers the dimensions of ``x`` from ``at`` on. A plain tensor is cut like the mask first.
    """
    shape = tuple(x.shape)
    covered = shape[at : at + mask.dim()]
    if mask.shape != covered:
        raise IndexError(f"the mask has the global shape {tuple(mask.shape)}, what it chooses from {covered}")
    site = site_for(func, x, mask)
    if not isinstance(x, SplitTensor):
        # Cut like the mask.
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
    y = checked_block(flat)[(slice(None),) * at + (here,)]
    return SplitTensor(y, lay.with_splits(layout, {at: _exchanged_split(site, layout, at, y.shape[at])}))


def _exchanged_split(site: Site, layout: Decomposition, at: int, count: int) -> Split:
    # Split of a dimension of which each rank keeps ``count`` elements; ranks exchange the counts. Each writes
    # its count at its place among zeros, so that a sum is a gather.
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


@checked_rule("movement", "nonzero", "argwhere")
@of_cut()
def nonzero(call: Call, site: Site, x: SplitTensor, as_tuple: bool = False) -> Any:
    """Indices of elements, cut in their order; ranks exchange how many they have."""
    flat = reshape(x, (-1,))
    places = torch.arange(*flat._layout.own_box.bounds[0], device=x.device)
    found = by_mask(call[0], SplitTensor(places, flat._layout), composed(torch.ne, flat, 0))
    numbers, layout = torch.unravel_index(found._local, x.shape), found._layout
    if as_tuple:
        return tuple(SplitTensor(each, layout) for each in numbers)
    rows = lay.reordered(layout, [0, None])
    return SplitTensor(torch.stack(numbers, 1), uncut(rows, {1: len(numbers)}))


@rule("pointwise", "where")
def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank computes its block; for a condition alone as ``nonzero``."""
    if len(args) + len(kwargs) == 1:
        return composed(torch.nonzero, *args, *kwargs.values(), as_tuple=True)
    return pointwise(func, args, kwargs)


@checked_rule("movement", "masked_select")
@of_any_cut
def masked_select(call: Call, site: Site, x: Any, mask: Any) -> Any:
    """Elements that a mask selects, cut in their order; ranks exchange how many they have."""
    x, mask = broadcast(torch.broadcast_tensors, (x, mask), {})
    return by_mask(call[0], x, mask)
