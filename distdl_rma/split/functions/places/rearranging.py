"""Elements of a tensor in other places: flipped, rolled, shuffled, windows and diagonals of them."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.split import cuts
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import checked_rule
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.functions.places.shapes import (
    cut_as,
    derived,
    on_shape,
    reshape,
    seen_of,
)
from distdl_rma.split.moves import redistributed
from distdl_rma.split.operands import of_cut
from distdl_rma.split.reducing import laid_out, positive, with_whole
from distdl_rma.split.tensor import SplitTensor, composed, local_of

_T: Any = torch.Tensor


@checked_rule("movement", *"flip fliplr flipud rot90 channel_shuffle native_channel_shuffle".split())
@of_cut(uncut=True)
def within_dims(call: Call, site: Site, x: SplitTensor, dims: Any = None, **_: Any) -> Any:
    """The order of elements along some dimensions, which must not be cut: another one is cut instead."""
    func, (_x, *rest), kwargs = call
    count = len(x._layout.shape)
    dims = (0 if func is torch.flipud or func is _T.flipud else 1) if dims is None else dims
    dims = (dims,) if isinstance(dims, int) else dims
    dims = tuple(positive(d, count) for d in dims)
    local, layout = with_whole(site, x, dims)
    y = func(local, *rest, **kwargs)
    return SplitTensor(y, laid_out(layout, range(count), y))


@checked_rule("movement", "roll")
@of_cut(uncut=True)
def rolled(call: Call, site: Site, x: SplitTensor, shifts: Any, dims: Any) -> Any:
    """Each rank rolls its block; along cut dimensions what leaves a block moves to where it enters."""
    func, *_ = call
    shifts, dims = ((each,) if isinstance(each, int) else tuple(each or ()) for each in (shifts, dims))
    if not dims:
        return reshape(composed(func, reshape(x, (-1,)), shifts[0], 0), x._layout.shape)
    cut, count = x._layout.cut_dims, len(x._layout.shape)
    here = [(s, d) for s, d in zip(shifts, dims, strict=True) if positive(d, count) not in cut]
    y = SplitTensor(
        torch.roll(local_of(x), *map(tuple, zip(*here, strict=True))) if here else local_of(x), x._layout
    )
    for number, (shift, dim) in enumerate(zip(shifts, dims, strict=True)):
        if dim % count in cut:
            y = _rolled_along(site, y, shift, dim % count, number)
    return y


def _rolled_along(site: Site, x: SplitTensor, shift: int, dim: int, number: int) -> SplitTensor:
    extent = x._layout.shape[dim]
    shift = shift % extent if extent else 0
    if not shift:
        return x
    split, me = x._layout.splits[dim], x._layout.partition.index
    part = 0 if me is None else me[x._layout.axes.index(dim)]
    pieces = []
    # The end comes first.
    for at, (start, stop, to) in enumerate(((extent - shift, extent, 0), (0, extent - shift, shift))):
        source, within = cuts.sliced(split, start, stop, 1)
        target = cuts.sliced(split, to, to + stop - start, 1)[0]
        low, high = within[part]
        mine, wanted = (lay.with_splits(x._layout, {dim: each}) for each in (source, target))
        piece = local_of(x).narrow(dim, low, high - low)
        pieces.append(
            redistributed(site, piece, mine, wanted, f"roll {number}, {'end' if at == 0 else 'start'}")
        )
    return SplitTensor(torch.cat(pieces, dim), x._layout)


@rule("movement", "pixel_shuffle", "pixel_unshuffle")
@of_cut(uncut=True, empty=False)
def pixels_shuffled(call: Call, site: Site, x: SplitTensor, **given: Any) -> Any:
    """Each rank shuffles its block; blocks end where elements of the result do."""
    func, up, factor = call[0], "upscale_factor" in given, int(*given.values())

    def make() -> tuple[Decomposition, Decomposition]:
        shape = tuple(func(on_shape(x), factor).shape)
        channels, *space = range(len(shape))[-3:]
        units = {channels: factor**2} if up else dict.fromkeys(space, factor)
        source = cuts.multiples(x._layout, units)
        splits = {
            d: cuts.scaled(source.splits[d], shape[d], x._layout.shape[d] or 1) for d in (channels, *space)
        }
        return source, lay.with_splits(source, splits)

    source, result = derived(x, (func, factor), make)
    local = cut_as(site, x, source, "shuffled")
    here = result.box(result.partition.me).shape
    return SplitTensor(func(local, factor) if local.numel() else local.reshape(here), result)


@checked_rule("movement", "triu", "tril")
@of_cut(uncut=True)
def triangle(call: Call, site: Site, x: SplitTensor, diagonal: int) -> Any:
    """Each rank keeps what its block has of the triangle."""
    row, column = x._layout.box(x._layout.partition.me).start[-2:]
    return SplitTensor(call[0](local_of(x), diagonal + row - column), x._layout)


@checked_rule("movement", _T.unfold)
@of_cut(uncut=True)
def unfolded(call: Call, site: Site, x: SplitTensor, dimension: int, size: int, step: int) -> Any:
    """Windows along a dimension that must not be cut: another one is cut instead."""
    dim = positive(dimension, len(x._layout.shape))
    local, layout = with_whole(site, x, [dim])
    y = local.unfold(dimension, size, step)
    # Of a number there is one window, along a new dimension.
    result = laid_out(layout, [*range(len(layout.shape)), None], y)
    return seen_of(x, y, result, layout is not x._layout)


@checked_rule("movement", "diagonal")
@of_cut(uncut=True)
def diagonal(call: Call, site: Site, x: SplitTensor, offset: int, dim1: int, dim2: int) -> Any:
    """Diagonals over two dimensions that must not be cut: another one is cut instead."""
    count = len(x._layout.shape)
    both = [positive(d, count) for d in (dim1, dim2)]
    local, layout = with_whole(site, x, both)
    y = local.diagonal(offset, dim1, dim2)
    result = laid_out(layout, [*(d for d in range(count) if d not in both), None], y)
    return seen_of(x, y, result, layout is not x._layout)


@checked_rule("movement", "diag", "diag_embed", "diagflat")
@of_cut(uncut=True, plain="an argument beside the tensor is split")
def onto_diagonal(call: Call, site: Site, x: SplitTensor, **given: Any) -> Any:
    """Diagonals to and from dimensions that are whole on each rank: another one is cut instead."""
    func, (_x, *rest), kwargs = call
    name, count = func.__name__, len(x._layout.shape)
    dims = [count - 1] if name == "diag_embed" else list(range(count))
    local, layout = with_whole(site, x, dims)
    y = func(local, *rest, **kwargs)
    kept: list[int | None] = [d for d in range(count) if d not in dims]
    if name == "diag_embed":
        for at in sorted(d % y.dim() for d in [*given.values()][1:]):
            kept.insert(at, None)
    else:
        kept += [None] * (y.dim() - len(kept))
    return SplitTensor(y, laid_out(layout, kept, y))
