"""The 64-bit integers of a peer's buffer, and what is atomic on them."""

from __future__ import annotations

from operator import index as as_int

from mpi4py import MPI

from distdl_rma.errors import ArgumentError, ShapeError
from distdl_rma.segments.memory.array_bytes import as_offset
from distdl_rma.segments.memory.remote_memory import RemoteMemory
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.waiting.header import WaitReason


class RemoteWords:
    """Atomic operations on a peer's buffer, each on a 64-bit integer at an offset in bytes.

    Atomic towards each other on all ranks, not towards puts and plain stores. All block, until the word has
    been changed. All raise

    - ``ShapeError`` if the offset is no multiple of 8 inside the buffer;
    - ``ArgumentError`` if a number has more than 64 bits;
    - ``ExchangeTimeout`` if the peer does not answer. Nothing was changed; the call can be repeated.
    """

    def __init__(self, memory: RemoteMemory) -> None:
        self._memory = memory
        self.peer, self.nbytes = memory.peer, memory.nbytes
        self._atomics = memory.context.segment.atomics

    def fetch_add(self, offset: int, value: int, timeout: float | None = None) -> int:
        """Add to the integer, and return what it was. The sum wraps around."""
        operand = _int64(value)
        return self._atomics.fetch(self.peer, self._word_at(offset, timeout), MPI.SUM, operand)

    def compare_swap(self, offset: int, expected: int, desired: int, timeout: float | None = None) -> int:
        """Set the integer to ``desired`` if it is ``expected``; return what it was: that if it was set."""
        old, new = _int64(expected), _int64(desired)
        return self._atomics.compare_swap(self.peer, self._word_at(offset, timeout), old, new)

    def atomic_swap(self, offset: int, value: int, timeout: float | None = None) -> int:
        """Set the integer, and return what it was."""
        operand = _int64(value)
        return self._atomics.fetch(self.peer, self._word_at(offset, timeout), MPI.REPLACE, operand)

    def atomic_store(self, offset: int, value: int, timeout: float | None = None) -> None:
        """Set the integer; it is set on return."""
        self.atomic_swap(offset, value, timeout)

    def atomic_load(self, offset: int, timeout: float | None = None) -> int:
        """Return the integer."""
        return self._atomics.fetch(self.peer, self._word_at(offset, timeout), MPI.NO_OP, 0)

    def _word_at(self, offset: int, timeout: float | None) -> int:
        # Where in the peer's segment, once the peer is known to answer.
        check_timeout(timeout)
        self._memory.context.check_open()
        offset = as_offset(offset, "an atomic")
        if offset % 8 or offset < 0 or offset + 8 > self.nbytes:
            raise ShapeError(
                f"an atomic works on 8 bytes at a multiple of 8 inside rank {self.peer}'s buffer of"
                f" {self.nbytes} bytes, got offset {offset}"
            )
        answered = self._atomics.responding(self.peer)
        if answered is not None:
            reason = WaitReason((self.peer,), "to answer before an atomic operation")
            self._memory.context.waiter.until(answered, lambda: reason, timeout)
        return self._memory.begin + offset


def _int64(value: int) -> int:
    number = as_int(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise ArgumentError(f"an atomic works on integers of 64 bits, got {number}")
    return number
