"""Products of matrices: rows stay in place; sums over a cut dimension need a sum over ranks.

All products are one contraction, written as in einsum: a label for each dimension of each operand, and those
of the result. ``planned`` chooses for each grid dimension one label that it cuts; operands and result are
then cut alike in that label (:class:`Work`). Which label is cut decides what the ranks do, here for a @ b
with the labels (m, k) and (k, n), on two ranks:

    cut m   rank 0: rows 0..3 of a, all of b   -> rows 0..3 of the result      nothing is summed
    cut n   rank 0: all of a, columns of b     -> columns of the result        nothing is summed
    cut k   rank 0: columns of a, rows of b    -> a partial product            one allreduce of the result

It is the label that the largest operand is cut in: that operand stays in place, and the others get the parts
that they need beside it (``as_part``). If ``k`` is cut, only the result is summed, which is smaller than the
gathered operands in most networks. Partial products of short dtypes are summed in a longer one and rounded
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.tensors import AUTOCASTS, no_autocast
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.autocast import castable
from distdl_rma.layers.split.calls.signatures import named
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import name_of, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule, raise_as_torch
from distdl_rma.layers.split.operands import (
    as_part,
    common_partition,
    composition,
    cut_by_largest,
    part_at,
    site_for,
)
from distdl_rma.layers.split.redistribution import all_sum
from distdl_rma.layers.split.tensor import SplitTensor, composed
from distdl_rma.layers.split.views import seen_of, strides_of

_T: Any = torch.Tensor
# A label for each dimension of an operand; as in einsum, equal labels are one index.
Labels = Sequence[Any]
Operands = Sequence[torch.Tensor]


class Work(NamedTuple):
    """How a contraction is cut: layouts of all labels as dimensions of one tensor, of operands and result."""

    all: Decomposition
    parts: list[Decomposition]
    result: Decomposition
    summed: tuple[int, ...]  # grid dimensions along which ranks have partial sums


def planned(func: Any, operands: Operands, labels: Sequence[Labels], out: Labels, uncut: Labels = ()) -> Work:
    """Choose the label that each grid dimension cuts: as in the largest operand, but none of ``uncut``.

    An operand in which the grid dimension cuts another label becomes whole along that. ``uncut`` are labels
    that torch's function needs whole, such as the keys of attention.
    """
    shapes = [tuple(x.shape) for x in operands]
    wrong = f"{name_of(func)}: global shapes {' and '.join(map(str, shapes))} do not go together"
    extents: dict[Any, int] = {}
    for shape, names in zip(shapes, labels, strict=True):
        if len(shape) != len(names):
            raise ShapeError(wrong)
        for n, name in zip(shape, names, strict=True):
            known = extents.setdefault(name, n)
            if known != n and 1 not in (known, n):
                raise ShapeError(f"{wrong}: {known} is not {n}")
            extents[name] = n if known == 1 else known
    order = list(extents)
    partition = common_partition(func, operands)
    places = [[order.index(name) for name in names] for names in labels]
    split = [(x._layout, at) for x, at in zip(operands, places, strict=True) if isinstance(x, SplitTensor)]
    layouts, split_places = zip(*split, strict=True)
    # A label that an operand has twice cannot be cut.
    never = [at for at, name in enumerate(order) if name in uncut or any(p.count(at) > 1 for p in places)]
    work = cut_by_largest(partition, [extents[name] for name in order], layouts, split_places, never)
    result = part_at([extents[name] for name in out], [order.index(name) for name in out], work)
    summed = tuple(g for g, axis in enumerate(work.axes) if axis is not None and order[axis] not in out)
    return Work(work, [part_at(*each, work) for each in zip(shapes, places, strict=True)], result, summed)


def contracted(
    func: Any, compute: Any, operands: Operands, labels: Sequence[Labels], out: Labels
) -> SplitTensor:
    """Multiply operands block by block, and sum over the labels that the result does not have.

    ``compute`` is torch's function of the blocks. If no summed label is cut, its product is the block of the
    result; of a single operand it may be a view, as in torch.
    """
    site, work, blocks = prepared(func, operands, labels, out)
    if not work.summed:
        y = product_of(compute, operands, blocks, work.result)
        x = operands[0]
        if len(operands) == 1 and isinstance(x, SplitTensor) and y._is_view():
            return seen_of(x, y, work.result, strides_of(x, compute), blocks[0] is not x._local)
        return SplitTensor(y, work.result)
    y, dtype = _summed(site, compute, operands, blocks, work)
    return SplitTensor(y.to(dtype), work.result)


def _summed(
    site: Site, compute: Any, operands: Operands, blocks: Operands, work: Work
) -> tuple[torch.Tensor, torch.dtype]:
    # The ranks' sum in a wide dtype, and torch's dtype of the result, to which the caller rounds once.
    dtype = _type_of(compute, operands)
    y = product_of(compute, operands, blocks, work.result, sum_dtype(dtype))
    return all_sum(site, y, work.all, work.summed), dtype


def product_of(
    compute: Any, operands: Operands, blocks: Operands, result: Decomposition, wide: torch.dtype | None = None
) -> torch.Tensor:
    """A rank's product of its blocks; zeros in the graph for empty blocks, which some functions refuse.

    ``wide`` is the dtype of products of short numbers that will be summed.
    """
    y: torch.Tensor
    autocasts, filled = AUTOCASTS(), all(x.numel() for x in blocks)
    if not autocasts and filled and (wide is None or all(x.dtype is wide for x in blocks)):
        y = compute(*blocks)
        return y
    dtype = _type_of(compute, operands)
    if filled:
        with no_autocast():
            y = compute(*(_cast(x, dtype, wide) for x in blocks))
        return y
    zero: Any = sum(x.flatten()[:0].sum() for x in blocks)
    y = zero.to(wide or dtype).expand(result.own_box.shape).clone()
    return y


def _type_of(compute: Any, operands: Sequence[torch.Tensor]) -> torch.dtype:
    # Torch's dtype of the result, or its error, from a product of at most two elements per dimension: under
    # autocast, products of one element have other dtypes. Torch sums integers in longer ones.
    few = [torch.zeros([min(n, 2) for n in x.shape], dtype=x.dtype, device=x.device) for x in operands]
    return compute(*few).dtype


def _cast(x: torch.Tensor, dtype: torch.dtype, wide: torch.dtype | None) -> torch.Tensor:
    # As autocast converts, if it is on; then to the dtype of sums, without loss.
    x = x.to(dtype) if castable(x) else x
    return x if wide is None else x.to(wide)


def prepared(
    func: Any, operands: Operands, labels: Sequence[Labels], out: Labels, uncut: Labels = ()
) -> tuple[Site, Work, list[torch.Tensor]]:
    """Site of a call, its work, and this rank's blocks of its operands; may block.

    The work follows from layouts and labels: it is planned once for these, for all lines of the program.
    """
    first = next(x for x in operands if isinstance(x, SplitTensor))
    key = tuple(x._layout if isinstance(x, SplitTensor) else tuple(x.shape) for x in operands)
    names = tuple(map(tuple, labels)), tuple(out), tuple(uncut)
    plan = partial(planned, func, operands, labels, out, uncut)
    work = lay.kept(first.partition, "work", (key, names), plan)
    site = site_for(func, first)
    blocks = [
        as_part(site, x, part, work.all, at)
        for at, (x, part) in enumerate(zip(operands, work.parts, strict=True))
    ]
    return site, work, blocks


def _batch(count: int) -> list[int]:
    # Labels of dimensions that are aligned at the last one.
    return list(range(-count, 0))


@rule("contraction", "linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank multiplies its block. If features are cut, ranks sum the products, then add the bias."""
    x, (weight, bias) = args[0], named(func, args, kwargs).values()
    rows = _batch(x.dim() - 1)
    out = [*rows, "out"] if weight.dim() == 2 else rows
    labels: list[Labels] = [[*rows, "in"], ["out", "in"][2 - weight.dim() :]]
    if bias is None:
        return contracted(func, func, [x, weight], labels, out)
    site, work, (block, matrix, added) = prepared(
        func, [x, weight, bias], [*labels, out[-bias.dim() or len(out) :]], out
    )
    if not work.summed:
        return SplitTensor(func(block, matrix, added), work.result)
    raise_as_torch(func, args, kwargs)
    y, dtype = _summed(site, func, [x, weight], [block, matrix], work)
    return composed(_T.to, composed(torch.add, SplitTensor(y, work.result), bias), dtype)


@rule("contraction", *"matmul mm bmm mv dot vdot outer ger __matmul__ __rmatmul__".split())
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank multiplies its blocks. If a summed dimension is cut, ranks sum the products."""
    a, b = (*args, *(each for key, each in kwargs.items() if key != "out"))
    if func.__name__ == "__rmatmul__":
        a, b, func = b, a, torch.matmul
    if func.__name__ in ("outer", "ger"):
        return contracted(func, func, [a, b], [["m"], ["n"]], ["m", "n"])
    if func.__name__ in ("dot", "vdot") or a.dim() == b.dim() == 1:
        return contracted(func, func, [a, b], [["k"], ["k"]], [])
    first = ["k"] if a.dim() == 1 else [*_batch(a.dim() - 2), "m", "k"]
    second = ["k"] if b.dim() == 1 else [*_batch(b.dim() - 2), "k", "n"]
    more = max(a.dim(), b.dim()) - 2
    out = [*_batch(max(more, 0)), *("m" for _ in first[-2:-1]), *("n" for _ in second[-1:] if b.dim() > 1)]
    return contracted(func, func, [a, b], [first, second], out)


@checked_rule("contraction", "addmm", "baddbmm")
@composition
def added_product(x: Any, **given: Any) -> Any:
    """A product, then a sum; numbers of short types are rounded once."""
    a, b, _, beta, alpha = given.values()
    dtype, wide = x.dtype, sum_dtype(x.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        # Torch rounds these factors to integers.
        beta, alpha = int(beta), int(alpha)
    y = torch.matmul(a.to(wide), b.to(wide)) * alpha
    return (y + x.to(wide) * beta if beta else y).to(dtype)


@checked_rule("contraction", torch.einsum)
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank contracts its blocks. If a summed index is cut, ranks sum the results."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    given, arrow, result = equation.replace(" ", "").partition("->")
    labels = [_named(names, x.dim()) for names, x in zip(given.split(","), operands, strict=True)]
    if arrow:
        most = max((sum(isinstance(name, int) for name in names) for names in labels), default=0)
        out = _named(result, len(result.replace("...", "")) + (most if "..." in result else 0))
    else:
        every = [name for names in labels for name in names]
        batch = sorted({name for name in every if isinstance(name, int)})
        out = [
            *batch,
            *sorted(name for name in set(every) if isinstance(name, str) and every.count(name) == 1),
        ]
    return contracted(func, lambda *blocks: torch.einsum(equation, *blocks), operands, labels, out)


def _named(names: str, dims: int) -> list[Any]:
    # Letters, and negative numbers for the dimensions of an ellipsis.
    ahead, dots, behind = names.partition("...")
    return list(ahead) if not dots else [*ahead, *_batch(max(0, dims - len(ahead) - len(behind))), *behind]


@checked_rule("contraction", "cross")
@composition
def cross(x: Any, other: Any, dim: int | None) -> Any:
    """Products of elements that are rolled along the vectors; these stay cut as they are."""
    # As in torch, the first dimension of three elements, if the user names none.
    dim = x.shape.index(3) if dim is None else dim
    return x.roll(-1, dim) * other.roll(-2, dim) - x.roll(-2, dim) * other.roll(-1, dim)
