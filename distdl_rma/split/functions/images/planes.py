"""Functions that need some dimensions whole: cut in others meanwhile, and as before behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.split import cuts
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import refusing
from distdl_rma.split.calls.site import site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.functions.images.convolutions import each_dim
from distdl_rma.split.moves import redistributed
from distdl_rma.split.operands import as_part, common_partition, machine_of, on_copies
from distdl_rma.split.reducing import computed, put_back, with_an_element, with_whole
from distdl_rma.split.tensor import SplitTensor, refused


def by_whole_dims(
    func: Any, x: SplitTensor, dims: Sequence[int], compute: Callable[[torch.Tensor], torch.Tensor]
) -> SplitTensor:
    """A function that needs some dimensions whole and treats the others apart.

    The result has the dimensions of the input in the same order.
    """
    site = site_of(machine_of(x), func)
    local, layout = with_whole(site, x, dims)
    return put_back(site, computed(compute, local), layout, x._layout)


@rule("window", F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
@refusing
def max_unpool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices may be anywhere in the plane: of all of it, cut again behind."""

    def arguments(
        input: Any,
        indices: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        output_size: Any = None,
    ) -> tuple[Any, ...]:
        return input, indices, (kernel_size, stride, padding, output_size)

    x, indices, others = arguments(*args, **kwargs)
    if not isinstance(x, SplitTensor):
        raise refused(func, "the indices are split, the input is not; both are to be cut alike")
    if not x.is_split and not (isinstance(indices, SplitTensor) and indices.is_split):
        return on_copies(func, args, kwargs)
    layout, site = x._layout, site_of(machine_of(x), func)
    if tuple(indices.shape) != layout.shape:
        raise ShapeError(f"{site.name}: input is {layout.shape}, the indices {tuple(indices.shape)}")
    dims = len(layout.shape)
    spatial = range(dims - int(func.__name__[-2]), dims)
    local, whole = with_whole(site, x, spatial)
    at = as_part(site, indices, whole, layout, 1)
    # Of indices that are not contiguous torch has no gradient, which ranks without any would not notice.
    y = computed(lambda block: func(block, with_an_element(at).contiguous(), *others), local)
    return put_back(site, y, whole, layout)


@rule("window", F.unfold)
@refusing
def unfold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The patches of whole planes; they are cut along their row, channels and batch stay cut."""
    x = args[0] if args else kwargs["input"]
    if not x.is_split:
        return on_copies(func, args, kwargs)
    others = {key: value for key, value in kwargs.items() if key != "input"}
    site, layout = site_of(machine_of(x), func), x._layout
    dims = len(layout.shape)
    channels = dims - 3
    local, whole = with_whole(site, x, (dims - 2, dims - 1))

    def make() -> tuple[int, int, Decomposition, Decomposition]:
        global_shape = func(torch.empty(layout.shape, device="meta"), *args[1:], **others).shape
        times, patches = global_shape[-2] // max(layout.shape[channels], 1), global_shape[-1]

        def cut_as(found: Decomposition, row: int | None) -> Decomposition:
            # Of which grid dimension ``row`` cuts the patches.
            each = Listed(tuple(n * times for n in cuts.lengths(found.splits[channels])))
            axes = [
                dims - 2 if g == row else a if a in range(channels + 1) else None
                for g, a in enumerate(found.axes)
            ]
            parts = 1 if row is None else found.partition.shape[row]
            splits = [*found.splits[:channels], each, Balanced(patches, parts)]
            return lay.layout(found.partition, splits, tuple(axes))

        first = next((g for g, axis in enumerate(layout.axes) if axis in (dims - 2, dims - 1)), None)
        return times, patches, cut_as(whole, None), cut_as(layout, first)

    times, patches, copies, cut = site.kept(("patches", layout, str((args[1:], others))), make)
    if local.numel():
        y = func(local, *args[1:], **others)
    else:
        nothing = local.new_zeros((*local.shape[:channels], local.shape[channels] * times, patches))
        y = nothing + local.sum().to(local.dtype)
    return SplitTensor(redistributed(site, y, copies, cut, "cut again"), cut)


@rule("window", F.fold)
@refusing
def fold(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Patches meet anywhere in the plane: of all of them, cut again behind."""

    def arguments(input: Any, output_size: Any, kernel_size: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        return input, each_dim(output_size, 2), prod(each_dim(kernel_size, 2))

    x, size, times = arguments(*args, **kwargs)
    if not x.is_split:
        return on_copies(func, args, kwargs)
    others = {key: value for key, value in kwargs.items() if key != "input"}
    site, layout = site_of(machine_of(x), func), x._layout
    rows, patches = len(layout.shape) - 2, len(layout.shape) - 1
    local, whole = with_whole(site, x, (rows, patches))

    def make() -> tuple[Decomposition, Decomposition]:
        channels = layout.shape[rows] // times
        planes = [Balanced(channels, 1), *(Balanced(n, 1) for n in size)]
        copies = lay.layout(layout.partition, [*whole.splits[:rows], *planes], whole.axes)
        planes = [
            Balanced(channels, layout.splits[rows].parts),
            Balanced(size[0], layout.splits[patches].parts),
        ]
        planes = [*layout.splits[:rows], *planes, Balanced(size[1], 1)]
        return copies, lay.layout(layout.partition, planes, layout.axes)

    copies, cut = site.kept(("planes", layout, times, size), make)
    if local.numel():
        y = func(local, *args[1:], **others)
    else:
        y = local.new_zeros(copies.box(layout.partition.me).shape) + local.sum()
    return SplitTensor(redistributed(site, y, copies, cut, "cut again"), cut)


@rule("window", "grid_sample", "grid_sampler")
@refusing
def grid_sample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Points may be anywhere in the plane: every rank gets all of it, for the points of its block."""

    def arguments(input: Any, grid: Any, *others: Any, **named: Any) -> tuple[Any, ...]:
        return input, grid, others, named

    x, grid, others, named = arguments(*args, **kwargs)
    both = [y for y in (x, grid) if isinstance(y, SplitTensor)]
    if not any(y.is_split for y in both):
        return on_copies(func, args, kwargs)
    partition, site = common_partition(func, both), site_of(machine_of(both[0]), func)
    of_x, of_grid = tuple(x.shape), tuple(grid.shape)
    dims = len(of_x)
    shape = (*of_x[:2], *of_grid[1:-1])

    def make() -> tuple[Decomposition, Decomposition, Decomposition]:
        x_shape, grid_shape = (torch.empty(each, device="meta") for each in (of_x, of_grid))
        func(x_shape, grid_shape, *others, **named)
        if isinstance(x, SplitTensor) and x.is_split:
            axes = x._layout.axes
            batch, channels = x._layout.splits[:2]
        else:
            axes = tuple(None if a is None or a == dims - 1 else a + (a > 0) for a in grid._layout.axes)
            batch, channels = grid._layout.splits[0], Balanced(of_x[1], 1)
        parts = [1] * dims
        for g, axis in enumerate(axes):
            if axis is not None:
                parts[axis] = partition.shape[g]
        points = [Balanced(n, parts[d]) for d, n in enumerate(shape) if d > 1]
        result = lay.layout(partition, [batch, channels, *points], axes)
        spatial = tuple(None if a is None or a > 1 else a for a in result.axes)
        planes = lay.layout(partition, [batch, channels, *(Balanced(n, 1) for n in of_x[2:])], spatial)
        of_points = tuple(None if a in (None, 1) else max(a - 1, 0) for a in result.axes)
        splits = [batch, *result.splits[2:], Balanced(of_grid[-1], 1)]
        return result, planes, lay.layout(partition, splits, of_points)

    layouts = [y._layout if isinstance(y, SplitTensor) else tuple(y.shape) for y in (x, grid)]
    result, planes, points = site.kept(("planes", *layouts, str((others, named))), make)
    local = as_part(site, x, planes, result, 0), as_part(site, grid, points, result, 1)
    if result.box(partition.me).empty:
        y = local[0].new_zeros(result.box(partition.me).shape) + local[0].sum() + local[1].sum()
    else:
        y = func(*local, *others, **named)
    return SplitTensor(y, result)
