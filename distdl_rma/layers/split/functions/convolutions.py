"""Convolutions and transposed convolutions, by the operations of the layers; every rank has the weights.

The input stays cut as it is. Each output lies on the rank that has its inputs, as far as extents allow, so
that only a halo travels: a strip of the neighbours' elements, as wide as the kernel reaches beyond the block.

    rank 0   own rows            | halo      the rank convolves the rows that need no halo, meanwhile
    rank 1        halo |  own rows           the strips travel, then the rows that need them

The rule finds the operation for layouts, dtypes and arguments that its site has met before, or makes it
(``layers/ops/conv``). All it does itself is to read arguments: a missing batch dimension, complex numbers,
and the choice of schedule for small blocks (``overlap_pays``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import each_dim
from distdl_rma.layers.ops.conv.conv_transpose import TransposedConvolution
from distdl_rma.layers.ops.conv.convolution import Convolution
from distdl_rma.layers.ops.conv.worker_grid import IN, OUT, options_of, overlap_pays, reads_sides
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import raise_as_torch
from distdl_rma.layers.split.operands import needs_of, of_cut, wholes
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, composed

_DIMS = {f"conv{kind}{dims}d": dims for kind in ("", "_transpose") for dims in (1, 2, 3)}
_WEIGHTS = "weight", "bias"


@rule("window", *_DIMS)
@of_cut(empty=False)
def convolution(call: Call, site: Site, x: SplitTensor, weight: Any, bias: Any, **how: Any) -> Any:
    """Each rank convolves its block and its halo with the whole weight; the halo travels meanwhile.

    A transposed convolution waits for the halo. In 16 bits, ranks sum overlapping outputs instead.
    """
    func, *_ = call
    layout = x._layout
    if len(layout.shape) == _DIMS[func.__name__] + 1:
        batch = composed(torch.unsqueeze, x, 0)
        return composed(torch.squeeze, composed(func, batch, weight, bias, **how), 0)
    if x._local.is_complex() and weight.is_complex():
        raise_as_torch(*call)
        return composed(_of_complex, func, x, weight, bias, how)
    weights: Any = wholes(site, (weight, bias), layout, _WEIGHTS)
    local, (weight, bias) = checked_block(x), weights
    # Lists have no hash.
    others = [tuple(n) if isinstance(n, list) else n for n in how.values()]
    of_bias = None if bias is None else (bias.shape, bias.dtype)
    key = layout, local.dtype, weight.shape, weight.dtype, of_bias, *others

    def make() -> tuple[Any, Decomposition]:
        raise_as_torch(*call)
        for name, w in zip(_WEIGHTS, weights, strict=True):
            # Torch accepts some of these, with another result for each of its kernels.
            if w is not None and w.dtype != local.dtype:
                raise ShapeError(f"{site.name}: input is {local.dtype}, the {name} {w.dtype}")
        operation = _operation(site, layout, tuple(weight.shape), local.dtype, **how)
        return operation, lay.with_splits(layout, dict(enumerate(operation.output.splits)))

    operation, output = site.kept(key, make)
    y = operation(needs_of(local, weight, bias), local, weight=weight, bias=bias)
    return SplitTensor(y, output)


def _of_complex(func: Any, x: Any, weight: Any, bias: Any, how: dict[str, Any]) -> Any:
    # As in torch: three convolutions of real numbers.
    real, imag = func(x.real, weight.real, None, **how), func(x.imag, weight.imag, None, **how)
    both = func(x.real + x.imag, weight.real + weight.imag, None, **how)
    y = torch.complex(real - imag, both - real - imag)
    return y if bias is None else y + bias.view(-1, *(1,) * (x.dim() - 2))


def _operation(
    site: Site, layout: Decomposition, weight: tuple[int, ...], dtype: torch.dtype, **given: Any
) -> Any:
    source, transposed = lay.on_grid(layout), "output_padding" in given
    P_x = source.partition
    options = options_of(given, weight, P_x, P_x, IN if transposed else OUT)
    if transposed:
        extra = each_dim(given["output_padding"], len(weight) - LEADING)
        return TransposedConvolution(site.call_site, options, source, P_x, dtype, extra)
    joins = not overlap_pays(options.stencil, source, dtype.itemsize)
    # For a small block without a halo, torch's own convolution is fastest.
    overlaps = options.overlaps and (reads_sides(options.stencil, source) or not joins)
    options = replace(options, overlaps=overlaps, joins=joins)
    return Convolution(site.call_site, options, source, P_x, dtype)
