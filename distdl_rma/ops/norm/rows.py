"""Sums over some dimensions of tensors of one shape: what is alike in all of them, worked out once."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
# Values per row are few: numpy computes on them in a third of the time that a call of torch takes.
Array = NDArray[Any]
# Rows of up to so many elements may be added one after the other.
_SHORT = 1 << 16
# Below so many elements a call of the kernel costs more than another pass.
_FEW = 1 << 12
_backward: Any = torch.ops.aten.native_batch_norm_backward.default
_SUMS_ALONE = (False, True, True)


class Rows:
    """Sums of tensors of a ``shape`` over ``dims``, which are kept with extent 1.

    A row is all that the trailing ones of these dimensions hold. Torch sums it, in the type of the data, or
    pieces of it that are short enough; the sums of several pieces and rows are added up in float64.
    """

    def __init__(self, shape: Sequence[int], dims: Sequence[int]) -> None:
        outer = len(shape)
        while outer and outer - 1 in dims:
            outer -= 1
        self.shape = tuple(1 if d in dims else n for d, n in enumerate(shape))
        self._dims, self._trailing = tuple(dims), tuple(range(outer, len(shape)))
        self._rows, self.length = tuple(shape[:outer]), prod(shape[outer:])
        self._number, self._few = prod(self._rows), prod(shape) < _FEW
        # Of the same length; one, where there are no such of a power of two.
        pieces = 1
        while self.length // pieces > _SHORT and self.length % (2 * pieces) == 0:
            pieces *= 2
        self._pieces, self._fit = pieces, 0 < self.length // pieces <= _SHORT
        self._in_pieces = (*self._rows, pieces, self.length // pieces)
        self._outer = tuple(d for d in dims if d < outer and shape[d] != 1)
        # Sums of rows, and whether one row is all of a sum.
        self._per_row, self._single = (*self._rows, *(1,) * len(self._trailing)), not self._outer
        # The kernel takes rows of one element for another layout, and is wrong there.
        self._by_kernel = not self._few and self.length // pieces >= 2
        self._flat = (1, self._number * pieces, self.length // pieces)
        # Whether these are as the kernel takes them.
        self._as_is = pieces == 1 and outer == 2 and shape[0] == 1

    def sums(self, x: Tensor) -> Array:
        """Sums of elements."""
        if not self._trailing:
            return x.sum(self._dims, True, dtype=torch.float64).numpy()
        # Summing is exact enough in the type of the data, pairwise as torch does it, and ten times as fast.
        found = x.sum(self._trailing, True).numpy()
        return found if self._single else self._added(found, 1)

    def squares(self, x: Tensor) -> Array:
        """Sums of squares of elements."""
        if not self._trailing or not self._fit:
            return self.sums(x.square())
        if self._pieces == 1:
            norms = torch.linalg.vector_norm(x, 2, self._trailing, True)
        else:
            norms = torch.linalg.vector_norm(x.reshape(self._in_pieces), 2, -1)
        found = norms.numpy()
        found = np.multiply(found, found, dtype=np.float64)
        return found if self._single and self._pieces == 1 else self._added(found, self._pieces)

    def products(self, a: Tensor, b: Tensor, mean: Tensor) -> tuple[Array, Array]:
        """Sums of ``a`` and of ``a * (b - mean)``; ``mean`` is of extent 1 in the dimensions of the sum."""
        if not self._by_kernel:
            return self.sums(a), self.sums(a * (b - mean))
        # That of batch norm: one pass, without a tensor of products.
        number, pieces = self._number, self._pieces
        if mean.numel() != number:
            mean = mean.expand(*self._rows, *(1,) * len(self._trailing))
        flat = mean.reshape(number)
        if pieces > 1:
            flat = flat.repeat_interleave(pieces)
        as_is = self._as_is and a.is_contiguous() and b.is_contiguous()
        _, products, sums = _backward(
            a if as_is else a.reshape(self._flat),
            b if as_is else b.reshape(self._flat),
            None,
            None,
            None,
            flat,
            _ones(number * pieces, flat.dtype),
            True,
            0.0,
            _SUMS_ALONE,
        )
        total = self._added(sums.numpy(), pieces) if self._fit else self.sums(a)
        return total, self._added(products.numpy(), pieces)

    def _added(self, pieces: Array, number: int) -> Array:
        # The rest of the sum; each row is so many pieces.
        if number > 1:
            pieces = np.add.reduce(pieces.reshape(*self._rows, number), -1, np.float64)
        if pieces.shape != self._per_row:
            pieces = pieces.reshape(self._per_row)
        return pieces if self._single else np.add.reduce(pieces, self._outer, np.float64, keepdims=True)


class _Quiet(threading.local):
    # numpy keeps its error state in the context: entering one that has it costs a fifth of np.errstate.
    def __init__(self) -> None:
        self.context = contextvars.Context()
        self.context.run(np.seterr, all="ignore")


_QUIET = _Quiet()


def without_fp_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Function that takes what is infinite or no number for a result as any other; not within itself."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return np.errstate(all="ignore")(function)

    @wraps(function)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        return _QUIET.context.run(function, *args, **kwargs)

    return quiet


@cache
def _ones(number: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(number, dtype=dtype)
