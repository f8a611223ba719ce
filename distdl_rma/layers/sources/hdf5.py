"""HDF5 files: the lock around their library, and links that stay within the folder of a file.

All calls of HDF5 in a process wait for each other, those of libraries above it too::

    h5py   h5netcdf   netCDF4   xarray, dask: whatever they read behind a slicing
      |       |          |        |
      +-------+----+-----+--------+
                   |
        the lock of this process
                   |
        libhdf5, libnetcdf: fail in threads

h5py has a lock of its own, but netCDF4 does not take it. A loader reads in a thread while the loop of the
user reads too, so that one lock is around both.

A file of HDF5 may show elements of other files: by external links, external storage and virtual datasets.
Whoever sends such a file could make a rank read any file of the user. So elements come from the folder of the
file alone, and the library is asked only after this is checked.
"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader
from pathlib import Path
from threading import RLock
from typing import Any

from distdl_rma.errors import DataError
from distdl_rma.layers.sources.remote import AHEAD_NBYTES, UrlFile, is_url

# Libraries that read HDF5 or NetCDF, or may do so behind a slicing. Their C libraries fail in threads.
LOCKED = frozenset({"h5py", "h5netcdf", "netCDF4", "xarray", "dask"})
_LOCKS: dict[int, AbstractContextManager[Any]] = {}
# Links that lead to other links, at most.
_LINKS = 64


def hdf5_lock(needed: bool = True) -> AbstractContextManager[Any]:
    """The lock of this process around all calls of HDF5 and NetCDF; none if it is not ``needed``.

    By the process: a fork would inherit the lock of a thread that it does not have, held for ever.
    """
    return _LOCKS.setdefault(os.getpid(), RLock()) if needed else nullcontext()


def hdf5_file(h5py: Any, path: Any, mode: str = "r") -> Any:
    """A file of h5py; without locks of the file system where this has none, such as many a network's."""
    if is_url(str(path)):
        return h5py.File(BufferedReader(_UncollectedFile(path), AHEAD_NBYTES), mode)
    return h5py.File(path, mode, locking="best-effort")


class _UncollectedFile(UrlFile):
    """A file of a server for h5py, whose lock this thread holds while another one receives the bytes.

    That one would wait for the lock, and so for ever, if it collected garbage that has objects of h5py.
    """

    def readinto(self, memory: Any) -> int:
        """As of a file; nobody else disables collection here, since only one thread is within the lock."""
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().readinto(memory)
        finally:
            if collects:
                gc.enable()


def behind_links(h5py: Any, path: str, name: str) -> Any:
    """What is called so in a file, also behind links; None if nothing is.

    Link by link, in place of ``file[name]``: the library would follow an external link to any file.
    """
    found, parts = hdf5_file(h5py, path), name.split("/")
    for _ in range(_LINKS):
        parts = [part for part in parts if part not in ("", ".")]
        if not parts or not isinstance(found, h5py.Group):
            return None if parts else found
        link = found.get(parts[0], getlink=True)
        if link is None:
            return None
        if isinstance(link, h5py.HardLink):
            found, parts = found[parts[0]], parts[1:]
            continue
        parts = [*link.path.split("/"), *parts[1:]]
        if isinstance(link, h5py.ExternalLink):
            path = _beside(path, link.filename, Path(path).parent, Path(path).resolve().parent)
            found = hdf5_file(h5py, path)
        elif link.path.startswith("/"):
            found = found.file
    return None


def check_near(h5py: Any, found: Any, seen: tuple[Any, ...] = ()) -> None:
    """``DataError`` if a dataset has elements in files elsewhere, or lacks some that it shows as filled.

    The library shows the fill value where a source of a virtual dataset is missing: a silently wrong number.
    """
    path = found.file.filename
    for name, *_ in found.external or ():
        # The library looks for these from where the process is.
        _beside(path, name, Path.cwd())
    sources = found.virtual_sources() if found.is_virtual else ()
    for other, name in dict.fromkeys((each.file_name, each.dset_name) for each in sources):
        place = path if other == "." else _beside(path, other, Path(path).parent)
        source = behind_links(h5py, place, name)
        if not isinstance(source, h5py.Dataset) or source in seen:
            raise DataError(f"{path}: shows elements of a dataset {name!r} in {place}, where none is")
        check_near(h5py, source, (*seen, source))


def _beside(path: str, other: str, *homes: Path) -> str:
    # The path of a file that a file names, in the first of the folders where HDF5 looks for it. A file of a
    # server has no folder.
    near = Path(path).is_file() and not Path(other).is_absolute()
    for place in [home / other for home in homes] if near else ():
        if place.is_file() and place.resolve().is_relative_to(Path(path).resolve().parent):
            return str(place)
    raise DataError(
        f"{path}: has elements in the file {other!r}, which must be within the folder of {path}, under a"
        f" relative path; if you trust both, pass the dataset: shard(grid, h5py.File({path!r})[name])"
    )
