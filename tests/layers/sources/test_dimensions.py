"""Names, spacings, origins and units are those that the libraries of the formats wrote, or None."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from distdl_rma import ArgumentError, open_array
from distdl_rma.layers.sources.dimensions import Dimensions, as_image, fitting, of_image

X = np.arange(3 * 4 * 5, dtype=np.int16).reshape(3, 4, 5)


def seen(path):
    source = pickle.loads(pickle.dumps(open_array(path)))
    return Dimensions(source.axes, source.spacing, source.origin, source.units)


@pytest.mark.parametrize("scaled", [False, True])
def test_nifti_has_spacing_and_units_and_an_origin_if_it_is_not_turned(scaled, tmp_path):
    import nibabel

    affine = np.diag([0.5, 2.0, 3.0, 1.0])
    affine[:3, 3] = 7, 8, 9
    found = nibabel.Nifti1Image(X, affine)
    found.header.set_xyzt_units("mm", "sec")
    if scaled:
        found.header.set_slope_inter(2.0, 1.0)
    nibabel.save(found, tmp_path / "x.nii")
    mm = ("millimeter",) * 3
    assert seen(tmp_path / "x.nii") == (("x", "y", "z"), (0.5, 2.0, 3.0), (7.0, 8.0, 9.0), mm)
    affine[0, 1] = 0.1
    nibabel.save(nibabel.Nifti1Image(X[..., None], affine), tmp_path / "y.nii")
    turned = seen(tmp_path / "y.nii")
    assert turned.axes == ("x", "y", "z", "t") and turned.origin is turned.units is None


def test_tiff_of_ome_and_imagej_has_the_sizes_of_pixels(tmp_path):
    import tifffile

    facts = {"axes": "ZYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25, "PhysicalSizeXUnit": "nm"}
    tifffile.imwrite(tmp_path / "x.ome.tif", X, metadata=facts)
    units = (None, "micrometer", "nanometer")
    assert seen(tmp_path / "x.ome.tif") == (("z", "y", "x"), (1.0, 0.25, 0.5), None, units)
    tifffile.imwrite(
        tmp_path / "ij.tif", X, imagej=True, resolution=(4, 2),
        metadata={"axes": "ZYX", "spacing": 3.0, "unit": "um"},
    )  # fmt: skip
    assert seen(tmp_path / "ij.tif") == (("z", "y", "x"), (3.0, 0.5, 0.25), None, ("micrometer",) * 3)
    tifffile.imwrite(tmp_path / "plain.tif", X[0], photometric="minisblack")
    assert seen(tmp_path / "plain.tif") == (("y", "x"), None, None, None)


def test_hdf5_and_netcdf_have_the_names_of_dimensions(tmp_path):
    import h5py
    import netCDF4

    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["labelled"], file["scaled"], file["plain"], file["depth"] = X, X, X, np.arange(3)
        for d, name in enumerate("abc"):
            file["labelled"].dims[d].label = name
        file["depth"].make_scale("depth")
        file["scaled"].dims[0].attach_scale(file["depth"])
        file["full"] = X[:, 0, 0]
        file["full"].dims[0].attach_scale(file["depth"])
    assert seen(tmp_path / "x.h5::full").axes == ("depth",)
    assert seen(tmp_path / "x.h5::labelled").axes == ("a", "b", "c")
    assert seen(tmp_path / "x.h5::scaled") == seen(tmp_path / "x.h5::plain") == Dimensions()
    with netCDF4.Dataset(tmp_path / "x.nc", "w") as file:
        for name, extent in zip(("time", "lat", "lon"), X.shape, strict=True):
            file.createDimension(name, extent)
        file.createVariable("x", "i2", ("time", "lat", "lon"))[...] = X
    assert seen(tmp_path / "x.nc").axes == seen(tmp_path / "x.nc::x").axes == ("time", "lat", "lon")
    np.save(tmp_path / "x.npy", X)
    assert seen(tmp_path / "x.npy") == Dimensions()


WRONG = [
    {"axes": "ab"}, {"axes": "aab"}, {"axes": ("a", "", "b")}, {"axes": (1, 2, 3)}, {"axes": 3},
    {"spacing": (1, 2)}, {"spacing": (1, 0, 1)}, {"spacing": (1, float("nan"), 1)}, {"spacing": "abc"},
    {"origin": (1, 2, float("inf"))}, {"units": "abc"}, {"units": (1, 2, 3)}, {"units": ("mm",)},
]  # fmt: skip


@pytest.mark.parametrize("given", WRONG)
def test_entries_that_do_not_fit_are_refused(given):
    with pytest.raises(ArgumentError, match=f"{next(iter(given))}= has an entry for each of 3 dimensions"):
        fitting(3, **given)


def test_an_image_has_axes_in_the_order_of_ome_zarr_and_is_valid():
    models = pytest.importorskip("ome_zarr_models.v05.image")
    for axes in ("yx", "zyx", "cyx", "tyx", "czyx", "tczyx", "tzyx", None):
        dims = len(axes or "tczyx")
        units = [None, *["mm"] * (dims - 1)]
        known = of_image(fitting(dims, axes=axes, origin=range(dims), units=units), dims)
        attributes = models.ImageAttrs(**as_image(known, "x")["ome"])
        assert "".join(axis.name for axis in attributes.multiscales[0].axes) == (axes or "tczyx")
    for axes in ("x", "cx", "zcyx", "ctyx", "wzyx", "czyxw", "ttyx"):
        with pytest.raises(ArgumentError, match=r"OME-Zarr image|different names"):
            of_image(fitting(len(axes), axes=axes), len(axes))


def test_damaged_words_about_dimensions_hide_no_array(tmp_path):
    import h5py
    import nibabel
    import tifffile

    found = nibabel.Nifti1Image(X, np.eye(4))
    found.header["xyzt_units"] = 255
    nibabel.save(found, tmp_path / "x.nii")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
        file["x"].attrs["DIMENSION_LIST"] = file["x"].attrs["axis_units"] = 3
        file["x"].attrs["axis_spacing"] = b"\xff"
    facts = {"axes": "ZYX", "unit": "um", "spacing": "wide"}
    tifffile.imwrite(tmp_path / "x.tif", X, imagej=True, resolution=(0, 1), metadata=facts)
    for name, axes in (("x.nii", None), ("x.h5", None), ("x.tif", ("z", "y", "x"))):
        assert np.array_equal(open_array(tmp_path / name)[:3, :4, :5], X)
        assert seen(tmp_path / name).axes == axes
