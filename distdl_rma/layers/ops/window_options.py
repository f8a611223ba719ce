"""Torch's arguments of pools, padding and up-sampling, as options of the operations.

Functions and layers come here with the same names of arguments: ``F.max_pool2d(x, kernel_size=3)`` by the
signature of the function, ``nn.MaxPool2d(kernel_size=3)`` by the attributes of the module. So both are read
in one place, and torch itself has checked them before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.halo import Stencil, each_dim
from distdl_rma.layers.ops.resizing import ResizeOptions, Resizing
from distdl_rma.layers.ops.windows import (
    AdaptiveOptions,
    AvgPooling,
    AvgPoolOptions,
    MaxPooling,
    MaxPoolOptions,
    Padding,
    PadOptions,
    WindowOperation,
)


def options_of(operation: type[WindowOperation[Any]], given: Mapping[str, Any], dims: int) -> Any:
    """Options of an operation for so many spatial dimensions, from arguments that torch has accepted.

    ``given`` are the arguments of a function by torch's names, or the attributes of torch's module.

    Examples
    --------
    >>> from distdl_rma.layers.ops.windows import AvgPooling
    >>> given = {"kernel_size": 3, "stride": None, "padding": 0, "ceil_mode": False}
    >>> options_of(AvgPooling, {**given, "count_include_pad": True}, dims=2).stencil.outputs((9, 6))
    (3, 2)
    """
    if operation is Padding:
        return _padding(given, dims)
    if operation is Resizing:
        if given["mode"] == "area":
            raise ShapeError("mode 'area' is an adaptive average pool: use DistributedAdaptiveAvgPool")
        size, factor = given["size"], given["scale_factor"]
        sizes = None if size is None else each_dim(size, dims)
        factors = None if factor is None else tuple(map(float, each_dim(factor, dims, float)))
        return ResizeOptions(
            sizes, factors, given["mode"], given["align_corners"], given["recompute_scale_factor"]
        )
    if operation is AvgPooling:
        counts, divisor = bool(given["count_include_pad"]), given.get("divisor_override")
        return AvgPoolOptions(_windows(given, dims), counts, divisor)
    indices = bool(given.get("return_indices"))
    if operation is MaxPooling:
        return MaxPoolOptions(_windows(given, dims), indices)
    return AdaptiveOptions(each_dim(given["output_size"], dims), indices)


def _windows(given: Mapping[str, Any], dims: int) -> Stencil:
    kernel, stride = each_dim(given["kernel_size"], dims), given["stride"]
    stride = kernel if stride is None else each_dim(stride, dims) or kernel
    sides = tuple((n, n) for n in each_dim(given["padding"], dims))
    return Stencil.of(
        kernel, stride, each_dim(given.get("dilation", 1), dims), sides, bool(given["ceil_mode"])
    )


def _padding(given: Mapping[str, Any], dims: int) -> PadOptions:
    # As in torch, the last dimension comes first, and dimensions that are not named have no padding.
    numbers = each_dim(given["padding"], 2 * dims)
    if len(numbers) > 2 * dims:
        raise ShapeError(f"padding {numbers} has more than {2 * dims} numbers, only spatial sides are padded")
    numbers += (0,) * (2 * dims - len(numbers))
    sides = tuple(zip(numbers[::2], numbers[1::2], strict=True))[::-1]
    if given["mode"] == "circular" and any(min(pair) < 0 < max(pair) for pair in sides):
        raise UnsupportedError(
            f"padding {given['padding']!r} crops one end of a dimension and wraps around at the other; crop"
            " by a layer of its own before this one"
        )
    value = given.get("value", 0.0)
    return PadOptions(sides, given["mode"] if value == 0 else "constant", value)
