"""Headers of the classic formats of NetCDF, compared with their files before the C library opens these.

The C library believes a header: it allocates as many dimensions as that says, and reads zeros where a file
was cut off, which no later check could tell from data. So the header is read here first, with every number
held against the bytes that are left::

    "CDF" version | number of records | dimensions | attributes | variables
                                        name, extent  name, type,  name, dimensions, attributes, type,
                                                      values       size, begin

    begin + size of each variable  <=  size of the file

Variables with the dimension of records lie record by record behind all others. A stream may leave the number
of records open; then the ends of these variables are not known, nor checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

from distdl_rma.errors import DataError

# Bytes of an element, by the number of its type; the first ones are those of all versions.
_NBYTES = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)
_CLASSIC, _PADDED = 7, 4
_OFFSET_64, _DATA_64 = 2, 5
# What begins a list, if it has entries: of dimensions, of variables and of attributes.
_DIMENSIONS, _VARIABLES, _ATTRIBUTES = 10, 11, 12


def check_netcdf_header(path: str) -> None:
    """``DataError`` if a header of a classic format does not fit its file; nothing for files of HDF5.

    The library reads zeros behind the end of a truncated file, and believes counts and sizes.
    """
    with Path(path).open("rb") as file:
        if file.read(3) != b"CDF":
            return
        header = _Header(file)
        try:
            end = max(header.ends(), default=0)
            _check(end <= header.nbytes, f"elements end at byte {end}; the file is truncated")
        except ValueError as error:
            raise DataError(
                f"{path}: its NetCDF header does not fit a file of {header.nbytes} bytes: {error}; copy or"
                " write it again"
            ) from error


class _Header:
    """Reads a header from the byte that has its version; ``ValueError`` if it is damaged.

    Numbers are big-endian; names and values end at multiples of four bytes. The three versions differ in the
    width of counts and of begins: 4 and 4 bytes, 4 and 8, 8 and 8.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.nbytes = file, os.fstat(file.fileno()).st_size
        self._version = int.from_bytes(file.read(1))
        # The format of 64-bit data has counts of 8 bytes, and more types.
        self._width, self._types = (8, _NBYTES) if self._version == _DATA_64 else (4, _NBYTES[:_CLASSIC])

    def ends(self) -> Iterator[int]:
        """Where the elements of each variable end in the file."""
        records = self._number()
        extents = [self._number() for _ in self._entries(_DIMENSIONS)]
        self._skip_attributes()
        fixed, by_record = list[tuple[int, int]](), list[tuple[int, int]]()
        for _ in self._entries(_VARIABLES):
            dims = [self._number() for _ in range(self._number())]
            # No number of a dimension is too large, and the extent of records, stored as 0, is the first.
            _check(
                all(d < len(extents) and (extents[d] or at == 0) for at, d in enumerate(dims)), "dimensions"
            )
            shape = [extents[d] for d in dims]
            recorded = 0 in shape
            self._skip_attributes()
            nbytes = self._element_nbytes() * prod(shape[recorded:])
            self._number()
            begin = self._number(4 if self._version < _OFFSET_64 else 8)
            (by_record if recorded else fixed).append((begin, nbytes))
        yield from (begin + nbytes for begin, nbytes in fixed)
        # All bits are set where a stream has left the number open. Records of one variable are not padded.
        if 0 < records < (1 << 8 * self._width) - 1:
            record = sum(n + (-n % _PADDED if len(by_record) > 1 else 0) for _, n in by_record)
            yield from (begin + (records - 1) * record + nbytes for begin, nbytes in by_record)

    def _number(self, nbytes: int | None = None) -> int:
        read = self._file.read(nbytes or self._width)
        _check(len(read) == (nbytes or self._width), "it ends within the header")
        return int.from_bytes(read)

    def _skip(self, nbytes: int) -> None:
        _check(nbytes <= self.nbytes - self._file.tell(), f"{nbytes} bytes should follow")
        self._file.seek(nbytes + -nbytes % _PADDED, 1)

    def _entries(self, kind: int) -> Iterator[None]:
        # Of a list, each of which begins with its name.
        tag, count = self._number(4), self._number()
        _check(tag == kind or tag == count == 0, f"a list of kind {tag}, wanted {kind}")
        for _ in range(count):
            _check((nbytes := self._number()) > 0, "a name without letters")
            self._skip(nbytes)
            yield

    def _element_nbytes(self) -> int:
        kind = self._number(4)
        _check(0 < kind < len(self._types), f"elements of the unknown type {kind}")
        return self._types[kind]

    def _skip_attributes(self) -> None:
        for _ in self._entries(_ATTRIBUTES):
            self._skip(self._element_nbytes() * self._number())


def _check(fits: bool, text: str) -> None:
    if not fits:
        raise ValueError(text)
