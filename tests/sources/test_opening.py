"""Paths are opened by their suffix, or refused with what to do."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from distdl_rma import ArgumentError, DataError, UnsupportedError, open_array
from distdl_rma.sources.raw import RawArray
from tests.sources import formats


@pytest.fixture
def x():
    return np.arange(80, dtype=np.float32).reshape(4, 20)


@pytest.mark.parametrize("made", [formats.npy, formats.hdf5, formats.hdf5_big_endian, formats.tiff])
def test_contiguous_arrays_are_read_by_offset(made, x, tmp_path):
    assert isinstance(open_array(made(tmp_path, x)), RawArray)


@pytest.mark.parametrize(
    ("made", "chunks"),
    [
        (formats.hdf5_chunked, (2, 2)),
        (formats.zarr2, (2, 2)),
        (formats.zarr_sharded, (2, 2)),
        (formats.netcdf_chunked, (2, 2)),
        (formats.netcdf, None),
        (formats.tiff_tiled, (16, 16)),
        (formats.nifti, None),
    ],
)
def test_a_source_knows_its_chunks(made, chunks, x, tmp_path):
    assert open_array(made(tmp_path, x)).chunks == chunks


def test_the_only_array_needs_no_name_and_others_are_listed(x, tmp_path):
    import h5py

    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["deep/x"] = x
    assert open_array(tmp_path / "one.h5").shape == (4, 20)
    assert open_array(tmp_path / "one.h5", "/deep/x").shape == (4, 20)
    for made in (formats.hdf5, formats.zarr_group):
        path, _, name = made(tmp_path, x).partition("::")
        assert open_array(path, name).shape == open_array(path, name=f"/{name}").shape == (4, 20)
        with pytest.raises(ArgumentError, match=f"has 2 arrays, which one.*'{name}'"):
            open_array(path)
        with pytest.raises(ArgumentError, match=f"none is called 'z'.*'{name}'"):
            open_array(f"{path}::z")
        with pytest.raises(ArgumentError, match="use one of both"):
            open_array(f"{path}::{name}", name)
    with pytest.raises(ArgumentError, match="without a name"):
        open_array(formats.npy(tmp_path, x), "x")


def test_what_is_no_source_is_refused(x):
    assert open_array(x) is x
    for wrong in ([1, 2], 3, None):
        with pytest.raises(ArgumentError, match="a source is a path"):
            open_array(wrong)
    with pytest.raises(ArgumentError, match="a source is a path"):
        open_array(x, "name")


@pytest.mark.parametrize(
    ("name", "command"),
    [("x.nii.gz", "gunzip --keep x.nii.gz"), ("x.npz", "numpy.load('x.npz')"), ("X.ZST", "unzstd X.ZST")],
)
def test_streams_are_refused_with_their_converter(name, command):
    with pytest.raises(UnsupportedError, match=f"no random access.*{re.escape(command)}"):
        open_array(name)


def test_an_unknown_suffix_is_refused_with_those_that_are_known():
    for name in ("x.png", "folder/x", "x.raw"):
        with pytest.raises(ArgumentError, match=r"\.npy, \.h5, .*numpy\.memmap.*Source"):
            open_array(name)


@pytest.mark.parametrize("suffix", [".npy", ".h5", ".nc", ".tif", ".nii", ".zarr"])
def test_missing_and_damaged_files_are_errors_with_the_path(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    with pytest.raises(DataError, match=f"x\\{suffix}: not found on"):
        open_array(path)
    if suffix == ".zarr":
        path.mkdir()
    else:
        path.write_bytes(b"no data at all " * 100)
    with pytest.raises(DataError, match=f"x\\{suffix}: cannot be opened"):
        open_array(path)


@pytest.mark.parametrize(
    "made",
    [
        formats.hdf5_chunked,
        formats.hdf5,
        formats.netcdf,
        formats.netcdf_classic,
        formats.tiff,
        formats.tiff_pages,
    ],
)
def test_truncated_files_are_errors_when_they_are_opened(made, x, tmp_path):
    path = str(made(tmp_path, np.tile(x, (6, 10, 10))))
    file = path.partition("::")[0]
    os.truncate(file, Path(file).stat().st_size * 2 // 3)
    with pytest.raises(DataError, match=r"truncated|cannot be opened"):
        open_array(path)


@pytest.mark.parametrize(
    ("made", "package", "command"),
    [
        (formats.hdf5, "h5py", "distdl_rma[hdf5]"),
        (formats.netcdf, "netCDF4", "distdl_rma[netcdf]"),
        (formats.zarr3, "zarr", "distdl_rma[zarr]"),
        (formats.tiff, "tifffile", "distdl_rma[tiff]"),
        (formats.nifti, "nibabel", "nibabel"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    made, package, command, x, tmp_path, monkeypatch
):
    path = made(tmp_path, x)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"pip install '?{re.escape(command)}"):
        open_array(path)
