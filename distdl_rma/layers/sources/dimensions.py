"""What the dimensions of an array are: names, and where in space and time its elements lie.

An element of index ``i`` of a dimension lies at ``origin + spacing * i``, in the unit of this dimension.
Formats say so in their own ways::

    OME-Zarr        axes with units, scales and translations of a level, then those of all levels
    Zarr, HDF5      names of dimensions; axis_spacing, axis_origin and axis_units, which this library writes
    NetCDF          names of dimensions
    NIfTI           pixdim, units, the affine matrix if it is diagonal
    TIFF            names; the sizes of pixels of OME and ImageJ

Nothing here changes an element: what a file does not say, or says in a way that does not fit the array, is
None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from re import fullmatch
from typing import Any, NamedTuple

import numpy as np

from distdl_rma.errors import ArgumentError

_T = "coordinateTransformations"
# What OME-Zarr calls dimensions, in the order that it wants, and those that are not of space.
_OME_NAMES, _OME_VERSION = "tczyx", "0.5"
_OME_KINDS = {"t": "time", "time": "time", "c": "channel", "channel": "channel"}
# Units of NIfTI, OME-TIFF and ImageJ by their names in OME-Zarr.
_UNITS = {
    "m": "meter", "mm": "millimeter", "um": "micrometer", "µm": "micrometer", "micron": "micrometer",
    "nm": "nanometer", "s": "second", "sec": "second", "msec": "millisecond", "usec": "microsecond",
    "unknown": None, "pixel": None, "": None,
}  # fmt: skip
# What libraries raise at words that are damaged. The elements of such a file are another matter.
_DAMAGED = (
    AttributeError, IndexError, KeyError, OSError, RuntimeError, SyntaxError, TypeError, ValueError,
    ZeroDivisionError,
)  # fmt: skip
_FITS: dict[str, Callable[[Any], bool]] = {
    "axes": lambda each: isinstance(each, str) and each != "",
    "spacing": lambda each: isfinite(each) and each > 0,
    "origin": isfinite,
    "units": lambda each: each is None or isinstance(each, str),
}


class Dimensions(NamedTuple):
    """What is known of the dimensions of an array, an entry for each; None where the file does not say."""

    axes: tuple[str, ...] | None = None
    spacing: tuple[float, ...] | None = None
    origin: tuple[float, ...] | None = None
    units: tuple[str | None, ...] | None = None


def fitting(dims: int, **given: Any) -> Dimensions:
    """What is given; ``ArgumentError`` if it does not fit an array of so many dimensions."""
    found = {name: _fitting(dims, name, entries) for name, entries in given.items() if entries is not None}
    for name in (name for name, values in found.items() if values is None):
        raise ArgumentError(
            f"{name}= has an entry for each of {dims} dimensions: different names in axes, numbers above 0 in"
            f" spacing, finite ones in origin, names or None in units; got {given[name]!r}"
        )
    return Dimensions(**found)


def known(dims: int, **said: Any) -> Dimensions:
    """What a file says; None where this does not fit, or names no unit."""
    found = Dimensions(**{name: _fitting(dims, name, entries) for name, entries in said.items()})
    return found if any(found.units or ()) else found._replace(units=None)


def _fitting(dims: int, name: str, entries: Any) -> Any:
    with suppress(TypeError, ValueError):
        numbers = name in ("spacing", "origin")
        values = tuple(map(float, entries)) if numbers else tuple(each or None for each in entries)
        distinct = len({*values}) == dims if name == "axes" else not isinstance(entries, str)
        if len(values) == dims and distinct and all(map(_FITS[name], values)):
            return values
    return None


def of_attributes(dims: int, names: Any, attributes: Mapping[str, Any]) -> Dimensions:
    """Of Zarr and HDF5, by the names of dimensions and the attributes that :func:`as_attributes` makes."""
    others = ("spacing", "origin", "units")
    return known(dims, axes=names, **{name: attributes.get(f"axis_{name}") for name in others})


def as_attributes(found: Dimensions) -> dict[str, list[Any]]:
    """All but the names, for which formats have a place. HDF5 has no text that is none."""
    given = found._replace(axes=None)._asdict().items()
    return {
        f"axis_{name}": ["" if each is None else each for each in entries]
        for name, entries in given
        if entries
    }


def of_level(attributes: Mapping[str, Any], path: str, dims: int) -> Dimensions | None:
    """Of a level of an image of OME-Zarr, by the attributes of its group; None if it has no such level."""
    with suppress(*_DAMAGED):
        for image in ome(attributes).get("multiscales", ()):
            for level in image["datasets"]:
                if level["path"].strip("/") == path:
                    return _of_level(image, level, dims)
    return None


def ome(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes of OME-Zarr, which in Zarr 3 have a name of their own."""
    return attributes.get("ome", attributes)


def _of_level(image: Mapping[str, Any], level: Mapping[str, Any], dims: int) -> Dimensions:
    spacing, origin = np.ones(dims), np.zeros(dims)
    for step in (steps := [*level.get(_T, ()), *image.get(_T, ())]):
        scale = np.asarray(step.get("scale", 1.0))
        spacing, origin = spacing * scale, origin * scale + np.asarray(step.get("translation", 0.0))
    # Those in a file of their own, of which only old versions knew, are not read.
    inline = bool(steps) and not any("path" in step for step in steps)
    axes = [each if isinstance(each, str) else each["name"] for each in image.get("axes", ())]
    units = [None if isinstance(each, str) else each.get("unit") for each in image.get("axes", ())]
    if not inline:
        return known(dims, axes=axes, units=units)
    return known(dims, axes=axes, spacing=spacing, origin=origin, units=units)


def of_image(found: Dimensions, dims: int) -> Dimensions:
    """With names of OME-Zarr if there are none; ``ArgumentError`` if an image cannot have such dimensions."""
    axes = found.axes or tuple(_OME_NAMES[-dims:])
    if len(axes) != dims or not fullmatch("t?c?s{2,3}", "".join(_kind(each)[0] for each in axes)):
        raise ArgumentError(
            "an OME-Zarr image has a time 't', if any, then a channel 'c', if any, then 2 or 3 axes of space;"
            f" got axes {axes} of an array of {dims} dimensions"
        )
    return found._replace(axes=axes)


def as_image(found: Dimensions, name: str) -> dict[str, Any]:
    """The attributes of a group of OME-Zarr with one level, ``0``."""
    axes = found.axes or ()
    steps = [{"type": "scale", "scale": [*(found.spacing or [1.0] * len(axes))]}]
    if found.origin:
        steps.append({"type": "translation", "translation": [*found.origin]})
    units = [{"unit": each} if each else {} for each in found.units or [None] * len(axes)]
    named = [{"name": each, "type": _kind(each)} | unit for each, unit in zip(axes, units, strict=True)]
    image = {"name": name, "axes": named, "datasets": [{"path": "0", _T: steps}]}
    return {"ome": {"version": _OME_VERSION, "multiscales": [image]}}


def _kind(axis: str) -> str:
    return _OME_KINDS.get(axis.lower(), "space")


def of_hdf5(dataset: Any) -> Dimensions:
    """Of a dataset of h5py: labels of its dimensions, else names of their scales.

    They are read as attributes: libhdf5's own functions for scales crash where these are damaged.
    """
    with suppress(*_DAMAGED):
        names, scales = dataset.attrs.get("DIMENSION_LABELS"), dataset.attrs.get("DIMENSION_LIST", ())
        if names is None:
            names = [dataset.file[each[0]].name.rpartition("/")[2] for each in scales]
        return of_attributes(len(dataset.shape), names, dataset.attrs)
    return Dimensions()


def of_nifti(image: Any) -> Dimensions:
    """Of an image of nibabel; its origin only if the affine matrix is one of scales and a translation."""
    with suppress(*_DAMAGED):
        dims, matrix, header = len(image.shape), image.affine, image.header
        spacing = [float(each) or 1.0 for each in header.get_zooms()]
        space, time = (_UNITS.get(each) for each in header.get_xyzt_units())
        turned = not np.allclose(matrix[:3, :3], np.diag([*spacing[:3], 1.0, 1.0][:3]))
        origin = None if turned else [*matrix[:3, 3], float(header["toffset"]), 0.0, 0.0, 0.0][:dims]
        units = [space, space, space, time, None, None, None][:dims]
        return known(dims, axes="xyztuvw"[:dims], spacing=spacing, origin=origin, units=units)
    return Dimensions()


def of_tiff(tifffile: Any, file: Any, number: int) -> Dimensions:
    """Of a series of a file of tifffile."""
    series, sizes = file.series[number], dict[str, tuple[float, Any]]()
    with suppress(*_DAMAGED):
        if file.is_ome:
            images = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]
            pixels = (images if isinstance(images, (list, tuple)) else [images])[number]["Pixels"]
            for each in "XYZ":
                if (size := pixels.get(f"PhysicalSize{each}")) is not None:
                    sizes[each] = float(size), pixels.get(f"PhysicalSize{each}Unit", "µm")
        elif file.is_imagej:
            facts, tags = file.imagej_metadata, series.keyframe.tags
            unit = facts.get("unit", "").replace("\\u00B5", "µ")
            sizes["Z"] = float(facts.get("spacing", 1.0)), unit
            for each in "XY":
                count, length = tags[f"{each}Resolution"].value
                sizes[each] = length / count, unit
    entries = [sizes.get(each, (1.0, None)) for each in series.axes]
    units = [_UNITS.get(unit, unit) for _, unit in entries]
    spacing = [size for size, _ in entries] if sizes else None
    return known(len(series.shape), axes=series.axes.lower(), spacing=spacing, units=units)
