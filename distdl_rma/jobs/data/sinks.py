"""Write split tensors into files and other arrays: every rank its block, never two ranks one chunk.

A chunk is written as a whole: two ranks that each have a part of it would read it, change their part, and
write it back over the other's. So blocks are first redistributed to end where chunks end. Ten rows on two
ranks, in a sink with chunks of four rows::

    chunks     0 1 2 3|4 5 6 7|8 9
    blocks     0 1 2 3 4|5 6 7 8 9       both ranks would write the chunk of rows 4 to 7
    aligned    0 1 2 3|4 5 6 7 8 9       the end of rank 0's block moves to the nearest end of a chunk

A file is made under another name, of its whole size, and gets its own when all bytes are on the disk::

    y.h5.part    enter    the first rank creates it, and all ranks open it
                 write    each rank writes boxes: of HDF5 at their offsets, without its library
    y.h5         leave    all ranks flush; then the first rank renames it

So whoever sees ``y.h5`` sees all of it, and a disk that is too small is an error before anything is computed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from math import prod
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.errors import ArgumentError, DataError, ProtocolError, ShapeError, UnsupportedError, told
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Listed, Split, lengths_of
from distdl_rma.layers.dtypes import NUMPY, as_numbers
from distdl_rma.layers.sources.chunks import chunks_of
from distdl_rma.layers.sources.dimensions import Dimensions, as_attributes, as_image, fitting, of_image
from distdl_rma.layers.sources.hdf5 import hdf5_file, hdf5_lock
from distdl_rma.layers.sources.opening import hdf5, npy
from distdl_rma.layers.sources.raw import RawArray, rename_synced, sync
from distdl_rma.layers.sources.reading import Slices, in_domain, label, library_of, placed
from distdl_rma.layers.sources.remote import check_found, is_url, needed
from distdl_rma.layers.split.layout import normal
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.segments.consensus import together
from distdl_rma.segments.machine import Machine

# Bytes of a chunk that this library chooses, at most: readers of other boxes fetch chunks as a whole.
_CHUNK_NBYTES = 16 << 20
# Bytes of an HDF5 file beside the elements, at most.
_HDF5_NBYTES = 1 << 16
# How long the chunks of a call that failed may take: Zarr writes them in a loop of events of its own.
_REST_SECONDS = 60.0
_ONE = "all ranks write one tensor to one sink"


def create_array(
    path: str | os.PathLike[str],
    shape: Sequence[int],
    dtype: Any = None,
    *,
    like: SplitTensor,
    chunks: Sequence[int] | None = None,
    axes: Sequence[str] | None = None,
    spacing: Sequence[float] | None = None,
    units: Sequence[str | None] | None = None,
    origin: Sequence[float] | None = None,
) -> ArraySink:
    """A new array in a file, for :func:`write_shards`; a context that all ranks of ``like`` enter and leave.

    Entering creates ``path.part`` with the whole size, and leaving renames it, after all bytes are on the
    disk: ``path`` is complete or not there. If the context ends by an error, ``path.part`` is removed.
    Both are collective and blocking; this call is local.

    Parameters
    ----------
    path
        Ends in ``.npy``, ``.h5``, ``.hdf5``, ``.zarr`` (format 3) or ``.ome.zarr`` (an image of OME-Zarr 0.5
        with one level, ``0``), on a disk that all ranks see. An array in HDF5 is called ``data``, or as the
        path says behind ``::``. Nothing may be there yet.
    shape
        Global shape of the array, of as many dimensions as ``like``. What nobody writes is zero.
    dtype
        Type of its elements, of numpy or torch; that of ``like`` if None.
    like
        A split tensor of the layout that will be written; its blocks decide about chunks.
    chunks
        Of Zarr; None for the blocks of ``like``, divided to at most 16 MiB.
    axes
        Names of the dimensions; None for none, in OME-Zarr for the last ones of ``tczyx``. These and the
        following are what :func:`open_array` returns of the file. ``.npy`` has no place for them.
    spacing, origin
        A number for each dimension: element ``i`` lies at ``origin + spacing * i``.
    units
        A unit for each dimension, such as ``"micrometer"``, or None.

    Raises
    ------
    ArgumentError
        If the suffix, the shape or the chunks do not fit. When the context begins, on all ranks: if axes,
        spacing, units or origin do not fit the array, or its format.
    UnsupportedError
        If numpy has no such elements, such as bfloat16.
    DataError
        When the context begins or ends, on all ranks: no space, no permission, or something is there already.

    Examples
    --------
    >>> y = shard({"H": -1}, torch.ones(1, 1, 6, 4))
    >>> with create_array("y.npy", (1, 1, 6, 4), like=y) as sink:
    ...     write_shards(sink, y)
    >>> open_array("y.npy").shape
    (1, 1, 6, 4)
    """
    if not isinstance(like, SplitTensor):
        raise ArgumentError(f"create_array: like= is a split tensor, got {label(like)}; shard() makes one")
    if not all(isinstance(n, Integral) for n in shape):
        raise ArgumentError(f"create_array: shape has an integer for each dimension, got {shape!r}")
    kind, layout = like.dtype if dtype is None else dtype, like.decomposition
    blocks = [max(lengths_of(split)) for split in layout.splits]
    if len(shape) != len(blocks) or min(shape, default=0) < 0:
        raise ArgumentError(
            f"create_array: shape {(*shape,)} must have the {len(blocks)} dimensions of like=, which is"
            f" {tuple(layout.shape)}"
        )
    owners: dict[str, Any] = {"machine": like.machine, "ranks": like.partition.ranks}
    given: dict[str, Any] = {"axes": axes, "spacing": spacing, "units": units, "origin": origin}
    return ArraySink(path, shape, kind, blocks, chunks=chunks, **owners, **given)


def _suffix(path: str) -> str:
    return ".ome.zarr" if path.lower().endswith(".ome.zarr") else Path(path).suffix.lower()


class ArraySink:
    """An array in a file that :func:`create_array` makes; ``sink[box] = array`` writes a box, locally.

    It is made by the ``ranks`` of a machine, or by one process. Chunks that are not given divide ``blocks``;
    ``given`` are axes, spacing, units and origin, as of :func:`create_array`.

    Between entering and leaving, each rank may write any box at any time; that no two of them write one chunk
    is for the caller to see to. Only the first rank creates, renames and, but for an error, removes. A rank
    whose context ends by an error removes the file without waiting for the others, which may be anywhere.

    ``shape``, ``dtype`` and ``chunks`` are those of the array, ``path`` is where it will be, and ``part``
    where it is until then.

    Examples
    --------
    >>> y = shard({"H": -1}, torch.ones(1, 1, 6, 4))
    >>> with create_array("y.npy", (1, 1, 6, 4), like=y) as sink:
    ...     sink[y.decomposition.slices()] = y.to_local().numpy()  # as write_shards(sink, y)
    >>> np.load("y.npy").sum()
    np.float32(24.0)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: Sequence[int],
        dtype: Any,
        blocks: Sequence[int],
        *,
        chunks: Sequence[int] | None = None,
        machine: Machine | None = None,
        ranks: Sequence[int] = (),
        **given: Any,
    ) -> None:
        place, _, name = os.fspath(path).partition("::")
        if is_url(place):
            raise ArgumentError(
                f"create_array: {path}: a result is written to a disk; copy it to the server then"
            )
        suffix, extents = _suffix(place), tuple(map(int, shape))
        if suffix not in _KINDS or (name and suffix not in (".h5", ".hdf5")):
            raise ArgumentError(
                f"create_array: {path}: writes {', '.join(_KINDS)}, with a name behind '::' for HDF5; for"
                " other files pass what their library opens to write_shards, or a Sink"
            )
        self.path: str = place
        self.name: str = name or "data"
        self.shape, self.dtype = extents, numpy_dtype(dtype)
        if chunks is not None:
            fits = len(chunks) == len(extents) and all(isinstance(n, Integral) for n in chunks)
            if not suffix.endswith(".zarr") or not fits or min(chunks, default=1) < 1:
                raise ArgumentError(
                    f"create_array: {path}: chunks= are of Zarr, one extent above 0 for each dimension of"
                    f" {extents}, got {chunks}; .npy and HDF5 are written contiguously"
                )
        elif suffix.endswith(".zarr"):
            chunks = _block_chunks(blocks, extents, self.dtype.itemsize)
        self.chunks = None if chunks is None else tuple(map(int, chunks))
        self.part, self._kind = Path(f"{place}.part"), _KINDS[suffix]
        self._given, self.dimensions = given, Dimensions()
        self._machine, self._ranks = machine, ranks
        self._first = machine is None or machine.rank == ranks[0]
        self._opened: Any = None

    def __setitem__(self, box: Slices, values: NDArray[Any]) -> None:
        """Write one box; ``ProtocolError`` outside of the context."""
        if self._opened is None:
            raise ProtocolError(f"{self.path}: is written within its context: with create_array(...) as sink")
        place, extents = placed(self, box)
        self._opened[place] = np.broadcast_to(values, extents)

    def __enter__(self) -> ArraySink:
        with self._together() as facts:
            self.dimensions = self._fitting()
            facts["array"] = [self.name, self.shape, str(self.dtype), self.chunks]
            facts |= self.dimensions._asdict()
            if self._first and Path(self.path).exists():
                raise DataError(f"{self.path}: is there already; remove it, or choose another name")
            check_found(str(self.part.absolute().parent))
        with ExitStack() as on_error:
            on_error.callback(self._remove)
            with self._together():
                if self._first:
                    self._remove()
                    self._kind.create(self.part, self)
                    if self.part.is_file():
                        # Else a full disk would be an error, or a crash, where data is written.
                        with self.part.open("rb+") as file:
                            os.posix_fallocate(file.fileno(), 0, self.part.stat().st_size)
            with self._together():
                self.reopen()
            on_error.pop_all()
        return self

    def _fitting(self) -> Dimensions:
        # What the file will say of its dimensions; raises where it cannot.
        found = fitting(len(self.shape), **self._given)
        if _suffix(self.path) == ".ome.zarr":
            return of_image(found, len(self.shape))
        if _suffix(self.path) == ".npy" and found != Dimensions():
            raise ArgumentError(
                f"{self.path}: .npy has no place for axes, spacing, units and origin; take .h5 or .zarr"
            )
        return found

    def reopen(self, hosts: int = 1) -> None:
        """Go on with ``part``, which another context has made, and which so many ``hosts`` write; local.

        For a prediction, which several processes write, and a later one goes on with; and within
        ``__enter__`` for all ranks.
        """
        check_found(str(self.part))
        self._opened = self._kind.opened(self.part, self)
        hosts = hosts if self._machine is None else len(self._machine.segments.segment.nodes)
        if isinstance(self._opened, RawArray) and hosts > 1:
            self._opened = replace(self._opened, on_hosts=True)

    def leave(self) -> None:
        """End the context, and leave ``part`` for :meth:`reopen`."""
        opened, self._opened = self._opened, None
        if opened is not None and self.part.is_dir():
            # Zarr still writes the other chunks of a call that failed: its folder would come back.
            with suppress(TimeoutError):
                needed("zarr", "zarr").core.sync.sync(_others_end(), timeout=_REST_SECONDS)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # The other ranks may be elsewhere, or still write, so this one does not wait for them.
            self._remove()
            return
        self._opened = None
        with ExitStack() as on_error:
            on_error.callback(self._remove)
            with self._together():
                self.flush()
            with self._together():
                if self._first:
                    rename_synced(self.part, Path(self.path))
            on_error.pop_all()

    def _together(self) -> AbstractContextManager[dict[str, Any]]:
        title = f"create_array {self.path}"
        if self._machine is None:
            return told(DataError, title)
        return together(self._machine, self._ranks, title)

    def _remove(self) -> None:
        # An error of it would hide the one that it is called for.
        self.leave()
        if not self.part.is_dir():
            with suppress(OSError):
                self.part.unlink()
            return
        shutil.rmtree(self.part, ignore_errors=True)

    def flush(self) -> None:
        """Wait until what this process has written is on the disk; local."""
        # Of the files of a folder each rank has some: a call for each waits for the disk, which many can do
        # at once.
        files = [self.part]
        if self.part.is_dir():
            mine, count = 0, 1
            if self._machine is not None:
                mine, count = self._ranks.index(self._machine.rank), len(self._ranks)
            files = sorted(one for one in self.part.rglob("*") if one.is_file())[mine::count]
        for file in files:
            sync(file)


async def _others_end() -> None:
    # In the loop of events of a library: ends when its other tasks have ended.
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def write_shards(sink: Any, y: SplitTensor, at: Sequence[int] | None = None) -> None:
    """Write a split tensor into a sink: every rank its block; collective over its ranks, blocking.

    Returns when all ranks have written. If blocks share chunks of the sink, the tensor is first redistributed
    to blocks that end where chunks end, so that no chunk is written by two ranks. Of copies one is written.

    Parameters
    ----------
    sink
        What :func:`create_array` gives; or anything with ``shape`` and ``dtype`` that takes
        ``sink[box] = array`` of a numpy array, opened on each rank: a writable ``numpy.memmap``, a Zarr or
        tensorstore array, a :class:`Sink`.
    y
        The tensor, of the sink's dtype. Its values are written, gradients are not.
    at
        Index of its first element in the sink, for each dimension; zeros if None.

    Raises
    ------
    ShapeError
        If the tensor does not lie in the sink, or has another dtype.
    UnsupportedError
        If the sink is a variable of HDF5 or NetCDF that several ranks would write.
    DataError
        If some rank cannot write, on all ranks: a full disk, for instance.

    Examples
    --------
    >>> y = shard({"H": -1}, torch.ones(1, 1, 6, 4))
    >>> with create_array("whole.npy", (1, 1, 12, 4), like=y) as sink:
    ...     write_shards(sink, y)
    ...     write_shards(sink, 2 * y, at=(0, 0, 6, 0))
    >>> np.load("whole.npy")[0, 0, :, 0]
    array([1., 1., 1., 1., 1., 1., 2., 2., 2., 2., 2., 2.], dtype=float32)
    """
    if not isinstance(y, SplitTensor):
        raise ArgumentError(f"write_shards: takes a sink, then a split tensor, got a {type(y).__name__!r}")
    machine, ranks = y.machine, y.partition.ranks
    with together(machine, ranks, "write_shards", differs=ShapeError, advice=_ONE) as facts:
        if not hasattr(sink, "shape") or not hasattr(sink, "__setitem__"):
            raise ArgumentError(
                "write_shards: a sink has a shape, a dtype and sink[box] = array; for a path take"
                f" create_array(path, shape, like=y), got {label(sink)}"
            )
        if isinstance(sink, np.memmap) and (not sink.flags.writeable or sink.mode == "c"):
            raise ArgumentError(f"write_shards: {label(sink)} is read only; open it by mode 'r+'")
        if _is_in_memory(sink):
            raise ArgumentError(
                f"write_shards: a {type(sink).__name__!r} in memory would get this rank's block only; take"
                " full_tensor(), or a file: create_array(path, shape, like=y)"
            )
        start = _start(sink, y, at)
        layout = aligned(y.decomposition, *_in_chunks(sink, start))
        facts |= {"at": start, "shape of the sink": [*map(int, sink.shape)]}
    if layout != y.decomposition:
        with torch.no_grad():
            y = y.redistribute(layout=layout)
    values, box = as_numbers(y.to_local()), layout.box(machine.rank)
    with together(machine, ranks, f"write_shards to {label(sink)}"):
        if machine.rank in layout.one_copy().partition and not box.empty:
            place = tuple(slice(*each) for each in box.shift(start).bounds)
            sink[in_domain(sink, place)] = values


def _is_in_memory(sink: Any) -> bool:
    # Whether what is written stays in this process.
    if isinstance(sink, np.memmap):
        # A copy of one has no file.
        return sink.mode is None
    library = library_of(sink)
    if library == "tensorstore":
        return sink.kvstore is None or sink.kvstore.url.startswith("memory:")
    if library == "zarr":
        return "Memory" in type(sink.store).__name__
    return isinstance(sink, (np.ndarray, torch.Tensor)) or library in ("dask", "xarray")


def _start(sink: Any, y: SplitTensor, at: Sequence[int] | None) -> tuple[int, ...]:
    # Where the tensor begins, after all checks.
    shape, extents = tuple(sink.shape), tuple(y.shape)
    start = (0,) * len(shape) if at is None else tuple(at)
    fits = len(start) == len(shape) == len(extents) and all(isinstance(a, Integral) for a in start)
    if not fits or any(not 0 <= a <= a + n <= most for a, n, most in zip(start, extents, shape, strict=True)):
        raise ShapeError(
            f"write_shards: a tensor of shape {extents} at {start} does not lie in {label(sink)} of {shape}"
        )
    # Of another byte order the array that is written converts.
    if (wanted := numpy_dtype(sink.dtype)).newbyteorder("=") != (found := numpy_dtype(y.dtype)):
        raise ShapeError(
            f"write_shards: {label(sink)} has elements of {wanted}, the tensor of {found}; convert it by"
            " y.to(...), or make the sink with its dtype"
        )
    if library_of(sink) in ("h5py", "netCDF4") and y.partition.size > 1:
        raise UnsupportedError(
            f"write_shards: {label(sink)}: several processes cannot have a file of HDF5 or NetCDF open for"
            " writing; use create_array('x.h5', ...)"
        )
    return tuple(map(int, start))


def _in_chunks(
    sink: Any, start: Sequence[int]
) -> tuple[Sequence[int], tuple[Any, ...] | None, Sequence[int]]:
    # Where a tensor begins, what one rank alone may write, and where the sink ends, from where chunks begin:
    # tensorstore has arrays that begin anywhere, and chunks that begin elsewhere.
    if not hasattr(sink, "chunk_layout"):
        # Of Zarr a shard, which has several chunks to read.
        return start, getattr(sink, "shards", None) or chunks_of(sink), tuple(sink.shape)
    chunks = sink.chunk_layout
    before = [a - b for a, b in zip(sink.domain.origin, chunks.grid_origin, strict=True)]
    ends = [n + more for n, more in zip(sink.shape, before, strict=True)]
    return [n + more for n, more in zip(start, before, strict=True)], tuple(chunks.write_chunk.shape), ends


def aligned(
    layout: Decomposition,
    start: Sequence[int],
    chunks: tuple[Any, ...] | None,
    shape: Sequence[int],
    nearest: bool = True,
) -> Decomposition:
    """The layout whose blocks, put at ``start``, end where chunks end: at the ``nearest``, or the one before.

    A block may become empty, and ends never fall: the order of the ranks stays, so that most data does too.
    """
    if chunks is None:
        return layout
    splits: list[Split] = []
    for split, first, chunk, extent in zip(layout.splits, start, chunks, shape, strict=True):
        stops, last = [], 0
        for part in range(split.parts):
            _, stop = split.interval(part)
            if stop < split.extent and first + stop < extent:
                stop = min(
                    max((first + stop + chunk // 2 * nearest) // chunk * chunk - first, 0), split.extent
                )
            stops.append(max(stop, last))
            last = stops[-1]
        splits.append(Listed(tuple(int(b - a) for a, b in zip([0, *stops], stops, strict=False))))
    return normal(Decomposition(layout.partition, tuple(splits), layout.axes))


def _block_chunks(blocks: Sequence[int], shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    # The largest block, divided until it is small enough; by divisors where there are some, so that blocks
    # end where chunks end and nothing is redistributed.
    chunks = [max(1, min(block, extent)) for block, extent in zip(blocks, shape, strict=True)]
    while prod(chunks) * itemsize > _CHUNK_NBYTES:
        d = chunks.index(max(chunks))
        smaller = range(chunks[d] // 2, chunks[d] // 4, -1)
        chunks[d] = next((n for n in smaller if blocks[d] % n == 0), -(-chunks[d] // 2))
    return tuple(chunks)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Numpy's type of elements of numpy, torch or tensorstore."""
    if isinstance(dtype, torch.dtype):
        if dtype not in NUMPY:
            raise UnsupportedError(f"numpy has no elements of {dtype}; write them as float32: y.float()")
        return NUMPY[dtype]
    with told(ArgumentError, f"a dtype is of numpy or torch, got {dtype!r}"):
        # Tensorstore has types of its own.
        return np.dtype(getattr(dtype, "numpy_dtype", dtype))


class _Kind(NamedTuple):
    """How one rank creates an array in one kind of file, and each rank opens it for ``[box] = array``."""

    create: Callable[[Path, ArraySink], None]
    opened: Callable[[Path, ArraySink], Any]


def _create_npy(part: Path, sink: ArraySink) -> None:
    descr = np.lib.format.dtype_to_descr(sink.dtype)
    with part.open("xb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": descr, "fortran_order": False, "shape": sink.shape}
        )
        file.truncate(file.tell() + prod(sink.shape) * sink.dtype.itemsize)


def _create_hdf5(part: Path, sink: ArraySink) -> None:
    h5py = needed("h5py", "hdf5")
    # Where space is short, or a file may not be so long, libhdf5 may crash, and takes the job with it.
    nbytes = _HDF5_NBYTES + prod(sink.shape) * sink.dtype.itemsize
    if nbytes > (free := shutil.disk_usage(part.absolute().parent).free):
        raise DataError(f"{part}: No space left on device: it needs {nbytes} bytes, {free} bytes are free")
    with part.open("xb") as whole:
        whole.truncate(nbytes)
    with hdf5_lock(), hdf5_file(h5py, part, "w") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        # What is allocated has an offset, and ranks write to it without the library.
        plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        dataset = file.create_dataset(sink.name, sink.shape, sink.dtype, dcpl=plan)
        dataset.attrs.update(as_attributes(sink.dimensions))
        for d, text in enumerate(sink.dimensions.axes or ()):
            dataset.dims[d].label = text


def _create_zarr(part: Path, sink: ArraySink) -> None:
    zarr, known, image = needed("zarr", "zarr"), sink.dimensions, _suffix(sink.path) == ".ome.zarr"
    if image:
        name = Path(sink.path).name[: -len(".ome.zarr")]
        zarr.create_group(str(part), zarr_format=3, attributes=as_image(known, name))
    zarr.create_array(
        str(part),
        name="0" if image else None,
        shape=sink.shape,
        dtype=sink.dtype,
        chunks=sink.chunks,
        fill_value=0,
        zarr_format=3,
        dimension_names=known.axes,
        attributes={} if image else as_attributes(known),
    )


def _opened_zarr(part: Path, sink: ArraySink) -> Any:
    place = part / "0" if _suffix(sink.path) == ".ome.zarr" else part
    return needed("zarr", "zarr").open_array(str(place), mode="r+")


_HDF5 = _Kind(_create_hdf5, lambda part, sink: hdf5(str(part), sink.name)[0])
_KINDS = {
    ".npy": _Kind(_create_npy, lambda part, _: npy(str(part), None)[0]),
    ".h5": _HDF5,
    ".hdf5": _HDF5,
    ".zarr": _Kind(_create_zarr, _opened_zarr),
    ".ome.zarr": _Kind(_create_zarr, _opened_zarr),
}
