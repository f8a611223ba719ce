"""Files with one array, written by the libraries of their formats, and arrays of other libraries."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from distdl_rma import Source


def npy(path, x):
    np.save(path / "x.npy", x)
    return path / "x.npy"


def npy_by_columns(path, x):
    np.save(path / "x.npy", np.asfortranarray(x))
    return path / "x.npy"


def npy_big_endian(path, x):
    np.save(path / "x.npy", x.astype(x.dtype.newbyteorder(">")))
    return path / "x.npy"


def memmap(path, x):
    x.tofile(path / "x")
    return np.memmap(path / "x", x.dtype, "r", shape=x.shape)


def _hdf5(path, x, **options):
    import h5py

    with h5py.File(path / "x.h5", "w", userblock_size=512) as file:
        file.create_dataset("deep/x", data=x, **options)
        file["y"] = np.zeros(3)
    return f"{path / 'x.h5'}::deep/x"


def hdf5(path, x):
    return _hdf5(path, x)


def hdf5_big_endian(path, x):
    return _hdf5(path, x, dtype=x.dtype.newbyteorder(">"))


def hdf5_chunked(path, x):
    return _hdf5(path, x, chunks=(2,) * x.ndim, compression="gzip")


def hdf5_dataset(path, x):
    import h5py

    _hdf5(path, x, chunks=(2,) * x.ndim)
    return h5py.File(path / "x.h5")["deep/x"]


def _zarr(path, x, **options):
    import zarr

    array = zarr.create_array(
        str(path / "x.zarr"), shape=x.shape, dtype=x.dtype, chunks=(2,) * x.ndim, **options
    )
    array[:] = x
    return path / "x.zarr"


def zarr2(path, x):
    return _zarr(path, x, zarr_format=2)


def zarr3(path, x):
    return _zarr(path, x)


def zarr_sharded(path, x):
    return _zarr(path, x, shards=(4,) * x.ndim)


def zarr_group(path, x):
    import zarr

    group = zarr.open_group(str(path / "x.zarr"), mode="w")
    for name in ("scale/0", "scale/1"):
        group.create_array(name, data=x, chunks=(2,) * x.ndim)
    return f"{path / 'x.zarr'}::scale/0"


def zarr_array(path, x):
    import zarr

    return zarr.open(str(_zarr(path, x)), mode="r")


def _netcdf(path, x, version="NETCDF4", **options):
    import netCDF4

    with netCDF4.Dataset(path / "x.nc", "w", format=version) as file:
        names = [f"d{d}" for d in range(x.ndim)]
        for name, extent in zip(names, x.shape, strict=True):
            file.createDimension(name, extent)
        file.createVariable("x", x.dtype, names, **options)[...] = x
        file.createVariable("d0", "f4", ["d0"])[...] = 0
    return path / "x.nc"


def netcdf(path, x):
    return _netcdf(path, x)


def netcdf_chunked(path, x):
    return _netcdf(path, x, zlib=True, chunksizes=(2,) * x.ndim)


def netcdf_classic(path, x):
    return _netcdf(path, x, "NETCDF3_CLASSIC")


def netcdf_variable(path, x):
    import netCDF4

    return netCDF4.Dataset(_netcdf(path, x))["x"]


def tiff(path, x):
    import tifffile

    tifffile.imwrite(path / "x.tif", x, photometric="minisblack", byteorder=">")
    return path / "x.tif"


def tiff_tiled(path, x):
    import tifffile

    tifffile.imwrite(path / "x.tif", x, photometric="minisblack", tile=(16, 16), compression="zlib")
    return path / "x.tif"


def tiff_pages(path, x):
    import tifffile

    with tifffile.TiffWriter(path / "x.tif", ome=True) as file:
        file.write(x, photometric="minisblack")
    return path / "x.tif"


def nifti(path, x):
    import nibabel

    nibabel.save(nibabel.Nifti1Image(x, np.eye(4)), path / "x.nii")
    return path / "x.nii"


def tensorstore(path, x):
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(_zarr(path, x, zarr_format=2))}}
    return tensorstore.open(spec, read=True).result()


def dask(path, x):
    import dask.array

    return dask.array.from_array(x, chunks=2) + 0


def xarray(path, x):
    import xarray

    return xarray.DataArray(x)


def tensor(path, x):
    return torch.from_numpy(x)


def by_function(path, x):
    return Source(x.shape, x.dtype, lambda box: x[box])


def tensor_by_function(path, x):
    return Source(x.shape, torch.from_numpy(x).dtype, lambda box: torch.from_numpy(x)[box])


def by_dlpack(path, x):
    return Source(x.shape, x.dtype, lambda box: SimpleDlpack(x[box].copy()))


class SimpleDlpack(SimpleNamespace):
    """What shows itself by DLPack only, as arrays of other libraries do."""

    def __init__(self, x):
        super().__init__(shape=x.shape, x=x)

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


# Those of images and volumes have at least two dimensions.
FLAT = [tiff, tiff_tiled]
FILES = [
    npy, npy_by_columns, npy_big_endian, hdf5, hdf5_big_endian, hdf5_chunked, zarr2, zarr3, zarr_sharded,
    zarr_group, netcdf, netcdf_chunked, netcdf_classic, tiff, tiff_tiled, nifti,
]  # fmt: skip
ARRAYS = [
    memmap, hdf5_dataset, zarr_array, netcdf_variable, tensorstore, dask, xarray, tensor, by_function,
    tensor_by_function, by_dlpack,
]  # fmt: skip
