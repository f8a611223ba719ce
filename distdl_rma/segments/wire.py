"""What MPI carries to the memory of one peer: large puts in pieces, and flushes that do not block."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

__all__ = ["Bytes", "Request", "Runs", "Transfer", "Wire"]

Bytes = npt.NDArray[np.uint8]

# A put of more bytes than these is cut.
_PIECE_NBYTES = 128 << 10
_PIECES_AT_FIRST, _PIECES_PER_WINDOW = 2, 4
_MOST_UNDER_WAY = 64 << 20
# From so many bytes on, a contiguous run is a transfer of its own instead of a part of an MPI datatype.
_LONG_RUN_BYTES = 64 << 10
# Questions before a flush. What it waits for may come behind the first answer; and at most so often the
# question is asked again, since others began something before it was answered.
_QUESTIONS, _MOST_QUESTIONS = 2, 4
# What comes later shall not wait for longer behind what is under way.
_SLOW_SECONDS = 8e-3


class Request(Protocol):
    """What completes some time, as a request of MPI does."""

    def Test(self) -> bool:  # noqa: N802 - as in MPI
        """Whether it is complete; does not block."""


@dataclass(frozen=True)
class Runs:
    """Equally long stretches of contiguous bytes in a segment: where each begins, and how long all are."""

    offsets: tuple[int, ...]
    nbytes: int

    @property
    def total(self) -> int:
        """Bytes of all stretches."""
        return len(self.offsets) * self.nbytes

    def piece(self, done: int, limit: int) -> Runs:
        """What follows the first ``done`` bytes: whole stretches up to a limit in bytes, or part of one."""
        index, inside = divmod(done, self.nbytes)
        if self.nbytes > limit or inside:
            return Runs((self.offsets[index] + inside,), min(limit, self.nbytes - inside))
        return Runs(self.offsets[index : index + limit // self.nbytes], self.nbytes)


class Transfer:
    """A put that a :class:`Wire` carries out; complete when all of its pieces are.

    Parameters
    ----------
    wire
        Who begins its pieces.
    runs, data
        Where contiguous bytes go.
    """

    def __init__(self, wire: Wire, runs: Runs, data: Bytes) -> None:
        self._wire, self._runs, self._data = wire, runs, data
        self._begun, self.left = 0, runs.total

    def piece(self, limit: int) -> tuple[Runs, Bytes]:
        """The next piece, of a limit in bytes."""
        part = self._runs.piece(self._begun, limit)
        start, self._begun = self._begun, self._begun + part.total
        return part, self._data[start : self._begun]

    @property
    def waits(self) -> bool:
        """Whether some of it has not begun."""
        return self._begun < self._runs.total

    def Test(self) -> bool:  # noqa: N802 - as in MPI
        """Whether the source may be used again; lets the wire go on."""
        self._wire.pump()
        return not self.left


@dataclass
class _Piece:
    transfer: Transfer
    nbytes: int
    requests: list[Request]
    begun: float
    # Until it is seen under way for long.
    prompt: bool = True


class Wire:
    """Carries bytes to and from the memory of one peer, and says when they have arrived there.

    A network in software takes what it is given in order. So that what comes later does not wait for all
    of a large put, this begins it in pieces; those of several puts take turns, and only so much is under
    way as leaves within milliseconds. How much that is shows itself.

    A put that is complete at this end is not yet complete at the peer. Only a flush tells, of everything
    that was begun, and it cannot be interrupted: it would spin on a core that others need, for ever if the
    peer is gone. So it follows small gets that were answered while nothing else began, and then has
    nothing to wait for. The caller has the lock.

    Parameters
    ----------
    window
        Window over the segments of all ranks, locked.
    position
        Rank of the peer in the window's group.
    least
        Bytes under way at least; puts of up to so many are not cut.
    clock
        Tells seconds.
    """

    def __init__(
        self,
        window: MPI.Win,
        position: int,
        least: int = _PIECE_NBYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._window, self._position, self._least, self._clock = window, position, least, clock
        self._limit = least * _PIECES_AT_FIRST
        self._waiting: deque[Transfer] = deque()
        self._flying: list[_Piece] = []
        self._flying_nbytes = 0
        # Operations begun so far, and of these, how many have arrived for sure.
        self.begun = 0
        self._arrived = 0
        self._question: tuple[Request, int] | None = None
        self._asked = 0
        self._answer = np.empty(1, np.int64)

    def put(self, runs: Runs, data: Bytes) -> list[Request]:
        """Begin to copy contiguous bytes to the peer; they must not change until that is complete."""
        if runs.total <= self._least:
            return self._put(runs, data)
        transfer = Transfer(self, runs, data)
        self._waiting.append(transfer)
        self.pump()
        return [transfer]

    def get(self, runs: Runs, out: Bytes) -> list[Request]:
        """Begin to copy bytes from the peer."""
        self.begun += 1
        return _transfers(runs, out, lambda part, there: self._window.Rget(part, self._position, there))

    def replace(self, word: int, value: npt.NDArray[np.int64], before: npt.NDArray[np.int64]) -> Request:
        """Begin to set a word of the peer, atomically; complete when it is set and the old one is here."""
        self.begun += 1
        there = word * 8, 1, MPI.INT64_T
        return self._window.Rget_accumulate(value, before, self._position, there, op=MPI.REPLACE)

    def arrived(self, begun: int) -> bool:
        """Whether the first operations have arrived, as many as had begun then; asks, and does not block."""
        if self._arrived >= begun:
            return True
        if self._question is None:
            self._ask()
        if self._question is None or not self._question[0].Test():
            return False
        (_, then), self._question = self._question, None
        if self._asked < (_QUESTIONS if then == self.begun else _MOST_QUESTIONS):
            self._ask()
            return False
        self._window.Flush(self._position)
        self._arrived, self._asked = self.begun, 0
        return True

    def _ask(self) -> None:
        self._asked += 1
        there = 0, 8, MPI.BYTE
        self._question = self._window.Rget(self._answer, self._position, there), self.begun

    def pump(self) -> None:
        """See what is complete, and begin what may begin; does not block."""
        if not (self._flying or self._waiting):
            return
        now = self._clock()
        if self._flying:
            self._look(now)
        # Nothing between a question and the flush.
        while self._waiting and self._question is None and self._flying_nbytes < self._limit:
            transfer = self._waiting.popleft()
            part, data = transfer.piece(max(self._least, self._limit // _PIECES_PER_WINDOW))
            self._flying.append(_Piece(transfer, part.total, self._put(part, data), now))
            self._flying_nbytes += part.total
            if transfer.waits:
                self._waiting.append(transfer)

    def _put(self, runs: Runs, data: Bytes) -> list[Request]:
        self.begun += 1
        return _transfers(runs, data, lambda part, there: self._window.Rput(part, self._position, there))

    def _look(self, now: float) -> None:
        left, slow = [], False
        for piece in self._flying:
            piece.requests = [request for request in piece.requests if not request.Test()]
            if not piece.requests:
                piece.transfer.left -= piece.nbytes
                self._flying_nbytes -= piece.nbytes
                continue
            left.append(piece)
            if now - piece.begun > _SLOW_SECONDS and piece.prompt:
                piece.prompt, slow = False, True
        self._flying = left
        if slow:
            self._limit = max(self._least, self._limit // 2)
        elif not left and self._waiting and self._question is None:
            self._limit = min(_MOST_UNDER_WAY, 2 * self._limit)


def _transfers(runs: Runs, data: Bytes, call: Callable[[Any, Any], Request]) -> list[Request]:
    # Many short runs travel together, as one datatype.
    if not runs.total:
        return []
    if len(runs.offsets) == 1 or runs.nbytes >= _LONG_RUN_BYTES:
        return [
            call(
                [data[i * runs.nbytes : (i + 1) * runs.nbytes], MPI.BYTE],
                (offset, runs.nbytes, MPI.BYTE),
            )
            for i, offset in enumerate(runs.offsets)
        ]
    first = runs.offsets[0]
    kind = MPI.BYTE.Create_hindexed_block(runs.nbytes, [offset - first for offset in runs.offsets])
    kind.Commit()
    try:
        return [call([data, MPI.BYTE], (first, 1, kind))]
    finally:
        # MPI keeps what is still in use.
        kind.Free()
