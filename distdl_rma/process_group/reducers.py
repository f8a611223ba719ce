"""Reductions of torch: their operations, and floats of 16 bits by torch's functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from distdl_rma.dtypes import BIT_WORDS, NUMPY, reduction_dtype
from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.segments.collectives.reduction import Array, Element, Reduction

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
_SHORT_FLOATS = (torch.bfloat16, torch.float16)
_BY_TORCH: dict[Any, Callable[..., object]] = {
    np.add: torch.add,
    np.multiply: torch.mul,
    np.minimum: torch.minimum,
    np.maximum: torch.maximum,
}


@dataclass(frozen=True)
class _ShortFloat(Element):
    """Floats of 16 bits as words, which torch converts."""

    dtype: torch.dtype

    def _tensor(self, words: Array) -> torch.Tensor:
        return torch.from_numpy(words).view(self.dtype)

    def of_two(self, function: Callable[..., Any]) -> Callable[..., object] | None:
        """Function of two stored arrays and ``out``: torch computes it in float32, and rounds once."""
        by_torch = _BY_TORCH[function]

        def both(first: Array, second: Array, out: Array) -> None:
            by_torch(self._tensor(first), self._tensor(second), out=self._tensor(out))

        return both

    def widen(self, values: Array) -> Array:
        wide: Array = self._tensor(values).float().numpy()
        return wide

    def narrow(self, wide: Array, out: Array) -> None:
        self._tensor(out).copy_(torch.from_numpy(wide))


def reducer_of(op: _Kind, dtype: torch.dtype, ranks: int, who: str = "a reduction") -> Reduction:
    """Reduction of an operation of torch, a mean by the number of ranks; not for two threads at once.

    ``ShapeError`` or ``UnsupportedError`` if the operation has no exact result. The sum of bool is that of
    ``torch.add``: whether any is true.
    """
    if op not in OPERATIONS:
        known = [name for name, _ in OPERATIONS.values()]
        raise UnsupportedError(f"{who!r}: a reduction is one of {known}, got {op}")
    if dtype not in NUMPY and dtype not in _SHORT_FLOATS:
        raise UnsupportedError(f"{who!r}: tensors of {dtype} cannot be reduced")
    if op == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ShapeError(f"{who!r}: an average of {dtype} is not exact: use sum, or a floating type")
    name, short = reduction_dtype(dtype), dtype in _SHORT_FLOATS
    storage = BIT_WORDS[2][1] if short else NUMPY[dtype]
    element = Element(name, storage, storage)
    if short:
        element = _ShortFloat(name, storage, np.dtype(np.float32), dtype)
    by_name = "bor" if op == ReduceOp.SUM and dtype == torch.bool else OPERATIONS[op][1]
    return Reduction(by_name, element, ranks, who)
