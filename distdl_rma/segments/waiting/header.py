"""What each rank is doing, in the header of its own segment, for others to read."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distdl_rma.segments.waiting.double_record import DoubleRecord

# The first bytes of every segment.
HEADER_BYTES = 2048
_RANKS = 8
_TEXT, _NAME = 512, 256
# Process, its namespace, state, since when, when written; ranks waited for (number, first few), text.
_STATE = DoubleRecord(f"qqqddq{_RANKS}q{_TEXT}s", 0)
# Epoch, begin and name of the operation begun last.
_OPERATION = DoubleRecord(f"qd{_NAME}s", _STATE.end)


class RankState(enum.IntEnum):
    """What a rank does, as far as others must know."""

    RUNNING = 1
    WAITING = 2
    FAILED = 3
    LEFT = 4


@dataclass(frozen=True)
class HeaderRecord:
    """Header of a segment, as read by another rank; times are seconds since the Unix epoch."""

    state: RankState
    process: int
    namespace: int
    since: float
    written: float
    waits_for: tuple[int, ...]
    text: str
    operation: str
    epoch: int
    operation_since: float

    @property
    def doing(self) -> str:
        """What the rank does, as a clause of a sentence."""
        now = time.time()
        ago = f"{max(now - self.since, 0):.1f} s"
        if self.state is RankState.FAILED:
            return f"failed {ago} ago: {self.text}"
        if self.state is RankState.LEFT:
            also = f", and waits for {numbered(self.waits_for)} to do so" if self.waits_for else ""
            return f"left {ago} ago, {self.text}{also}"
        if self.state is RankState.WAITING:
            return f"waits since {ago} for {numbered(self.waits_for)} {self.text}"
        last = ""
        if self.operation:
            began = max(now - self.operation_since, 0)
            last = f": the last that it began, {began:.1f} s ago, was {self.operation!r} (epoch {self.epoch})"
        return f"waits for nobody{last or f' since {ago}'}"


def numbered(ranks: tuple[int, ...]) -> str:
    """Name some ranks: "rank 3", "ranks 1, 2"."""
    some = ", ".join(map(str, ranks[:_RANKS])) + (", ..." if len(ranks) > _RANKS else "")
    return f"rank{'s' * (len(ranks) != 1)} {some}"


class HeaderWriter:
    """This rank's header, the first bytes of its segment: written by it alone, read by others at any moment.

    The fence keeps stores before it from being seen after those behind it.
    """

    def __init__(self, header: memoryview, fence: Callable[[], None]) -> None:
        self._header, self._fence = header, fence
        # Records written so far, of either kind.
        self._states = self._operations = 0
        self._process = os.getpid()
        self._namespace = namespace()
        self._state: RankState | None = None
        self._since = 0.0
        self.begin(b"", 0)
        self.write(RankState.RUNNING)

    def write(self, state: RankState, text: str = "", ranks: tuple[int, ...] = ()) -> None:
        """Say what this rank does; the time since when is that of the last change of state."""
        if state is not self._state:
            self._state, self._since = state, time.time()
        listed = (*ranks[:_RANKS], *[-1] * (_RANKS - len(ranks[:_RANKS])))
        self._states += 1
        fields = self._process, self._namespace, state, self._since, time.time(), len(ranks), *listed
        _STATE.write(self._header, self._states, self._fence, *fields, clip(text, _TEXT))

    def begin(self, name: bytes, epoch: int) -> None:
        """Say which operation this rank begins; ``name`` is ``operation_name`` of it."""
        self._operations += 1
        _OPERATION.write(self._header, self._operations, self._fence, epoch, time.time(), name)

    def close(self) -> None:
        """Let go of the memory."""
        self._header.release()


def operation_name(name: str) -> bytes:
    """Name of an operation as :meth:`HeaderWriter.begin` takes it."""
    return clip(name, _NAME)


def clip(text: str, nbytes: int) -> bytes:
    """Text in UTF-8 that fits, without half a character at the end."""
    return text.encode()[:nbytes].decode(errors="ignore").encode()


def parse(header: bytes) -> HeaderRecord | None:
    """Record in a copy of a header; None if it cannot be read, being written for the first time or again."""
    doing, begun = _STATE.read(header), _OPERATION.read(header)
    if doing is None or begun is None:
        return None
    process, space, state, since, written, number, *ranks, text = doing
    epoch, began, name = begun
    text, name = (words.rstrip(b"\0").decode(errors="replace") for words in (text, name))
    waits_for = tuple(ranks[: min(number, _RANKS)])
    return HeaderRecord(RankState(state), process, space, since, written, waits_for, text, name, epoch, began)


def namespace() -> int:
    """Which processes a process number of this process is one of; 0 where that cannot be told."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def is_gone(process: int) -> bool:
    """Whether a process of this node and namespace has ended, reaped or not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        # "pid (name) state ...": the name may hold anything, so the last bracket counts.
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "ZX"
