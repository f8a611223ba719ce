"""Headers of segments: each rank writes its state and its waits to its header, and other ranks read them.

The first 2048 bytes of each segment::

    | state, place 0 | state, place 1 | operation, place 0 | operation, place 1 | unused | moving |
      a record: | text | count | numbers | checksum |                                      word 255

The owner writes records in turn to the two places of each kind, and nobody else writes them. So while one
place changes, the other is whole. Peers alone write the word ``moving``, by MPI's atomics
(``transport/links.py``).

A reader takes no lock and sends no message: it loads the header of a peer on its node, and gets that of
another. So the state of a rank can be read while it computes, is stopped or has died, and costs it nothing.
It writes a record at the begin of each operation and in waits that are long.
"""

from __future__ import annotations

import enum
import os
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.transport.heap import Bytes
from distdl_rma.segments.transport.links import ByteRuns, RemoteLink
from distdl_rma.segments.transport.segment import Segment

# Bytes at the start of every segment.
HEADER_BYTES = 2048
_RANKS = 8
_TEXT, _NAME = 512, 256
_CHECK = struct.Struct("=q")
# Most reads of a header while its owner changes it; then the owner counts as silent.
_LOOKS = 100


@dataclass(frozen=True)
class WaitReason:
    """Ranks that this rank waits for and what they have to do, as in "to send in 'enc1' (epoch 7, ...)".

    ``hint`` ends the message of a timeout. With ``anyone``, any one of the ranks may do it, and the wait is
    in vain only when all of them have left. With ``leavers``, ranks that have left do it too, while their
    processes live. With ``in_step``, a rank does it only by its own program: ranks that wait so for each
    other wait for ever.
    """

    ranks: tuple[int, ...]
    what: str
    hint: str = ""
    anyone: bool = False
    leavers: bool = False
    in_step: bool = False

    def __str__(self) -> str:
        return f"for {numbered(self.ranks)} {self.what}"


class RecordText(NamedTuple):
    """Text at the start of a record: padded, and with its checksum, which the record's checksum continues."""

    padded: bytes
    checksum: int


class DoubleRecord:
    """Two places for one record, written in turn: while one of them changes, the other is valid.

    A record is a text, a count, which tells the newer record of the two, other fields and a checksum. Readers
    copy both places and use the newer valid record. So no order of stores and loads, on either side, lets a
    mixture of two records pass for one. Memory that was never written, all zeros, is no record.

    ``form`` lists the fields as ``struct`` does, in native sizes without alignment. The text has ``text``
    bytes; its checksum can be computed in advance. The two places lie between the byte offsets ``begin``, a
    multiple of 8, and ``end``.
    """

    def __init__(self, form: str, begin: int, text: int) -> None:
        self._text, self._numbers = text, struct.Struct(f"=q{form}")
        self._size = text + self._numbers.size
        self._places = (begin, begin + self._size + _CHECK.size)
        self.end = begin + 2 * (self._size + _CHECK.size)

    def write(
        self, text: RecordText, memory: memoryview, count: int, fence: Callable[[], object], *fields: Any
    ) -> None:
        """Overwrite the older record, after a fence that completes the last; ``count`` is one more."""
        at = self._places[count & 1]
        behind = at + self._text
        numbers = self._numbers.pack(count, *fields)
        fence()
        memory[at:behind] = text.padded
        memory[behind : at + self._size + _CHECK.size] = numbers + _CHECK.pack(
            zlib.crc32(numbers, text.checksum)
        )

    def read(self, copied: bytes) -> tuple[Any, ...] | None:
        """Text and fields of the newer valid record in a copy of the memory; None if neither is valid."""
        records = []
        for at in self._places:
            text, behind = copied[at : at + self._text], at + self._size
            if _CHECK.unpack_from(copied, behind)[0] == zlib.crc32(copied[at:behind]):
                count, *fields = self._numbers.unpack_from(copied, at + self._text)
                records.append((count, text.rstrip(b"\0").decode(errors="replace"), *fields))
        return max(records)[1:] if records else None


# Text, process, namespace, state, since when, when written, origin; number of ranks waited for, first few.
_STATE = DoubleRecord(f"qqqddqq{_RANKS}q", 0, _TEXT)
# Name, epoch and start time of the last operation.
_OPERATION = DoubleRecord("qd", _STATE.end, _NAME)


class RankState(enum.IntEnum):
    """State of a rank, for other ranks.

    ::

        RUNNING <----> WAITING, WAITING_IN_STEP     a long wait, and its end
           |  ^
           |  +------- RAISED, SETTLING             a call raised; the rank goes on
           +---------> LEFT                         closes its machine; back only if not all ranks close
           +---------> FAILED                       for ever
    """

    RUNNING = 1
    WAITING = 2
    FAILED = 3
    LEFT = 4
    RAISED = 5  # an error in a collective call; ranks that wait for this rank find out whether they raise too
    WAITING_IN_STEP = 6  # a wait with ``in_step``
    SETTLING = 7  # an error in a collective call; waits for the others to raise too


@dataclass(frozen=True)
class HeaderRecord:
    """Header of a segment, as read by another rank; times are seconds since the Unix epoch.

    ``origin`` is the rank on which the error of ``text`` began, -1 for the owner of the header.
    """

    state: RankState
    process: int
    namespace: int
    since: float
    written: float
    origin: int
    waits_for: tuple[int, ...]
    text: str
    operation: str
    epoch: int
    operation_since: float

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for others."""
        return self.state in (RankState.WAITING, RankState.WAITING_IN_STEP)

    @property
    def doing(self) -> str:
        """State of the rank, as a clause of a sentence."""
        now = time.time()
        ago = f"{max(now - self.since, 0):.1f} s"
        if self.state is RankState.FAILED:
            return f"failed {ago} ago: {self.text}"
        if self.state in (RankState.RAISED, RankState.SETTLING):
            return f"raised {ago} ago: {self.text}"
        if self.state is RankState.LEFT:
            also = f", and waits for {numbered(self.waits_for)} to do so" if self.waits_for else ""
            return f"left {ago} ago, {self.text}{also}"
        if self.is_waiting:
            return f"waits since {ago} for {numbered(self.waits_for)} {self.text}"
        if not self.operation:
            return f"waits for nobody since {ago}"
        began = f"the last that it began, {max(now - self.operation_since, 0):.1f} s ago,"
        return f"waits for nobody: {began} was {self.operation!r} (epoch {self.epoch})"


def numbered(ranks: tuple[int, ...]) -> str:
    """Name some ranks for a message: "rank 3", "ranks 1, 2", or "the other ranks" if it is unknown which."""
    if not ranks:
        return "the other ranks"
    some = ", ".join(map(str, ranks[:_RANKS])) + (", ..." if len(ranks) > _RANKS else "")
    return f"rank{'s' * (len(ranks) != 1)} {some}"


class HeaderWriter:
    """This rank's header, the first bytes of its segment: it alone writes it, others read it any time."""

    def __init__(self, header: memoryview, fence: Callable[[], object]) -> None:
        self._header, self._fence = header, fence
        # Number of records written, of each kind.
        self._states = self._operations = 0
        self._process, self._namespace = os.getpid(), namespace()
        self._state: RankState | None = None
        self._since = 0.0
        self.begin(operation_name(""), 0)
        self.write(RankState.RUNNING)

    def write(self, state: RankState, text: str = "", ranks: tuple[int, ...] = (), origin: int = -1) -> None:
        """Write the state of this rank; ``origin`` is the rank on which the error began, if another one."""
        if state is not self._state:
            self._state, self._since = state, time.time()
        listed = (*ranks[:_RANKS], *[-1] * (_RANKS - len(ranks[:_RANKS])))
        self._states += 1
        fields = self._process, self._namespace, state, self._since, time.time(), origin, len(ranks)
        _STATE.write(record_text(text, _TEXT), self._header, self._states, self._fence, *fields, *listed)

    def begin(self, name: RecordText, epoch: int) -> None:
        """Write which operation this rank begins; ``operation_name`` makes ``name``."""
        self._operations += 1
        _OPERATION.write(name, self._header, self._operations, self._fence, epoch, time.time())

    def close(self) -> None:
        """Release the memory."""
        self._header.release()


def operation_name(name: str) -> RecordText:
    """Name of an operation for ``HeaderWriter.begin``."""
    return record_text(name, _NAME)


def record_text(text: str, nbytes: int) -> RecordText:
    """Text of a record, of at most ``nbytes`` bytes."""
    padded = clip(text, nbytes).ljust(nbytes, b"\0")
    return RecordText(padded, zlib.crc32(padded))


def clip(text: str, nbytes: int) -> bytes:
    """Encode text in at most ``nbytes`` of UTF-8, cut between characters; lone surrogates are escaped."""
    return text.encode(errors="backslashreplace")[:nbytes].decode(errors="ignore").encode()


def parse(header: bytes) -> HeaderRecord | None:
    """Record in a copy of a header; None if it is not valid, because it is being written."""
    doing, begun = _STATE.read(header), _OPERATION.read(header)
    if doing is None or begun is None:
        return None
    text, process, space, state, since, written, origin, number, *ranks = doing
    waits_for = tuple(ranks[: min(number, _RANKS)])
    return HeaderRecord(RankState(state), process, space, since, written, origin, waits_for, text, *begun)


class PeerHeaders:
    """Headers of all ranks; those that this rank cannot load are read by gets, answered later or never.

    A get is pending until it is answered, and a rank has one at most. A killed rank never answers: the get
    and its memory stay in ``_asked`` until the network reports the loss, or for ever.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, self._namespace = segment, namespace()
        # Pending gets; the last answer of each rank of another node, and its time.
        self._asked: dict[int, tuple[MPI.Request, Bytes]] = {}
        self._answers: dict[int, tuple[HeaderRecord, float]] = {}
        # By rank: when its last record was written (its clock), when this rank first read it (own clock).
        self._last: dict[int, tuple[float, float]] = {}

    def is_near(self, rank: int) -> bool:
        """Whether a rank's header is read by load."""
        return self.segment.link(rank).memory is not None

    def read(self, rank: int, deadline: float) -> HeaderRecord | None:
        """Record of a rank; None if it does not answer. Blocking, until the deadline at most."""
        memory = self.segment.link(rank).memory
        if memory is not None:
            for _ in range(_LOOKS):
                record = parse(bytes(memory[:HEADER_BYTES].data))
                if record is not None:
                    return record
                os.sched_yield()
            return None
        while not self._poll_answer(rank):
            if time.monotonic() > deadline:
                return None
            if self.segment.hand_over is None:
                time.sleep(5e-5 if self.segment.keep_moving() else 1e-3)
            else:
                self.segment.hand_over(None)
        return self._answers[rank][0]

    def glance(self, rank: int) -> HeaderRecord | None:
        """Record of a rank, from its last answer; None if it never answered. Does not block."""
        if self.is_near(rank):
            return self.read(rank, 0.0)
        self._poll_answer(rank)
        return self._answers[rank][0] if rank in self._answers else None

    def age(self, rank: int) -> float:
        """Seconds since the rank's last answer; 0 if its header is read by load."""
        if self.is_near(rank):
            return 0.0
        return time.monotonic() - self._answers[rank][1] if rank in self._answers else float("inf")

    def unchanged(self, rank: int, record: HeaderRecord) -> float:
        """Seconds since this rank saw a waiting rank's record change; 0 for a rank that does not wait.

        A waiting rank rewrites its record ten times a second, so an old record is that of a stopped rank. The
        time is measured by this rank's clock: clocks of two nodes differ.
        """
        now = time.monotonic()
        written, since = self._last.get(rank, (0.0, now))
        if written != record.written:
            since = now
        self._last[rank] = record.written, since
        return now - since if record.is_waiting or record.state is RankState.LEFT else 0.0

    def forget(self) -> None:
        """Forget all answers."""
        self._answers.clear()

    def process_has_ended(self, rank: int, record: HeaderRecord) -> bool:
        """Whether a rank's process has ended; False on another node, where that is unknown."""
        near = rank in self.segment.node_ranks and record.namespace == self._namespace
        return near and bool(record.namespace) and has_ended(record.process)

    def _poll_answer(self, rank: int) -> bool:
        # Sends a get or receives its answer; returns whether the rank answered just now.
        with self.segment.lock:
            try:
                if rank not in self._asked:
                    header = np.empty(HEADER_BYTES, np.uint8)
                    link = cast(RemoteLink, self.segment.link(rank))
                    self._asked[rank] = link.get(ByteRuns((0,), HEADER_BYTES), header), header
                request, header = self._asked[rank]
                if not request.Test():
                    return False
            except (PeerFailedError, MPI.Exception):
                # The network has lost a killed rank, so there is no answer.
                self._asked.pop(rank, None)
                return False
            del self._asked[rank]
            record = parse(header.tobytes())
            if record is not None:
                self._answers[rank] = record, time.monotonic()
            return record is not None


def namespace() -> int:
    """Inode of this process's pid namespace; 0 if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def has_ended(process: int) -> bool:
    """Whether a process of this node and namespace has ended, reaped or not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        # "pid (name) state ...": the name may contain brackets, so the last one counts.
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "ZX"
