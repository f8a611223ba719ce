"""Bytes of arrays, tensors and buffers that travel, and layouts of arrays in a segment."""

from __future__ import annotations

import math
from operator import index as as_int
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ArgumentError, DistdlError, ShapeError

# Types whose memory is all that they are, unlike that of masked arrays; looked up without a call.
PLAIN = {np.ndarray, memoryview, bytes, bytearray}


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


def as_count(number: Any, what: str, error: type[DistdlError] = ArgumentError) -> int:
    """Number as a Python integer from 0 on; an ``error``, which begins with ``what`` it is, if it is none."""
    try:
        found = -1 if isinstance(number, bool) else as_int(number)
    except TypeError:
        found = -1
    if found < 0:
        raise error(f"{what}, at least 0, got {number!r}")
    return found


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
