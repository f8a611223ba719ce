"""Shapes and orders of dimensions: ranks reshape blocks; elements move if the results are no blocks.

A reorder of dimensions (``permute``) reorders the cuts with them. A reshape joins and divides dimensions. A
block of rows of a (4, 6) tensor is an interval of the (24,) tensor, a block of columns is not:

    cut in rows           reshape(24)               cut in columns        reshape(24)
    0 0 0 0 0 0                                     0 0 0 1 1 1
    0 0 0 0 0 0    ->   0 0 ... 0 1 1 ... 1         0 0 0 1 1 1    ->   0 0 0 1 1 1 0 0 0 1 ...
    1 1 1 1 1 1         two intervals: local        0 0 0 1 1 1         no intervals: the cut moves first
    1 1 1 1 1 1                                     0 0 0 1 1 1         to the rows

``layout_choice.py`` decides by arithmetic what must move; this file asks it, and calls torch.

In torch most of these results are views: a change in place of one changes the other. Where no element moved,
the block of the result is a view of the block, and torch does the same. Where elements moved it is a copy,
and a change in place is refused (``seen_of(..., moved=True)``). What torch would return, a view or a copy,
with which strides, is asked of torch itself on the meta device, for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split import layout_choice
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.operands import composition, of_cut, on_whole_tensors, site_for
from distdl_rma.layers.split.redistribution import redistributed
from distdl_rma.layers.split.reduction_axes import laid_out, with_whole
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, composed, refused
from distdl_rma.layers.split.views import fills_memory, in_memory, seen_of, strides_of

_T: Any = torch.Tensor


def uncut(layout: Decomposition, extents: dict[int, int]) -> Decomposition:
    """Layout in which some uncut dimensions have other extents, as those that torch's function changes."""
    return lay.with_splits(layout, {d: Balanced(n, 1) for d, n in extents.items()})


def on_shape(x: SplitTensor) -> torch.Tensor:
    """A tensor of the global shape on the meta device: torch computes shapes, or raises errors, with it."""
    return torch.empty(x._layout.shape, dtype=x._local.dtype, device="meta")


@rule(
    "movement",
    *"permute transpose swapaxes swapdims t movedim moveaxis adjoint".split(),
    *(getattr(_T, name).__get__ for name in ("T", "mT", "H", "mH")),
)
def reordered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reorders dimensions; each rank keeps its block."""
    x, *rest = args
    # Torch reorders a shape whose extents all differ, so that they identify the dimensions. So the rule needs
    # to know none of these functions' arguments.
    probe = func(torch.empty(tuple(range(1, len(x._layout.shape) + 1)), device="meta"), *rest, **kwargs)
    layout = lay.reordered(x._layout, [n - 1 for n in probe.shape])
    strides = strides_of(x, lambda whole: func(whole, *rest, **kwargs))
    return seen_of(x, func(checked_block(x), *rest, **kwargs), layout, strides)


@rule(
    "movement",
    *"view reshape flatten unflatten ravel view_as reshape_as squeeze unsqueeze".split(),
    *"atleast_1d atleast_2d atleast_3d".split(),
)
def reshaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank reshapes its block; elements move only if the result would not be cut into blocks.

    If several dimensions are joined, the cut of the first one stays, at ends that fit. The cut of another one
    moves to the first one, or to the longest dimension if the first one is too short. If none fits, every
    rank gets a copy.
    """
    x, *rest = args
    if isinstance(x, (list, tuple)):
        return type(x)(composed(func, each) for each in x)
    if func.__name__.startswith("atleast") and rest:
        return tuple(composed(func, each) for each in args)
    if func.__name__ in ("view_as", "reshape_as"):
        (other,) = *rest, *kwargs.values()
        func, rest, kwargs = getattr(_T, func.__name__[:-3]), [other.shape], {}
        if not isinstance(x, SplitTensor):
            return func(x, *rest)
    if not isinstance(x, SplitTensor):
        return on_whole_tensors(func, args, kwargs)
    (*_, given) = x, *rest, *kwargs.values()
    if func is _T.view and isinstance(given, torch.dtype):
        if given.itemsize != x._local.dtype.itemsize:
            raise refused(func, "a type of another size changes extents of blocks")
        return seen_of(x, checked_block(x).view(given), x._layout, x._strides)
    shape = tuple(func(on_shape(x), *rest, **kwargs).shape)
    strides: Any = _COPIED
    # Unlike reshape, ravel copies whatever is not contiguous.
    if func.__name__ != "ravel" or in_memory(x).is_contiguous():
        with suppress(RuntimeError):
            strides = strides_of(x, lambda whole: whole.view(shape))
    key = x._layout, shape
    source, result = lay.kept(x.partition, "reshaped", key, lambda: layout_choice.reshaped(*key))
    return _reshaped(func, x, source, result, strides)


def reshape(x: SplitTensor, shape: Sequence[int]) -> SplitTensor:
    """``reshape`` by its rule, for other rules."""
    return reshaped(_T.reshape, (x, tuple(shape)), {})


# Stands for the strides of what torch cannot show by a view.
_COPIED = object()


def _reshaped(
    func: Any, x: SplitTensor, source: Decomposition, result: Decomposition, strides: Any
) -> SplitTensor:
    # Block and whole may differ in whether a reshape is a view, since the block has other strides. All ranks
    # must return a view, or none: otherwise a change in place would reach the input on some ranks only.
    shape = result.own_box.shape
    if source is x._layout:
        y, here = checked_block(x).reshape(shape), x._local.stride()
        # Whether strides decrease, as in contiguous memory.
        in_order = x._strides is not None or all(a >= b for a, b in pairwise(here))
        copied = strides is _COPIED or not (in_order or _views(x, result.shape))
        if copied and y.data_ptr() == x._local.data_ptr():
            y = y.clone()
        if strides is _COPIED:
            return SplitTensor(y, result)
        # Torch may return a copy of a view, so that the result counts as one on all ranks.
        unsure = x._is_seen and func.__name__ in _MAY_COPY and x._strides is None and not fills_memory(x)
        return seen_of(x, y, result, strides, unsure)
    local = redistributed(site_for(func, x), checked_block(x), x._layout, source, "reshaped")
    y = local.reshape(shape)
    if strides is not _COPIED:
        return seen_of(x, y, result, strides, True)
    return SplitTensor(y.clone() if y.data_ptr() == x._local.data_ptr() else y, result)


# Functions that return a view if possible, otherwise a copy.
_MAY_COPY = "reshape", "flatten", "ravel"


def _views(x: SplitTensor, shape: tuple[int, ...]) -> bool:
    # Whether torch would return a view of the whole tensor, if its strides were ordered like the block's.
    strides = x._local.stride()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    memory = torch.empty([x._layout.shape[d] for d in order], device="meta")
    try:
        memory.permute([order.index(d) for d in range(len(order))]).view(shape)
    except RuntimeError:
        return False
    return True


@rule("movement", "expand", "expand_as", "broadcast_to")
def expanded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank expands its block; expanded dimensions are whole on all ranks."""
    x, *rest = args
    if func is _T.expand_as:
        (other,) = *rest, *kwargs.values()
        func, rest, kwargs = _T.expand, [other.shape], {}
    if not isinstance(x, SplitTensor):
        return func(x, *rest, **kwargs)
    return _expanded(func, x, _shape_of(func, x, rest, kwargs))


def _shape_of(func: Any, x: SplitTensor, rest: list[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    # Global shape of a function's result, as torch says.
    return tuple(func(on_shape(x), *rest, **kwargs).shape)


def _expanded(func: Any, x: SplitTensor, shape: tuple[int, ...]) -> SplitTensor:
    # An expanded dimension has one element, which one rank has if it is cut: that one sends it to all.
    ahead, mine = len(shape) - len(x._layout.shape), x._layout.shape
    local, layout = with_whole(site_for(func, x), x, [d for d, n in enumerate(mine) if n != shape[d + ahead]])
    longer = lay.reordered(layout, [*(None,) * ahead, *range(len(mine))])
    result = uncut(longer, {d: n for d, n in enumerate(shape) if n != longer.shape[d]})
    strides = strides_of(x, lambda whole: whole.expand(shape))
    y = local.expand(result.own_box.shape)
    return seen_of(x, y, result, strides, layout is not x._layout)


@rule("movement", "broadcast_tensors")
def broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``expand`` of each tensor to the common shape; plain tensors stay plain."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return type(tensors)(
        _expanded(func, x, tuple(shape)) if isinstance(x, SplitTensor) else x.expand(shape) for x in tensors
    )


@rule("movement", "repeat", "tile")
@of_cut(uncut=True)
def repeated(call: Call, site: Site, x: SplitTensor, **_: Any) -> Any:
    """Each rank repeats its block; repeated dimensions become whole."""
    func, (_x, *rest), kwargs = call
    shape = _shape_of(func, x, rest, kwargs)
    mine, ahead = x._layout.shape, len(shape) - len(x._layout.shape)
    local, layout = with_whole(site, x, [d for d, n in enumerate(mine) if n != shape[d + ahead]])
    y = func(local, *rest, **kwargs)
    return SplitTensor(y, laid_out(layout, [*(None,) * ahead, *range(len(mine))], y))


@rule("movement", "repeat_interleave")
@composition
def repeated_elements(x: Any, repeats: Any, dim: int | None, output_size: int | None) -> Any:
    """Each rank repeats its elements; for different numbers the dimension becomes whole."""
    if dim is None:
        x, dim = x.reshape(-1), 0
    numbers = repeats.full_tensor() if isinstance(repeats, SplitTensor) else repeats
    # Torch's errors, too.
    at = torch.arange(x.shape[dim], device=x.device).repeat_interleave(numbers, output_size=output_size)
    if not isinstance(repeats, int):
        return x.index_select(dim, at)
    ahead, behind = x.shape[: dim % x.dim() + 1], x.shape[dim % x.dim() + 1 :]
    return x.unsqueeze(len(ahead)).expand(*ahead, repeats, *behind).flatten(len(ahead) - 1, len(ahead))
