"""Arithmetic of torch on arrays of the segments: large ones by several threads, and floats of 16 bits.

Segments compute with numpy, on one thread. Importing this file gives them torch's threads for large arrays
(``large_arrays.use``), for the functions whose results are bit for bit those of numpy: a sum must not depend
on whether torch was imported, or on how many threads it has. And it gives them the two floats of 16 bits that
numpy lacks or computes slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distdl_rma.layers.dtypes import NUMPY
from distdl_rma.segments import large_arrays
from distdl_rma.segments.collectives.reduction import Array, Element

_Types = set[np.dtype[Any]]
_FLOATS: _Types = {np.dtype("f4"), np.dtype("f8")}
_REAL: _Types = {*_FLOATS, *(np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1"))}
_COPIED: _Types = {*_REAL, np.dtype("c8"), np.dtype("c16")}
# Functions with the same results as numpy's. Those of torch differ for minima of zeros of both signs, and for
# sums of complex infinities.
_ALIKE: dict[Any, tuple[Callable[..., object], _Types]] = {
    np.add: (torch.add, _REAL),
    np.divide: (torch.true_divide, _FLOATS),
}
_SHORT: dict[Any, Callable[..., object]] = {
    np.add: torch.add,
    np.multiply: torch.mul,
    np.minimum: torch.minimum,
    np.maximum: torch.maximum,
}


class _TorchThreads:
    """The threads that torch computes with, where there are several.

    Each function returns False where it does nothing, and the caller uses numpy.
    """

    def number(self) -> int:
        """Threads that work together."""
        return torch.get_num_threads()

    def copy(self, target: Array, source: Array) -> bool:
        """Copy an array into another of the same shape."""
        if torch.get_num_threads() == 1 or target.shape != source.shape or target.dtype != source.dtype:
            return False
        tensors = _tensors(_COPIED, target, source)
        if tensors is None:
            return False
        tensors[0].copy_(tensors[1])
        return True

    def apply(self, function: Callable[..., Any], first: Array, second: Array | int, out: Array) -> bool:
        """Write what a function of numpy returns for two arrays, or for an array and a number, to ``out``."""
        if torch.get_num_threads() == 1 or function not in _ALIKE:
            return False
        by_torch, dtypes = _ALIKE[function]
        arrays = (first, out) if isinstance(second, int) else (first, second, out)
        tensors = _tensors(dtypes, *arrays)
        if tensors is None:
            return False
        by_torch(tensors[0], second if isinstance(second, int) else tensors[1], out=tensors[-1])
        return True


def _tensors(dtypes: _Types, *arrays: Array) -> list[torch.Tensor] | None:
    # Views of arrays of one type; None if torch has no such views.
    first = arrays[0].dtype
    if first not in dtypes or any(a.dtype != first or not a.flags.writeable for a in arrays):
        return None
    try:
        return [torch.from_numpy(a) for a in arrays]
    except ValueError:
        # A stride is negative, or no whole number of elements.
        return None


large_arrays.use(_TorchThreads())


@dataclass(frozen=True)
class ShortFloat(Element):
    """Floats of 16 bits, or words of their bits; torch computes in float32 and rounds once."""

    dtype: torch.dtype

    def _tensor(self, words: Array) -> torch.Tensor:
        return torch.from_numpy(words).view(self.dtype)

    def of_two(self, function: Callable[..., Any]) -> Callable[..., object] | None:
        """Function of two stored arrays and ``out``."""
        by_torch = _SHORT[function]

        def both(first: Array, second: Array, out: Array) -> None:
            by_torch(self._tensor(first), self._tensor(second), out=self._tensor(out))

        return both

    def widen(self, values: Array) -> Array:
        """Copy of stored values in float32."""
        return self._tensor(values).float().numpy()

    def narrow(self, wide: Array, out: Array) -> None:
        """Store values of float32, rounded once."""
        self._tensor(out).copy_(torch.from_numpy(wide))


def reduction_dtype(dtype: torch.dtype) -> str | Element:
    """A torch dtype in reductions of the segments: its name, or how torch computes with it."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in (torch.bfloat16, torch.float16):
        return name
    storage = np.dtype(NUMPY.get(dtype, np.uint16))
    return ShortFloat(name, storage, np.dtype(np.float32), dtype)
