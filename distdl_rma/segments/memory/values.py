"""What may be assigned to a slice of a peer's array: whatever its type takes without a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ShapeError
from distdl_rma.segments.memory.array_bytes import as_array

# Numbers of numpy, by kind, in the order in which one kind holds those before it.
_NUMBERS = "biufc"


def as_values(data: Any, dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    """Array whose values a ``dtype`` takes without a loss, else ``ShapeError``.

    Python's numbers and lists of them are of any type that holds them: integers exactly, floats rounded to
    the nearest as in numpy, but not to infinity.
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
    if isinstance(data, np.ma.MaskedArray):
        raise ShapeError(f"{what}: a masked array does not fit into {dtype}: what is masked has no value")
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
            raise ShapeError(
                f"{what} takes arrays, numbers and lists of numbers, got a list of {type(entry).__name__}"
            )


def _as_number(data: complex, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    whole = isinstance(data, int)
    kind = "b" if isinstance(data, bool) else "i" if whole else "f" if isinstance(data, float) else "c"
    if dtype.kind not in _NUMBERS[_NUMBERS.index(kind) :]:
        return None
    try:
        with np.errstate(over="ignore"):
            taken = np.asarray(data, dtype)
    except OverflowError:
        return None
    finite = bool(np.isfinite(taken))
    fits = finite and int(taken.real) == data if whole else finite or not np.isfinite(data)
    return taken if fits else None


def _is_castable(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    # Numbers stay numbers, text stays text, times stay times.
    if "V" in (source.kind, dtype.kind):
        return np.can_cast(source, dtype, "equiv")
    alike = source.kind == dtype.kind or (source.kind in _NUMBERS and dtype.kind in _NUMBERS)
    return alike and np.can_cast(source, dtype, "safe")


def _comes_back(source: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    # What numpy calls safe although it may round or overflow: long integers as floats, and times.
    kind = source.dtype.kind
    if kind in "mM":
        back = source.astype(dtype).astype(source.dtype)
        return bool(((back == source) | (np.isnat(back) & np.isnat(source))).all())
    if kind not in "iu" or source.dtype.itemsize < 8 or dtype.kind not in "fc":
        return True
    there = source.astype(dtype).real
    # The way back from a number beyond all integers is not defined.
    inside = bool((there < 2.0 ** (63 if kind == "i" else 64)).all())
    return inside and bool((there.astype(source.dtype) == source).all())
