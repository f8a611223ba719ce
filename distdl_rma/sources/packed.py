"""Packed elements: small integers in a file that stand for other numbers, by the attributes of the array."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import DataError
from distdl_rma.sources.reading import Slices

# Attributes of the CF conventions: what an element is multiplied by, and what is added then.
SCALES = {"scale_factor": np.multiply, "add_offset": np.add}
# Elements that stand for none: these values, and those outside of these limits.
_FILLS = ("_FillValue", "missing_value")
_LIMITS = {"valid_min": np.less, "valid_max": np.greater}


class Packed:
    """An array whose elements are unpacked as netCDF4 does: ``stored * scale_factor + add_offset``.

    Missing elements are NaN, or masked if the result has integers. Types are those of numpy's promotion, but
    an integral factor or offset never changes the type of floats.
    """

    def __init__(self, path: str, array: Any, attributes: Mapping[str, Any]) -> None:
        self._array, self._stored = array, np.dtype(array.dtype)
        self.shape, self.chunks = array.shape, getattr(array, "chunks", None)
        unsigned = "true" in str(attributes.get("_Unsigned")).lower()
        self._kind = np.dtype(self._stored.str.replace("i", "u")) if unsigned else self._stored
        self._fills = [fill for name in _FILLS for fill in self._in_stored(attributes.get(name))]
        low, high = (*_numbers(attributes.get("valid_range")), None, None)[:2]
        limits = attributes.get("valid_min", low), attributes.get("valid_max", high)
        self._limits = [
            (beyond, limit) for beyond, given in zip(_LIMITS.values(), limits, strict=True)
            for limit in self._in_stored(given)
        ]  # fmt: skip
        self._scales = []
        for name, function in SCALES.items():
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
        """Whether some element may stand for another one."""
        same = self.dtype == self._stored.newbyteorder("=") and not self._scales and not self._limits
        return not same or not np.isnan(self._fills).all()

    def __getitem__(self, box: Slices) -> NDArray[Any]:
        """The unpacked box."""
        stored = np.asanyarray(self._array[box])
        if self._kind != self._stored:
            stored = stored.view(self._kind)
        missing = np.zeros(stored.shape, bool)
        for fill in self._fills:
            missing |= stored == fill
        for beyond, limit in self._limits:
            missing |= beyond(stored, limit)
        found = self._scaled(stored)
        if not missing.any():
            return found
        if found.dtype.kind not in "fc":
            return np.ma.array(found, mask=missing)
        found = np.array(found)
        found[missing] = np.nan
        return found

    def _scaled(self, found: NDArray[Any]) -> NDArray[Any]:
        for function, number in self._scales:
            weak = found.dtype.kind in "fc" and number.dtype.kind in "iu"
            kind = found.dtype.newbyteorder("=") if weak else np.result_type(found.dtype, number.dtype)
            found = function(found, number, dtype=kind)
        return found

    def _in_stored(self, given: Any) -> NDArray[Any]:
        # Numbers of an attribute as elements of the file; others than these equal none.
        numbers = _numbers(given, self._stored.kind)
        with np.errstate(all="ignore"):
            stored = numbers.astype(self._stored).view(self._kind)
        kept = (stored == numbers) | (stored.view(self._stored) == numbers) | (self._stored.kind in "fc")
        found: NDArray[Any] = stored[kept]
        return found


def unpacked(path: str, array: Any, attributes: Mapping[str, Any]) -> Any:
    """The array, as ``Packed`` if its attributes say that elements stand for others."""
    names = {*SCALES, *_FILLS, *_LIMITS, "valid_range", "_Unsigned"} & {*attributes}
    if not names or getattr(array.dtype, "kind", "") not in {*"iufc"}:
        return array
    found = Packed(path, array, {name: attributes[name] for name in names})
    return found if found.changes else array


def _numbers(given: Any, kind: str = "") -> NDArray[Any]:
    # Of an attribute; none if it is text, but for the floats of xarray in Zarr 3.
    if isinstance(given, str) and kind == "f":
        with suppress(ValueError):
            return np.frombuffer(b64decode(given, validate=True), "<f8")
    found = np.asarray(given).reshape(-1)
    return found if found.dtype.kind in "iufc" else np.empty(0, "i1")
