"""Open arrays in files, by the suffix of their path."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from importlib import import_module
from math import prod
from pathlib import Path
from struct import unpack
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from distdl_rma.errors import ArgumentError, DataError, DistdlError, UnsupportedError
from distdl_rma.sources.chunks import chunks_of
from distdl_rma.sources.raw import RawArray
from distdl_rma.sources.reading import hdf5_lock, text_of

# Streams that can be read from their beginning only, and what makes a file of them that is read anywhere.
_STREAMS = {
    ".npz": "numpy.save('x.npy', numpy.load('{}')['name'])",
    ".zip": "unzip {}",
    ".gz": "gunzip --keep {}",
    ".mgz": "mri_convert {} x.nii",
    ".bz2": "bunzip2 --keep {}",
    ".xz": "unxz --keep {}",
    ".zst": "unzstd {}",
}


class Format(NamedTuple):
    """How the arrays in one kind of file are opened."""

    opened: Callable[[str, str | None], Any]
    # Whether calls of its library wait for each other.
    locked: bool = False
    # Whether its library scales elements, so that they are of another type than those in the file.
    scaled: bool = False


def open_array(source: str | os.PathLike[str] | Any, name: str | None = None) -> Any:
    """A source for :func:`shard`: an array in a file, or an array as it is; local.

    Nothing is read but the header. Each process opens the file for itself, also after a fork, and what is
    returned can be pickled.

    Parameters
    ----------
    source
        A path that ends in ``.npy``, ``.h5``, ``.hdf5``, ``.zarr`` (2 and 3), ``.nc``, ``.tif``, ``.tiff`` or
        ``.nii``; or an object with ``shape`` that is sliced like an array.
    name
        Of the array in the file, if it has several. A path may have it behind ``::``.

    Returns
    -------
    object
        With ``shape``, ``dtype``, ``chunks`` (None if boxes are read alone) and slicing.

    Raises
    ------
    ArgumentError
        If the suffix is unknown, or the name is missing or not in the file.
    DataError
        If the file is missing, truncated or may not be read, or the package that reads it is not installed.
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
    path, _, inner = os.fspath(source).partition("::")
    if inner and name is not None:
        raise ArgumentError(f"{source}: the array is named in the path and by name={name!r}; use one of both")
    name, suffix = inner or name, Path(path).suffix.lower()
    if suffix in _STREAMS:
        raise UnsupportedError(
            f"{path}: a compressed stream has no random access, every rank would read all of it; convert it"
            f" once: {_STREAMS[suffix].format(path)}"
        )
    if suffix not in _FORMATS:
        raise ArgumentError(
            f"{path}: no suffix that says how it is read, as {', '.join(_FORMATS)} do; for raw data pass"
            " numpy.memmap(path, dtype, 'r', shape=shape), for other files what their library opens, or"
            " a Source(shape, dtype, read)"
        )
    try:
        check_found(path)
        opened = _FORMATS[suffix].opened(path, name)
    except DistdlError:
        raise
    except Exception as error:
        raise DataError(
            f"{path}: cannot be opened: {type(error).__name__}: {error}; is it a whole {suffix} file that"
            " this user may read?"
        ) from error
    return opened if isinstance(opened, RawArray) else FileSource(path, name, _FORMATS[suffix], opened)


def check_found(path: str) -> None:
    """``DataError`` if this process does not see a file."""
    if "://" not in path and not Path(path).exists():
        raise DataError(
            f"{path}: not found on {platform.node()} from {Path.cwd()}; ranks on several machines need a path"
            " that leads all of them to the file"
        )


class FileSource:
    """An array in a file that a library reads. Each process opens it for itself; it can be pickled.

    ``shape``, ``dtype`` and ``chunks`` are those that it had when it was opened.
    """

    def __init__(self, path: str, name: str | None, kind: Format, array: Any) -> None:
        self.path, self.name = path, name
        self._kind, self._array, self._pid = kind, array, os.getpid()
        self.shape: tuple[int, ...] = tuple(map(int, array.shape))
        self.dtype: Any = array.dtype
        if kind.scaled and 0 not in self.shape:
            self.dtype = self[(slice(0, 1),) * len(self.shape)].dtype
        self.chunks = chunks_of(array)

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        """The box, as the library returns it; ``DataError`` if it fails."""
        with hdf5_lock() if self._kind.locked else nullcontext():
            try:
                # A handle that a fork inherits would return wrong data.
                if self._pid != os.getpid():
                    self._array, self._pid = self._kind.opened(self.path, self.name), os.getpid()
                return self._array[box]
            except Exception as error:
                raise DataError(
                    f"{self}: reading {text_of(box)} failed: {type(error).__name__}: {error}; if the file"
                    " is damaged, copy or write it again"
                ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return open_array, (self.path, self.name)

    def __repr__(self) -> str:
        return self.path if self.name is None else f"{self.path}::{self.name}"


def needed(package: str, extra: str = "") -> Any:
    """An optional package; ``DataError`` with the command that installs it if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        command = f"pip install 'distdl_rma[{extra}]'" if extra else f"pip install {package}"
        raise DataError(f"this file is read by {package}, which is not installed: {command}") from error


def _chosen(path: str, names: Iterable[str], name: str | None) -> str:
    # The name of one array in a file that has these.
    known = sorted(names)
    if name is None and len(known) == 1:
        return known[0]
    if name is None or name.strip("/") not in known:
        wrong = "which one?" if name is None else f"none is called {name!r}:"
        raise ArgumentError(
            f"{path} has {len(known)} arrays, {wrong} '{path}::NAME' with NAME one of {known}"
        )
    return name.strip("/")


def npy(path: str, name: str | None) -> RawArray:
    """The array of a file of numpy."""
    if name is not None:
        raise ArgumentError(f"{path} has one array, without a name, got {name!r}")
    with Path(path).open("rb") as file:
        version = np.lib.format.read_magic(file)
        header = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
        shape, fortran, dtype = getattr(np.lib.format, header)(file)
        return RawArray(path, dtype, shape, file.tell(), fortran).check_size()


def hdf5(path: str, name: str | None) -> Any:
    """A dataset of h5py; a :class:`RawArray` if it is contiguous and needs no conversion."""
    h5py = needed("h5py", "hdf5")
    with hdf5_lock():
        file, names = h5py.File(path, "r", locking="best-effort"), []
        file.visititems(lambda key, one: names.append(key) if isinstance(one, h5py.Dataset) else None)
        found = file[_chosen(path, names, name)]
        # Contiguous data that needs no conversion is read from the file itself.
        offset = found.id.get_offset()
        if offset is None or found.id.get_type() != h5py.h5t.py_create(found.dtype, logical=True):
            return found
        return RawArray(path, np.dtype(found.dtype.str), found.shape, offset).check_size()


def _netcdf(path: str, name: str | None) -> Any:
    netcdf = needed("netCDF4", "netcdf")
    with hdf5_lock():
        file = netcdf.Dataset(path)
        if Path(path).is_file():
            check_netcdf_size(path)
        groups, names = [file], []
        for group in groups:
            groups += group.groups.values()
            inner = [one for one in group.variables if name or one not in group.dimensions]
            names += [f"{group.path}/{one}".strip("/") for one in inner]
        found = file[_chosen(path, names, name)]
        found.set_always_mask(False)
        return found


def _zarr(path: str, name: str | None) -> Any:
    zarr = needed("zarr", "zarr")
    found = zarr.open(path, mode="r")
    if isinstance(found, zarr.Array):
        return found if name is None else _chosen(path, (), name)
    names = [key for key, one in found.members(max_depth=None) if isinstance(one, zarr.Array)]
    return found[_chosen(path, names, name)]


def _tiff(path: str, name: str | None) -> Any:
    file = needed("tifffile", "tiff").TiffFile(path)
    with ExitStack() as stack:
        stack.push(file)
        _check_pages(path, file)
        series = file.series[int(_chosen(path, map(str, range(len(file.series))), name))]
        if series.dataoffset is not None:
            dtype = series.dtype.newbyteorder(file.byteorder)
            return RawArray(path, dtype, tuple(series.shape), series.dataoffset).check_size()
        found = needed("zarr", "tiff").open(series.aszarr(level=0), mode="r")
        # It reads from the open file, which is closed with it.
        weakref.finalize(found, stack.pop_all().close)
        return found


def _check_pages(path: str, file: Any) -> None:
    # Tifffile leaves out the pages that lie behind the end of a truncated file.
    kind, handle = file.tiff, file.filehandle
    handle.seek(file.pages[-1].offset)
    (tags,) = unpack(kind.tagnoformat, handle.read(kind.tagnosize))
    handle.seek(tags * kind.tagsize, os.SEEK_CUR)
    if handle.read(kind.offsetsize) != bytes(kind.offsetsize):
        raise DataError(
            f"{path}: ends before its last page, of {len(file.pages)} or more; the file is truncated: copy or"
            " write it again"
        )


def _nifti(path: str, name: str | None) -> Any:
    if name is not None:
        raise ArgumentError(f"{path} has one array, without a name, got {name!r}")
    return needed("nibabel").load(path).dataobj


_HDF5, _NETCDF, _TIFF = Format(hdf5, locked=True), Format(_netcdf, True, True), Format(_tiff)
_FORMATS = {
    ".npy": Format(npy),
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".he5": _HDF5,
    ".nc": _NETCDF,
    ".nc4": _NETCDF,
    ".zarr": Format(_zarr),
    ".tif": _TIFF,
    ".tiff": _TIFF,
    ".nii": Format(_nifti, scaled=True),
}


# Of the classic formats of NetCDF: bytes of an element, by the number of its type.
_NBYTES = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)
_PADDED = 4
_OFFSET_64, _DATA_64 = 2, 5


def check_netcdf_size(path: str) -> None:
    """``DataError`` if a file of a classic format ends before its elements; nothing for files of HDF5.

    The library reads zeros behind the end of a truncated file.
    """
    with Path(path).open("rb") as file:
        if file.read(3) != b"CDF":
            return
        wanted = max(_ends(file, file.read(1)[0]), default=0)
    if (found := Path(path).stat().st_size) < wanted:
        raise DataError(
            f"{path}: has {found} bytes, but by its header the elements end at byte {wanted}; the file is"
            " truncated: copy or write it again"
        )


def _ends(file: BinaryIO, version: int) -> Iterator[int]:
    # Where the elements of each variable end. The format of 64-bit data has counts of 8 bytes.
    width = 8 if version == _DATA_64 else 4

    def number(nbytes: int = width) -> int:
        return int.from_bytes(file.read(nbytes), "big")

    def skip(nbytes: int) -> None:
        file.seek(nbytes + -nbytes % _PADDED, 1)

    def entries() -> Iterator[None]:
        # Of a list, each of which begins with its name.
        file.seek(_PADDED, 1)
        for _ in range(number()):
            skip(number())
            yield

    def skip_attributes() -> None:
        for _ in entries():
            skip(_NBYTES[number(4)] * number())

    records = number()
    extents = [number() for _ in entries()]
    skip_attributes()
    fixed, by_record = list[tuple[int, int]](), list[tuple[int, int]]()
    for _ in entries():
        shape = [extents[number()] for _ in range(number())]
        skip_attributes()
        size = _NBYTES[number(4)]
        number()
        begin = number(4 if version < _OFFSET_64 else 8)
        # The extent of records is stored as 0.
        recorded = 0 in shape[:1]
        (by_record if recorded else fixed).append((begin, prod(shape[recorded:]) * size))
    yield from (begin + nbytes for begin, nbytes in fixed)
    # All bits are set where a stream has left the number open. Records of one variable alone are not padded.
    if 0 < records < (1 << 8 * width) - 1:
        record = sum(n + (-n % _PADDED if len(by_record) > 1 else 0) for _, n in by_record)
        yield from (begin + (records - 1) * record + nbytes for begin, nbytes in by_record)
