"""Rearranged elements: joined, split, flipped, rolled, shuffled; windows and diagonals.

Three ways to rearrange a dimension that is cut:

- *Parts of other lengths* (``cat``, ``split``, ``chunk``): each rank keeps its elements, and the result has
  its parts where these elements lie. If a small tensor is joined to a large one, the first and the last rank
  keep what is added, so that no block of the large one moves (``layout_choice.joined``).
- *Another cut meanwhile* (``flip``, ``diag``, ``unfold``: the rows of ``_enter``): every index of the other
  dimensions is rearranged alike. So one of these is cut instead, torch's function runs on the blocks, and the
  result stays cut there. Functions of matrices, such as ``svd``, are here too.
- *Strips to other blocks* (``roll``): two slices of the dimension are joined in the other order, and cut as
  before. By a small shift most elements stay on their rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split import layout_choice
from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.functions.indexing import narrowed
from distdl_rma.layers.split.functions.shapes import on_shape, reshape
from distdl_rma.layers.split.operands import (
    as_part,
    block_of,
    common_partition,
    composition,
    of_any_cut,
    of_cut,
    on_whole_tensors,
)
from distdl_rma.layers.split.redistribution import redistributed
from distdl_rma.layers.split.reduction_axes import laid_out, positive, with_whole
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, composed
from distdl_rma.layers.split.views import seen_of, strides_of


@checked_rule("movement", "cat", "concat", "concatenate")
@of_any_cut
def cat(call: Call, site: Site, tensors: Any, dim: int) -> Any:
    """Each rank joins its blocks, cut as the largest tensor is; along a cut dimension elements move."""
    partition = common_partition(call[0], tensors)
    # Torch joins empty vectors with any tensors: the result has their common type, and is in their graph.
    empty = [x for x in tensors if x.shape == (0,)]
    tensors = [x for x in tensors if x.shape != (0,)]
    if not any(isinstance(x, SplitTensor) for x in tensors):
        return on_whole_tensors(*call)
    shapes = [tuple(x.shape) for x in tensors]
    # A cut tensor before copies: copies can be cut without a message.
    largest = max(
        (at for at, x in enumerate(tensors) if isinstance(x, SplitTensor)),
        key=lambda at: (tensors[at].is_split, Box.of_shape(shapes[at]).volume),
    )
    dim = positive(dim, len(shapes[largest]))
    layouts = tuple(x._layout if isinstance(x, SplitTensor) else tuple(x.shape) for x in tensors)

    def make() -> tuple[Decomposition, list[Decomposition]]:
        base = tensors[largest]._layout
        if dim not in base.cut_dims:
            base = lay.ending_first(base, [x for x in layouts if isinstance(x, Decomposition)])
        return _places(base, largest, shapes, dim)

    result, parts = lay.kept(partition, "cat", (layouts, largest, dim), make)
    pieces = [
        as_part(site, x, part, result, at) for at, (x, part) in enumerate(zip(tensors, parts, strict=True))
    ]
    pieces += map(block_of, empty)
    return SplitTensor(torch.cat(pieces, dim), result)


def _places(
    base: Decomposition, at: int, shapes: Sequence[tuple[int, ...]], dim: int
) -> tuple[Decomposition, list[Decomposition]]:
    # Layout of a concatenation, and the layout of each tensor within it.
    extents = [shape[dim] for shape in shapes]
    cut = dim in base.axes
    whole = layout_choice.joined(extents, at, base.splits[dim]) if cut else Balanced(sum(extents), 1)
    result = lay.with_splits(base, {dim: whole})
    starts = accumulate(extents, initial=0)
    places = [
        layout_choice.sliced(whole, start, start + n, 1)[0] for start, n in zip(starts, extents, strict=False)
    ]
    return result, [lay.with_splits(base, {dim: place}) for place in places]


@rule("movement", "stack")
@composition
def stack(tensors: Any, dim: int) -> Any:
    """Each rank stacks its blocks, cut as the largest tensor is."""
    return torch.cat([torch.unsqueeze(x, dim) for x in tensors], dim)


@checked_rule("movement", *"hstack vstack dstack row_stack column_stack".split())
def stacked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As ``cat`` of tensors with more dimensions."""
    tensors, name = args[0], func.__name__
    if name == "column_stack":
        wide = [composed(torch.Tensor.reshape, x, (-1, 1)) if x.dim() < 2 else x for x in tensors]
        return composed(torch.cat, wide, 1)
    least: Any = {"hstack": torch.atleast_1d, "dstack": torch.atleast_3d}.get(name, torch.atleast_2d)
    more = [composed(least, x) for x in tensors]
    dim = {"hstack": 0 if more[0].dim() == 1 else 1, "dstack": 2}.get(name, 0)
    return composed(torch.cat, more, dim)


@rule(
    "movement",
    *"split split_with_sizes chunk tensor_split unsafe_chunk unsafe_split unsafe_split_with_sizes".split(),
    *"hsplit vsplit dsplit".split(),
)
@of_cut(uncut=True)
def taken_apart(call: Call, site: Site, x: SplitTensor, dim: int = 0, **_: Any) -> Any:
    """Each rank keeps its elements of each part."""
    func, (_x, *rest), kwargs = call
    dim = {"hsplit": min(1, x.dim() - 1), "vsplit": 0, "dsplit": 2}.get(func.__name__, dim)
    found = func(on_shape(x), *rest, **kwargs)
    dim = positive(dim, x.dim())
    starts = accumulate((part.shape[dim] for part in found), initial=0)
    return type(found)(
        narrowed(x, dim, start, part.shape[dim]) for start, part in zip(starts, found, strict=False)
    )


@checked_rule("movement", "glu")
@composition
def gated(x: Any, dim: int) -> Any:
    """One half of a dimension times the sigmoid of the other; if it is cut, one half moves."""
    values, gates = torch.chunk(x, 2, dim)
    return values * torch.sigmoid(gates)


_T: Any = torch.Tensor


def _enter(
    *names: Any,
    dims: tuple[Any, ...] | None,
    doc: str,
    kind: str = "movement",
    gone: bool = False,
    new: tuple[str, ...] = (),
    view: bool = False,
) -> None:
    # Functions that need some dimensions uncut, and treat every index of the others separately. ``dims`` are
    # these dimensions: numbers, or names of arguments with them; None for all dimensions. ``gone``: the
    # result does not have them. ``new``: arguments with positions of new dimensions, which otherwise come
    # last. ``view``: torch returns a view.

    @of_cut(uncut=True)
    def handler(call: Call, site: Site, x: SplitTensor, **given: Any) -> Any:
        """Needs dimensions uncut: others are cut instead."""
        func, (_x, *rest), kwargs = call
        if any(each.dim() for each in tensors_in(rest, kwargs)):
            return on_whole_tensors(*call)
        count = len(x._layout.shape)
        found: Any = range(count) if dims is None else [given.get(d, d) for d in dims]
        each_of = (each if isinstance(each, (tuple, list)) else (each,) for each in found)
        whole = [positive(d, count) for each in each_of for d in each]
        # Torch's errors about strides are raised on all ranks, before elements move.
        strides = strides_of(x, lambda memory: func(memory, *rest, **kwargs)) if view else None
        local, layout = with_whole(site, x, whole)
        moved = layout is not x._layout
        kept = [None if d in whole else d for d in range(count) if not (gone and d in whole)]

        def split(y: torch.Tensor) -> SplitTensor:
            if local.requires_grad and not (y.requires_grad or local.numel()) and y.dtype.is_floating_point:
                # For empty blocks, torch returns some results without a graph, unlike on other ranks.
                y = y + local.sum().abs().to(y.dtype)
            order = [*kept]
            for at in sorted(given[name] % y.dim() for name in new):
                order.insert(at, None)
            result = laid_out(layout, [*order, *(None,) * (y.dim() - len(order))], y)
            return seen_of(x, y, result, strides, moved) if view else SplitTensor(y, result)

        return mapped(split, func(local.contiguous() if moved else local, *rest, **kwargs))

    checked_rule(kind, *names, doc=doc)(handler)


_ORDER = "Reorders elements of some dimensions; if one is cut, another dimension is cut instead."
_WINDOWS = "Windows along a dimension; if it is cut, another one is cut instead."
_DIAGONALS = "Diagonals over two dimensions; if one is cut, another dimension is cut instead."
_ONTO_DIAGONALS = "Builds or takes diagonals; if their dimensions are cut, another one is cut instead."
_enter("flip", "rot90", dims=("dims",), doc=_ORDER)
_enter("flipud", dims=(0,), doc=_ORDER)
_enter("fliplr", "channel_shuffle", "native_channel_shuffle", dims=(1,), doc=_ORDER)
_enter(_T.unfold, dims=("dimension",), view=True, doc=_WINDOWS)
_OF_PAIRS = "Each rank views its block; the dimension of both parts is whole."
_enter("view_as_real", dims=(), view=True, doc=_OF_PAIRS)
_enter("view_as_complex", dims=(-1,), gone=True, view=True, doc=_OF_PAIRS)
_enter("diagonal", dims=("dim1", "dim2"), gone=True, view=True, doc=_DIAGONALS)
_enter("diag", "diagflat", dims=None, gone=True, doc=_ONTO_DIAGONALS)
_enter("diag_embed", dims=(-1,), gone=True, new=("dim1", "dim2"), doc=_ONTO_DIAGONALS)
_enter(
    *"svd svdvals qr eig eigvals eigh eigvalsh cholesky cholesky_ex inv inv_ex inverse pinv pinverse".split(),
    *"det logdet slogdet matrix_rank matrix_power matrix_exp lu_factor cond cholesky_inverse".split(),
    dims=(-2, -1),
    gone=True,
    kind="contraction",
    doc="Each rank applies the function to its matrices; if these are cut, another dimension is instead.",
)


@checked_rule("movement", "roll")
@of_cut(uncut=True)
def rolled(call: Call, site: Site, x: SplitTensor, shifts: Any, dims: Any) -> Any:
    """Each rank rolls its block; along a cut dimension elements move to other blocks."""
    shifts, dims = ((each,) if isinstance(each, int) else tuple(each or ()) for each in (shifts, dims))
    if not dims:
        return reshape(composed(call[0], reshape(x, (-1,)), shifts[0], 0), x._layout.shape)
    for number, (shift, dim) in enumerate(zip(shifts, dims, strict=True)):
        x = _rolled_along(site, x, shift, positive(dim, x.dim()), number)
    return x


def _rolled_along(site: Site, x: SplitTensor, shift: int, dim: int, number: int) -> SplitTensor:
    # A roll by 2 along 8 elements of two ranks: 0 1 2 3 | 4 5 6 7 becomes 6 7 0 1 | 2 3 4 5. The end 6 7
    # joins the first block; then strips at the ends of blocks move on.
    extent = x._layout.shape[dim]
    shift = shift % extent if extent else 0
    if not shift or dim not in x._layout.cut_dims:
        return SplitTensor(torch.roll(checked_block(x), shift, dim), x._layout)
    pieces = narrowed(x, dim, extent - shift, shift), narrowed(x, dim, 0, extent - shift)
    y = composed(torch.cat, pieces, dim)
    local = redistributed(site, checked_block(y), y._layout, x._layout, f"roll {number}")
    return SplitTensor(local, x._layout)


@rule("movement", "pixel_shuffle", "pixel_unshuffle")
@of_cut(uncut=True, empty=False)
def pixels_shuffled(call: Call, site: Site, x: SplitTensor, **given: Any) -> Any:
    """Each rank shuffles its block; blocks end at whole elements of the result."""
    func, up, factor = call[0], "upscale_factor" in given, int(*given.values())
    shape = tuple(func(on_shape(x), factor).shape)
    channels, *space = range(len(shape))[-3:]
    units = {channels: factor**2} if up else dict.fromkeys(space, factor)
    source = layout_choice.multiples(x._layout, units)
    splits = {
        d: layout_choice.scaled(source.splits[d], shape[d], x._layout.shape[d] or 1)
        for d in (channels, *space)
    }
    result = lay.with_splits(source, splits)
    local = redistributed(site, checked_block(x), x._layout, source, "shuffled")
    y = func(local, factor) if local.numel() else local.reshape(result.own_box.shape)
    return SplitTensor(y, result)


@checked_rule("movement", "triu", "tril")
@of_cut(uncut=True)
def triangle(call: Call, site: Site, x: SplitTensor, diagonal: int) -> Any:
    """Each rank keeps its part of the triangle."""
    # A block of rows from 4 on sees the diagonal 4 columns further to the right.
    row, column = x._layout.own_box.start[-2:]
    return SplitTensor(call[0](checked_block(x), diagonal + row - column), x._layout)
