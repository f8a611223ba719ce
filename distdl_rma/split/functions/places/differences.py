"""Differences of neighbours by finite differences, and diagonals."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.signatures import named
from distdl_rma.split.calls.site import Site, site_of
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.functions.places.shapes import (
    derived,
    frozen,
    on_shape,
    uncut,
)
from distdl_rma.split.operands import composition, machine_of, of_cut
from distdl_rma.split.reducing import positive, with_whole
from distdl_rma.split.tensor import SplitTensor, composed, refused

_T: Any = torch.Tensor


@rule("window", torch.gradient)
@refusing
@of_cut()
def gradient(call: Call, site: Site, x: SplitTensor, spacing: Any, dim: Any, edge_order: int) -> Any:
    """Differences of neighbours, which a rank's elements fetch, one tensor for each dimension."""
    spacing, count = 1 if spacing is None else spacing, len(x._layout.shape)
    dims = range(count) if dim is None else dim if isinstance(dim, (list, tuple)) else (dim,)
    steps = spacing if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
    if any(isinstance(h, torch.Tensor) and h.dim() for h in steps):
        raise refused(call[0], "it is given coordinates; spacing is to be numbers")
    return tuple(composed(_along, x, d % count, h, edge_order) for d, h in zip(dims, steps, strict=True))


def _along(x: torch.Tensor, dim: int, h: Any, order: int) -> torch.Tensor:
    n = x.shape[dim]
    at = [x.narrow(dim, each, 1) for each in (0, 1, n - 2, n - 1)]
    first, last = at[1] - at[0], at[3] - at[2]
    if order == 2:
        first = (4 * at[1] - 3 * at[0] - x.narrow(dim, 2, 1)) / 2
        last = (3 * at[3] - 4 * at[2] + x.narrow(dim, n - 3, 1)) / 2
    inner = (x.narrow(dim, 2, n - 2) - x.narrow(dim, 0, n - 2)) / 2
    found: torch.Tensor = torch.cat([first, inner, last], dim) / h
    return found


@rule("reduction", "trapezoid", "trapz")
@composition
def trapezoid(y: Any, x: Any, dim: int, dx: Any) -> Any:
    """Sums over the ranks of the means of neighbours."""
    n = y.shape[dim]
    if not n:
        return y.sum(dim)
    if x is None:
        return (y.sum(dim) * 2 - y.select(dim, 0) - y.select(dim, n - 1)) * (dx / 2)
    return _twice_areas(y, x, dx, dim).sum(dim) / 2


@rule("reduction", "cumulative_trapezoid")
@refusing
@composition
def cumulative_trapezoid(y: Any, x: Any, dim: int, dx: Any) -> Any:
    """Running sums of the means of neighbours, over the ranks."""
    return _twice_areas(y, x, dx, dim).cumsum(dim) / 2


def _twice_areas(y: Any, x: Any, dx: Any, dim: int) -> Any:
    n = y.shape[dim]
    both = y.narrow(dim, 1, n - 1) + y.narrow(dim, 0, n - 1)
    if x is None:
        return both * dx
    # Dimensions go together from the last one on; a vector lies along the one that is summed.
    at = positive(dim, y.dim()) - y.dim()
    x = x.reshape(-1, *(1,) * (-1 - at)) if x.dim() == 1 else x
    return both * (x.narrow(at, 1, x.shape[at] - 1) - x.narrow(at, 0, x.shape[at] - 1))


@rule("movement", "diag", "diag_embed", "diagflat")
@refusing
def onto_diagonal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Diagonals to and from dimensions that are whole on each rank: another one is cut instead."""
    x, *rest = args
    if not isinstance(x, SplitTensor):
        raise refused(func, "an argument beside the tensor is split")
    name, count = func.__name__, len(x._layout.shape)
    probe = derived(
        x, (func, frozen(rest), frozen(kwargs)), lambda: tuple(func(on_shape(x), *rest, **kwargs).shape)
    )
    dims = [count - 1] if name == "diag_embed" else list(range(count))
    local, layout = with_whole(site_of(machine_of(x), func), x, dims)
    y = func(local, *rest, **kwargs)

    def make() -> Decomposition:
        kept: list[int | None] = [d for d in range(count) if d not in dims]
        if name == "diag_embed":
            one, other = (d % len(probe) for d in [*named(func, args, kwargs).values()][1:])
            for at in sorted((one, other)):
                kept.insert(at, None)
        else:
            kept += [None] * (len(probe) - len(kept))
        result = lay.reordered(layout, kept)
        return uncut(result, {d: probe[d] for d, source in enumerate(kept) if source is None})

    return SplitTensor(y, derived(x, (func, layout, frozen(rest), frozen(kwargs), "layout"), make))
