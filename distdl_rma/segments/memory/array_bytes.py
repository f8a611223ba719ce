"""Conversion of arrays, tensors and numbers to bytes that travel; and slices of arrays in a segment.

What a put to an array of float64 does with its data::

    data                            arrives
    an array of float64             as it is
    an array of float32, int32      converted: each value has its float64
    an array of int64               converted if all values come back from float64 unchanged, else refused
    an array of complex128          refused, also if all imaginary parts are 0
    1, 2.5, [1, 2.5]                converted; an integer above 2**53 without its float64 is refused
    a masked array, objects, text   refused

A loss that depends on values is found here, before anything is sent, so that no rank gets a wrong number.

A slice of a row-major array is a set of contiguous stretches. ``x[1:3, ::2]`` of an array of 4 x 6 bytes::

    . . . . . .
    # . # . # .     six stretches of one byte, at 6, 8, 10, 12, 14, 16
    # . # . # .
    . . . . . .     and x[1:3] is one stretch of 12 bytes at 6
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as as_int
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.segments.transport.links import ByteRuns

# Types whose memory is all that they are, unlike that of masked arrays; looked up without a call.
PLAIN = {np.ndarray, memoryview, bytes, bytearray}
# Numeric kinds of numpy; each kind can hold the kinds before it.
_NUMBERS = "biufc"


def as_array(data: Any, what: str) -> NDArray[Any]:
    """Array over the memory of an array, tensor or other buffer; no copy. ``ShapeError`` if not possible."""
    if isinstance(data, np.ndarray):
        if isinstance(data, np.ma.MaskedArray):
            raise ShapeError(f"{what}: a masked array: what is masked has no value; pass x.filled(value)")
        array = data
    elif hasattr(data, "__array__"):
        try:
            array = np.asarray(data)
        except (TypeError, RuntimeError) as error:
            # The tensor requires a gradient, lies on a device, or has a dtype unknown to numpy.
            raise ShapeError(f"{what}: not an array that numpy can look at: {error}") from None
    else:
        try:
            array = np.asarray(memoryview(data))
        except (TypeError, ValueError, BufferError):
            kind = type(data).__name__
            raise ShapeError(f"{what} takes a numpy array, a tensor or bytes, got {kind}") from None
    if array.dtype.hasobject:
        raise ShapeError(f"{what}: Python objects mean nothing to another process, got dtype {array.dtype}")
    return array


def as_target(out: Any, what: str) -> NDArray[Any]:
    """Array over memory to write to; no copy. ``ShapeError`` if writing would not change ``out``.

    A get into a copy, or into one place for several elements as of ``expand``, would lose data in silence.
    """
    array = as_array(out, what)
    # An object that gives numpy a copy of itself, as a number does, gives a different one each time.
    copied = array is not out and array.size and not np.may_share_memory(array, as_array(out, what))
    if copied or not array.flags.writeable:
        raise ShapeError(f"{what}: {type(out).__name__} is read-only")
    steps = zip(array.shape, array.strides, strict=True)
    if 0 in array.strides and array.size and any(count > 1 and not step for count, step in steps):
        raise ShapeError(f"{what}: {type(out).__name__} has several elements in one place of its memory")
    return array


def as_bytes(data: Any, what: str) -> memoryview:
    """Contiguous bytes of an array, tensor or buffer: a view if it is contiguous, else a packed copy.

    Most data is a plain array, of which a memoryview needs no call of a function of numpy.
    """
    try:
        view = memoryview(data)
        plain = data.__class__ in PLAIN or not isinstance(data, np.ma.MaskedArray)
        if plain and view.c_contiguous and "O" not in view.format:
            return view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError, BufferError):
        pass
    return np.ascontiguousarray(as_array(data, what)).reshape(-1).view(np.uint8).data


def as_offset(offset: Any, what: str) -> int:
    """Offset as a Python integer, which cannot overflow; ``ArgumentError`` if it is no integer."""
    return as_integer(offset, f"{what}: an offset is a whole number of bytes")


def as_integer(value: Any, what: str) -> int:
    """Value as a Python integer; ``ArgumentError``, which begins with ``what`` is wanted, if it is none."""
    try:
        return as_int(value)
    except TypeError:
        raise ArgumentError(f"{what}, got {value!r}") from None


def as_values(data: Any, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Array whose values convert to ``dtype`` without loss, else ``ShapeError``.

    A Python number, or a list of them, converts to any dtype that holds it: integers exactly; floats rounded
    to the nearest as in numpy, but not to infinity.
    """
    if isinstance(data, (int, float, complex)) and not isinstance(data, np.generic):
        number = _as_number(data, dtype)
        if number is None:
            raise ShapeError(f"{what}: {data!r} does not fit into {dtype} without a loss")
        return number
    if isinstance(data, (list, tuple)):
        _check_list(data, dtype, what)
        try:
            return np.asarray(data, dtype)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{what}: the list does not fit into an array of {dtype}: {error}") from None
    source = as_array(data, what)
    if source.dtype == dtype or (_is_castable(source.dtype, dtype) and _comes_back(source, dtype)):
        return source
    raise ShapeError(f"{what}: {source.dtype} does not fit into {dtype} without a loss")


def _check_list(entries: Sequence[Any], dtype: np.dtype[Any], what: str) -> None:
    for entry in entries:
        if isinstance(entry, (list, tuple)):
            _check_list(entry, dtype, what)
        elif isinstance(entry, (int, float, complex, np.generic)):
            as_values(entry, dtype, what)
        else:
            kind = type(entry).__name__
            raise ShapeError(f"{what} takes arrays, numbers and lists of numbers, got a list of {kind}")


def _as_number(data: complex, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    # A number of Python as an array of the dtype; None if the dtype cannot hold it.
    whole = isinstance(data, int)
    kind = "b" if isinstance(data, bool) else "i" if whole else "f" if isinstance(data, float) else "c"
    if dtype.kind not in _NUMBERS[_NUMBERS.index(kind) :]:
        return None
    try:
        with np.errstate(over="ignore"):
            taken = np.asarray(data, dtype)
    except OverflowError:
        return None
    if whole:
        return taken if np.isfinite(taken) and int(taken.real) == data else None
    parts = ((taken.real, data.real), (taken.imag, data.imag))
    return taken if all(np.isfinite(part) or not np.isfinite(given) for part, given in parts) else None


def _is_castable(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    # Numbers convert to numbers only, text to text, times to times. Numpy would also make text of numbers.
    if "V" in (source.kind, dtype.kind):
        return np.can_cast(source, dtype, "equiv")
    alike = source.kind == dtype.kind or (source.kind in _NUMBERS and dtype.kind in _NUMBERS)
    return alike and np.can_cast(source, dtype, "safe")


def _comes_back(source: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    # Casts that numpy calls safe although they may round or overflow: long integers to floats, and times.
    kind = source.dtype.kind
    if kind in "mM":
        back = source.astype(dtype).astype(source.dtype)
        return bool(((back == source) | (np.isnat(back) & np.isnat(source))).all())
    if kind not in "iu" or source.dtype.itemsize < 8 or dtype.kind not in "fc":
        return True
    there = source.astype(dtype).real
    # The conversion of a float beyond the range of the integers is undefined.
    inside = bool((there < 2.0 ** (63 if kind == "i" else 64)).all())
    return inside and bool((there.astype(source.dtype) == source).all())


class ArrayLayout:
    """Dtype and shape of a row-major array in a segment.

    ``ShapeError`` if elements are Python objects or arrays or have no size, or if an extent is negative or no
    integer.
    """

    def __init__(self, dtype: DTypeLike, shape: int | tuple[int, ...]) -> None:
        try:
            self.dtype = np.dtype(dtype)
            self.shape = tuple(as_int(n) for n in (shape if hasattr(shape, "__iter__") else (shape,)))
        except (TypeError, ValueError) as error:
            raise ShapeError(f"no segment holds an array of {dtype!r} of shape {shape!r}: {error}") from None
        odd = self.dtype.hasobject or self.dtype.subdtype is not None or not self.dtype.itemsize
        if odd or any(extent < 0 for extent in self.shape):
            raise ShapeError(f"no segment holds an array of {self.dtype} of shape {self.shape}")
        # In Python integers, which do not overflow.
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)

    def part(self, key: Any) -> ArrayPart:
        """Part that a key selects; keys consist of integers, slices and one ellipsis, else ``ShapeError``."""
        keys = tuple(_checked(k) for k in (key if isinstance(key, tuple) else (key,)))
        if not any(k is ... for k in keys):
            # Without an ellipsis, a key for a single element gives a number instead of a view.
            keys = (*keys, ...)
        # An array of strides without memory: its elements are never accessed.
        steps = [self.dtype.itemsize * math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        whole = as_strided(np.empty(1, self.dtype), self.shape, steps, writeable=False)
        try:
            part = whole[keys]
        except (IndexError, TypeError, ValueError) as error:
            raise ShapeError(f"{key!r} does not fit a peer's array of shape {self.shape}: {error}") from None
        begin = part.ctypes.data - whole.ctypes.data if part.size else 0
        return ArrayPart(keys, self.dtype, part.shape, part.strides, begin)


@dataclass(frozen=True)
class ArrayPart:
    """A slice of a row-major array: its shape, its strides in bytes, and the byte at which it begins."""

    key: tuple[int | slice | EllipsisType, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.dtype.itemsize * math.prod(self.shape)

    def runs(self, offset: int) -> ByteRuns:
        """Contiguous stretches of the slice, in order, if the whole array is at ``offset`` of a segment.

        Inner dimensions that are taken whole, or of which one element is taken, lengthen a stretch. Each
        other dimension multiplies the number of stretches.
        """
        nbytes, outer = self.dtype.itemsize, list(zip(self.shape, self.strides, strict=True))
        if not self.nbytes:
            return ByteRuns((), nbytes)
        while outer and (outer[-1][1] == nbytes or outer[-1][0] == 1):
            nbytes *= outer.pop()[0]
        starts = np.array([offset + self.begin])
        for count, step in outer:
            starts = (starts[:, None] + np.arange(count) * step).reshape(-1)
        return ByteRuns(tuple(starts.tolist()), nbytes)


def _checked(key: object) -> int | slice | EllipsisType:
    if isinstance(key, (slice, EllipsisType)):
        return key
    try:
        if not isinstance(key, bool):
            return as_int(key)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ShapeError(f"a part of a peer's array is given by integers and slices, got {key!r}")
