"""Arrays whose elements lie in a file one after the other: boxes are read and written by offset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import ArgumentError, DataError
from distdl_rma.layers.sources.reading import Slices, placed, text_of

# Shorter runs of bytes are not worth a call of the system: such boxes go through mapped pieces of the file.
_RUN_NBYTES, _PIECE_NBYTES = 16 << 10, 16 << 20


@dataclass(frozen=True)
class RawArray:
    """An array in row-major order in a file, from a byte offset on; holds no handle, so it can be pickled.

    Reading and writing a box touches its bytes only, and maps at most 16 MiB at a time. Boxes without a
    common element can be written by several processes at once; if these are ``on_hosts``, the file is not
    mapped for writing, which makes many short runs of bytes slow.
    """

    path: str
    dtype: np.dtype[Any]  # in the byte order of the file
    shape: tuple[int, ...]
    offset: int = 0  # bytes of the file before the first element
    fortran: bool = False  # whether the elements lie in column-major order
    on_hosts: bool = False

    def __post_init__(self) -> None:
        if self.dtype.hasobject or not self.dtype.itemsize:
            raise DataError(
                f"{self.path}: its elements of type {self.dtype} are no numbers, which alone are read"
            )

    def check_size(self) -> RawArray:
        """Itself; ``DataError`` if the file is too short for it."""
        wanted = self.offset + prod(self.shape) * self.dtype.itemsize
        if (found := Path(self.path).stat().st_size) < wanted:
            raise DataError(
                f"{self.path}: has {found} bytes, but its header says {self.shape} of {self.dtype}, which"
                f" ends at byte {wanted}; the file is truncated: copy or write it again"
            )
        # Raises where numpy has no array of so many dimensions, or of such an extent beside one of 0.
        np.empty(self.shape if 0 in self.shape else [0] * len(self.shape), self.dtype)
        return self

    def __getitem__(self, box: Slices) -> NDArray[Any]:
        """The box, in new memory and the byte order of the file."""
        box, extents = placed(self, box)
        if any(each.step for each in box):
            whole = tuple(slice(each.start, each.stop) for each in box)
            return self[whole][tuple(slice(None, None, each.step) for each in box)]
        found = np.empty(extents, self.dtype, "F" if self.fortran else "C")
        box, rows = self._by_rows(box, found)
        run = self._run(rows)
        if self._is_short(run, rows):
            for piece, at in self._pieces(box, rows):
                piece[...] = self._mapped(piece, at, "r")
            return found
        with FileIO(self.path) as file:
            for memory, at in self._runs(box, rows, run):
                self._read(file, memory, at)
        return found

    def __setitem__(self, box: Slices, values: NDArray[Any]) -> None:
        """Write the box, whose bytes must be allocated; ``ArgumentError`` if it has steps."""
        box, extents = placed(self, box)
        if any(each.step for each in box):
            raise ArgumentError(f"{self.path}: a box is written without steps, got {text_of(box)}")
        given = np.broadcast_to(np.asarray(values, self.dtype, "F" if self.fortran else "C"), extents)
        box, rows = self._by_rows(box, given)
        run = self._run(rows)
        if not self.on_hosts and self._is_short(run, rows):
            for piece, at in self._pieces(box, rows):
                self._mapped(piece, at, "r+")[...] = piece
            return
        # Nor is it open for reading: a client of a network file system would read the rest of a page, and
        # write it back over what a rank on another host has written there.
        file = os.open(self.path, os.O_WRONLY)
        try:
            for left, start in self._runs(box, rows, run):
                memory, at = left, start
                while memory:
                    done = os.pwrite(file, memory, at)
                    memory, at = memory[done:], at + done
        finally:
            os.close(file)

    def _by_rows(self, box: Slices, values: NDArray[Any]) -> tuple[Slices, NDArray[Any]]:
        # Both with the slowest dimension first.
        return (box[::-1], values.T) if self.fortran else (box, values)

    @property
    def _strides(self) -> list[int]:
        # Bytes from one index to the next, from the slowest dimension on.
        strides = [self.dtype.itemsize]
        for extent in (self.shape if self.fortran else self.shape[::-1])[:-1]:
            strides.insert(0, strides[0] * extent)
        return strides

    def _first(self, rows: NDArray[Any]) -> int:
        # The last dimensions that a box has whole belong to one run, and one more.
        shape = self.shape[::-1] if self.fortran else self.shape
        return max((d for d, n in enumerate(rows.shape) if n < shape[d]), default=0)

    def _run(self, rows: NDArray[Any]) -> int:
        # Elements of a box that follow each other in the file.
        return prod(rows.shape[self._first(rows) :])

    def _is_short(self, run: int, rows: NDArray[Any]) -> bool:
        return rows.ndim > 0 and run * self.dtype.itemsize < _RUN_NBYTES

    def _runs(self, box: Slices, rows: NDArray[Any], run: int) -> Iterator[tuple[memoryview, int]]:
        # The bytes of each run of elements, and where they are in the file.
        if not rows.size:
            return
        offsets, nbytes = np.array([self.offset]), run * self.dtype.itemsize
        first = self._first(rows)
        for d, (each, stride) in enumerate(zip(box, self._strides, strict=False)):
            places = range(each.start, each.stop if d < first else each.start + 1)
            offsets = np.add.outer(offsets, np.array(places) * stride).reshape(-1)
        memory = rows.reshape(-1).view(np.uint8).data
        for number, at in enumerate(offsets):
            yield memory[number * nbytes : (number + 1) * nbytes], int(at)

    def _pieces(self, box: Slices, rows: NDArray[Any]) -> Iterator[tuple[NDArray[Any], int]]:
        # Parts of a box that lie together in the file, in no more bytes than are mapped at a time.
        if not rows.size:
            return
        strides, start = self._strides, [each.start for each in box]
        first = next(d for d, nbytes in enumerate(strides) if nbytes <= _PIECE_NBYTES)
        step = max(1, _PIECE_NBYTES // strides[first])
        for lead in np.ndindex(rows.shape[:first]):
            for row in range(0, rows.shape[first], step):
                places = zip((*lead, row, *[0] * (rows.ndim - first - 1)), start, strides, strict=True)
                at = self.offset + sum((i + a) * nbytes for i, a, nbytes in places)
                yield rows[(*lead, slice(row, row + step))], at

    def _read(self, file: FileIO, memory: memoryview, at: int) -> None:
        while memory:
            done = os.preadv(file.fileno(), [memory], at)
            if not done:
                raise self._ends(at)
            memory, at = memory[done:], at + done

    def _ends(self, at: int) -> DataError:
        return DataError(
            f"{self.path}: ends within the array, behind byte {at} at most; the file was truncated since it"
            " was opened: copy or write it again"
        )

    def _mapped(self, piece: NDArray[Any], at: int, mode: Any) -> NDArray[Any]:
        # The bytes of the piece, of which those between its runs are not used.
        strides = self._strides[len(self.shape) - piece.ndim :]
        span = sum((n - 1) * nbytes for n, nbytes in zip(piece.shape, strides, strict=True))
        span += self.dtype.itemsize
        try:
            mapped = np.memmap(self.path, np.uint8, mode, at, (span,))
        except ValueError as error:
            raise self._ends(at) from error
        return np.ndarray(piece.shape, self.dtype, mapped, 0, strides)


def sync(path: Path) -> None:
    """Wait until what was written to a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
