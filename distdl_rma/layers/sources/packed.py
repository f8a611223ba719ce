"""Packed elements: numbers in a file that stand for other ones, or for none, by the attributes of the array.

A temperature in 16 bits, with ``scale_factor=0.01, add_offset=273.15, _FillValue=-32768``::

    stored      -32768     0        1500
    unpacked    nan        273.15   288.15

The libraries of NetCDF and NIfTI unpack. h5py and Zarr give what is stored, and a model would train on it
without a word: so such arrays are refused.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

from distdl_rma.errors import DataError

SCALES = ("scale_factor", "add_offset")
# Attributes of the CF conventions, with the values that change nothing. Zarr 2 may have no fill value, and
# Zarr 3 has no NaN in its JSON, so that xarray writes the bytes.
_NANS = ("nan", "None", b64encode(np.float64(np.nan).tobytes()).decode())
_NEUTRAL = {
    "scale_factor": ("1.0", "1"), "add_offset": ("0.0", "0"), "_Unsigned": ("false",),
    "_FillValue": _NANS, "missing_value": _NANS,
    "valid_min": (), "valid_max": (), "valid_range": (),
}  # fmt: skip


def check_stored(path: str, array: Any, attributes: Mapping[str, Any]) -> None:
    """``DataError`` if attributes of numbers say that some of these stand for other ones."""
    if getattr(array.dtype, "kind", "") not in {*"iufc"}:
        return
    for name in _NEUTRAL.keys() & attributes.keys():
        given = np.asarray(attributes[name]).reshape(-1)
        if given.size != 1 or str(given[0]) not in _NEUTRAL[name]:
            raise DataError(
                f"{path}: has {name}={attributes[name]!r}, so that elements stand for others, or for none;"
                " pass what unpacks them: shard(grid, xarray.open_dataset(path)[name]); or, for the stored"
                " numbers, the array that h5py or zarr opens"
            )
