"""Packed elements: small integers in a file that stand for other numbers, by the attributes of the array.

A temperature in 16 bits, with ``scale_factor=0.01, add_offset=273.15, _FillValue=-32768``::

    stored      -32768     0        1500
    unpacked    nan        273.15   288.15

netCDF4 unpacks so. h5py and Zarr give what is stored, and a model would train on it without a word. So all
formats go through this one rule, a box at a time, and a file gives the same numbers by every library.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import DataError
from distdl_rma.layers.sources.chunks import chunks_of
from distdl_rma.layers.sources.reading import Slices

# Attributes of the CF conventions: what an element is multiplied by, and what is added then.
_SCALES = {"scale_factor": np.multiply, "add_offset": np.add}
# Elements that stand for none: those for which this comparison with a number of the attribute holds. It is
# one with what is stored, before it is scaled.
_MISSING = {
    "_FillValue": np.equal, "missing_value": np.equal, "valid_min": np.less, "valid_max": np.greater,
}  # fmt: skip
_RANGE = ("valid_min", "valid_max")


class Packed:
    """An array whose elements are unpacked as netCDF4 does: ``stored * scale_factor + add_offset``.

    Missing elements are NaN, or masked if the result has integers. Types are those of numpy's promotion, but
    an integral factor or offset never changes the type of stored floats. What is known when the file is
    opened is prepared there, and a wrong attribute is an error there: reading a box only compares and scales.
    """

    def __init__(self, path: str, array: Any, attributes: Mapping[str, Any]) -> None:
        self._array, self._stored = array, np.dtype(array.dtype)
        self.shape, self.chunks = array.shape, chunks_of(array)
        unsigned = "true" in str(attributes.get("_Unsigned")).lower()
        self._kind = np.dtype(self._stored.str.replace("i", "u")) if unsigned else self._stored
        if len(limits := _numbers(attributes.get("valid_range"))) == len(_RANGE):
            attributes = {**attributes, **dict(zip(_RANGE, limits, strict=True))}
        self._missing = [
            (compare, number) for name, compare in _MISSING.items()
            for number in self._in_stored(attributes.get(name))
        ]  # fmt: skip
        self._scales = []
        for name, function in _SCALES.items():
            if (given := attributes.get(name)) is not None:
                number = _numbers(given)
                if len(number) != 1:
                    raise DataError(
                        f"{path}: the attribute {name} is {given!r}, wanted a number; to get what is stored,"
                        " pass the array that the library of the file opens"
                    )
                self._scales.append((function, number[0]))
        self.dtype = self._scaled(np.empty(0, self._kind)).dtype

    @property
    def changes(self) -> bool:
        """Whether some element may stand for another one; else the array alone is as good."""
        return bool(self._missing or self._scales or self._kind != self._stored)

    def __getitem__(self, box: Slices) -> NDArray[Any]:
        """The unpacked box."""
        stored = np.asarray(self._array[box])
        if self._kind != self._stored:
            stored = stored.view(self._kind)
        missing = np.zeros(stored.shape, bool)
        for compare, number in self._missing:
            missing |= compare(stored, number)
        found = self._scaled(stored)
        if missing.any():
            if found.dtype.kind not in "fc":
                return np.ma.array(found, mask=missing)
            found = np.array(found)
            found[missing] = np.nan
        return found

    def _scaled(self, found: NDArray[Any]) -> NDArray[Any]:
        for function, number in self._scales:
            weak = self._stored.kind in "fc" and number.dtype.kind in "iu"
            kind = found.dtype.newbyteorder("=") if weak else np.result_type(found.dtype, number.dtype)
            found = function(found, number, dtype=kind)
        return found

    def _in_stored(self, given: Any) -> list[Any]:
        # Numbers of an attribute as elements of the file; NaN, and what these cannot hold, equals none.
        numbers = _numbers(given, self._stored.kind)
        with np.errstate(all="ignore"):
            stored = numbers.astype(self._stored).view(self._kind)
        kept = (stored == numbers) | (stored.view(self._stored) == numbers) | (self._stored.kind in "fc")
        return [*stored[kept & ~np.isnan(stored)]]


def unpacked(path: str, array: Any, attributes: Mapping[str, Any]) -> Any:
    """The array, as ``Packed`` if its attributes say that elements stand for others."""
    names = {*_SCALES, *_MISSING, "valid_range", "_Unsigned"} & {*attributes}
    if not names or getattr(array.dtype, "kind", "") not in {*"iufc"}:
        return array
    found = Packed(path, array, {name: attributes[name] for name in names})
    return found if found.changes else array


def _numbers(given: Any, kind: str = "") -> NDArray[Any]:
    # Of an attribute; none if it is text, but for the floats of xarray in Zarr 3, which JSON cannot have:
    # their bytes in base 64.
    if isinstance(given, str) and kind == "f":
        with suppress(ValueError):
            return np.frombuffer(b64decode(given, validate=True), "<f8")
    found = np.asarray(given).reshape(-1)
    return found if found.dtype.kind in "iufc" else np.empty(0, "i1")
