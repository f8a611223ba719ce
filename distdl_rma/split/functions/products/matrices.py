"""Decompositions and inverses of matrices, systems of equations, cross and Kronecker products."""

from __future__ import annotations

from typing import Any

import torch

from distdl_rma.split import cuts
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import checked_rule
from distdl_rma.split.calls.signatures import named
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.functions.places.shapes import frozen
from distdl_rma.split.functions.products.contractions import Labels, prepared
from distdl_rma.split.operands import as_whole, of_cut, on_copies
from distdl_rma.split.reducing import laid_out, positive, with_an_element, with_whole
from distdl_rma.split.tensor import SplitTensor, local_of, mapped, refused, tensors_in

_BESIDE = "a tensor stands beside the matrices"


@rule(
    "contraction",
    *"svd svdvals qr eig eigvals eigh eigvalsh cholesky cholesky_ex inv inv_ex inverse pinv pinverse".split(),
    *"det logdet slogdet matrix_rank matrix_power matrix_exp lu_factor cond cholesky_inverse".split(),
)
@of_cut(plain=_BESIDE)
def of_matrices(call: Call, site: Site, x: SplitTensor, **_: Any) -> Any:
    """Of the matrices of each rank's block; where the last two dimensions are cut, another one is instead."""
    func, (_x, *rest), kwargs = call
    if any(len(frozen(y)) for y in tensors_in(rest, kwargs)):
        raise refused(func, _BESIDE)
    count = len(x._layout.shape)
    if count < 2:
        return on_copies(*call)
    local, layout = with_whole(site, x, (count - 2, count - 1), "matrices made whole")

    def split(y: torch.Tensor) -> SplitTensor:
        if local.requires_grad and not y.requires_grad and not local.numel() and y.dtype.is_floating_point:
            # Torch leaves what some functions make of nothing out of the graph, where other ranks are in it.
            y = y + local.sum().abs().to(y.dtype)
        order = [*range(count - 2), *(None,) * (y.dim() - count + 2)]
        return SplitTensor(y, laid_out(layout, order, y))

    return mapped(split, func(local, *rest, **kwargs))


@rule("contraction", torch.linalg.solve, torch.linalg.solve_triangular, "cholesky_solve")
def solved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank solves for its samples and right-hand sides, by matrices that are whole."""
    a, options = args[0], named(func, args, kwargs)
    by_factor = func.__name__ == "cholesky_solve"
    b = options.pop("input2" if by_factor else "B")
    if by_factor:
        a, b = b, a
    one, two = frozen(a), frozen(b)
    vectors = func is torch.linalg.solve and (len(two) == 1 or two == one[:-1])
    left = options.get("left", True)
    rows, sides = list(range(2 - len(one), 0)), list(range((1 if vectors else 2) - len(two), 0))
    mine: Labels = [*sides, *(("m",) if vectors else ("m", "k") if left else ("k", "m"))]
    batch = max(rows, sides, key=len)
    out = [*batch, *(("n",) if vectors else ("n", "k") if left else ("k", "n"))]
    _, work, (matrix, right) = prepared(func, [a, b], [[*rows, "m", "n"], mine], out, ("m", "n"))
    if by_factor:
        matrix, right = right, matrix
    return SplitTensor(func(matrix, right, **options), work.result)


@checked_rule("contraction", torch.linalg.lstsq)
def least_squares(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank solves for its samples; drivers that look at the rank of all matrices get all of them."""
    a, (b, rcond, driver) = args[0], named(func, args, kwargs).values()
    one, two = frozen(a), frozen(b)
    if driver in ("gelsd", "gelss") or 0 in (*one, *two) or one[:-2] != two[: len(one) - 2]:
        return on_copies(func, args, kwargs)
    rows, sides = list(range(2 - len(one), 0)), ["k"] * (len(one) == len(two))
    labels: list[Labels] = [[*rows, "m", "n"], [*rows, "m", *sides]]
    _, work, blocks = prepared(func, [a, b], labels, [*rows, "n", *sides], ("m", "n", "k"))
    found = func(*map(with_an_element, blocks), rcond, driver=driver)
    shape = work.result.box(work.result.partition.me).shape[: len(rows)]

    def split(y: torch.Tensor) -> SplitTensor:
        if y.shape == (0,):
            return SplitTensor(y, lay.replicated(work.result.partition, y.shape))
        order = [*range(len(rows)), *(None,) * (y.dim() - len(rows))]
        layout = laid_out(work.result, order, y)
        return SplitTensor(y[tuple(map(slice, shape))], layout)

    return type(found)([split(each) for each in found])


@rule("contraction", "cross")
def cross(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank multiplies its vectors, whose three elements are whole."""
    a, (b, dim) = args[0], named(func, args, kwargs).values()
    shape = frozen(a)
    if dim is None:
        if 3 not in shape:
            raise RuntimeError("no dimension of size 3 in input")
        dim = shape.index(3)
    names = list(range(-len(shape), 0))
    if len(frozen(b)) != len(shape):
        raise RuntimeError(f"cross: inputs must have the same number of dimensions, got {shape}, {frozen(b)}")
    dim = positive(dim, len(shape))
    _, work, blocks = prepared(func, [a, b], [names, names], names, (names[dim],))
    return SplitTensor(torch.linalg.cross(*blocks, dim=dim), work.result)


@rule("contraction", "kron")
@of_cut()
def kron(call: Call, site: Site, a: SplitTensor, other: Any) -> Any:
    """The first factor stays cut, every rank gets all of the second; where that alone is split, of both."""
    ours, theirs = len(a._layout.shape), frozen(other)
    count = max(ours, len(theirs))
    base = lay.reordered(a._layout, [*(None,) * (count - ours), *range(ours)])
    extents = (1,) * (count - len(theirs)) + theirs
    result = lay.with_splits(
        base, {d: cuts.scaled(split, extents[d], 1) for d, split in enumerate(base.splits)}
    )
    return SplitTensor(call[0](local_of(a), as_whole(site, other, result, "second factor")), result)
