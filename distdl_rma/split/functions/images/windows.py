"""Pooling, resizing, padding: every rank fetches what its outputs read, and computes those."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.ops.windows import (
    AdaptiveAvgPooling,
    AdaptiveMaxPooling,
    AdaptiveOptions,
    AvgPooling,
    AvgPoolOptions,
    MaxPooling,
    MaxPoolOptions,
    MaxWindows,
    Padding,
    PadOptions,
    ResizeOptions,
    Resizing,
)
from distdl_rma.split import layout as lay
from distdl_rma.split.calls.refusals import raise_as_torch, refusing
from distdl_rma.split.calls.site import Site, site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.functions.images.convolutions import each_dim
from distdl_rma.split.functions.images.planes import by_whole_dims
from distdl_rma.split.moves import all_sum, redistributed
from distdl_rma.split.operands import cut_site, machine_of, needs_of, on_copies
from distdl_rma.split.tensor import SplitTensor, local_of, refused

_LEADING = 2
_DIMS = (1, 2, 3)


def named(*patterns: str) -> tuple[str, ...]:
    """Names of functions for 1 to 3 spatial dimensions."""
    return tuple(pattern.format(dims) for pattern in patterns for dims in _DIMS)


@cache
def dims_of(func: Any) -> int:
    """Spatial dimensions that a function says in its name."""
    return next(int(letter) for letter in func.__name__ if letter.isdigit())


def on_meta(func: Any, shape: Sequence[int], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Result without elements, or torch's error, of a function of a whole tensor."""
    return func(torch.empty(tuple(shape), dtype=dtype, device="meta"), *args, **kwargs)


def _widened(x: torch.Tensor) -> torch.Tensor:
    # Under autocast torch computes these in float32.
    short = x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if short and torch.is_autocast_enabled("cpu") else x


def windowed(
    site: Site,
    x: torch.Tensor,
    layout: Decomposition,
    dims: int,
    kind: type[Any],
    key: Hashable,
    make_options: Callable[[], Any],
) -> tuple[SplitTensor, Any]:
    """An operation of windows on a block with or without a batch; and the operation.

    ``key`` tells its options apart, which are made, and checked, when it is.
    """
    batched = len(layout.shape) == dims + _LEADING

    def make() -> tuple[Any, Decomposition]:
        options = make_options()
        order = range(dims + _LEADING) if batched else (None, *range(dims + 1))
        source = lay.reordered(layout, list(order))
        operation = kind(site.call_site, lay.on_grid(source), lay.on_grid(source).partition, x.dtype, options)
        output = lay.with_splits(source, dict(enumerate(operation.output.splits)))
        return operation, output if batched else lay.reordered(output, range(1, dims + _LEADING))

    operation, output = site.kept((kind, layout, x.dtype, key), make)
    y = operation(needs_of(x), x if batched else x.unsqueeze(0))
    return SplitTensor(y if batched else y.squeeze(0), output), operation


def with_single_copied(site: Site, y: SplitTensor) -> SplitTensor:
    """The same, with copies of what has a single element in a dimension that was cut."""
    layout = y._layout
    if 1 not in layout.shape:
        return y
    single = [d for d in layout.cut_dims if layout.shape[d] == 1]
    if not single:
        return y
    target = lay.whole(layout, single)
    return SplitTensor(redistributed(site, y._local, layout, target), target)


def _stencil(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, dims: int) -> Stencil:
    size = each_dim(kernel, dims)
    stride = size if stride is None or stride in ([], ()) else each_dim(stride, dims)
    sides = tuple((n, n) for n in each_dim(padding, dims))
    return Stencil.of(size, stride, each_dim(dilation, dims), sides, bool(ceil_mode))


def _max_pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...]:
    return input, kernel_size, stride, padding, dilation, ceil_mode, return_indices


def _avg_pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tuple[Any, ...]:
    return input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override


@rule("window", *named("max_pool{}d", "max_pool{}d_with_indices"))
def max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest element of each window, of what a rank's outputs fetch; indices are of the whole plane."""
    x, kernel, stride, padding, dilation, ceil_mode, indices = _max_pool(*args, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return on_copies(func, args, kwargs)
    dims, indices, local = dims_of(func), indices or func.__name__.endswith("_with_indices"), local_of(x)

    def make() -> MaxPoolOptions:
        raise_as_torch(func, args, kwargs)
        return MaxPoolOptions(_stencil(kernel, stride, padding, dilation, ceil_mode, dims), bool(indices))

    key = str((kernel, stride, padding, dilation, ceil_mode, indices))
    return _largest(site, local, x._layout, dims, MaxPooling, key, make, bool(indices))


def _largest(
    site: Site,
    local: torch.Tensor,
    layout: Decomposition,
    dims: int,
    kind: type[Any],
    key: Hashable,
    make: Callable[[], Any],
    indices: bool,
) -> Any:
    y, operation = windowed(site, local, layout, dims, kind, key, make)
    if not indices:
        return with_single_copied(site, y)
    found = operation.take_indices() if isinstance(operation, MaxWindows) else None
    if found is None:
        found = torch.zeros(y._local.shape, dtype=torch.int64)
    index = SplitTensor(found.reshape(y._local.shape), y._layout)
    return with_single_copied(site, y), with_single_copied(site, index)


@rule("window", *named("avg_pool{}d"))
def avg_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean of each window, which a rank's outputs fetch."""
    x, kernel, stride, padding, ceil_mode, count_pad, divisor = _avg_pool(*args, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return on_copies(func, args, kwargs)
    dims, local = dims_of(func), local_of(x)

    def make() -> AvgPoolOptions:
        raise_as_torch(func, args, kwargs)
        return AvgPoolOptions(_stencil(kernel, stride, padding, 1, ceil_mode, dims), bool(count_pad), divisor)

    key = str((kernel, stride, padding, ceil_mode, count_pad, divisor))
    return with_single_copied(site, windowed(site, local, x._layout, dims, AvgPooling, key, make)[0])


@rule("window", *named("lp_pool{}d"))
def lp_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The norm of each window, which a rank's outputs fetch."""

    def arguments(
        input: Any, norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
    ) -> tuple[Any, ...]:
        return input, float(norm_type), kernel_size, stride, ceil_mode

    x, norm, kernel, stride, ceil_mode = arguments(*args, **kwargs)
    site = cut_site(func, x)
    if site is None:
        return on_copies(func, args, kwargs)
    dims, local, layout = dims_of(func), local_of(x), x._layout
    key, largest = str((kernel, stride, ceil_mode)), abs(norm) == float("inf")

    def make() -> Any:
        raise_as_torch(func, args, kwargs)
        stencil = _stencil(kernel, stride, 0, 1, ceil_mode, dims)
        return MaxPoolOptions(stencil) if largest else AvgPoolOptions(stencil)

    if largest:
        sign = 1 if norm > 0 else -1
        top: SplitTensor = _largest(site, sign * local.abs(), layout, dims, MaxPooling, key, make, False)
        return SplitTensor(sign * top._local, top._layout)
    found = windowed(site, local.pow(norm), layout, dims, AvgPooling, key, make)[0]
    mean = with_single_copied(site, found)
    y, number = mean._local, prod(each_dim(kernel, dims))
    return SplitTensor((y.sign() * y.abs().relu()).mul(number).pow(1.0 / norm), mean._layout)


@rule("window", *named("adaptive_avg_pool{}d"))
def adaptive_avg_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean of each window: ranks sum their own elements, sums travel; one of all is copied everywhere."""

    def arguments(input: Any, output_size: Any) -> tuple[Any, Any]:
        return input, output_size

    x, size = arguments(*args, **kwargs)
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    return averaged(func, x, _sizes(size, dims_of(func)), args, kwargs)


def averaged(
    func: Any, x: SplitTensor, size: tuple[int | None, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SplitTensor:
    """Adaptive averages of a split tensor."""
    dims, site, layout = len(size), site_of(machine_of(x), func), x._layout
    local = _widened(local_of(x)) if dims == _DIMS[-1] else local_of(x)

    def check() -> bool:
        raise_as_torch(func, args, kwargs)
        if 0 in layout.shape[-dims:]:
            raise ShapeError(f"{site.name}: the global input {layout.shape} has no elements to pool")
        if not local.dtype.is_floating_point:
            raise refused(func, f"the input is {local.dtype}; only floating point numbers are averaged")
        return True

    site.kept(("checked", size, layout, local.dtype), check)
    first = len(layout.shape) - dims
    single = tuple(d for d, n in enumerate(size, first) if n == 1 and layout.splits[d].parts > 1)
    if single:
        number = prod(layout.shape[d] for d in single)
        sums = local.sum(single, keepdim=True, dtype=sum_dtype(local.dtype))
        cut = tuple(g for g, axis in enumerate(layout.axes) if axis in single)
        mean = all_sum(site, sums, layout, cut) / number
        local = mean.to(local.dtype)
        layout = lay.with_splits(lay.whole(layout, single), {d: Balanced(1, 1) for d in single})
        size = tuple(None if d in single else n for d, n in enumerate(size, first))
    if all(n is None or n == layout.shape[d] for d, n in enumerate(size, first)):
        return SplitTensor(local, layout)
    rest = windowed(site, local, layout, dims, AdaptiveAvgPooling, size, lambda: AdaptiveOptions(size))[0]
    return with_single_copied(site, rest)


def _sizes(value: Any, dims: int) -> tuple[int | None, ...]:
    sizes = (value,) if value is None or isinstance(value, int) else tuple(value)
    sizes = sizes * dims if len(sizes) == 1 else sizes
    return tuple(None if n is None else int(n) for n in sizes)


@rule("window", *named("adaptive_max_pool{}d", "adaptive_max_pool{}d_with_indices"))
def adaptive_max_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest element of each window, which a rank's outputs fetch; one of all is a copy everywhere."""

    def arguments(input: Any, output_size: Any, return_indices: bool = False) -> tuple[Any, ...]:
        return input, output_size, return_indices

    x, size, indices = arguments(*args, **kwargs)
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    # The one-dimensional function of torch's lowest floor returns both.
    both = func.__name__.endswith("_with_indices") or func is torch.adaptive_max_pool1d
    dims, site = dims_of(func), site_of(machine_of(x), func)
    options = AdaptiveOptions(_sizes(size, dims), bool(indices or both))

    def make() -> AdaptiveOptions:
        raise_as_torch(func, args, kwargs)
        return options

    where = options.return_indices
    return _largest(site, local_of(x), x._layout, dims, AdaptiveMaxPooling, options, make, where)


@rule("window", "interpolate")
def interpolate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Weighted neighbours by global extents, which a rank fetches; all of the plane if antialiased."""

    def arguments(
        input: Any,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> tuple[Any, ...]:
        return input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias

    x, size, factor, mode, corners, recompute, antialias = arguments(*args, **kwargs)
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    dims, site = x._local.dim() - _LEADING, site_of(machine_of(x), func)
    others = {key: value for key, value in kwargs.items() if key != "input"}
    said = str((size, factor, mode, corners, recompute, antialias)), x._layout, x._local.dtype

    def make() -> tuple[int, ...]:
        raise_as_torch(func, args, kwargs)
        return tuple(on_meta(func, x._layout.shape, x._local.dtype, *args[1:], **others).shape[_LEADING:])

    # What torch makes of it decides how large the result is.
    outputs = site.kept(("outputs", *said), make)
    if mode == "area":
        return averaged(func, x, outputs, args, kwargs)
    if antialias or not x._local.dtype.is_floating_point:
        spatial = range(_LEADING, _LEADING + dims)
        return by_whole_dims(func, x, spatial, lambda local: func(local, *args[1:], **others))

    def options() -> ResizeOptions:
        if factor is None:
            return ResizeOptions(outputs, None, mode, corners, recompute)
        factors = tuple(float(f) for f in ([factor] if isinstance(factor, (int, float)) else factor))
        return ResizeOptions(None, factors * (dims // len(factors)), mode, corners, recompute)

    return windowed(site, local_of(x), x._layout, dims, Resizing, said, options)[0]


@rule("window", "pad")
@refusing
def pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Padding of the whole in every mode, and cropping: a rank fetches what its part of the result shows."""

    def arguments(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> tuple[Any, ...]:
        return input, tuple(int(n) for n in pad), mode, value

    x, sides, mode, value = arguments(*args, **kwargs)
    if not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    site = site_of(machine_of(x), func)
    value = 0.0 if value is None or mode != "constant" else value
    if mode == "circular" and any(
        min(pair) < 0 < max(pair) for pair in zip(sides[::2], sides[1::2], strict=True)
    ):
        cropped = _padded(func, site, x, tuple(min(n, 0) for n in sides), "constant", 0.0)
        return _padded(func, site, cropped, tuple(max(n, 0) for n in sides), mode, 0.0)
    return _padded(func, site, x, sides, mode, value)


def _padded(
    func: Any, site: Site, x: SplitTensor, sides: tuple[int, ...], mode: str, value: float
) -> SplitTensor:
    layout, local = x._layout, local_of(x)
    if mode in ("reflect", "replicate"):
        local = _widened(local)
    dims = len(layout.shape)
    by_dim = {dims - 1 - at: (sides[2 * at], sides[2 * at + 1]) for at in range(len(sides) // 2)}
    padded = [d for d in range(dims) if by_dim.get(d, (0, 0)) != (0, 0)]
    if not padded:
        return SplitTensor(local.clone(), layout)
    if mode == "constant" and not set(padded) & set(lay.cut_dims(layout)):
        longer = {d: Balanced(layout.shape[d] + sum(by_dim[d]), 1) for d in padded}
        return SplitTensor(func(local, sides, mode, value), lay.with_splits(layout, longer))

    def make() -> tuple[Any, list[int | None], list[int], Decomposition]:
        # Two dimensions that are not padded lead; the others are those of space.
        kept: list[int | None] = [d for d in range(dims) if d not in padded]
        order = [*([None] * max(0, _LEADING - len(kept))), *kept, *padded]
        source = lay.reordered(layout, order)
        spatial = tuple(by_dim.get(d, (0, 0)) if d is not None else (0, 0) for d in order[_LEADING:])
        way = "zeros" if mode == "constant" and value == 0 else mode
        grid = lay.on_grid(source)
        options = PadOptions(spatial, way, value)
        operation = Padding(site.call_site, grid, grid.partition, local.dtype, options)
        output = lay.with_splits(source, dict(enumerate(operation.output.splits)))
        back = [order.index(d) for d in range(dims)]
        return operation, order, back, lay.reordered(output, back)

    operation, order, back, output = site.kept(("pad", layout, local.dtype, sides, mode, value), make)
    first = order.count(None)
    straight = order == list(range(dims))
    given = local if straight else local.permute([d for d in order if d is not None])[(None,) * first]
    y = operation(needs_of(local), given)
    if straight:
        return SplitTensor(y, output)
    y = y[(0,) * first] if first else y
    # In memory as torch has it, where what looks like a view of it is one.
    return SplitTensor(y.permute([at - first for at in back]).contiguous(), output)
