"""What functions along dimensions share: their arguments, results' layouts, and what ranks bring together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index as as_int
from typing import Any

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split
from distdl_rma.split import layout as lay
from distdl_rma.split import layout_choice
from distdl_rma.split.calls.site import Site
from distdl_rma.split.moves import all_sum, redistributed
from distdl_rma.split.tensor import SplitTensor, checked_block

# What is computed of a block.
OnBlock = Callable[[torch.Tensor], torch.Tensor]


def chosen_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions that a call means, from 0, rising; all of them where it names none."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    given = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(sorted(positive(d, ndim) for d in given))


def positive(dim: Any, ndim: int) -> int:
    """A dimension from 0; ``IndexError`` as torch has it."""
    d, most = as_int(dim), max(ndim, 1)
    if not -most <= d < most:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {d})"
        )
    return d % most


@dataclass
class Along:
    """A split tensor and dimensions of it that a function reduces."""

    site: Site
    local: torch.Tensor
    layout: Decomposition
    dims: tuple[int, ...]

    @classmethod
    def of(cls, site: Site, x: SplitTensor, dim: Any) -> Along:
        """Dimensions as a call names them."""
        return cls(site, checked_block(x), x._layout, chosen_dims(dim, len(x._layout.shape)))

    @property
    def cut(self) -> tuple[int, ...]:
        """Grid dimensions that cut what is reduced."""
        return tuple(g for g, axis in enumerate(self.layout.axes) if axis is not None and axis in self.dims)

    @property
    def count(self) -> int:
        """Elements of the whole that become one."""
        count = 1
        for d in self.dims:
            count *= self.layout.shape[d]
        return count

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose elements meet."""
        return lay.line(self.layout, self.cut)

    def result(self, y: torch.Tensor, keepdim: bool) -> SplitTensor:
        """Split tensor of a result that has extent 1 where it was reduced."""
        layout, dims = self.layout, self.dims

        def make() -> Decomposition:
            order = [None if d in dims else d for d in range(len(layout.shape)) if keepdim or d not in dims]
            return lay.reordered(lay.whole(layout, dims), order)

        return SplitTensor(y if keepdim else y.squeeze(dims), self.site.kept((layout, dims, keepdim), make))

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """Sum of the ranks' results, which have extent 1 where they were reduced; differentiable."""
        return all_sum(self.site, y, self.layout, self.cut)

    def partial(self, f: OnBlock, dtype: torch.dtype) -> torch.Tensor:
        """What a function makes of the block: extent 1 where it reduces, 0 where the block has nothing."""
        empty = [d for d in self.dims if not self.local.shape[d]]
        if not empty:
            return f(self.local)
        nothing = self.local.sum(self.dims, keepdim=True)
        for d in empty:
            nothing = nothing.narrow(d, 0, 0)
        return (nothing if dtype.is_complex == nothing.is_complex() else nothing.abs()).to(dtype)

    def together(self, y: torch.Tensor, what: str, each: int = 1) -> torch.Tensor:
        """What all ranks found, in the order of their blocks, on all of them; blocking, differentiable.

        ``y`` has ``each`` elements in the first reduced dimension, 1 in others, none where the block is
        empty. The result is for use alike on all ranks.
        """
        if not self.cut:
            return y
        source, target = self.site.kept(
            (self.layout, self.dims, each, "partial"), lambda: parts_and_all(self.layout, self.dims, each)
        )
        return redistributed(self.site, y, source, target, what)

    def twice(self, f: OnBlock, dtype: torch.dtype, what: str) -> torch.Tensor:
        """What a function makes of the blocks, then of the ranks' results; blocking, differentiable."""
        y = self.partial(f, dtype)
        return f(self.together(y, what)) if self.cut or not y.numel() else y


def parts_and_all(
    layout: Decomposition, dims: Sequence[int], each: int = 1
) -> tuple[Decomposition, Decomposition]:
    """Layouts of what every block gives of some dimensions, and of all of that on each of these ranks.

    A block gives ``each`` elements in the first of the dimensions and 1 in the others, none if it is empty.
    """
    parts: dict[int, Split] = {}
    for at, d in enumerate(dims):
        split, n = layout.splits[d], each if at == 0 else 1
        lengths = tuple(n if length else 0 for length in layout_choice.lengths(split))
        parts[d] = Listed(lengths) if split.parts > 1 else Balanced(n if split.extent else 0, 1)
    source = lay.with_splits(layout, parts)
    return source, lay.whole(source, dims)


def computed(f: OnBlock, x: torch.Tensor, reduced: Sequence[int] = ()) -> torch.Tensor:
    """What a function makes of a block, dimension by dimension; of nothing nothing, but where it reduces.

    Torch computes that of an element instead, in the graph: some of its functions refuse blocks without any,
    and what it refuses of the block's type it refuses on all ranks.
    """
    y = f(with_an_element(x))
    for d in (d for d, n in enumerate(x.shape) if not n and d not in reduced):
        y = y.narrow(d, 0, 0)
    return y


def with_an_element(x: torch.Tensor) -> torch.Tensor:
    """The block; where it has no elements, zeros of extent 1 in its graph."""
    if x.numel():
        return x
    return x.new_zeros([max(n, 1) for n in x.shape]) + x.sum().to(x.dtype)


def with_whole(
    site: Site, x: SplitTensor, dims: Sequence[int], what: str = "dimensions made whole"
) -> tuple[torch.Tensor, Decomposition]:
    """A block in which some dimensions are whole, and its layout; differentiable, blocking if it moves.

    Functions that need dimensions whole call this, :func:`layout_choice.cut_other_dims` within it, and
    :func:`put_back` behind.
    """
    layout, dims = x._layout, tuple(dims)
    if not any(axis in dims for axis in layout.axes):
        return checked_block(x), layout
    target = lay.kept(
        layout.partition, "elsewhere", (layout, dims), lambda: layout_choice.cut_other_dims(layout, dims)
    )
    return redistributed(site, checked_block(x), layout, target, what), target


def put_back(
    site: Site, y: torch.Tensor, layout: Decomposition, before: Decomposition, what: str = "moved back"
) -> SplitTensor:
    """A result of a function for which dimensions were made whole, cut as its input was.

    Where it has other extents than that, in balanced blocks.
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


def by_whole_dims(
    site: Site, x: SplitTensor, dims: Sequence[int], compute: OnBlock, what: str = "dimensions made whole"
) -> SplitTensor:
    """A function that needs some dimensions whole and treats the others apart.

    The result has the dimensions of the input in the same order.
    """
    local, layout = with_whole(site, x, dims, what)
    return put_back(site, computed(compute, local), layout, x._layout)


def laid_out(layout: Decomposition, order: Sequence[int | None], y: torch.Tensor) -> Decomposition:
    """Layout of a result ``y`` with these dimensions of blocks in this order, None for new ones.

    What is not cut has the extents of the result.
    """
    found = lay.reordered(layout, order)
    extents = {d: Balanced(n, 1) for d, n in enumerate(y.shape) if found.splits[d].parts == 1}
    return lay.with_splits(found, extents)
