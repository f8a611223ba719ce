"""Arrays whose elements lie in a file one after the other: boxes are read and written by offset."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import DataError

# Shorter runs of bytes are not worth a call of the system: such boxes go through mapped pieces of the file.
_RUN_NBYTES, _PIECE_NBYTES = 16 << 10, 16 << 20
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class RawArray:
    """An array in row-major order in a file, from a byte offset on; holds no handle, so it can be pickled.

    Reading and writing a box touches its bytes only, and maps at most 16 MiB at a time. Boxes without a
    common element can be written by several processes at once.

    Parameters
    ----------
    path
        The file.
    dtype
        Type of the elements, in the byte order of the file.
    shape
        Shape of the array.
    offset
        Bytes of the file before its first element.
    fortran
        Whether the elements lie in column-major order.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int = 0
    fortran: bool = False

    def __post_init__(self) -> None:
        if self.dtype.hasobject:
            raise DataError(
                f"{self.path}: has objects as elements, such as strings; only numbers can be read"
            )

    def check_size(self) -> RawArray:
        """Itself; ``DataError`` if the file is too short for it."""
        wanted = self.offset + prod(self.shape) * self.dtype.itemsize
        if (found := Path(self.path).stat().st_size) < wanted:
            raise DataError(
                f"{self.path}: has {found} bytes, but its header says {self.shape} of {self.dtype}, which"
                f" ends at byte {wanted}; the file is truncated: copy or write it again"
            )
        return self

    def __getitem__(self, box: Slices) -> NDArray[Any]:
        """The box, in new memory and the byte order of the file."""
        if any(each.step not in (None, 1) for each in box):
            whole = tuple(slice(each.start, each.stop) for each in box)
            return self[whole][tuple(slice(None, None, each.step) for each in box)]
        order = -1 if self.fortran else 1
        found = np.empty([each.stop - each.start for each in box], self.dtype, "F" if self.fortran else "C")
        with FileIO(self.path) as file:
            for piece, at, run in self._pieces(box[::order], found.T if self.fortran else found):
                if run:
                    self._read(file, piece, at)
                else:
                    piece[...] = self._mapped(piece, at, "r")
        return found

    def __setitem__(self, box: Slices, values: NDArray[Any]) -> None:
        """Write the box, whose bytes must be allocated; steps are not supported."""
        values = np.asarray(values, self.dtype, "F" if self.fortran else "C")
        order = -1 if self.fortran else 1
        with FileIO(self.path, "r+") as file:
            for piece, at, run in self._pieces(box[::order], values.T if self.fortran else values):
                if run:
                    _write(file, piece, at)
                else:
                    self._mapped(piece, at, "r+")[...] = piece

    def _pieces(self, box: Sequence[slice], values: NDArray[Any]) -> Iterator[tuple[NDArray[Any], int, bool]]:
        # Parts of ``values`` that lie together in the file, each with the offset of its first byte and
        # whether it is one run of bytes.
        if not values.size or not values.ndim:
            yield from [(values.reshape(-1), self.offset, True)] * values.size
            return
        strides, start = self._strides, [each.start for each in box]
        shape = self.shape[::-1] if self.fortran else self.shape
        # The last dimensions that the box has whole belong to one run, and one more.
        first = max((d for d, n in enumerate(values.shape) if n < shape[d]), default=0)
        run = values.shape[first] * strides[first] >= _RUN_NBYTES
        if not run:
            first = next(d for d, nbytes in enumerate(strides) if nbytes <= _PIECE_NBYTES)
        rows = values.shape[first] if run else max(1, _PIECE_NBYTES // strides[first])
        for lead in np.ndindex(values.shape[:first]):
            for row in range(0, values.shape[first], rows):
                places = zip((*lead, row, *[0] * (values.ndim - first - 1)), start, strides, strict=True)
                at = self.offset + sum((i + a) * nbytes for i, a, nbytes in places)
                yield values[(*lead, slice(row, row + rows))], at, run

    @property
    def _strides(self) -> list[int]:
        # Bytes from one index to the next, from the slowest dimension on.
        strides = [self.dtype.itemsize]
        for extent in (self.shape if self.fortran else self.shape[::-1])[:-1]:
            strides.insert(0, strides[0] * extent)
        return strides

    def _read(self, file: FileIO, piece: NDArray[Any], at: int) -> None:
        left = piece.reshape(-1).view(np.uint8).data
        while left:
            done = os.preadv(file.fileno(), [left], at)
            if not done:
                raise self._ends(at)
            left, at = left[done:], at + done

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


def _write(file: FileIO, piece: NDArray[Any], at: int) -> None:
    left = piece.reshape(-1).view(np.uint8).data
    while left:
        done = os.pwrite(file.fileno(), left, at)
        left, at = left[done:], at + done
