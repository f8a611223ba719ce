"""Open arrays in files, by the suffix of their path.

Every source has ``shape``, ``dtype``, ``chunks`` and slicing, and can be pickled. What stands behind it::

    .npy, .nii, contiguous HDF5 and TIFF       RawArray: bytes at offsets, no library, no open file
    other HDF5, .nc, .zarr, other TIFF, URLs,
    scaled .nii                                FileSource: the library's array, opened again in each process
    an array that the user has opened          itself

A file of a stranger is input: a header is held against the size of its file before anything is allocated,
what would run code or read other files is refused, and so is what has no random access, with the command that
makes a file which has. A rank that would read a whole stream for its block would do so on every rank.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from distdl_rma.errors import ArgumentError, DataError, UnsupportedError, told
from distdl_rma.layers.sources.chunks import chunks_of
from distdl_rma.layers.sources.dimensions import Dimensions, known, of_hdf5, of_nifti, of_tiff
from distdl_rma.layers.sources.hdf5 import behind_links, check_own, hdf5_file, hdf5_lock, uncollected
from distdl_rma.layers.sources.packed import SCALES, check_stored
from distdl_rma.layers.sources.raw import RawArray
from distdl_rma.layers.sources.reading import text_of, torch_dtype
from distdl_rma.layers.sources.remote import check_found, is_url, needed, opened, version_of
from distdl_rma.layers.sources.zarr_nodes import chosen, store_of, zarr_array

# Streams that are read from their beginning only, and archives; what makes a file that is read anywhere.
_STREAMS = {
    ".npz": "numpy.save('x.npy', numpy.load('{}')['name'])",
    ".gz": "gunzip --keep {}",
    ".mgz": "mri_convert {} x.nii",
    ".bz2": "bunzip2 --keep {}",
    ".xz": "unxz --keep {}",
    ".zst": "unzstd {}",
}


# Numpy itself refuses longer headers, but reads them before: up to 4 GiB, as the header says.
_NPY_VERSIONS, _NPY_HEADER_NBYTES = ((1, 0), (2, 0), (3, 0)), 10_000
# What a header of NIfTI 2 begins with: how many bytes it has, in one byte order or the other.
_NIFTI_2 = (b"\x1c\x02\0\0", b"\0\0\x02\x1c")


class Format(NamedTuple):
    """How the arrays in one kind of file are opened."""

    opened: Callable[[str, str | None], tuple[Any, Dimensions]]
    # Whether calls of its library wait for each other.
    locked: bool = False
    # Whether an array is a folder.
    folder: bool = False
    # Whether its library returns elements of other types than that of the array, which is of what is stored.
    unpacks: bool = False


def open_array(source: str | os.PathLike[str] | Any, name: str | None = None) -> Any:
    """A source for :func:`shard`: an array in a file, or an array as it is; local.

    Nothing is read but the header. Each process opens the file for itself, also after a fork, and what is
    returned can be pickled. Of a URL, boxes are read by range requests; a server of http that sends nothing
    for 30 seconds is an error.

    Parameters
    ----------
    source
        A path that ends in ``.npy``, ``.h5``, ``.hdf5``, ``.zarr`` (2 and 3), ``.zarr.zip``, ``.ozx``,
        ``.nc``, ``.tif``, ``.tiff`` or ``.nii``; or a URL that ends so, of any protocol of ``fsspec``, but
        for ``.nc``; or an object with ``shape`` that is sliced like an array.
    name
        Of the array in the file, if it has several. A path may have it behind ``::``. Of an image of OME-Zarr
        the full resolution needs none, other levels are ``1`` and so on, and its labels ``labels/nuclei``.

    Returns
    -------
    object
        With ``shape``, ``dtype``, ``chunks`` (None if boxes are read alone) and slicing. Packed elements of
        NetCDF and NIfTI are unpacked by their libraries, and missing floats are NaN.

        Of a path it also has ``axes``, the names of dimensions such as ``("c", "z", "y", "x")``; ``spacing``
        and ``origin``, a number for each, so that element ``i`` lies at ``origin + spacing * i``; and
        ``units``, such as ``"micrometer"`` or None for each. Each of the four is None where the file does not
        say it, and a ``spacing`` is 1.0 for dimensions that have none. OME-Zarr and NIfTI say all of it,
        OME-TIFF and ImageJ all but the origin, Zarr, HDF5 and NetCDF the names; and the others if
        :func:`create_array` wrote them.

    Raises
    ------
    ArgumentError
        If the suffix is unknown, or the name is missing or not in the file.
    DataError
        If the file is missing, truncated or may not be read, if its header does not fit it, if it would run
        code or has elements in other files, if elements of HDF5 or Zarr are packed, or if the package that
        reads it is not installed. If a server fails, is silent, or answers by whole files.
    ShapeError
        If torch does not have such elements.
    UnsupportedError
        If the file is a stream that has no random access; the message has a command that converts it.

    Examples
    --------
    >>> np.save("scan.npy", np.arange(12.0).reshape(6, 2))
    >>> scan = open_array("scan.npy")
    >>> scan.shape, scan[1:3, :1]
    ((6, 2), array([[2.],
           [4.]]))
    >>> shard((2, 1), scan).to_local().shape  # each rank reads its rows only
    torch.Size([3, 2])
    """
    if not isinstance(source, (str, os.PathLike)):
        if name is not None or not hasattr(source, "shape") or not hasattr(source, "__getitem__"):
            raise ArgumentError(
                "a source is a path, with a name if its file has several arrays, or an object with a shape"
                f" that is sliced like an array, got a {type(source).__name__!r}"
            )
        return source
    text = os.fspath(source)
    # The address of a server may have colons, between brackets.
    host = text.find("]") + 1 if "://[" in text else 0
    path, _, inner = text[host:].partition("::")
    path = text[:host] + path
    if path.startswith("file://"):
        path = url2pathname(urlsplit(path).path)
    if inner and name is not None:
        raise ArgumentError(f"{source}: the array is named in the path and by name={name!r}; use one of both")
    name, suffix = inner or name, _suffix(path)
    if suffix in _STREAMS:
        raise UnsupportedError(
            f"{path}: a compressed stream or archive has no random access, every rank would read all of it;"
            f" convert it once: {_STREAMS[suffix].format(path)}"
        )
    if suffix not in _FORMATS:
        raise ArgumentError(
            f"{path}: no suffix that says how it is read, as {', '.join(_FORMATS)} do; for raw data pass"
            " numpy.memmap(path, dtype, 'r', shape=shape), for other files what their library opens, or"
            " a Source(shape, dtype, read)"
        )
    advice = f"is it a whole {suffix} file that this user may read?"
    with told(DataError, f"{path}: cannot be opened", advice):
        check_found(store_of(path)[0])
        found, where = _FORMATS[suffix].opened(path, name)
        if isinstance(found, RawArray) and not is_url(path):
            return replace(found, **where._asdict())
        return FileSource(path, name, _FORMATS[suffix], found, where)


def _suffix(path: str) -> str:
    # Of the file; of an array in a group of Zarr, by its path, that of the store.
    path = urlsplit(path).path if is_url(path) else path
    suffix = PurePosixPath(path).suffix.lower()
    return suffix if suffix in _FORMATS else PurePosixPath(store_of(path)[0]).suffix.lower()


class FileSource:
    """An array in a file that a library reads. Each process opens it for itself; it can be pickled.

    ``shape``, ``dtype``, ``chunks`` and what is known of its dimensions are those that it had when it was
    opened. The library's array belongs
    to the process ``_pid``: another one, a fork or what has unpickled it, opens the file again before it
    reads.
    """

    def __init__(self, path: str, name: str | None, kind: Format, array: Any, where: Dimensions) -> None:
        self.path, self.name = path, name
        self._kind, self._array, self._pid = kind, array, os.getpid()
        self.shape: tuple[int, ...] = tuple(map(int, array.shape))
        self.dtype: Any = array.dtype
        # Before anything is read: a codec for objects may run code.
        torch_dtype(self, self.dtype)
        if kind.unpacks:
            with hdf5_lock(kind.locked):
                self.dtype = array[(slice(0, 0),) * len(self.shape)].dtype
        self.chunks = chunks_of(array)
        self.axes, self.spacing, self.origin, self.units = where
        # A Zarr array is many files, of which none has a version of all.
        self.version = version_of(path) if is_url(path) and not kind.folder else None

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        """The box, as the library returns it; ``DataError`` if it fails, or a server's file has changed."""
        advice = "if the file is damaged, copy or write it again"
        reading = told(DataError, f"{self}: reading {text_of(box)} failed", advice)
        with hdf5_lock(self._kind.locked), uncollected(self.path if self._kind.locked else ""), reading:
            # A handle that a fork inherits would return wrong data.
            if self._pid != os.getpid():
                self._array, self._pid = self._kind.opened(self.path, self.name)[0], os.getpid()
            found = self._array[box]
        if self.version is not None and version_of(self.path) != self.version:
            raise DataError(f"{self}: has changed on the server since it was opened: open it again")
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # With the version of the first opening.
        return open_array, (self.path, self.name), {"version": self.version}

    def __repr__(self) -> str:
        return self.path if self.name is None else f"{self.path}::{self.name}"


def npy(path: str, name: str | None) -> tuple[RawArray, Dimensions]:
    """The array of a file of numpy.

    Its header is read by numpy, but in the order that keeps it harmless: version and length first.
    """
    if name is not None:
        raise ArgumentError(f"{path} has one array, without a name, got {name!r}")
    with opened(path) as file:
        version = np.lib.format.read_magic(file)
        width = 2 if version == (1, 0) else 4
        nbytes = int.from_bytes(file.read(width), "little")
        if version not in _NPY_VERSIONS or nbytes > _NPY_HEADER_NBYTES:
            raise DataError(
                f"{path}: version {version} of the format with a header of {nbytes} bytes; read are versions"
                f" {_NPY_VERSIONS} with headers of at most {_NPY_HEADER_NBYTES} bytes"
            )
        file.seek(-width, os.SEEK_CUR)
        header = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
        shape, fortran, dtype = getattr(np.lib.format, header)(file)
        return RawArray(path, dtype, shape, file.tell(), fortran).check_size(), Dimensions()


def hdf5(path: str, name: str | None) -> tuple[Any, Dimensions]:
    """A dataset of h5py; a :class:`RawArray` if it is contiguous and needs no conversion.

    Contiguous datasets are the usual ones, and as raw arrays need neither the lock nor an open file: ranks
    and threads read them at the speed of the disk.
    """
    h5py = needed("h5py", "hdf5")
    with hdf5_lock(), uncollected(path):
        found = name and behind_links(h5py, path, name)
        if not isinstance(found, h5py.Dataset):
            file, names = hdf5_file(h5py, path), list[str]()
            file.visititems(lambda key, one: names.append(key) if isinstance(one, h5py.Dataset) else None)
            found = behind_links(h5py, path, chosen(path, names, name))
        check_own(found)
        if found.shape is None:
            raise DataError(f"{path}: the dataset {found.name!r} is null: it has a type, but no elements")
        check_stored(path, found, found.attrs)
        # Contiguous data that needs no conversion is read from the file itself.
        array, offset = found, found.id.get_offset()
        if offset is not None and found.id.get_type() == h5py.h5t.py_create(found.dtype, logical=True):
            array = RawArray(path, np.dtype(found.dtype.str), found.shape, offset).check_size()
        return array, of_hdf5(found)


def _netcdf(path: str, name: str | None) -> tuple[Any, Dimensions]:
    netcdf = needed("netCDF4", "netcdf")
    if is_url(path):
        raise UnsupportedError(
            f"{path}: NetCDF is read from disks, since its library may wait for a server for ever; download"
            " the file, or have it as Zarr"
        )
    with hdf5_lock():
        _check_netcdf(path)
        file = netcdf.Dataset(path)
        groups, names = [file], []
        for group in groups:
            groups += group.groups.values()
            inner = [one for one in group.variables if name or one not in group.dimensions]
            names += [f"{group.path}/{one}".strip("/") for one in inner]
        found = file[place := chosen(path, names, name)]
        if file.disk_format == "HDF5" and find_spec("h5py"):
            h5py, (home, _, last) = needed("h5py"), place.rpartition("/")
            # A variable that is called as a dimension, but is none of its coordinates, has another name.
            for each in (place, f"{home}/_nc4_non_coord_{last}"):
                if isinstance(lies := behind_links(h5py, path, each), h5py.Dataset):
                    check_own(lies)
        scale, offset = (np.asarray(getattr(found, each, np.nan)) for each in SCALES)
        if scale == 1 and offset == 0 and not np.can_cast(found.dtype, scale.dtype):
            raise DataError(
                f"{path}: netCDF4 would round elements of {found.dtype} to {scale.dtype}, the type of"
                f" scale_factor; pass the variable {place!r} after set_auto_scale(False)"
            )
        return found, known(len(found.shape), axes=found.dimensions)


def _check_netcdf(path: str) -> None:
    # The C library allocates what a header of a classic format says, and reads zeros where such a file was
    # cut off, which no later check could tell from data. Scipy maps all variables, and so fails at both.
    with Path(path).open("rb") as file:
        if file.read(3) != b"CDF":
            return
    what = f"{path}: its NetCDF header does not fit the file, which is truncated, or scipy does not know it"
    advice = f"copy or write it again; a whole one is converted by: nccopy -k nc4 {path} new.nc"
    with told(DataError, what, advice), needed("scipy.io", "netcdf").netcdf_file(path, mmap=True):
        pass


def _tiff(path: str, name: str | None) -> tuple[Any, Dimensions]:
    tifffile = needed("tifffile", "tiff")
    file = tifffile.TiffFile(opened(path) if is_url(path) else path)
    with ExitStack() as stack:
        stack.push(file)
        _check_pages(path, file)
        number = int(chosen(path, map(str, range(len(file.series))), name))
        series, where = file.series[number], of_tiff(tifffile, file, number)
        if series.dataoffset is not None:
            dtype = series.dtype.newbyteorder(file.byteorder)
            return RawArray(path, dtype, tuple(series.shape), series.dataoffset).check_size(), where
        found = needed("zarr", "tiff").open(series.aszarr(level=0), mode="r")
        # It reads from the open file, which is closed with it.
        weakref.finalize(found, stack.pop_all().close)
        return found, where


def _check_pages(path: str, file: Any) -> None:
    # Tifffile leaves out the pages that lie behind the end of a truncated file: a volume with fewer slices,
    # and no error. The last page names the place of the next one, which must be none.
    file.filehandle.seek(file.pages.next_page_offset)
    if file.filehandle.read(file.tiff.offsetsize) != bytes(file.tiff.offsetsize):
        raise DataError(
            f"{path}: ends before its last page, of {len(file.pages)} or more; the file is truncated: copy or"
            " write it again"
        )


def _nifti(path: str, name: str | None) -> tuple[Any, Dimensions]:
    if name is not None:
        raise ArgumentError(f"{path} has one array, without a name, got {name!r}")
    nibabel = needed("nibabel")
    if is_url(path):
        file = opened(path)
        kind = nibabel.Nifti2Image if file.read(4) in _NIFTI_2 else nibabel.Nifti1Image
        file.seek(0)
        image = kind.from_stream(file)
    else:
        image = nibabel.load(path)
    found = image.dataobj
    array = RawArray(path, found.dtype, found.shape, found.offset, fortran=found.order == "F").check_size()
    scaled = (found.slope, found.inter) != (1, 0)
    return found if scaled else array, of_nifti(image)


_HDF5, _TIFF = Format(hdf5, locked=True), Format(_tiff)
_NETCDF = Format(_netcdf, locked=True, unpacks=True)
_FORMATS = {
    ".npy": Format(npy),
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".he5": _HDF5,
    ".nc": _NETCDF,
    ".nc4": _NETCDF,
    ".zarr": Format(zarr_array, folder=True),
    ".zip": Format(zarr_array),
    ".ozx": Format(zarr_array),
    ".tif": _TIFF,
    ".tiff": _TIFF,
    ".nii": Format(_nifti, unpacks=True),
}
