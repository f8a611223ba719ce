"""Reductions of torch on flat arrays, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from distdl_rma.dtypes import BIT_WORDS, NUMPY
from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.segments.collectives.reduction import Array, Fold, without_fp_errors

# Elements reduced at a time where there are more than two rows: all of them stay in the cache.
_BLOCK = 32 << 10
_Kind = Any
OPERATIONS: dict[_Kind, tuple[str, Callable[..., Any], Callable[..., Any] | None]] = {
    ReduceOp.SUM: ("sum", np.add, torch.add),
    ReduceOp.AVG: ("avg", np.add, torch.add),
    ReduceOp.PRODUCT: ("product", np.multiply, torch.mul),
    ReduceOp.MIN: ("min", np.minimum, torch.minimum),
    ReduceOp.MAX: ("max", np.maximum, torch.maximum),
    ReduceOp.BAND: ("band", np.bitwise_and, None),
    ReduceOp.BOR: ("bor", np.bitwise_or, None),
    ReduceOp.BXOR: ("bxor", np.bitwise_xor, None),
}
_SHORT_FLOATS = (torch.bfloat16, torch.float16)


class Reducer:
    """One operation on elements of one type, in the order of the rows; bitwise the same on all ranks.

    Floats of 16 bits are reduced in float32 and rounded once, integers wrap around, and the sum of bool is
    that of ``torch.add``: whether any is true. Made by :func:`reducer_of`.
    """

    def __init__(self, op: _Kind, dtype: torch.dtype, ranks: int) -> None:
        self.name, ufunc, self._function = OPERATIONS[op]
        self._op = op
        self._short = dtype in _SHORT_FLOATS
        # Floats of 16 bits are arrays of words, viewed as tensors where they are reduced.
        self.dtype, self.storage = dtype, BIT_WORDS[2][1] if self._short else NUMPY[dtype]
        self._fold = Fold(ufunc, np.dtype(np.float32) if self._short else self.storage, _BLOCK)
        self._divisor = ranks if self.name == "avg" and ranks > 1 else 0
        self._quietly = without_fp_errors(self._reduce)
        self._two = without_fp_errors(self._fold.function)
        self._plain = not (self._short or self._divisor)

    @cached_property
    def unrounded(self) -> Reducer:
        """Reducer of partial results: without the division of a mean, or the rounding of short floats."""
        op = ReduceOp.SUM if self._divisor else self._op
        return Reducer(op, torch.float32 if self._short else self.dtype, 1)

    def widened(self, x: Array, copied: bool) -> Array:
        """Elements in the type of ``unrounded``; a copy if the type differs, or if ``copied``."""
        if self._short:
            wide: Array = torch.from_numpy(x).view(self.dtype).float().numpy()
            return wide
        return x.copy() if copied else x

    def finish(self, total: Array, out: Array) -> None:
        """Divide and round the unrounded result of all ranks into ``out``, which may be ``total``."""
        if self._divisor:
            np.divide(total, self._divisor, out=total)
        if self._short:
            torch.from_numpy(out).view(self.dtype).copy_(torch.from_numpy(total))
        elif out is not total:
            out[...] = total

    def reduce(self, rows: Sequence[Array], out: Array) -> None:
        """Reduce rows of one length into ``out``, which may be one of them; not for two threads at once."""
        if self._plain and len(rows) == 2:
            self._two(rows[0], rows[1], out=out)
        else:
            self._quietly(rows, out)

    def bound(self, rows: Sequence[Array], out: Array) -> Callable[[], object]:
        """The same, to be called again and again."""
        if self._plain and len(rows) == 2:
            return partial(self._two, rows[0], rows[1], out=out)
        return partial(self._quietly, rows, out)

    def _reduce(self, rows: Sequence[Array], out: Array) -> None:
        step = out.size if len(rows) <= 2 else _BLOCK
        for begin in range(0, out.size, step or 1):
            end = begin + step
            part = [row[begin:end] for row in rows]
            if self._short:
                self._reduce_short(part, out[begin:end])
            else:
                self._fold(part, target := out[begin:end])
                self.finish(target, target)

    def _reduce_short(self, rows: list[Array], out: Array) -> None:
        if len(rows) == 2 and not self._divisor and self._function is not None:
            # Computed in float32 and rounded once, as the others are.
            first, second, target = (torch.from_numpy(row).view(self.dtype) for row in (*rows, out))
            self._function(first, second, out=target)
            return
        wide = [self.widened(row, False) for row in rows]
        self._fold(wide, wide[-1])
        self.finish(wide[-1], out)


def reducer_of(op: _Kind, dtype: torch.dtype, ranks: int) -> Reducer:
    """Reducer of an operation of torch; not for two threads at once.

    ``ShapeError`` or ``UnsupportedError`` if the operation has no exact result.
    """
    if op not in OPERATIONS:
        known = [name for name, *_ in OPERATIONS.values()]
        raise UnsupportedError(f"a reduction is one of {known}, got {op}")
    if dtype not in NUMPY and dtype not in _SHORT_FLOATS:
        raise UnsupportedError(f"tensors of {dtype} cannot be reduced")
    name = OPERATIONS[op][0]
    inexact = dtype.is_floating_point or dtype.is_complex
    if name == "avg" and not inexact:
        raise ShapeError(f"an average of {dtype} is not exact: use sum, or a floating type")
    if name in ("band", "bor", "bxor") and inexact:
        raise ShapeError(f"{name} is of integers, got {dtype}")
    if name in ("min", "max") and dtype.is_complex:
        raise ShapeError("complex numbers have no order: reduce real and imaginary parts, or magnitudes")
    return Reducer(op, dtype, ranks)
