"""What functions along dimensions share: arguments, layouts of results, and gathering of partial results.

Two answers to a dimension that is cut and that a function needs whole:

- *Partial results* (:class:`Along`), for reductions: each rank reduces its block, and the results of a line
  of ranks are combined. Little data moves, and the result is the same on all ranks of the line.

      grid 2 x 2 over (rows, columns), a sum over rows:
      rank 0 | rank 1      ranks 0 and 2 are a line: both have rows of the same columns
      -------+-------      the result is cut in columns as before, with copies on ranks 0 and 2
      rank 2 | rank 3

- *Another cut* (``with_whole``, ``put_back``), for what depends on all elements in their order: the block is
  moved so that the dimension is whole and another one is cut; afterwards it may move back. Every element
  travels once each way, and the memory stays divided.

Blocks may be empty on some ranks. Functions of torch raise for some of these, or leave them out of the graph;
``computed`` gives them an element for the call, and takes it from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from operator import index as as_int
from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split, lengths_of
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split import layout_choice
from distdl_rma.layers.split.calls.signatures import mapped
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.redistribution import all_sum, redistributed
from distdl_rma.layers.split.tensor import SplitTensor, checked_block

# A function of a block; of one tensor, or of several with the same dimensions.
OnBlock = Callable[[torch.Tensor], Any]


def chosen_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions of a call's ``dim`` argument, counted from 0, ascending; all dimensions if it names none."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    given = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(sorted(positive(d, ndim) for d in given))


def positive(dim: Any, ndim: int) -> int:
    """A dimension counted from 0; ``IndexError`` with torch's text if there is no such dimension."""
    d, most = as_int(dim), max(ndim, 1)
    if not -most <= d < most:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {d})"
        )
    return d % most


@dataclass
class Along:
    """A split tensor and the dimensions of it that a function reduces.

    Rules may replace ``local`` and ``layout`` together, as by the block in a longer dtype or in another cut.
    """

    site: Site
    local: torch.Tensor
    layout: Decomposition
    dims: tuple[int, ...]

    @classmethod
    def of(cls, site: Site, x: SplitTensor, dim: Any) -> Along:
        """Of the dimensions that a call names."""
        return cls(site, checked_block(x), x._layout, chosen_dims(dim, len(x._layout.shape)))

    @property
    def cut(self) -> tuple[int, ...]:
        """Grid dimensions that cut reduced dimensions."""
        return tuple(g for g, axis in enumerate(self.layout.axes) if axis is not None and axis in self.dims)

    @property
    def count(self) -> int:
        """Number of elements of the whole tensor that one result is computed from."""
        return prod([self.layout.shape[d] for d in self.dims])

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose blocks contribute to the same results."""
        return lay.line(self.layout, self.cut)

    def result(self, y: torch.Tensor, keepdim: bool) -> SplitTensor:
        """Split tensor of a result whose reduced dimensions have extent 1."""
        layout, dims = self.layout, self.dims

        def make() -> Decomposition:
            order = [None if d in dims else d for d in range(len(layout.shape)) if keepdim or d not in dims]
            return lay.reordered(lay.whole(layout, dims), order)

        return SplitTensor(y if keepdim else y.squeeze(dims), self.site.kept((layout, dims, keepdim), make))

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """Sum of the ranks' results, whose reduced dimensions have extent 1; differentiable, blocking."""
        return all_sum(self.site, y, self.layout, self.cut)

    def together(self, y: torch.Tensor, what: str, each: int = 1) -> torch.Tensor:
        """Results of all ranks, in the order of their blocks, on all of them; blocking, differentiable.

        ``y`` has ``each`` elements in the first reduced dimension and 1 in the others, or none if the block
        is empty. All ranks must use the result in the same way.
        """
        if not self.cut:
            return y
        source, target = parts_and_all(self.layout, self.dims, each)
        return redistributed(self.site, y, source, target, what)


def parts_and_all(
    layout: Decomposition, dims: Sequence[int], each: int = 1
) -> tuple[Decomposition, Decomposition]:
    """Layouts of the partial results of all blocks, and of all of these on each of the ranks.

    A block has ``each`` results in the first dimension of ``dims`` and 1 in the others, none if it is empty.
    """
    parts: dict[int, Split] = {}
    for at, d in enumerate(dims):
        split, n = layout.splits[d], each if at == 0 else 1
        lengths = tuple(n if length else 0 for length in lengths_of(split))
        parts[d] = Listed(lengths) if split.parts > 1 else Balanced(n if split.extent else 0, 1)
    source = lay.with_splits(layout, parts)
    return source, lay.whole(source, dims)


def computed(f: OnBlock, x: torch.Tensor) -> Any:
    """Result of a function for a block, also for an empty one.

    Some functions of torch refuse empty blocks. So an empty block is replaced by zeros of extent 1 in its
    graph, and the result is cut to extent 0 in all empty dimensions. Torch also raises the same errors about
    dtypes there as on other ranks.
    """
    empty = [d for d, n in enumerate(x.shape) if not n]

    def cut(y: torch.Tensor) -> torch.Tensor:
        for d in empty:
            y = y.narrow(d, 0, 0)
        return y

    return mapped(cut, f(with_an_element(x)))


def with_an_element(x: torch.Tensor) -> torch.Tensor:
    """The block; or zeros of extent 1, in its graph, if it has no elements."""
    return x if x.numel() else x.new_zeros([max(n, 1) for n in x.shape]) + x.sum().to(x.dtype)


def with_whole(site: Site, x: SplitTensor, dims: Sequence[int]) -> tuple[torch.Tensor, Decomposition]:
    """A block in which some dimensions are whole, and its layout; differentiable, blocking if data moves.

    :func:`layout_choice.cut_other_dims` chooses the layout; :func:`put_back` is called with the result.
    """
    layout, dims = x._layout, tuple(dims)
    if not any(axis in dims for axis in layout.axes):
        return checked_block(x), layout
    target = layout_choice.cut_other_dims(layout, dims)
    return redistributed(site, checked_block(x), layout, target, "dimensions made whole"), target


def put_back(
    site: Site, y: torch.Tensor, layout: Decomposition, before: Decomposition, what: str = "moved back"
) -> SplitTensor:
    """A result for which dimensions were made whole, cut as the function's input was.

    Dimensions whose extent changed are cut into balanced blocks.
    """
    changed = {
        d: Balanced(n, 1 if split.parts == 1 else split.parts)
        for d, (n, split) in enumerate(zip(y.shape, before.splits, strict=True))
        if layout.splits[d].parts == 1 and n != split.extent
    }
    source = lay.with_splits(layout, {d: Balanced(split.extent, 1) for d, split in changed.items()})
    return SplitTensor(
        redistributed(site, y, source, target := lay.with_splits(before, changed), what), target
    )


def by_whole_dims(site: Site, x: SplitTensor, dims: Sequence[int], compute: OnBlock) -> Any:
    """Apply a function that needs some dimensions whole and treats every index of the others separately.

    Its result, or each of its results, has the dimensions of the input in the same order.
    """
    local, layout = with_whole(site, x, dims)
    return mapped(lambda y: put_back(site, y, layout, x._layout), computed(compute, local))


def laid_out(layout: Decomposition, order: Sequence[int | None], y: torch.Tensor) -> Decomposition:
    """Layout of a result ``y`` whose dimensions are ``order`` of the blocks' ones; None stands for a new one.

    Uncut dimensions have the extents of ``y``.
    """
    found = lay.reordered(layout, order)
    extents = {d: Balanced(n, 1) for d, n in enumerate(y.shape) if found.splits[d].parts == 1}
    return lay.with_splits(found, extents)
