"""Fourier transforms, and complex numbers as pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distdl_rma.geometry.intervals import Balanced
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.operands import machine_of, on_copies
from distdl_rma.split.reducing import arguments, computed, positive, put_back, with_whole
from distdl_rma.split.tensor import SplitTensor, local_of

_ONE = "fft ifft rfft irfft hfft ihfft".split()
_TWO = [f"{name}2" for name in _ONE]
_MANY = [f"{name}n" for name in _ONE]


@rule("movement", *(getattr(torch.fft, name) for name in (*_ONE, *_TWO, *_MANY)))
@refusing
def transform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where a transformed dimension is split, another one is cut meanwhile, and the result goes back.

    Split dimensions whose extent changes are in balanced blocks then. If no other dimension is left to be
    cut, every rank transforms the same.
    """
    name = func.__name__.removeprefix("fft_")
    if name in _ONE:
        given = arguments(func, args, kwargs, n=None, dim=-1, norm=None)
    else:
        given = arguments(func, args, kwargs, s=None, dim=(-2, -1) if name in _TWO else None, norm=None)
    x, dim, extents = given.pop("input"), given["dim"], given.get("s")
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    ndim = x.dim()
    if dim is None:
        dims = tuple(range(ndim - len(extents) if extents is not None else 0, ndim))
    else:
        dims = tuple(positive(d, ndim) for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))
    site = site_of(machine_of(x), func)
    local, layout = with_whole(site, x, dims, "transformed dimensions made whole")
    given["dim"] = dims if name not in _ONE else dims[0]
    return put_back(site, computed(partial(func, **given), local), layout, x._layout)


@rule("movement", torch.fft.fftshift, torch.fft.ifftshift)
@refusing
def shift(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the transforms."""
    given = arguments(func, args, kwargs, dim=None)
    x, dim = given["input"], given["dim"]
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    each = range(x.dim()) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = tuple(positive(d, x.dim()) for d in each)
    site = site_of(machine_of(x), func)
    local, layout = with_whole(site, x, dims, "shifted dimensions made whole")
    return put_back(site, func(local, dims), layout, x._layout)


@rule("pointwise", torch.Tensor.real.__get__, torch.Tensor.imag.__get__)  # type: ignore[attr-defined]
def part_of_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitTensor:
    """Of each block."""
    return SplitTensor(func(local_of(args[0])), args[0]._layout)


@rule("pointwise", "view_as_real")
@refusing
def view_as_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitTensor:
    """Of each block; the last dimension is new, and whole."""
    x = arguments(func, args, kwargs)["input"]
    ndim = x.dim()
    layout = lay.with_splits(lay.reordered(x._layout, [*range(ndim), None]), {ndim: Balanced(2, 1)})
    return SplitTensor(func(local_of(x)), layout)


@rule("pointwise", "view_as_complex")
@refusing
def view_as_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitTensor:
    """Of each block; the last dimension, if it is split, is made whole first."""
    x = arguments(func, args, kwargs)["input"]
    last = x.dim() - 1
    local, layout = with_whole(site_of(machine_of(x), func), x, (last,))
    moved = layout is not x._layout
    y = func(local.contiguous() if moved else local)
    return SplitTensor(y, lay.reordered(layout, range(last)), copy_of=x._local if moved else None)
