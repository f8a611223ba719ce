"""Refuse truncated NetCDF files of the classic formats, of which the library reads zeros behind the end."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

from distdl_rma.errors import DataError

# Bytes of an element, by the format's number of its type.
_NBYTES = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)
_PADDED = 4
_OFFSET_64, _DATA_64 = 2, 5


def check_size(path: str) -> None:
    """``DataError`` if a file ends before the elements that its header states; nothing for files of HDF5."""
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
