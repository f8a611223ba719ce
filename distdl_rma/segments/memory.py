"""Arrays, tensors and bytes as the contiguous bytes that travel, and slices as the bytes that they mean."""

from __future__ import annotations

from operator import index as as_int
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from distdl_rma.errors import ShapeError
from distdl_rma.segments.transport import Runs

__all__ = ["as_array", "as_bytes", "runs_of"]


def as_array(data: Any, what: str) -> npt.NDArray[Any]:
    """Array over the memory of a numpy array, a torch tensor or another object; no copy."""
    if isinstance(data, np.ndarray):
        return data
    if hasattr(data, "__array__"):
        try:
            return np.asarray(data)
        except (TypeError, RuntimeError) as error:
            # A tensor that needs a gradient, lies on a device, or has a type unknown to numpy.
            raise ShapeError(f"{what}: not an array that numpy can look at: {error}") from None
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise ShapeError(
            f"{what} takes a numpy array, a tensor or bytes, got {type(data).__name__}"
        ) from None


def as_bytes(data: Any, what: str) -> memoryview:
    """Contiguous bytes of an array, tensor or buffer: a view, or packed where it is not contiguous."""
    try:
        view = memoryview(data)
    except (TypeError, ValueError, BufferError):
        array = np.ascontiguousarray(as_array(data, what))
        return array.reshape(-1).view(np.uint8).data
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else np.ascontiguousarray(view).data.cast("B")


def runs_of(
    shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, key: Any
) -> tuple[Runs, tuple[int, ...]]:
    """Bytes that a slice of a row-major array at an offset means, and the shape of the slice.

    Raises
    ------
    ShapeError
        If the key is not made of integers, slices and one ellipsis.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if not all(k is ... or isinstance(k, slice) or _is_integer(k) for k in keys):
        raise ShapeError(f"a part of a peer's array is given by integers and slices, got {key!r}")
    # Strides without memory: what the slice touches is never looked at.
    steps = np.cumprod((dtype.itemsize, *shape[:0:-1]))[::-1] if shape else ()
    whole = as_strided(np.empty(1, dtype), shape, [int(step) for step in steps], writeable=False)
    try:
        part = whole[keys if any(k is ... for k in keys) else (*keys, ...)]
    except IndexError as error:
        raise ShapeError(f"{key!r} does not fit a peer's array of shape {shape}: {error}") from None
    begin = offset + part.ctypes.data - whole.ctypes.data
    nbytes, outer = dtype.itemsize, list(zip(part.shape, part.strides, strict=True))
    if part.size == 0:
        return Runs((), nbytes), part.shape
    while outer and (outer[-1][1] == nbytes or outer[-1][0] == 1):
        nbytes *= outer.pop()[0]
    starts = np.array([begin])
    for count, step in outer:
        starts = (starts[:, None] + np.arange(count) * step).reshape(-1)
    return Runs(tuple(starts.tolist()), nbytes), part.shape


def _is_integer(key: object) -> bool:
    try:
        as_int(key)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(key, bool)
