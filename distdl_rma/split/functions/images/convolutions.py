"""Convolutions and transposed ones: by the operations of the layers, with weights that every rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil
from distdl_rma.ops.conv.conv_transpose import TransposedConvolution
from distdl_rma.ops.conv.convolution import Convolution, convolve
from distdl_rma.ops.conv.worker_grid import IN, OUT, ConvolutionOptions, WorkerGrid, can_overlap
from distdl_rma.ops.core.operation import Agreed
from distdl_rma.ops.core.tensors import autocast
from distdl_rma.split import layout as lay
from distdl_rma.split.operands import as_whole, machine_of, needs_of, on_copies
from distdl_rma.split.site import Site, site_of
from distdl_rma.split.table import rule
from distdl_rma.split.tensor import SplitTensor, composed, local_of

_DIMS = {
    "conv1d": 1,
    "conv2d": 2,
    "conv3d": 3,
    "conv_transpose1d": 1,
    "conv_transpose2d": 2,
    "conv_transpose3d": 3,
}

_WEIGHTS = "weight", "bias"


def _conv_arguments(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    return input, weight, bias, stride, padding, dilation, groups, 0


def _transposed_arguments(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> tuple[Any, ...]:
    return input, weight, bias, stride, padding, dilation, groups, output_padding


def each_dim(value: Any, dims: int) -> tuple[int, ...]:
    """A number for each spatial dimension, of one number or several."""
    numbers = (value,) if isinstance(value, int) else tuple(int(n) for n in value)
    return numbers * dims if len(numbers) == 1 else numbers


def _sides(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        padding = 0
    if padding == "same":
        spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((span // 2, span - span // 2) for span in spans)
    return tuple((n, n) for n in each_dim(padding, len(kernel)))


@rule("window", *_DIMS)
def convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every rank convolves its block with the whole weight; halos travel meanwhile, overlaps are summed."""
    dims = _DIMS[func.__name__]
    transposed = func.__name__.startswith("conv_transpose")
    arguments = (_transposed_arguments if transposed else _conv_arguments)(*args, **kwargs)
    x, weight, bias, stride, padding, dilation, groups, extra = arguments
    if not isinstance(x, SplitTensor) or not x.is_split or not x.numel():
        return on_copies(func, args, kwargs)
    if x.dim() == dims + 1:
        batch = composed(torch.unsqueeze, x, 0)
        given = [batch, weight, bias, stride, padding, dilation, groups]
        if transposed:
            given = [batch, weight, bias, stride, padding, extra, groups, dilation]
        return composed(torch.squeeze, composed(func, *given), 0)
    site, layout = site_of(machine_of(x), func), x._layout
    others = (
        None if w is None else as_whole(site, w, layout, what)
        for w, what in zip((weight, bias), _WEIGHTS, strict=True)
    )
    local, weight, bias = cast("tuple[Any, ...]", autocast(local_of(x), *others))
    stride, dilation, extra = (each_dim(value, dims) for value in (stride, dilation, extra))
    key = layout, local.dtype, tuple(weight.shape), stride, str(padding), dilation, groups, extra

    def make() -> tuple[Any, Decomposition]:
        if transposed and any(n >= max(most) for n, *most in zip(extra, stride, dilation, strict=True)):
            raise ShapeError(f"{site.name}: output padding {extra} must be smaller than stride or dilation")
        kernel = tuple(weight.shape[2:])
        stencil = Stencil.of(kernel, stride, dilation, _sides(padding, kernel, dilation))
        operation = _operation(
            site, stencil, layout, tuple(weight.shape), groups, local.dtype, extra if transposed else None
        )
        return operation, lay.with_splits(layout, dict(enumerate(operation.output.splits)))

    if weight.dtype != local.dtype:
        raise ShapeError(f"{site.name}: input is {local.dtype}, the weight {weight.dtype}")
    operation, output = site.kept(key, make)
    weights = {what: w for what, w in zip(_WEIGHTS, (weight, bias), strict=True) if w is not None}
    needs = needs_of(local, *weights.values())
    if transposed:
        return SplitTensor(operation(needs, local, **weights), output)
    return SplitTensor(convolve(Agreed(operation, needs), operation.overlaps, local, weights)[0], output)


def _operation(
    site: Site,
    stencil: Stencil,
    layout: Decomposition,
    weight: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    extra: Sequence[int] | None,
) -> Any:
    source, rows = lay.on_grid(layout), OUT if extra is None else IN
    batch, channels, *space = source.partition.shape
    both = [channels if d == rows else 1 for d in (OUT, IN)]
    grid = source.partition.create_cartesian_topology_partition((batch, *both, *space))
    workers = WorkerGrid(grid, rows, groups, weight)
    overlaps = can_overlap(stencil, "zeros", workers, source.partition)
    options = ConvolutionOptions(stencil, workers, "zeros", True, overlaps)
    if extra is None:
        return Convolution(site.call_site, options, source, source.partition, dtype)
    return TransposedConvolution(site.call_site, options, source, source.partition, dtype, extra)
