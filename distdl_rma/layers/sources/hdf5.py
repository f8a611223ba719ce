"""HDF5 files: the lock around their library, and links that stay within a file.

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
Whoever sends such a file could make a rank read any file of the user. So all three are refused, before the
library opens another file.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BufferedReader
from threading import RLock
from typing import Any

from distdl_rma.errors import DataError
from distdl_rma.layers.sources.remote import AHEAD_NBYTES, UrlFile, is_url, meet_receiver

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
        return h5py.File(BufferedReader(UrlFile(path), AHEAD_NBYTES), mode)
    return h5py.File(path, mode, locking="best-effort")


@contextmanager
def uncollected(path: Any) -> Iterator[None]:
    """Context, within the lock, in which no thread collects garbage while h5py reads a file of a server.

    h5py holds a lock of its own while another thread receives the bytes. That thread would wait for it, and
    so for ever, if it collected garbage that has objects of h5py.
    """
    if not is_url(str(path)):
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        # Behind a collection that this thread has begun.
        meet_receiver()
        yield
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
        if isinstance(link, h5py.ExternalLink):
            raise _refused(path, f"{name!r} leads into the file {link.filename!r}")
        parts = [*link.path.split("/"), *parts[1:]]
        if link.path.startswith("/"):
            found = found.file
    return None


def check_own(found: Any) -> None:
    """``DataError`` if a dataset has elements in other files or datasets."""
    path, name = found.file.filename, found.name
    if found.external:
        raise _refused(path, f"{name!r} has elements in the file {found.external[0][0]!r}")
    if found.is_virtual:
        # The library shows the fill value where a source is missing: a silently wrong number.
        raise _refused(path, f"{name!r} is virtual: it shows elements of other datasets")


def _refused(path: str, reason: str) -> DataError:
    return DataError(
        f"{path}: {reason}; elements are read from the dataset itself alone: pass the path of the file that"
        f" has them, or, if you trust all of these files, the dataset: shard(grid, h5py.File({path!r})[name])"
    )
