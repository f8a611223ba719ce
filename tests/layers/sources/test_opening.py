"""Paths are opened by their suffix, or refused with what to do."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from distdl_rma import ArgumentError, DataError, ShapeError, UnsupportedError, open_array
from distdl_rma.layers.sources.raw import RawArray
from distdl_rma.layers.sources.reading import read_box
from tests.fuzz.hostile_files import MARK, Evil
from tests.layers.sources.formats import OF


@pytest.fixture
def x():
    return np.arange(80, dtype=np.float32).reshape(4, 20)


# By formats; None where boxes are read alone, "raw" where they are read by their offset.
CHUNKS = {
    "npy": "raw", "hdf5": "raw", "hdf5, big endian": "raw", "tiff": "raw", "hdf5, chunked": (2, 2),
    "zarr 2": (2, 2), "zarr, sharded": (2, 2), "netcdf, chunked": (2, 2), "netcdf": None,
    "tiff, tiled": (16, 16), "nifti": "raw",
}  # fmt: skip


@pytest.mark.parametrize("name", CHUNKS)
def test_a_source_knows_its_chunks_or_is_read_by_offset(name, x, tmp_path):
    found = open_array(OF[name](tmp_path, x))
    assert isinstance(found, RawArray) if CHUNKS[name] == "raw" else found.chunks == CHUNKS[name]


def test_the_only_array_needs_no_name_and_others_are_listed(x, tmp_path):
    import h5py

    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["deep/x"] = x
    assert open_array(tmp_path / "one.h5").shape == (4, 20)
    assert open_array(tmp_path / "one.h5", "/deep/x").shape == (4, 20)
    for made in ("hdf5", "zarr, group"):
        path, _, name = OF[made](tmp_path, x).partition("::")
        assert open_array(path, name).shape == open_array(path, name=f"/{name}").shape == (4, 20)
        with pytest.raises(ArgumentError, match=f"has 2 arrays, which one.*'{name}'"):
            open_array(path)
        with pytest.raises(ArgumentError, match=f"none is called 'z'.*'{name}'"):
            open_array(f"{path}::z")
        with pytest.raises(ArgumentError, match="use one of both"):
            open_array(f"{path}::{name}", name)
    with pytest.raises(ArgumentError, match="without a name"):
        open_array(OF["npy"](tmp_path, x), "x")


def test_what_is_no_source_is_refused(x):
    assert open_array(x) is x
    for wrong in ([1, 2], 3, None):
        with pytest.raises(ArgumentError, match="a source is a path"):
            open_array(wrong)
    with pytest.raises(ArgumentError, match="a source is a path"):
        open_array(x, "name")


def test_paths_of_streams_and_of_unknown_suffixes_are_refused_with_what_to_do():
    streams = {"x.nii.gz": "gunzip --keep x.nii.gz", "x.npz": "numpy.load('x.npz')", "X.ZST": "unzstd X.ZST"}
    for name, command in streams.items():
        with pytest.raises(UnsupportedError, match=f"no random access.*{re.escape(command)}"):
            open_array(name)
    for name in ("x.png", "folder/x", "x.raw"):
        with pytest.raises(ArgumentError, match=r"\.npy, \.h5, .*numpy\.memmap.*Source"):
            open_array(name)


@pytest.mark.parametrize("suffix", [".npy", ".h5", ".nc", ".tif", ".nii", ".zarr"])
def test_missing_and_damaged_files_and_pipes_are_errors_with_the_path(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    with pytest.raises(DataError, match=f"x\\{suffix}: not found on"):
        open_array(path)
    os.mkfifo(path)
    # And not waited for.
    with pytest.raises(DataError, match=f"x\\{suffix}: is a pipe or a device"):
        open_array(path)
    path.unlink()
    if suffix == ".zarr":
        path.mkdir()
    else:
        path.write_bytes(b"no data at all " * 100)
    with pytest.raises(DataError, match=f"x\\{suffix}: cannot be opened"):
        open_array(path)


@pytest.mark.parametrize(
    "name", ["hdf5, chunked", "hdf5", "netcdf", "netcdf, classic", "nifti", "tiff", "tiff, pages"]
)
def test_truncated_files_are_errors_when_they_are_opened(name, x, tmp_path):
    path = str(OF[name](tmp_path, np.tile(x, (6, 10, 10))))
    file = path.partition("::")[0]
    os.truncate(file, Path(file).stat().st_size * 2 // 3)
    with pytest.raises(DataError, match=r"truncated|cannot be opened"):
        open_array(path)


def test_a_missing_package_is_named_with_the_command_that_installs_it(x, tmp_path, monkeypatch):
    for name, package, command in (
        ("hdf5", "h5py", "distdl_rma[hdf5]"), ("netcdf", "netCDF4", "distdl_rma[netcdf]"),
        ("zarr 3", "zarr", "distdl_rma[zarr]"), ("tiff", "tifffile", "distdl_rma[tiff]"),
        ("nifti", "nibabel", "nibabel"),
    ):  # fmt: skip
        path = OF[name](tmp_path, x)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataError, match=f"pip install '?{re.escape(command)}"):
            open_array(path)


def test_an_array_of_a_zarr_group_may_be_named_by_its_path(x, tmp_path):
    path, _, name = OF["zarr, group"](tmp_path, x).partition("::")
    assert np.array_equal(open_array(f"{path}/{name}")[(slice(0, 4), slice(0, 20))], x)
    with pytest.raises(ArgumentError, match=r"x\.zarr/scale has 2 arrays.*\['0', '1'\]"):
        open_array(f"{path}/scale")


@pytest.mark.parametrize(
    "codecs",
    [
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "pickle"}},
        {"dtype": "|O", "filters": [{"id": "pickle"}]},
        {"dtype": "|O", "fill_value": "", "filters": [{"id": "vlen-utf8"}], "compressor": {"id": "pickle"}},
        {"dtype": "|O", "fill_value": "", "filters": [{"id": "vlen-utf8"}, {"id": "pickle"}]},
    ],
    ids=str,
)
def test_pickles_in_chunks_are_not_loaded_also_where_numcodecs_would(codecs, tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    meta = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "compressor": None, "fill_value": 0,
        "order": "C", "filters": None,
    }  # fmt: skip
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / ".zarray").write_text(json.dumps(meta | codecs))
    (tmp_path / "x.zarr" / "0").write_bytes(pickle.dumps(Evil(tmp_path)))
    with pytest.raises((DataError, ShapeError), match=r"x\.zarr"):
        read_box(open_array(tmp_path / "x.zarr"), (slice(0, 4),))
    assert not (tmp_path / MARK).exists()


def test_a_netcdf_variable_that_is_called_as_a_dimension_is_read(x, tmp_path):
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(tmp_path / "x.nc", "w") as file:
        for name, extent in (("y", 4), ("x", 20)):
            file.createDimension(name, extent)
        file.createGroup("g").createVariable("x", "f4", ("y", "x"))[...] = x
        file.createVariable("x", "f4", ("y", "x"))[...] = x
    for name in ("x", "g/x"):
        assert np.array_equal(read_box(open_array(tmp_path / "x.nc", name), np.s_[0:4, 0:20]).numpy(), x)


def test_compressed_chunks_that_become_gigabytes_are_refused(tmp_path):
    zarr = pytest.importorskip("zarr")
    for name, codecs in (("x", None), ("y", "auto")):
        path = str(tmp_path / f"{name}.zarr")
        zarr.create_array(path, shape=(4, 1 << 28), dtype="f4", chunks=(4, 1 << 28), compressors=codecs)
    assert open_array(tmp_path / "x.zarr").shape == (4, 1 << 28)
    with pytest.raises(DataError, match=r"y\.zarr: a compressed chunk becomes 4294967296 bytes"):
        open_array(tmp_path / "y.zarr")
