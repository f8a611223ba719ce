"""Fourier transforms, and complex numbers as pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distdl_rma.geometry.intervals import Balanced
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import Site, site_of
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.operands import machine_of, of_cut
from distdl_rma.split.reducing import computed, positive, put_back, with_whole
from distdl_rma.split.tensor import SplitTensor, local_of

_EACH = "fft ifft rfft irfft hfft ihfft".split()


@rule("movement", *(getattr(torch.fft, f"{name}{dims}") for name in _EACH for dims in ("", "2", "n")))
@refusing
@of_cut(empty=False)
def transform(call: Call, site: Site, x: SplitTensor, dim: Any, **given: Any) -> Any:
    """Where a transformed dimension is split, another one is cut meanwhile, and the result goes back.

    Split dimensions whose extent changes are in balanced blocks then. If no other dimension is left to be
    cut, every rank transforms the same.
    """
    func, *_ = call
    ndim, extents = x.dim(), given.get("s")
    if dim is None:
        dims = tuple(range(ndim - len(extents) if extents is not None else 0, ndim))
    else:
        dims = tuple(positive(d, ndim) for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))
    local, layout = with_whole(site, x, dims, "transformed dimensions made whole")
    compute = partial(func, dim=dims[0] if "n" in given else dims, **given)
    return put_back(site, computed(compute, local), layout, x._layout)


@rule("movement", torch.fft.fftshift, torch.fft.ifftshift)
@refusing
@of_cut(empty=False)
def shift(call: Call, site: Site, x: SplitTensor, dim: Any) -> Any:
    """As the transforms."""
    each = range(x.dim()) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = tuple(positive(d, x.dim()) for d in each)
    local, layout = with_whole(site, x, dims, "shifted dimensions made whole")
    return put_back(site, call[0](local, dims), layout, x._layout)


@rule("pointwise", torch.Tensor.real.__get__, torch.Tensor.imag.__get__)  # type: ignore[attr-defined]
def part_of_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitTensor:
    """Of each block."""
    return SplitTensor(func(local_of(args[0])), args[0]._layout)


@rule("pointwise", "view_as_real")
@refusing
def view_as_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitTensor:
    """Of each block; the last dimension is new, and whole."""
    x = args[0]
    ndim = x.dim()
    layout = lay.with_splits(lay.reordered(x._layout, [*range(ndim), None]), {ndim: Balanced(2, 1)})
    return SplitTensor(func(local_of(x)), layout)


@rule("pointwise", "view_as_complex")
@refusing
def view_as_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitTensor:
    """Of each block; the last dimension, if it is split, is made whole first."""
    x = args[0]
    last = x.dim() - 1
    local, layout = with_whole(site_of(machine_of(x), func), x, (last,))
    moved = layout is not x._layout
    y = func(local.contiguous() if moved else local)
    return SplitTensor(y, lay.reordered(layout, range(last)), copy_of=x._local if moved else None)
