"""Elements of a tensor in other places: flipped, rolled, shuffled, windows and diagonals of them."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.split import cuts
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import Site, site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.functions.places.shapes import (
    argument,
    cut_as,
    derived,
    frozen,
    on_shape,
    reshape,
    seen_of,
    tensor_and_rest,
    uncut,
)
from distdl_rma.split.moves import redistributed
from distdl_rma.split.operands import machine_of, on_copies
from distdl_rma.split.reducing import positive, with_whole
from distdl_rma.split.tensor import SplitTensor, local_of

_T: Any = torch.Tensor


@rule("movement", *"flip fliplr flipud rot90 channel_shuffle native_channel_shuffle".split())
def within_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The order of elements along some dimensions, which must not be cut: another one is cut instead."""
    x, rest, kwargs = tensor_and_rest(args, kwargs)
    if not isinstance(x, SplitTensor):
        return on_copies(func, (x, *rest), kwargs)
    name, count = func.__name__, len(x._layout.shape)
    dims: Any = {"fliplr": (1,), "flipud": (0,)}.get(name, (1,))
    if name == "flip":
        dims = kwargs.get("dims", rest[0] if len(rest) == 1 else rest)
        dims = (dims,) if isinstance(dims, int) else dims
    if name == "rot90":
        dims = argument(1, "dims", rest, kwargs, (0, 1))
    shape = derived(
        x, (func, frozen(rest), frozen(kwargs)), lambda: tuple(func(on_shape(x), *rest, **kwargs).shape)
    )
    dims = tuple(positive(d, count) for d in dims)
    local, layout = with_whole(site_of(machine_of(x), func), x, dims)
    return SplitTensor(func(local, *rest, **kwargs), uncut(layout, {d: shape[d] for d in dims if shape}))


@rule("movement", "roll")
@refusing
def rolled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank rolls its block; along cut dimensions what leaves a block moves to where it enters."""
    x, rest, kwargs = tensor_and_rest(args, kwargs)
    shifts, dims = argument(0, "shifts", rest, kwargs, None), argument(1, "dims", rest, kwargs, ())
    if not isinstance(x, SplitTensor):
        return on_copies(func, (x, *rest), kwargs)
    shifts, dims = ((each,) if isinstance(each, int) else tuple(each or ()) for each in (shifts, dims))
    if not dims:
        return reshape(rolled(func, (reshape(x, (-1,)), shifts[0], 0), {}), x._layout.shape)
    site, cut, count = site_of(machine_of(x), func), lay.cut_dims(x._layout), len(x._layout.shape)
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
def pixels_shuffled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank shuffles its block; blocks end where elements of the result do."""
    x, rest, kwargs = tensor_and_rest(args, kwargs)
    if not isinstance(x, SplitTensor) or not x.numel():
        return on_copies(func, (x, *rest), kwargs)
    up = func.__name__ == "pixel_shuffle"
    factor = int((*rest, *kwargs.values())[0])

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
    local = cut_as(site_of(machine_of(x), func), x, source, "shuffled")
    return SplitTensor(_shuffled(func, local, factor, result), result)


def _shuffled(func: Any, local: torch.Tensor, factor: int, result: Decomposition) -> torch.Tensor:
    if not local.numel():
        return local.reshape(result.box(result.partition.me).shape)
    shuffled: torch.Tensor = func(local, factor)
    return shuffled


@rule("movement", "triu", "tril")
@refusing
def triangle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank keeps what its block has of the triangle."""
    x, rest, kwargs = tensor_and_rest(args, kwargs)
    if not isinstance(x, SplitTensor):
        return on_copies(func, (x, *rest), kwargs)
    row, column = x._layout.box(x._layout.partition.me).start[-2:]
    diagonal = argument(0, "diagonal", rest, kwargs, 0)
    return SplitTensor(func(local_of(x), diagonal + row - column), x._layout)


@rule("movement", _T.unfold)
@refusing
def unfolded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Windows along a dimension that must not be cut: another one is cut instead."""
    x, rest, kwargs = tensor_and_rest(args, kwargs)
    dim = positive(argument(0, "dimension", rest, kwargs, 0), len(x._layout.shape))
    local, layout = with_whole(site_of(machine_of(x), func), x, [dim])
    y = func(local, *rest, **kwargs)
    longer = lay.reordered(layout, [*range(len(layout.shape)), None])
    # Of a number there is one window, along a new dimension.
    result = uncut(longer, {dim: y.shape[dim], y.dim() - 1: y.shape[-1]})
    return seen_of(x, y, result, layout is not x._layout)


@rule("movement", "diagonal")
@refusing
def diagonal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Diagonals over two dimensions that must not be cut: another one is cut instead."""
    x, rest, kwargs = tensor_and_rest(args, kwargs)
    if not isinstance(x, SplitTensor):
        return on_copies(func, (x, *rest), kwargs)
    count = len(x._layout.shape)
    # Those that torch takes where none are given: the last ones, or the first.
    first = -2 if func is torch.linalg.diagonal else 0
    both = [positive(argument(at, f"dim{at}", rest, kwargs, first + at - 1), count) for at in (1, 2)]
    local, layout = with_whole(site_of(machine_of(x), func), x, both)
    y = func(local, *rest, **kwargs)
    longer = lay.reordered(layout, [*(d for d in range(count) if d not in both), None])
    return seen_of(x, y, uncut(longer, {count - 2: y.shape[-1]}), layout is not x._layout)
