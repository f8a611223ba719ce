"""Packed arrays of NetCDF and NIfTI are unpacked by their libraries; others are never read as they are."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from distdl_rma import DataError, ShapeError, open_array
from distdl_rma.layers.sources.packed import check_stored
from distdl_rma.layers.sources.raw import RawArray
from distdl_rma.layers.sources.reading import read_box
from tests.layers.sources.formats import whole

STORED = np.array([[0, 1, -9], [7, -1, 100]], "i2")


def netcdf(path, stored, attributes):
    netcdf4, dims = pytest.importorskip("netCDF4"), [f"d{d}" for d in range(stored.ndim)]
    with netcdf4.Dataset(path, "w") as file:
        for name, extent in zip(dims, stored.shape, strict=True):
            file.createDimension(name, extent)
        fill = attributes.get("_FillValue", False)
        variable = file.createVariable("x", stored.dtype, dims, fill_value=fill)
        variable.setncatts({name: value for name, value in attributes.items() if name != "_FillValue"})
        variable.set_auto_maskandscale(False)
        variable[...] = stored
    return path


CASES = {
    "scaled": ("i2", {"scale_factor": np.float64(0.01), "add_offset": np.float64(270)}, np.float64),
    "scaled in 32 bits": ("i2", {"scale_factor": np.float32(0.5), "_FillValue": np.int16(-9)}, np.float32),
    "wide integers in 32 bits": ("i4", {"scale_factor": np.float32(0.5)}, np.float64),
    "offset alone": ("i1", {"add_offset": np.float32(3), "missing_value": np.int8(7)}, np.float32),
    "unsigned": (
        "i2", {"_Unsigned": "true", "scale_factor": np.float32(0.5), "_FillValue": np.int16(-1)}, np.float32,
    ),
    "limits": ("f4", {"valid_range": np.array([-5, 50], "f4")}, np.float32),
    "fill of floats": ("f4", {"_FillValue": np.float32(7)}, np.float32),
    "integral factor of floats": ("f4", {"scale_factor": 2, "add_offset": 1}, np.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_netcdf_is_unpacked_and_hdf5_is_refused(name, tmp_path):
    kind, attributes, wanted = CASES[name]
    path = netcdf(tmp_path / "x.nc", STORED.astype(kind), attributes)
    source = open_array(path, "x")
    found = whole(source)
    assert source.dtype == found.dtype == wanted
    shutil.copy(path, tmp_path / "x.h5")
    with pytest.raises(DataError, match=r"x\.h5: has .* elements stand for others.*xarray\.open_dataset"):
        open_array(tmp_path / "x.h5", "x")
    if name == "limits":
        # Of which xarray knows none.
        assert np.isnan(found).sum() == 2
        return
    xarray = pytest.importorskip("xarray")
    with xarray.open_dataset(path, engine="netcdf4") as file:
        np.testing.assert_allclose(found, file["x"].values, rtol=1e-6)
        np.testing.assert_array_equal(whole(file["x"]), file["x"].values)


def test_netcdf_that_its_library_would_round_is_refused(tmp_path):
    path = netcdf(tmp_path / "x.nc", STORED / 8, {"scale_factor": np.float32(1), "add_offset": np.int32(0)})
    with pytest.raises(DataError, match="would round elements of float64 to float32"):
        open_array(path, "x")


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_of_xarray_is_read_where_nothing_is_packed(version, tmp_path):
    xarray = pytest.importorskip("xarray")
    x = np.where(STORED > 50, np.nan, STORED / 8)
    how = {
        "packed": {"dtype": "i2", "scale_factor": 0.25, "add_offset": 20.0, "_FillValue": -99},
        "filled": {"dtype": "f4", "_FillValue": np.float32(-1.125)},
        "plain": {"dtype": "f8"},
    }
    made = xarray.Dataset(dict.fromkeys(how, (("y", "x"), x)))
    made.to_zarr(tmp_path / "x.zarr", encoding=how, zarr_format=version, consolidated=False)
    np.testing.assert_array_equal(whole(open_array(tmp_path / "x.zarr", "plain")), x)
    words = r"x\.zarr: has .*, so that elements stand for others, or for none"
    for name in ("packed", "filled"):
        with pytest.raises(DataError, match=words):
            open_array(tmp_path / "x.zarr", name)


def test_missing_integers_are_refused_where_they_are_read(tmp_path):
    path = netcdf(tmp_path / "x.nc", STORED, {"_FillValue": np.int16(-9)})
    source = open_array(path, "x")
    assert read_box(source, (slice(1, 2), slice(0, 3))).tolist() == [[7, -1, 100]]
    with pytest.raises(ShapeError, match=r"some elements are masked.*set_auto_mask"):
        whole(source)


def test_attributes_that_change_nothing_are_no_reason(tmp_path):
    neutral = {"scale_factor": 1.0, "add_offset": np.int32(0), "_Unsigned": "false", "_FillValue": np.nan}
    check_stored("x.h5", STORED.astype("f4"), neutral | {"missing_value": np.array([np.nan], "f4")})
    check_stored("x.h5", np.array(["a"]), {"_FillValue": "b"})
    for wrong in ("two", np.ones(2)):
        with pytest.raises(DataError, match=r"x\.h5: has scale_factor="):
            check_stored("x.h5", STORED, {"scale_factor": wrong})


def test_without_such_attributes_the_file_is_read_by_offset(tmp_path):
    path = netcdf(tmp_path / "x.h5", STORED, {"units": "K"})
    assert isinstance(open_array(path, "x"), RawArray)


@pytest.mark.parametrize("kind", ["u1", ">i2", "i4", "f4", ">f8"])
@pytest.mark.parametrize(("slope", "inter"), [(0.5, 3), (1, -2), (0.1, 0), (None, None)])
def test_nifti_is_scaled_as_nibabel_does(kind, slope, inter, tmp_path):
    nibabel = pytest.importorskip("nibabel")
    x = np.arange(24).reshape(2, 3, 4).astype(kind)
    header = nibabel.Nifti1Header(endianness=">" if kind[0] == ">" else "<")
    header.set_data_dtype(x.dtype)
    nibabel.Nifti1Image(x, np.eye(4), header).to_filename(tmp_path / "x.nii")
    # It stores what is scaled; here the numbers of the file are those of x.
    damaged = bytearray((tmp_path / "x.nii").read_bytes())
    scales = [np.nan if each is None else each for each in (slope, inter)]
    damaged[112:120] = np.array(scales, ">f4" if kind[0] == ">" else "<f4").tobytes()
    (tmp_path / "x.nii").write_bytes(damaged)
    wanted = np.asarray(nibabel.load(tmp_path / "x.nii").dataobj)
    found = whole(tmp_path / "x.nii")
    assert found.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, wanted)
