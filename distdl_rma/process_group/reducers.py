"""Reductions of torch: their operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ReduceOp

from distdl_rma.arithmetic import reduction_dtype
from distdl_rma.dtypes import BIT_WORDS, NUMPY
from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.segments.collectives.reduction import Element, Reduction

_Kind = Any
# Torch's names, and those of the segments.
OPERATIONS: dict[_Kind, tuple[str, str]] = {
    ReduceOp.SUM: ("sum", "sum"),
    ReduceOp.AVG: ("avg", "mean"),
    ReduceOp.PRODUCT: ("product", "prod"),
    ReduceOp.MIN: ("min", "min"),
    ReduceOp.MAX: ("max", "max"),
    ReduceOp.BAND: ("band", "band"),
    ReduceOp.BOR: ("bor", "bor"),
    ReduceOp.BXOR: ("bxor", "bxor"),
}


def reducer_of(op: _Kind, dtype: torch.dtype, ranks: int, who: str = "a reduction") -> Reduction:
    """Reduction of an operation of torch, a mean by the number of ranks; not for two threads at once.

    ``ShapeError`` or ``UnsupportedError`` if the operation has no exact result. The sum of bool is that of
    ``torch.add``: whether any is true.
    """
    if op not in OPERATIONS:
        known = [name for name, _ in OPERATIONS.values()]
        raise UnsupportedError(f"{who!r}: a reduction is one of {known}, got {op}")
    element = reduction_dtype(dtype)
    if dtype not in NUMPY and not isinstance(element, Element):
        raise UnsupportedError(f"{who!r}: tensors of {dtype} cannot be reduced")
    if op == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ShapeError(f"{who!r}: an average of {dtype} is not exact: use sum, or a floating type")
    if isinstance(element, Element):
        # Words of bits: all tensors are shown as these.
        element = replace(element, storage=BIT_WORDS[2][1])
    else:
        element = Element(element, NUMPY[dtype], NUMPY[dtype])
    by_name = "bor" if op == ReduceOp.SUM and dtype == torch.bool else OPERATIONS[op][1]
    return Reduction(by_name, element, ranks, who)
