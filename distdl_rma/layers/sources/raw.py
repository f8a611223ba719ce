"""Bytes of files by their offset, and arrays whose elements lie in a file one after the other.

A box of such an array is *runs* of elements that follow each other in the file. Of an array of shape (4, 6),
whose elements begin at byte 8 of the file, the box [1:3, 2:5] is two runs of three elements::

        0  1  2  3  4  5
    0   .  .  .  .  .  .
    1   .  .  8  9 10  .         places 8 to 10: bytes 8 + 8 * itemsize and on
    2   .  . 14 15 16  .         places 14 to 16
    3   .  .  .  .  .  .

Dimensions that a box has whole, the last ones, make its runs longer: of the box [1:3, 0:6] there is one run.
Whatever has rows in a file goes through ``runs``, ``read_at`` and ``write_at``: sources and sinks here, the
items of checkpoints, scratch files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import ArgumentError, DataError
from distdl_rma.geometry.box import Box
from distdl_rma.layers.sources.reading import Slices, placed, text_of
from distdl_rma.layers.sources.remote import fetch, is_url, nbytes_of

# Shorter runs of bytes are not worth a call of the system: such boxes go through mapped pieces of the file.
_RUN_NBYTES, _PIECE_NBYTES = 16 << 10, 16 << 20
# Places that are computed at a time: all those of a box may need more memory than the box.
_AT_A_TIME = 1 << 16


def read_at(file: int, memory: memoryview, at: int) -> int:
    """Fill memory by the bytes of a file from ``at`` on; returns how many these are, fewer at the end of it.

    The system may return less than it is asked for: after a signal, and always of more than 2 GiB.
    """
    count = 0
    while count < len(memory) and (done := os.preadv(file, [memory[count:]], at + count)):
        count += done
    return count


def write_at(file: int, memory: memoryview, at: int) -> None:
    """Write all of the memory into a file from ``at`` on; likewise in as many calls as the system needs."""
    while memory:
        done = os.pwrite(file, memory, at)
        memory, at = memory[done:], at + done


@contextmanager
def handle(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    """Context of a file that is open as the system's flags say.

    Who writes opens it for writing alone: otherwise a client of a network file system reads the rest of a
    page, and writes it back over what a rank on another host has written there.
    """
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def sync(path: Path) -> None:
    """Wait until what was written to a file, or the names in a folder, are on the disk."""
    with handle(path, os.O_RDONLY) as file:
        os.fsync(file)


def rename_synced(part: Path, path: Path) -> None:
    """Give a file or folder the name that says that it is whole, and wait until the disk has this name.

    Readers, also after a loss of power, find all of it or nothing, if its bytes were synced before.
    """
    part.rename(path)
    sync(path.absolute().parent)


def runs(shape: Sequence[int], box: Box, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Where elements of a box lie in an array in row-major order; the elements count in the order of the box.

    For elements [first, last) the place in the array, the first element and the number of each run.

    Examples
    --------
    >>> list(runs((4, 6), Box(((1, 3), (2, 5))), 1, 6))
    [(9, 1, 2), (14, 3, 3)]
    """
    extents, cut = box.shape, _cut(shape, box.shape)
    length, strides = prod(extents[cut:]), [prod(shape[d + 1 :]) for d in range(len(shape))]
    corner = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    end = -(-last // length) if first < last else 0
    for low in range(first // length if length else 0, end, _AT_A_TIME):
        rest = np.arange(low, min(low + _AT_A_TIME, end))
        places = np.full(len(rest), corner)
        for d in reversed(range(cut)):
            rest, index = np.divmod(rest, extents[d])
            places += index * strides[d]
        for row, place in enumerate(places.tolist(), low):
            begin, stop = max(first, row * length), min(last, (row + 1) * length)
            yield place + begin - row * length, begin, stop - begin


def _cut(shape: Sequence[int], extents: Sequence[int]) -> int:
    # The last dimension that a box has not whole: its indices, and all behind them, are one run.
    return max((d for d, n in enumerate(extents) if n < shape[d]), default=0)


@dataclass(frozen=True)
class RawArray:
    """An array in row-major order in a file, from a byte offset on; holds no handle, so it can be pickled.

    Reading and writing a box touches its bytes only, and maps at most 16 MiB at a time; a file under a URL is
    read only. Boxes without a
    common element can be written by several processes at once. If these are ``on_hosts``, the file is not
    mapped for writing, since a host writes whole pages back, with stale bytes beside its own: many short runs
    of bytes are slow then.

    Examples
    --------
    >>> np.arange(24, dtype="<f4").reshape(4, 6).tofile("plain.bin")
    >>> RawArray("plain.bin", np.dtype("<f4"), (4, 6))[1:3, 2:5]
    array([[ 8.,  9., 10.],
           [14., 15., 16.]], dtype=float32)
    """

    path: str
    dtype: np.dtype[Any]  # in the byte order of the file
    shape: tuple[int, ...]
    offset: int = 0  # bytes of the file before the first element
    fortran: bool = False  # whether the elements lie in column-major order
    on_hosts: bool = False
    # What is known of its dimensions.
    axes: tuple[str, ...] | None = None
    spacing: tuple[float, ...] | None = None
    origin: tuple[float, ...] | None = None
    units: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype.hasobject or not self.dtype.itemsize:
            raise DataError(
                f"{self.path}: its elements of type {self.dtype} are no numbers, which alone are read"
            )

    def check_size(self) -> RawArray:
        """Itself; ``DataError`` if the file is too short for it."""
        wanted = self.offset + prod(self.shape) * self.dtype.itemsize
        if (found := nbytes_of(self.path)) < wanted:
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
        target, rows = self._by_rows(box, found)
        if is_url(self.path):
            fetch(self.path, self._runs(target, rows))
            return found
        if self._has_short_runs(target):
            for piece, at in self._pieces(target, rows):
                piece[...] = self._mapped(piece, at, "r")
            return found
        with handle(self.path, os.O_RDONLY) as file:
            for memory, at in self._runs(target, rows):
                if (count := read_at(file, memory, at)) < len(memory):
                    raise self._ends(at + count)
        return found

    def __setitem__(self, box: Slices, values: NDArray[Any]) -> None:
        """Write the box, whose bytes must be allocated; ``ArgumentError`` if it has steps."""
        box, extents = placed(self, box)
        if any(each.step for each in box):
            raise ArgumentError(f"{self.path}: a box is written without steps, got {text_of(box)}")
        given = np.broadcast_to(np.asarray(values, self.dtype, "F" if self.fortran else "C"), extents)
        target, rows = self._by_rows(box, given)
        if not self.on_hosts and self._has_short_runs(target):
            for piece, at in self._pieces(target, rows):
                self._mapped(piece, at, "r+")[...] = piece
            return
        with handle(self.path, os.O_WRONLY) as file:
            for memory, at in self._runs(target, rows):
                write_at(file, memory, at)

    @property
    def _rows(self) -> tuple[int, ...]:
        # Extents from the slowest dimension on.
        return self.shape[::-1] if self.fortran else self.shape

    @property
    def _strides(self) -> list[int]:
        # Bytes from one index to the next, likewise.
        return [prod(self._rows[d + 1 :]) * self.dtype.itemsize for d in range(len(self.shape))]

    def _by_rows(self, box: Slices, values: NDArray[Any]) -> tuple[Box, NDArray[Any]]:
        # Both with the slowest dimension first.
        target = Box(tuple((each.start, each.stop) for each in (box[::-1] if self.fortran else box)))
        return target, values.T if self.fortran else values

    def _has_short_runs(self, box: Box) -> bool:
        run = prod(box.shape[_cut(self._rows, box.shape) :])
        return box.dim > 0 and run * self.dtype.itemsize < _RUN_NBYTES

    def _runs(self, box: Box, rows: NDArray[Any]) -> Iterator[tuple[memoryview, int]]:
        # The bytes of each run of elements, and where they are in the file.
        memory, size = rows.reshape(-1).view(np.uint8).data, self.dtype.itemsize
        for place, first, count in runs(self._rows, box, 0, rows.size):
            yield memory[first * size : (first + count) * size], self.offset + place * size

    def _pieces(self, box: Box, rows: NDArray[Any]) -> Iterator[tuple[NDArray[Any], int]]:
        # Parts of a box that lie together in the file, in no more bytes than are mapped at a time.
        if not rows.size:
            return
        strides = self._strides
        first = next(d for d, nbytes in enumerate(strides) if nbytes <= _PIECE_NBYTES)
        step = max(1, _PIECE_NBYTES // strides[first])
        for lead in np.ndindex(rows.shape[:first]):
            for row in range(0, rows.shape[first], step):
                places = zip((*lead, row, *[0] * (rows.ndim - first - 1)), box.start, strides, strict=True)
                at = self.offset + sum((i + a) * nbytes for i, a, nbytes in places)
                yield rows[(*lead, slice(row, row + step))], at

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
