"""Reductions: operations, element types, and the order of summation.

Floating-point sums depend on their order, and on where they are rounded. So both are fixed here: from the
first row to the last, and of 16-bit floats in float32 with one rounding at the end::

    row 0   bfloat16 -> float32  \
    row 1   bfloat16 -> float32   +  -> + -> ... -> / divisor -> bfloat16
    ...                          /

One rank reduces an element and copies the result to the others, or all ranks reduce it in the same order.
Either way it is bitwise the same on all of them, which replicas of a model need: they would drift apart.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.segments.large_arrays import LARGE_NBYTES, by_threads, copy, copy_small, number_of_threads

Array = NDArray[Any]

# Bytes that a thread reduces at a time: all rows stay in its cache until the result is stored to every peer.
_BLOCK_BYTES = 256 << 10
_divide = by_threads(np.divide)
# By numpy, and by MPI without the division of a mean.
_OPERATIONS: dict[str, tuple[Callable[..., Any], MPI.Op]] = {
    "sum": (np.add, MPI.SUM),
    "mean": (np.add, MPI.SUM),
    "prod": (np.multiply, MPI.PROD),
    "min": (np.minimum, MPI.MIN),
    "max": (np.maximum, MPI.MAX),
    "band": (np.bitwise_and, MPI.BAND),
    "bor": (np.bitwise_or, MPI.BOR),
    "bxor": (np.bitwise_xor, MPI.BXOR),
}
_INEXACT = "a mean of integers is not exact; use sum, or a floating dtype"
_UNORDERED = "complex numbers have no order; reduce real and imaginary parts, or magnitudes"
# Operations without a clear result for kinds of numpy's types: why, and what to use instead.
_REFUSED = {
    ("mean", "i"): _INEXACT,
    ("mean", "u"): _INEXACT,
    ("mean", "b"): "a mean of bool counts nothing; reduce them as floats",
    ("sum", "b"): "a sum of bool counts nothing; use max for any of them, or an integer dtype to count",
    ("min", "c"): _UNORDERED,
    ("max", "c"): _UNORDERED,
    **{(op, kind): f"{op} is of integers and bool" for op in ("band", "bor", "bxor") for kind in "fc"},
}


@dataclass(frozen=True)
class Element:
    """A type of elements: the dtype that it is stored in, and the ``wide`` dtype that it is reduced in."""

    name: str
    storage: np.dtype[Any]
    wide: np.dtype[Any]

    @property
    def exact(self) -> bool:
        """Whether elements are reduced in the type in which they are stored."""
        return self.storage == self.wide

    def of_two(self, function: Callable[..., Any]) -> Callable[..., object] | None:
        """Function of two stored arrays and ``out`` that rounds once; None if no such function exists."""
        return function if self.exact else None

    def widen(self, values: Array) -> Array:
        """Copy of stored values in the wide type."""
        return widen_bfloat16(values) if self.name == "bfloat16" else values.astype(self.wide)

    def narrow(self, wide: Array, out: Array) -> None:
        """Store values of the wide type, rounded once."""
        out[...] = narrow_bfloat16(wide) if self.name == "bfloat16" else wide


_FLOATS = ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"]
_INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
# Types that are reduced in another type.
_WIDER = {
    "float16": "float32",
    "bfloat16": "float32",
    # Some MPIs saturate sums of short integers: sums modulo 2**32 wrap around as they should.
    "int8": "int32",
    "int16": "int32",
    "uint8": "uint32",
    "uint16": "uint32",
    # MPI has no arithmetic of truth values: they are reduced as numbers 0 and 1.
    "bool": "uint8",
}
_ELEMENTS = {
    name: Element(name, np.dtype("uint16" if name == "bfloat16" else name), np.dtype(_WIDER.get(name, name)))
    for name in (*_FLOATS, *_INTEGERS, "bool")
}


def element_of(dtype: DTypeLike | Element, who: str) -> Element:
    """Element type of a numpy dtype, or of ``"bfloat16"``, which is stored as uint16 words.

    An element type is returned as it is. ``ShapeError``, which names ``who`` asked, if elements of this dtype
    cannot be reduced.
    """
    if isinstance(dtype, Element):
        return dtype
    try:
        name = "bfloat16" if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in _ELEMENTS:
        raise ShapeError(f"{who}: a reduction takes one of {list(_ELEMENTS)}, got {dtype!r}")
    return _ELEMENTS[name]


# numpy has no bfloat16: words of 16 bits hold its bits.
_QUIET, _SHIFT, _HALF, _ONE = map(np.uint32, (0x0040, 16, 0x7FFF, 1))


def widen_bfloat16(bits: Array) -> Array:
    """Convert bfloat16 words to a new array of float32, exactly."""
    wide = bits.astype(np.uint32)
    np.left_shift(wide, _SHIFT, out=wide)
    return wide.view(np.float32)


def narrow_bfloat16(values: Array) -> Array:
    """Round contiguous float32 values to bfloat16 words, to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    high = bits >> _SHIFT
    # Adds half of the last place that is kept, a little less where that place is even.
    rounded = (bits + (_HALF + (high & _ONE))) >> _SHIFT
    return np.where(np.isnan(values), high | _QUIET, rounded).astype(np.uint16)


def _product(first: Array, second: Array, out: Array) -> Array:
    # numpy's rounding of a complex product depends on the alignment of the arrays. Here each operation rounds
    # separately, and equally on all ranks.
    real = first.real * second.real - first.imag * second.imag
    out.imag = first.real * second.imag + first.imag * second.real
    out.real = real
    return out


def without_fp_errors(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function so that it neither warns nor raises for infinities and NaN.

    A user who makes numpy raise means errors of the user's own lines: here one rank would raise, and the
    others wait for it. Two threads cannot call it at once.
    """
    # numpy keeps its error state in the context, and entering one is cheaper than np.errstate.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return functools.partial(context.run, function)


class Reduction:
    """Reduces rows of one element type by one operation, each element in the order of the rows.

    Infinities and NaN are ordinary results: numpy's error state and filters of warnings have no effect.
    16-bit floats are reduced in float32 and rounded once, integers wrap around. A mean divides by
    ``divisor``, after the sum. Messages name the user by ``who``. Two threads cannot use it at once: it keeps
    memory for sums. Long rows are reduced block by block, so that a block stays in the cache from the first
    row to the copies of its result.
    """

    def __init__(self, op: str, element: Element, divisor: int, who: str) -> None:
        if op not in _OPERATIONS:
            raise ArgumentError(f"{who}: operation is one of {list(_OPERATIONS)}, got {op!r}")
        # Words stand for floats of 16 bits.
        kind = "f" if element.wide.kind == "f" else element.storage.kind
        if (op, kind) in _REFUSED:
            raise ShapeError(f"{who}: {_REFUSED[op, kind]}; got {element.name}")
        if divisor < 1:
            raise ArgumentError(f"{who}: a mean divides by at least 1, got {divisor}")
        self.op, self.element, self.divisor, self._who = op, element, divisor, who
        function, self.mpi = _OPERATIONS[op]
        self._function = _product if function is np.multiply and element.wide.kind == "c" else function
        self._divides = op == "mean" and divisor > 1
        self._scratch = np.empty(0, element.wide)
        two = None if self._divides else element.of_two(self._function)
        self._two = self._two_large = None if two is None else without_fp_errors(two)
        self._large = by_threads(self._function)
        if two is self._function:
            self._two_large = without_fp_errors(self._large)
        self._quietly = without_fp_errors(self._reduce)

    @property
    def terms(self) -> str:
        """Facts that must be equal on all ranks, a line ``name=value`` for each."""
        return f"op={self.op}\ndtype={self.element.name}\ndivisor={self.divisor}"

    @functools.cached_property
    def unrounded(self) -> Reduction:
        """Reduction of partial results, of the wide type: does not divide a mean."""
        op, wide = "sum" if self.op == "mean" else self.op, self.element.wide
        return Reduction(op, Element(wide.name, wide, wide), 1, self._who)

    def reduce(self, rows: Sequence[Array], *targets: Array) -> None:
        """Reduce rows of one length; store the result in all targets, which may be some of the rows."""
        self.bound(rows, *targets)()

    def bound(self, rows: Sequence[Array], *targets: Array) -> Callable[[], object]:
        """Return a function that calls ``reduce`` with these arrays, for steps that reduce them again.

        For two short rows, the most frequent case, it is numpy's function itself, and a copy.
        """
        # The function of two such rows and ``out``, if there is one, and for how many targets.
        two, most = (self._two, 2) if rows[0].nbytes < LARGE_NBYTES else (self._two_large, 1)
        if two is None or len(rows) != 2 or len(targets) > most:
            return functools.partial(self._quietly, rows, targets)
        first = functools.partial(two, *rows, out=targets[0])
        if len(targets) == 1:
            return first
        out, other = targets

        def both() -> None:
            first()
            copy_small(other, out)

        return both

    @property
    def _block(self) -> int:
        # Elements of a block, which all threads reduce together.
        return number_of_threads() * _BLOCK_BYTES // self.element.wide.itemsize

    def _reduce(self, rows: Sequence[Array], targets: Sequence[Array]) -> None:
        size, exact, block = rows[0].size, self.element.exact, self._block
        if exact and len(targets) == 1 and (len(rows) < 3 or size <= block):
            # Each element is read and written once, or the rows stay in the cache.
            self._fold(rows, targets[0])
            self._finish(targets[0], targets[0])
            return
        for begin in range(0, size, block):
            end = begin + block
            first, *others = [target[begin:end] for target in targets]
            wide = self._combine([row[begin:end] for row in rows], first if exact else None)
            self._finish(wide, first)
            for other in others:
                copy(other, first)

    def partial(self, rows: Sequence[Array], out: Array) -> None:
        """Reduce rows into another array of the wide type; does not divide a mean."""
        block = self._block
        with np.errstate(all="ignore"):
            for begin in range(0, rows[0].size, block):
                end = begin + block
                self._combine([row[begin:end] for row in rows], out[begin:end])

    def finish(self, wide: Array, out: Array) -> None:
        """Divide a mean, round once and store; overwrites ``wide``, which may be ``out``."""
        with np.errstate(all="ignore"):
            self._finish(wide, out)

    def _fold(self, rows: Sequence[Array], out: Array) -> None:
        # Stores into ``out``, which may be the last row, or either of two. More than two rows are at most as
        # long as a block.
        if len(rows) == 1:
            copy(out, rows[0])
            return
        if len(rows) > 2 and self._scratch.size < out.size:
            self._scratch = np.empty(max(out.size, self._block), self.element.wide)
        function = self._function if out.nbytes < LARGE_NBYTES else self._large
        total, scratch = rows[0], self._scratch[: out.size]
        for row in rows[1:-1]:
            total = function(total, row, out=scratch)
        function(total, rows[-1], out=out)

    def _finish(self, wide: Array, out: Array) -> None:
        if self._divides:
            _divide(wide, self.divisor, out=wide)
        if out is not wide:
            self.element.narrow(wide, out)

    def _combine(self, rows: list[Array], out: Array | None) -> Array:
        # Wide copies of the rows may be overwritten.
        if not self.element.exact:
            rows = [self.element.widen(row) for row in rows]
        total = rows[-1] if out is None else out
        self._fold(rows, total)
        return total
