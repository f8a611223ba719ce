"""Write split tensors into files and other arrays: every rank its block, never two ranks one chunk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.checks.outcome import agreed
from distdl_rma.dtypes import NUMPY
from distdl_rma.errors import (
    ArgumentError,
    DataError,
    DistdlError,
    ProtocolError,
    ShapeError,
    UnsupportedError,
)
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Listed, Split
from distdl_rma.geometry.partition import Partition
from distdl_rma.machine import Machine
from distdl_rma.sources.chunks import chunks_of
from distdl_rma.sources.opening import needed
from distdl_rma.sources.raw import RawArray
from distdl_rma.sources.reading import hdf5_lock, label
from distdl_rma.split.layout import normal
from distdl_rma.split.tensor import SplitTensor

Slices = tuple[slice, ...]
# Bytes of a chunk at most: readers of other boxes fetch chunks as a whole.
_CHUNK_NBYTES = 16 << 20


def create_array(
    path: str | os.PathLike[str],
    shape: Sequence[int],
    dtype: Any = None,
    *,
    like: SplitTensor,
    chunks: Sequence[int] | None = None,
) -> ArraySink:
    """A new array in a file, for :func:`write_shards`; a context that all ranks of ``like`` enter and leave.

    Entering creates ``path.part`` with the whole size, and leaving renames it, after all bytes are on the
    disk: ``path`` is complete or not there. If the context ends by an error, ``path.part`` is removed.
    Both are collective and blocking; this call is local.

    Parameters
    ----------
    path
        Ends in ``.npy``, ``.h5``, ``.hdf5`` or ``.zarr`` (format 3), on a disk that all ranks see. An array
        in HDF5 is called ``data``, or as the path says behind ``::``. Nothing may be there yet.
    shape
        Global shape of the array, of as many dimensions as ``like``. What nobody writes is zero.
    dtype
        Type of its elements, of numpy or torch; that of ``like`` if None.
    like
        A split tensor of the layout that will be written; its blocks decide about chunks.
    chunks
        Of Zarr; None for the blocks of ``like``, divided to at most 16 MiB. Of HDF5, whose datasets are
        contiguous if None; with chunks the ranks write in turns.

    Raises
    ------
    ArgumentError
        If the suffix, the shape or the chunks do not fit.
    UnsupportedError
        If numpy has no such elements, such as bfloat16.
    DataError
        When the context begins or ends, on all ranks: no space, no permission, or something is there already.
    """
    place, _, name = os.fspath(path).partition("::")
    suffix, extents = Path(place).suffix.lower(), tuple(map(int, shape))
    _check_place(path, suffix, name)
    if len(extents) != like.dim() or min(extents, default=0) < 0:
        raise ArgumentError(
            f"create_array: shape {extents} must have the {like.dim()} dimensions of like=, which is"
            f" {tuple(like.shape)}"
        )
    kind = _numpy_dtype(like.dtype if dtype is None else dtype)
    if chunks is not None:
        chunks = tuple(map(int, chunks))
        if suffix == ".npy" or len(chunks) != len(extents) or min(chunks) < 1:
            raise ArgumentError(
                f"create_array: {path}: chunks= are of Zarr and HDF5, one extent above 0 for each of"
                f" {len(extents)} dimensions, got {chunks}"
            )
    elif suffix == ".zarr":
        chunks = _block_chunks(like.decomposition, extents, kind.itemsize)
    return ArraySink(place, name or "data", extents, kind, chunks, like.machine, like.partition.ranks)


def array_of_one(path: str | os.PathLike[str], shape: Sequence[int], dtype: Any) -> ArraySink:
    """As :func:`create_array`, for a process that writes all of the array; local."""
    place, _, name = os.fspath(path).partition("::")
    suffix, extents = Path(place).suffix.lower(), tuple(map(int, shape))
    _check_place(path, suffix, name)
    kind = _numpy_dtype(dtype)
    whole = Decomposition.replicated(Partition((0,), (1,) * len(extents), 0), extents)
    chunks = _block_chunks(whole, extents, kind.itemsize) if suffix == ".zarr" else None
    return ArraySink(place, name or "data", extents, kind, chunks)


def _check_place(path: str | os.PathLike[str], suffix: str, name: str) -> None:
    if suffix not in _CREATORS or (name and suffix not in (".h5", ".hdf5")):
        raise ArgumentError(
            f"create_array: {path}: writes {', '.join(_CREATORS)}, with a name behind '::' for HDF5; for"
            " other files pass what their library opens to write_shards, or a Sink"
        )


class ArraySink:
    """An array in a file that :func:`create_array` makes; ``sink[box] = array`` writes a box, locally.

    ``shape``, ``dtype`` and ``chunks`` are those of the array, ``path`` is where it will be. Without a
    machine one process has it. ``offset`` is that of the elements in ``part``, the file until then; None if a
    library writes them.
    """

    def __init__(
        self,
        path: str,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: tuple[int, ...] | None,
        machine: Machine | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.path, self.name, self.shape, self.dtype, self.chunks = path, name, shape, dtype, chunks
        self.part = Path(f"{path}.part")
        self._machine, self._ranks = machine, ranks
        self.offset: int | None = None
        self._write: Callable[[Slices, NDArray[Any]], None] | None = None
        suffix = Path(path).suffix.lower()
        self._create = _CREATORS[suffix]
        # Only one process at a time may have a file of HDF5 open for writing.
        self.in_turns = chunks is not None and suffix != ".zarr"

    def __setitem__(self, box: Slices, values: NDArray[Any]) -> None:
        """Write one box; ``ProtocolError`` outside of the context."""
        if self._write is None:
            raise ProtocolError(f"{self.path}: is written within its context: with create_array(...) as sink")
        self._write(box, values)

    def __enter__(self) -> ArraySink:
        offset, error = None, None
        try:
            if self._first:
                if Path(self.path).exists():
                    raise DataError(f"{self.path}: is there already; remove it, or choose another name")
                self._remove()
                offset = self._create(self.part, self)
        except Exception as problem:  # noqa: BLE001 - all ranks raise it
            error = problem
            self._remove()
        self.reopen(next(iter(self._agree(error, offset).values())))
        return self

    def reopen(self, offset: int | None) -> None:
        """Go on with ``path.part``, which an earlier context has made, with this ``offset``; local."""
        self.offset = offset
        if offset is not None:
            self._write = RawArray(str(self.part), self.dtype, self.shape, offset).__setitem__
        else:
            self._write = self._write_zarr if Path(self.path).suffix.lower() == ".zarr" else self._write_hdf5

    def leave(self) -> None:
        """End the context, and leave ``path.part`` for :meth:`reopen`."""
        self._write = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write = None
        if error is not None:
            # The other ranks may be elsewhere, so this one does not wait for them.
            self._remove()
            return
        self._finish(self._flush)
        self._finish(self._rename if self._first else lambda: None)

    @property
    def _first(self) -> bool:
        return self._machine is None or self._machine.rank == self._ranks[0]

    def _finish(self, action: Callable[[], None]) -> None:
        problem = None
        try:
            action()
        except OSError as error:
            problem = error
        try:
            self._agree(problem)
        except Exception:
            self._remove()
            raise

    def _agree(self, error: Exception | None, facts: Any = None) -> dict[int, Any]:
        title = f"create_array {self.path}"
        if self._machine is not None:
            return agreed(self._machine, self._ranks, title, error, facts)
        if isinstance(error, DistdlError):
            raise error
        if error is not None:
            raise DataError(f"{title}: {type(error).__name__}: {error}") from error
        return {0: facts}

    def _remove(self) -> None:
        if self._first:
            if self.part.is_dir():
                shutil.rmtree(self.part, ignore_errors=True)
            else:
                self.part.unlink(missing_ok=True)

    def _flush(self) -> None:
        # Of the files of a folder each rank has some.
        files = [self.part]
        if self.part.is_dir():
            mine, count = 0, 1
            if self._machine is not None:
                mine, count = self._ranks.index(self._machine.rank), len(self._ranks)
            files = sorted(one for one in self.part.rglob("*") if one.is_file())[mine::count]
        for file in files:
            _fsync(file)

    def _rename(self) -> None:
        self.part.rename(self.path)
        _fsync(Path(self.path).absolute().parent)

    def _write_zarr(self, box: Slices, values: NDArray[Any]) -> None:
        needed("zarr", "zarr").open_array(str(self.part), mode="r+")[box] = values

    def _write_hdf5(self, box: Slices, values: NDArray[Any]) -> None:
        with hdf5_lock(), needed("h5py", "hdf5").File(self.part, "r+", locking="best-effort") as file:
            file[self.name][box] = values


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
        If the sink is an HDF5 dataset that several ranks would write.
    DataError
        If some rank cannot write, on all ranks: a full disk, for instance.
    """
    if not isinstance(y, SplitTensor):
        raise ArgumentError(f"write_shards: takes a sink, then a split tensor, got a {type(y).__name__!r}")
    machine, ranks = y.machine, y.partition.ranks
    try:
        if isinstance(sink, (np.ndarray, torch.Tensor)) and not isinstance(sink, np.memmap):
            raise ArgumentError(
                f"write_shards: a {type(sink).__name__!r} in memory would get this rank's block only; take"
                " full_tensor(), or a file: create_array(path, shape, like=y)"
            )
        start = _start(sink, y, at)
        layout = _aligned(y.decomposition, start, _write_chunks(sink), tuple(sink.shape))
    except Exception as error:
        agreed(machine, ranks, "write_shards", error)
        raise
    facts = [list(start), list(map(int, sink.shape))]
    for rank, theirs in agreed(machine, ranks, "write_shards", None, facts).items():
        if theirs != facts:
            raise ShapeError(
                f"write_shards: rank {machine.rank} writes at {start} of a sink of {tuple(sink.shape)}, but"
                f" rank {rank} at {tuple(theirs[0])} of {tuple(theirs[1])}; all write one tensor to one sink"
            )
    if layout != y.decomposition:
        with torch.no_grad():
            y = y.redistribute(layout=layout)
    values, box = y.to_local().detach().numpy(), layout.box(machine.rank)
    writes = machine.rank in layout.one_copy().partition and not box.empty
    turns = [(rank,) for rank in ranks] if getattr(sink, "in_turns", False) else [ranks]
    for turn in turns:
        problem = None
        if writes and machine.rank in turn:
            try:
                target = box.shift(start).bounds
                sink[tuple(slice(*each) for each in target)] = values
            except Exception as error:  # noqa: BLE001 - all ranks raise it
                problem = error
        agreed(machine, ranks, f"write_shards to {label(sink)}", problem)


def _start(sink: Any, y: SplitTensor, at: Sequence[int] | None) -> tuple[int, ...]:
    # Where the tensor begins, after all checks.
    shape, extents = tuple(sink.shape), tuple(y.shape)
    start = (0,) * len(shape) if at is None else tuple(map(int, at))
    fits = len(start) == len(shape) == len(extents)
    if not fits or any(not 0 <= a <= a + n <= most for a, n, most in zip(start, extents, shape, strict=True)):
        raise ShapeError(
            f"write_shards: a tensor of shape {extents} at {start} does not lie in {label(sink)} of {shape}"
        )
    if (wanted := _numpy_dtype(sink.dtype)) != (found := _numpy_dtype(y.dtype)):
        raise ShapeError(
            f"write_shards: {label(sink)} has elements of {wanted}, the tensor of {found}; convert it by"
            " y.to(...), or make the sink with its dtype"
        )
    if type(sink).__module__.startswith("h5py") and y.partition.size > 1:
        raise UnsupportedError(
            f"write_shards: {label(sink)}: several processes cannot have a file of HDF5 open for writing; use"
            " create_array('x.h5', ...)"
        )
    return start


def _write_chunks(sink: Any) -> tuple[Any, ...] | None:
    # What one rank alone may write: of Zarr a shard, which has several chunks to read.
    if hasattr(sink, "chunk_layout"):
        return tuple(sink.chunk_layout.write_chunk.shape)
    return getattr(sink, "shards", None) or chunks_of(sink)


def _aligned(
    layout: Decomposition, start: Sequence[int], chunks: tuple[Any, ...] | None, shape: Sequence[int]
) -> Decomposition:
    # The layout whose blocks, put at ``start``, end where chunks end, as near as possible to the old ends.
    if chunks is None:
        return layout
    splits: list[Split] = []
    for split, first, chunk, extent in zip(layout.splits, start, chunks, shape, strict=True):
        stops, last = [], 0
        for part in range(split.parts):
            _, stop = split.interval(part)
            if stop < split.extent and first + stop < extent:
                stop = min(max((first + stop + chunk // 2) // chunk * chunk - first, 0), split.extent)
            stops.append(max(stop, last))
            last = stops[-1]
        splits.append(Listed(tuple(int(b - a) for a, b in zip([0, *stops], stops, strict=False))))
    return normal(Decomposition(layout.partition, tuple(splits), layout.axes))


def _block_chunks(layout: Decomposition, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    # The largest block, divided until it is small enough; by divisors where there are some.
    blocks = [max(b - a for a, b in map(split.interval, range(split.parts))) for split in layout.splits]
    chunks = [max(1, min(block, extent)) for block, extent in zip(blocks, shape, strict=True)]
    while prod(chunks) * itemsize > _CHUNK_NBYTES:
        d = chunks.index(max(chunks))
        smaller = range(chunks[d] // 2, chunks[d] // 4, -1)
        chunks[d] = next((n for n in smaller if blocks[d] % n == 0), -(-chunks[d] // 2))
    return tuple(chunks)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, torch.dtype):
        if dtype not in NUMPY:
            raise UnsupportedError(f"numpy has no elements of {dtype}; write them as float32: y.float()")
        return NUMPY[dtype]
    # Tensorstore has types of its own.
    found: np.dtype[Any] = np.dtype(getattr(dtype, "numpy_dtype", dtype))
    return found


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _create_npy(part: Path, sink: ArraySink) -> int:
    header = {
        "descr": np.lib.format.dtype_to_descr(sink.dtype),
        "fortran_order": False,
        "shape": sink.shape,
    }
    with part.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        offset = file.tell()
        file.flush()
        os.posix_fallocate(file.fileno(), 0, offset + prod(sink.shape) * sink.dtype.itemsize)
    return offset


def _create_hdf5(part: Path, sink: ArraySink) -> int | None:
    h5py = needed("h5py", "hdf5")
    with hdf5_lock():
        with h5py.File(part, "x", locking="best-effort") as file:
            if sink.chunks is not None or not prod(sink.shape):
                file.create_dataset(sink.name, sink.shape, sink.dtype, chunks=sink.chunks)
                return None
            home, _, name = sink.name.rpartition("/")
            plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            # Only what is allocated has an offset.
            plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            kind, space = h5py.h5t.py_create(sink.dtype, logical=True), h5py.h5s.create_simple(sink.shape)
            group = file.require_group(home or "/")
            offset = h5py.h5d.create(group.id, name.encode(), kind, space, plan).get_offset()
        with part.open("rb+") as written:
            os.posix_fallocate(written.fileno(), offset, prod(sink.shape) * sink.dtype.itemsize)
    return int(offset)


def _create_zarr(part: Path, sink: ArraySink) -> None:
    needed("zarr", "zarr").create_array(
        str(part), shape=sink.shape, dtype=sink.dtype, chunks=sink.chunks, fill_value=0
    )


_CREATORS: dict[str, Callable[[Path, ArraySink], int | None]] = {
    ".npy": _create_npy,
    ".h5": _create_hdf5,
    ".hdf5": _create_hdf5,
    ".zarr": _create_zarr,
}
