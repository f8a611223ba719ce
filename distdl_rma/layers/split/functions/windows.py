"""Pools, resizing, padding, patches, sampling: ranks fetch the elements that their outputs need.

Two families, by how far an output looks:

- *Windows of a fixed reach* (pools, resizing, padding). Outputs lie with their inputs, and an operation of
  ``layers/ops/windows.py`` fetches what a rank's outputs read of other blocks. The layout of the result is
  the operation's: extents change, and with them the ends of the parts. Here windows of three elements:

      rank 0   a a a a            output 0 reads a a a: local
      rank 1           b b b b    output 1 reads a b b: its rank fetches what it lacks

- *Anywhere in the plane* (unpooling, ``fold``, ``grid_sample``): where an output reads depends on indices or
  overlaps. So planes become whole, samples or channels are cut meanwhile, and the result is cut again.

A mean over a whole plane is a reduction: ranks sum their blocks, and no element travels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import each_dim
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.resizing import Resizing
from distdl_rma.layers.ops.window_options import options_of
from distdl_rma.layers.ops.windows import (
    AdaptiveAvgPooling,
    AdaptiveMaxPooling,
    AvgPooling,
    MaxPooling,
    Padding,
    PadOptions,
)
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split import layout_choice
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.functions.shapes import on_shape, uncut
from distdl_rma.layers.split.operands import as_part, common_partition, needs_of, of_any_cut, of_cut
from distdl_rma.layers.split.redistribution import redistributed
from distdl_rma.layers.split.reduction_axes import (
    Along,
    by_whole_dims,
    computed,
    put_back,
    with_an_element,
    with_whole,
)
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, refused

_LEADING = 2
_DIMS = (1, 2, 3)


def _of_dims(*patterns: str) -> tuple[str, ...]:
    # Names of a function for 1 to 3 spatial dimensions.
    return tuple(pattern.format(dims) for pattern in patterns for dims in _DIMS)


@cache
def dims_of(func: Any) -> int:
    """Number of spatial dimensions in a function's name."""
    return next(int(letter) for letter in func.__name__ if letter.isdigit())


def _widened(x: torch.Tensor, on_cpu: bool = True) -> torch.Tensor:
    # Under autocast torch computes these in float32: on the CPU, or on other devices.
    short = x.dtype in (torch.bfloat16, torch.float16) and x.is_cpu == on_cpu
    return x.float() if short and torch.is_autocast_enabled(x.device.type) else x


Given = Mapping[str, Any]


def windowed(
    site: Site, x: torch.Tensor, layout: Decomposition, dims: int, kind: type[Any], given: Given
) -> tuple[SplitTensor, Any]:
    """Run an operation of windows on a block with or without a batch; returns the result and the operation.

    The text of the arguments ``given`` is the key: 1.0 equals 1, and torch takes only one of them.
    """
    batched = len(layout.shape) == dims + _LEADING

    def make() -> tuple[Any, Decomposition]:
        options = options_of(kind, given, dims)
        order = range(dims + _LEADING) if batched else (None, *range(dims + 1))
        operation, output = _made(kind, site, lay.reordered(layout, list(order)), x.dtype, options)
        return operation, output if batched else lay.reordered(output, range(1, dims + _LEADING))

    operation, output = site.kept((kind, layout, x.dtype, str(given)), make)
    y = operation(needs_of(x), x if batched else x.unsqueeze(0))
    return SplitTensor(y if batched else y.squeeze(0), output), operation


def _made(
    kind: type[Any], site: Site, source: Decomposition, dtype: torch.dtype, options: Any
) -> tuple[Any, Decomposition]:
    # An operation on blocks of batch, channels and space, and the layout of its result.
    grid = lay.on_grid(source)
    operation = kind(site.call_site, grid, grid.partition, dtype, options)
    return operation, lay.with_splits(source, dict(enumerate(operation.output.splits)))


def with_single_copied(site: Site, y: SplitTensor) -> SplitTensor:
    """The same tensor, with copies in place of cuts in dimensions with a single element; may block.

    A dimension of one element is often a whole plane that was pooled to one number. On one rank only, it
    would leave the others without work in all layers behind.
    """
    layout = y._layout
    if 1 not in layout.shape:
        return y
    single = [d for d in layout.cut_dims if layout.shape[d] == 1]
    if not single:
        return y
    target = lay.whole(layout, single)
    return SplitTensor(redistributed(site, y._local, layout, target), target)


@checked_rule("window", *_of_dims("max_pool{}d", "max_pool{}d_with_indices"))
@checked_rule("window", *_of_dims("adaptive_max_pool{}d", "adaptive_max_pool{}d_with_indices"))
@of_cut(empty=False)
def max_pool(call: Call, site: Site, x: SplitTensor, return_indices: bool = False, **how: Any) -> Any:
    """The largest element of each window; ranks fetch the inputs of their outputs. Indices are global."""
    func, kind = call[0], AdaptiveMaxPooling if "output_size" in how else MaxPooling
    # torch.adaptive_max_pool1d always returns both.
    both = func.__name__.endswith("_with_indices") or func is torch.adaptive_max_pool1d
    dims, indices = dims_of(func), bool(return_indices or both)
    given = {**how, "return_indices": indices}
    y, operation = windowed(site, checked_block(x), x._layout, dims, kind, given)
    if not indices:
        return with_single_copied(site, y)
    index = SplitTensor(operation.take_indices(y._local).reshape(y._local.shape), y._layout)
    return with_single_copied(site, y), with_single_copied(site, index)


@checked_rule("window", *_of_dims("avg_pool{}d"))
@of_cut(empty=False)
def avg_pool(call: Call, site: Site, x: SplitTensor, **how: Any) -> Any:
    """The mean of each window; ranks fetch the inputs of their outputs."""
    y, _ = windowed(site, checked_block(x), x._layout, dims_of(call[0]), AvgPooling, how)
    return with_single_copied(site, y)


@checked_rule("window", *_of_dims("adaptive_avg_pool{}d"))
@of_cut(empty=False)
def adaptive_avg_pool(call: Call, site: Site, x: SplitTensor, output_size: Any) -> Any:
    """The mean of each window; ranks sum their elements and exchange sums. One window is replicated."""
    return averaged(site, x, each_dim(output_size, dims_of(call[0])))


def averaged(site: Site, x: SplitTensor, size: tuple[int | None, ...]) -> SplitTensor:
    """Adaptive averages of a split tensor; blocking."""
    dims, layout = len(size), x._layout
    local = _widened(checked_block(x)) if dims == _DIMS[-1] else checked_block(x)
    first = len(layout.shape) - dims
    single = tuple(d for d, n in enumerate(size, first) if n == 1)
    # Dimensions that are cut and pooled to one element: by sums. The others: by windows.
    if any(layout.splits[d].parts > 1 for d in single):
        along = Along(site, local, layout, single)
        sums = along.summed(local.sum(single, keepdim=True, dtype=sum_dtype(local.dtype)))
        local = (sums / along.count).to(local.dtype)
        layout = lay.with_splits(lay.whole(layout, single), {d: Balanced(1, 1) for d in single})
        size = tuple(None if d in single else n for d, n in enumerate(size, first))
    if all(n is None or n == layout.shape[d] for d, n in enumerate(size, first)):
        return SplitTensor(local.clone() if local is x._local else local, layout)
    rest, _ = windowed(site, local, layout, dims, AdaptiveAvgPooling, {"output_size": size})
    return with_single_copied(site, rest)


@checked_rule("window", "interpolate")
@of_cut(empty=False)
def interpolate(call: Call, site: Site, x: SplitTensor, **how: Any) -> Any:
    """Weighted neighbours by global sizes, which ranks fetch; if antialiased, the whole plane."""
    func, *_ = call
    dims, mode = x._local.dim() - _LEADING, how["mode"]
    if mode == "area":
        # Torch computes the size of the result.
        return averaged(site, x, tuple(func(on_shape(x), **how).shape[_LEADING:]))
    if how["antialias"] or not x._local.dtype.is_floating_point:
        spatial = range(_LEADING, _LEADING + dims)
        return by_whole_dims(site, x, spatial, lambda local: func(local, **how))
    return windowed(site, _widened(checked_block(x), False), x._layout, dims, Resizing, how)[0]


@checked_rule("window", "pad")
@of_cut(empty=False)
def padded(call: Call, site: Site, x: SplitTensor, pad: Any, mode: str, value: Any) -> Any:
    """Padding in every mode, and cropping; ranks fetch the elements of their part of the result."""
    func, sides = call[0], tuple(int(n) for n in pad)
    value = 0.0 if value is None or mode != "constant" else value
    # One object for all NaNs, so that the operation is found again.
    value = math.nan if math.isnan(value) else value
    pairs = zip(sides[::2], sides[1::2], strict=True)
    if mode == "circular" and any(min(pair) < 0 < max(pair) for pair in pairs):
        # Torch crops first: what wraps around is of the cropped tensor.
        x = _padded(func, site, x, tuple(min(n, 0) for n in sides), "constant", 0.0)
        sides = tuple(max(n, 0) for n in sides)
    return _padded(func, site, x, sides, mode, value)


def _padded(
    func: Any, site: Site, x: SplitTensor, sides: tuple[int, ...], mode: str, value: float
) -> SplitTensor:
    # The operation never pads the first two dimensions, batch and channels: if one of these is padded, new
    # dimensions of extent 1 are before it.
    layout, local = x._layout, checked_block(x)
    if mode in ("reflect", "replicate"):
        local = _widened(local)
    dims = len(layout.shape)
    by_dim = {dims - 1 - at: (sides[2 * at], sides[2 * at + 1]) for at in range(len(sides) // 2)}
    padded = [d for d in range(dims) if by_dim.get(d, (0, 0)) != (0, 0)]
    if not padded:
        return SplitTensor(local.clone(), layout)
    if mode == "constant" and not set(padded) & set(layout.cut_dims):
        longer = {d: Balanced(layout.shape[d] + sum(by_dim[d]), 1) for d in padded}
        return SplitTensor(func(local, sides, mode, value), lay.with_splits(layout, longer))

    new = max(0, _LEADING - padded[0])

    def make() -> tuple[Any, Decomposition]:
        spatial = tuple(by_dim.get(d, (0, 0)) for d in range(_LEADING - new, dims))
        options = PadOptions(spatial, "zeros" if mode == "constant" and value == 0 else mode, value)
        source = lay.reordered(layout, [*(None,) * new, *range(dims)])
        operation, output = _made(Padding, site, source, local.dtype, options)
        return operation, lay.reordered(output, range(new, new + dims))

    operation, output = site.kept(("pad", layout, local.dtype, sides, mode, value), make)
    y = operation(needs_of(local), local[(None,) * new] if new else local)
    return SplitTensor(y[(0,) * new] if new else y, output)


@checked_rule("window", F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
@of_any_cut
def max_unpool(call: Call, site: Site, x: Any, indices: Any, **others: Any) -> Any:
    """Indices may be anywhere in the plane: the plane is gathered, the result is cut again."""
    func, *_ = call
    if not isinstance(x, SplitTensor):
        raise refused(func, "the indices are split, the input is not; both are to be cut alike")
    layout = x._layout
    dims = len(layout.shape)
    spatial = range(dims - int(func.__name__[-2]), dims)
    local, whole = with_whole(site, x, spatial)
    # The indices are places in the whole plane, so they are right for a block with whole planes.
    at = as_part(site, indices, whole, layout, 1)
    # Torch has no gradient for indices that are not contiguous; ranks with empty blocks would not raise that.
    y = computed(lambda block: func(block, with_an_element(at).contiguous(), **others), local)
    return put_back(site, y, whole, layout)


@checked_rule("window", F.unfold)
@of_cut()
def unfold(call: Call, site: Site, x: SplitTensor, **how: Any) -> Any:
    """Patches of whole planes; the result is cut along patches, channels and batch stay cut."""
    dims, times = len(x._layout.shape), math.prod(each_dim(how["kernel_size"], 2))
    rows, columns, channels = dims - 2, dims - 1, dims - 3
    local, whole = with_whole(site, x, (rows, columns))
    y = computed(partial(call[0], **how), local)

    # Patches get the cut of rows or columns, whichever an earlier grid dimension cuts.
    d = next((axis for axis in x._layout.axes if axis in (rows, columns)), rows)
    found, before = (
        lay.with_splits(each, {channels: layout_choice.scaled(each.splits[channels], times, 1)})
        for each in (whole, lay.whole(x._layout, {rows, columns} - {d}))
    )
    found, before = (lay.reordered(found, [*range(rows), None]), lay.reordered(before, [*range(rows), d]))
    return put_back(site, y, found, before, "cut again")


@checked_rule("window", F.fold)
@of_cut()
def fold(call: Call, site: Site, x: SplitTensor, **how: Any) -> Any:
    """Patches may overlap anywhere: all of them are gathered, the result is cut again."""
    dims = len(x._layout.shape)
    local, whole = with_whole(site, x, (dims - 2, dims - 1))
    # The dimension of patches becomes the rows; the columns are new.
    found, before = (lay.reordered(each, [*range(dims), None]) for each in (whole, x._layout))
    return put_back(site, computed(partial(call[0], **how), local), found, before, "cut again")


@checked_rule("window", "grid_sample", "grid_sampler")
@of_any_cut
def grid_sample(call: Call, site: Site, x: Any, grid: Any, **how: Any) -> Any:
    """Points may be anywhere: every rank gets the whole plane, and samples the points of its block."""
    func, *_ = call
    partition = common_partition(func, [x, grid])
    of_x, of_grid = tuple(x.shape), tuple(grid.shape)
    dims = len(of_x)
    shape = (*of_x[:2], *of_grid[1:-1])

    # Layouts of the result, of the planes and of the points. The result is cut where the input is, a spatial
    # cut of which becomes one of the points; an input that is not cut follows the points.
    if isinstance(x, SplitTensor) and x.is_split:
        axes, kept = x._layout.axes, dict(enumerate(x._layout.splits[:2]))
    else:
        axes = tuple(None if a is None or a == dims - 1 else a + (a > 0) for a in grid._layout.axes)
        kept = {0: grid._layout.splits[0]}
    result = lay.with_splits(lay.balanced(partition, shape, axes), kept)
    planes = uncut(lay.whole(result, range(2, dims)), dict(enumerate(of_x[2:], 2)))
    points = lay.reordered(lay.whole(result, (1,)), [0, *range(2, dims), None])
    points = uncut(points, {dims - 1: of_grid[-1]})
    plane, point = as_part(site, x, planes, result, 0), as_part(site, grid, points, result, 1)
    if result.own_box.empty:
        # In the graph of both, so that this rank runs their backward, in which other ranks wait for it.
        return SplitTensor(plane.new_zeros(result.own_box.shape) + plane.sum() + point.sum(), result)
    return SplitTensor(func(plane, point, **how), result)
