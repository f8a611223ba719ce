"""Packed arrays are unpacked alike in all formats: as netCDF4 and xarray do."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from distdl_rma import DataError, ShapeError, open_array
from distdl_rma.layers.sources.packed import unpacked
from distdl_rma.layers.sources.raw import RawArray
from distdl_rma.layers.sources.reading import read_box

STORED = np.array([[0, 1, -9], [7, -1, 100]], "i2")


def whole(source):
    return read_box(source, tuple(slice(0, n) for n in source.shape)).numpy()


def netcdf(path, stored, attributes):
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(path, "w") as file:
        for d, extent in enumerate(stored.shape):
            file.createDimension(f"d{d}", extent)
        fill = attributes.get("_FillValue", False)
        variable = file.createVariable(
            "x", stored.dtype, [f"d{d}" for d in range(stored.ndim)], fill_value=fill
        )
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
    "integral factor of floats": ("f4", {"scale_factor": 2, "add_offset": 1}, np.float32),
    "integral factor, filled": ("f4", {"scale_factor": 2, "_FillValue": np.float32(7)}, np.float32),
}  # fmt: skip
NANS = {"limits": 2, "integral factor, filled": 1}


@pytest.mark.parametrize("name", CASES)
def test_one_file_is_the_same_array_as_netcdf_and_as_hdf5(name, tmp_path):
    kind, attributes, wanted = CASES[name]
    path = netcdf(tmp_path / "x.nc", STORED.astype(kind), attributes)
    shutil.copy(path, tmp_path / "x.h5")
    with np.errstate(all="ignore"):
        found = [whole(open_array(f"{tmp_path / file}::x")) for file in ("x.nc", "x.h5")]
    assert [each.dtype for each in found] == [wanted] * 2
    np.testing.assert_array_equal(*found)
    if name in NANS:
        # Xarray fails, or knows no limits.
        assert np.isnan(found[0]).sum() == NANS[name]
        return
    xarray = pytest.importorskip("xarray")
    with xarray.open_dataset(path, engine="netcdf4") as file:
        np.testing.assert_allclose(found[0], file["x"].values, rtol=1e-6)


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_of_xarray_is_what_xarray_reads(version, tmp_path):
    xarray = pytest.importorskip("xarray")
    x = np.where(STORED > 50, np.nan, STORED / 8)
    how = {
        "packed": {"dtype": "i2", "scale_factor": 0.25, "add_offset": 20.0, "_FillValue": -99},
        "filled": {"dtype": "f4", "_FillValue": np.float32(-1.125)},
        "plain": {"dtype": "f8"},
    }
    made = xarray.Dataset(dict.fromkeys(how, (("y", "x"), x)))
    made.to_zarr(tmp_path / "x.zarr", encoding=how, zarr_format=version, consolidated=False)
    with xarray.open_zarr(tmp_path / "x.zarr", consolidated=False) as wanted:
        for name in how:
            found = whole(open_array(f"{tmp_path / 'x.zarr'}::{name}"))
            assert found.dtype == wanted[name].dtype
            np.testing.assert_array_equal(found, wanted[name].values)
            assert np.isnan(found).any()


def test_missing_integers_are_refused_where_they_are_read(tmp_path):
    path = netcdf(tmp_path / "x.h5", STORED, {"_FillValue": np.int16(-9)})
    source = open_array(path, "x")
    assert read_box(source, (slice(1, 2), slice(0, 3))).tolist() == [[7, -1, 100]]
    with pytest.raises(ShapeError, match="some elements are masked"):
        whole(source)


def test_a_factor_that_is_no_number_is_refused_and_a_fill_that_cannot_occur_is_none(tmp_path):
    for wrong in ("two", np.ones(2)):
        with pytest.raises(DataError, match=r"x\.h5: the attribute scale_factor is"):
            unpacked("x.h5", STORED, {"scale_factor": wrong})
    for fill in ("none", np.nan, 1e30, 0.5):
        assert unpacked("x.h5", STORED, {"_FillValue": fill}) is STORED
    assert unpacked("x.h5", STORED.astype("f4"), {"_FillValue": np.nan, "units": "K"}).dtype == "f4"


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
    found = whole(open_array(tmp_path / "x.nii"))
    assert found.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, wanted)
