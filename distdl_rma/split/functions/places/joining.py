"""Tensors put together, whose pieces move to their place, and taken apart, whose parts stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.split import cuts
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import checked_rule
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call, name_of, rule
from distdl_rma.split.functions.places.indexing import narrowed
from distdl_rma.split.functions.places.shapes import derived, frozen, on_shape
from distdl_rma.split.operands import as_part, common_partition, composition, of_any_cut, of_cut, on_copies
from distdl_rma.split.reducing import positive
from distdl_rma.split.tensor import SplitTensor, composed, local_of


@rule("movement", "cat", "concat", "concatenate")
@of_any_cut
def cat(call: Call, site: Site, tensors: Any, dim: int) -> Any:
    """Each rank joins its blocks, cut as the largest tensor is; along a cut dimension pieces move."""
    func, *_ = call
    common_partition(func, tensors)
    # As in torch, empty vectors go with anything: the result has their type, and is in their graph.
    empty = [x for x in tensors if frozen(x) == (0,)]
    tensors = [x for x in tensors if frozen(x) != (0,)] if empty else tensors
    if not any(isinstance(x, SplitTensor) for x in tensors):
        return on_copies(*call)
    shapes = [frozen(x) for x in tensors]
    largest = max(
        (at for at, x in enumerate(tensors) if isinstance(x, SplitTensor)),
        key=lambda at: (tensors[at].is_split, Box.of_shape(shapes[at]).volume),
    )
    layouts = tuple(x._layout if isinstance(x, SplitTensor) else tuple(x.shape) for x in tensors)

    def make() -> tuple[Decomposition, list[Decomposition]]:
        return _places(name_of(func), tensors[largest]._layout, largest, shapes, dim)

    result, parts = derived(tensors[largest], ("cat", layouts, largest, dim), make)
    pieces = [
        as_part(site, x, part, result, at) for at, (x, part) in enumerate(zip(tensors, parts, strict=True))
    ]
    pieces += [local_of(x) if isinstance(x, SplitTensor) else x for x in empty]
    return SplitTensor(torch.cat(pieces, dim), result)


def _places(
    name: str, base: Decomposition, at: int, shapes: Sequence[tuple[int, ...]], dim: int
) -> tuple[Decomposition, list[Decomposition]]:
    # Layout of a concatenation, and of each tensor as it is in it.
    dims = len(base.shape)
    if not -dims <= dim < dims:
        raise IndexError(f"{name}: dim {dim} is out of range for tensors of {dims} dimensions")
    dim %= dims
    for number, shape in enumerate(shapes):
        if len(shape) != dims or any(n != base.shape[d] for d, n in enumerate(shape) if d != dim):
            raise ShapeError(
                f"{name}: tensor {at} has the global shape {base.shape} but tensor {number} {shape}, which"
                f" must agree but in dimension {dim}"
            )
    extents = [shape[dim] for shape in shapes]
    cut = dim in base.axes
    whole = cuts.joined(extents, at, base.splits[dim]) if cut else Balanced(sum(extents), 1)
    result = lay.with_splits(base, {dim: whole})
    starts = accumulate(extents, initial=0)
    places = [cuts.sliced(whole, start, start + n, 1)[0] for start, n in zip(starts, extents, strict=False)]
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
    """Parts of a tensor, of which each rank keeps what it has."""
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
    """One half of a dimension times the sigmoid of the other; where that is cut, one of them moves."""
    values, gates = torch.chunk(x, 2, dim)
    return values * torch.sigmoid(gates)
