"""Files with one array, written by the libraries of their formats, and arrays of other libraries."""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import torch

from distdl_rma import Source, open_array
from distdl_rma.layers.sources.reading import read_box


def _npy(path, x):
    np.save(path / "x.npy", x)
    return path / "x.npy"


def _memmap(path, x):
    x.tofile(path / "x")
    return np.memmap(path / "x", x.dtype, "r", shape=x.shape)


def _hdf5(path, x, **options):
    import h5py

    with h5py.File(path / "x.h5", "w", userblock_size=512) as file:
        file.create_dataset("deep/x", data=x, **options)
        file["y"] = np.zeros(3)
    return f"{path / 'x.h5'}::deep/x"


def _zarr(path, x, **options):
    made = {"shape": x.shape, "dtype": x.dtype, "chunks": (2,) * x.ndim} | options
    import_module("zarr").create_array(str(path / "x.zarr"), **made)[:] = x
    return path / "x.zarr"


def _zarr_group(path, x):
    group = import_module("zarr").open_group(str(path / "x.zarr"), mode="w")
    for name in ("scale/0", "scale/1"):
        group.create_array(name, data=x, chunks=(2,) * x.ndim)
    return f"{path / 'x.zarr'}::scale/0"


def _netcdf(path, x, version="NETCDF4", **options):
    with import_module("netCDF4").Dataset(path / "x.nc", "w", format=version) as file:
        names = [f"d{d}" for d in range(x.ndim)]
        for name, extent in zip(names, x.shape, strict=True):
            file.createDimension(name, extent)
        file.createVariable("x", x.dtype, names, **options)[...] = x
        file.createVariable("d0", "f4", ["d0"])[...] = 0
    return path / "x.nc"


def _tiff(path, x, **options):
    import_module("tifffile").imwrite(path / "x.tif", x, photometric="minisblack", **options)
    return path / "x.tif"


def _nifti(path, x):
    nibabel = import_module("nibabel")
    nibabel.save(nibabel.Nifti1Image(x, np.eye(4)), path / "x.nii")
    return path / "x.nii"


def _tensorstore(path, x):
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(_zarr(path, x, zarr_format=2))}}
    return import_module("tensorstore").open(spec, read=True).result()


class SimpleDlpack(SimpleNamespace):
    """What shows itself by DLPack only, as arrays of other libraries do."""

    def __init__(self, x):
        super().__init__(shape=x.shape, x=x)

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


_FILES = {
    "npy": _npy,
    "npy by columns": lambda path, x: _npy(path, np.asfortranarray(x)),
    "npy, big endian": lambda path, x: _npy(path, x.astype(x.dtype.newbyteorder(">"))),
    "hdf5": _hdf5,
    "hdf5, big endian": lambda path, x: _hdf5(path, x, dtype=x.dtype.newbyteorder(">")),
    "hdf5, chunked": lambda path, x: _hdf5(path, x, chunks=(2,) * x.ndim, compression="gzip"),
    "zarr 2": lambda path, x: _zarr(path, x, zarr_format=2),
    "zarr 3": _zarr,
    "zarr, sharded": lambda path, x: _zarr(path, x, shards=(4,) * x.ndim),
    "zarr, group": _zarr_group,
    "netcdf": _netcdf,
    "netcdf, chunked": lambda path, x: _netcdf(path, x, zlib=True, chunksizes=(2,) * x.ndim),
    "netcdf, classic": lambda path, x: _netcdf(path, x, "NETCDF3_CLASSIC"),
    "tiff": lambda path, x: _tiff(path, x, byteorder=">"),
    "tiff, tiled": lambda path, x: _tiff(path, x, tile=(16, 16), compression="zlib"),
    "nifti": _nifti,
}
_ARRAYS = {
    "memmap": _memmap,
    "hdf5 dataset": lambda path, x: import_module("h5py").File(
        _hdf5(path, x, chunks=(2,) * x.ndim).partition("::")[0]
    )["deep/x"],
    "zarr array": lambda path, x: import_module("zarr").open(str(_zarr(path, x)), mode="r"),
    "netcdf variable": lambda path, x: import_module("netCDF4").Dataset(_netcdf(path, x))["x"],
    "tensorstore": _tensorstore,
    "dask": lambda path, x: import_module("dask.array").from_array(x, chunks=2) + 0,
    "xarray": lambda path, x: import_module("xarray").DataArray(x),
    "tensor": lambda path, x: torch.from_numpy(x),
    "by function": lambda path, x: Source(x.shape, x.dtype, lambda box: x[box]),
    "tensor by function": lambda path, x: Source(
        x.shape, torch.from_numpy(x).dtype, lambda box: torch.from_numpy(x)[box]
    ),
    "by dlpack": lambda path, x: Source(x.shape, x.dtype, lambda box: SimpleDlpack(x[box].copy())),
}
# Functions of a folder and an array, each with its name.
OF = _FILES | _ARRAYS | {"tiff, pages": lambda path, x: _tiff(path, x, ome=True)}
for _name, _made in OF.items():
    _made.__name__ = _name
FILES, ARRAYS = [*_FILES.values()], [*_ARRAYS.values()]


def some(*names):
    """These formats."""
    return [OF[name] for name in names]


def whole(source):
    """All elements of a source, or of that of a path."""
    source = open_array(source)
    return read_box(source, [slice(0, n) for n in source.shape]).numpy()


def holds_in_a_fork(check):
    """Whether a check holds in a process that is forked off this one."""
    if (child := os.fork()) == 0:
        right = False
        try:
            right = check()
        finally:
            os._exit(0 if right else 1)
    return os.waitpid(child, 0)[1] == 0
