"""Functions that need some dimensions whole: cut in others meanwhile, and as before behind."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.split import cuts
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import checked_rule
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call
from distdl_rma.split.functions.images.convolutions import each_dim
from distdl_rma.split.moves import redistributed
from distdl_rma.split.operands import as_part, common_partition, of_any_cut, of_cut
from distdl_rma.split.reducing import computed, put_back, with_an_element, with_whole
from distdl_rma.split.tensor import SplitTensor, refused


@checked_rule("window", F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
@of_any_cut
def max_unpool(call: Call, site: Site, x: Any, indices: Any, **others: Any) -> Any:
    """Indices may be anywhere in the plane: of all of it, cut again behind."""
    func, *_ = call
    if not isinstance(x, SplitTensor):
        raise refused(func, "the indices are split, the input is not; both are to be cut alike")
    layout = x._layout
    if tuple(indices.shape) != layout.shape:
        raise ShapeError(f"{site.name}: input is {layout.shape}, the indices {tuple(indices.shape)}")
    dims = len(layout.shape)
    spatial = range(dims - int(func.__name__[-2]), dims)
    local, whole = with_whole(site, x, spatial)
    at = as_part(site, indices, whole, layout, 1)
    # Of indices that are not contiguous torch has no gradient, which ranks without any would not notice.
    y = computed(lambda block: func(block, with_an_element(at).contiguous(), **others), local)
    return put_back(site, y, whole, layout)


@checked_rule("window", F.unfold)
@of_cut()
def unfold(call: Call, site: Site, x: SplitTensor, **how: Any) -> Any:
    """The patches of whole planes; they are cut along their row, channels and batch stay cut."""
    dims, times = len(x._layout.shape), math.prod(each_dim(how["kernel_size"], 2))
    rows, columns, channels = dims - 2, dims - 1, dims - 3
    local, whole = with_whole(site, x, (rows, columns))
    y = computed(partial(call[0], **how), local)

    def of_patches(found: Decomposition) -> Decomposition:
        # Patches are cut as the first of rows and columns that is.
        d = next((axis for axis in found.axes if axis in (rows, columns)), rows)
        rest = lay.whole(found, {rows, columns} - {d})
        splits = {
            channels: cuts.scaled(found.splits[channels], times, 1),
            rows: Balanced(y.shape[-1], found.splits[d].parts),
        }
        return lay.with_splits(lay.reordered(rest, [*range(rows), d]), splits)

    target = of_patches(x._layout)
    return SplitTensor(redistributed(site, y, of_patches(whole), target, "cut again"), target)


@checked_rule("window", F.fold)
@of_cut()
def fold(call: Call, site: Site, x: SplitTensor, **how: Any) -> Any:
    """Patches meet anywhere in the plane: of all of them, cut again behind."""
    dims = len(x._layout.shape)
    local, whole = with_whole(site, x, (dims - 2, dims - 1))
    # Patches become rows, and columns are new.
    found, before = (lay.reordered(each, [*range(dims), None]) for each in (whole, x._layout))
    return put_back(site, computed(partial(call[0], **how), local), found, before, "cut again")


@checked_rule("window", "grid_sample", "grid_sampler")
@of_any_cut
def grid_sample(call: Call, site: Site, x: Any, grid: Any, **how: Any) -> Any:
    """Points may be anywhere in the plane: every rank gets all of it, for the points of its block."""
    func, *_ = call
    partition = common_partition(func, [x, grid])
    of_x, of_grid = tuple(x.shape), tuple(grid.shape)
    dims = len(of_x)
    shape = (*of_x[:2], *of_grid[1:-1])

    def make() -> tuple[Decomposition, Decomposition, Decomposition]:
        x_shape, grid_shape = (torch.empty(each, device="meta") for each in (of_x, of_grid))
        func(x_shape, grid_shape, **how)
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
    result, planes, points = site.kept(("planes", *layouts, str(how)), make)
    local = as_part(site, x, planes, result, 0), as_part(site, grid, points, result, 1)
    if result.box(partition.me).empty:
        y = local[0].new_zeros(result.box(partition.me).shape) + local[0].sum() + local[1].sum()
    else:
        y = func(*local, **how)
    return SplitTensor(y, result)
