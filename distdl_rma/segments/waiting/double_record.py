"""Records in memory that others read at any moment, and that is whole even if its writer stops midway."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

_CHECK = struct.Struct("=q")
_COUNT = "q"


class DoubleRecord:
    """Two places for one record, written in turn: while one of them changes, the other is whole.

    A record has a count in front, which tells the newer of the two, and a checksum behind. Readers copy both
    places and believe what the checksums confirm: no order of stores and loads, on either side, can make a
    mixture of two records pass for one. Memory that was never written, all zeros, is no record.

    ``form`` has the fields as ``struct`` has them, in native sizes without alignment; the two places lie
    between the offsets ``begin``, a multiple of 8, and ``end``, in bytes.
    """

    def __init__(self, form: str, begin: int) -> None:
        self._form = struct.Struct(f"={_COUNT}{form}")
        self._size = self._form.size
        self._places = (begin, begin + self._size + _CHECK.size)
        self.end = begin + 2 * (self._size + _CHECK.size)

    def write(self, memory: memoryview, count: int, fence: Callable[[], None], *fields: Any) -> None:
        """Write a record over the older of the two; ``count`` is one more than that of the last one.

        The fence keeps stores in order: the last record is whole before the one before it is destroyed.
        """
        at = self._places[count & 1]
        fence()
        self._form.pack_into(memory, at, count, *fields)
        _CHECK.pack_into(memory, at + self._size, zlib.crc32(memory[at : at + self._size]))

    def read(self, copied: bytes) -> tuple[Any, ...] | None:
        """Fields of the newer record that is whole, in a copy of the memory; None if neither is."""
        records = [record for at in self._places if (record := self._whole(copied, at)) is not None]
        return max(records, key=lambda record: record[0])[1:] if records else None

    def _whole(self, copied: bytes, at: int) -> tuple[Any, ...] | None:
        behind = at + self._size
        if _CHECK.unpack_from(copied, behind)[0] != zlib.crc32(copied[at:behind]):
            return None
        return self._form.unpack_from(copied, at)
