"""Detection of ranks that failed, left, are missing or have ended, and of ranks that wait for each other.

What a look of a long wait finds in the header of a rank that it waits for, and what follows::

    header                                  the wait
    RUNNING, WAITING                        goes on
    WAITING_IN_STEP, in a ring with this    ExchangeTimeout after a second: they wait for each other
    FAILED, or its process has ended        PeerFailedError after a second; the machine is lost
    LEFT                                    PeerFailedError after a second, but for waits of the end of a job
    RAISED, SETTLING                        PeerFailedError after a second, if it did not raise here too
    not readable                            goes on to its timeout: a busy rank of another node looks alike

Why a second: the last messages of a rank may arrive after it has left or died, and a rank that raised may be
a little earlier than this one with the same error.

A failing rank also sends notices (``FailureNotices``), since a rank on another node sees its header late or
never, and since any wait ends by a notice, also one for other ranks.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn

from mpi4py import MPI

from distdl_rma.errors import ExchangeTimeout, PeerFailedError
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.virtual_ranks.comm import is_true_within
from distdl_rma.segments.waiting.error_texts import ANSWER_SECONDS, LOST, append_state, timeout_message
from distdl_rma.segments.waiting.header import (
    HeaderRecord,
    HeaderWriter,
    PeerHeaders,
    RankState,
    WaitReason,
    clip,
)

# A notice: the rank that failed, and the cause.
_NOTICE_BYTES = 1016
_NOTICE = struct.Struct(f"=q{_NOTICE_BYTES}s")
# How long a failed rank stays alive for the others to receive its notice.
NOTICE_SECONDS = 1.0
# A rank's last messages may arrive some time after it has left.
_SUSPICION_SECONDS = 1.0
# Fewest looks at a ring before it is an error. Time alone does not suffice: processes may have been stopped.
_LOOKS_BEFORE_ERROR = 8
# Most ranks that one look checks.
_WATCHED = 8
_LONGEST_RING = 16


class FailureNotices:
    """Notices that a failing rank sends to the others; every wait receives notices that have arrived.

    They have their own communicator, freed by ``close``; ``ranks`` are the rank ids by position in it. Calls
    of MPI hold the lock, since the progress engine is another thread. ``failures`` maps known failed ranks to
    their causes. ``failed`` is whether this rank has sent a notice; its header then has the state FAILED.

    A rank sends one notice in its life. ``failures`` only grows, and its first entry stays the one that later
    errors name: the cause, and not what followed from it.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        lock: AbstractContextManager[Any],
        header: HeaderWriter,
    ) -> None:
        self._comm, self._ranks, self._lock, self._header = comm, ranks, lock, header
        self.rank = ranks[comm.rank]
        self.failures: dict[int, str] = {}
        self.failed = False
        # Cause of this rank's own failure, empty if it has not failed.
        self._own = ""
        self._sent: list[tuple[MPI.Request, object]] = []

    @property
    def any_failed(self) -> bool:
        """Whether any rank has failed, so that no collective call can complete any more."""
        return self.failed or bool(self.failures)

    @property
    def before(self) -> tuple[int, ...]:
        """The ranks before this one, in the order of M."""
        return self._ranks[: self._comm.rank]

    def poll(self) -> None:
        """Receive notices of failed ranks, and let MPI make progress; does not block."""
        # Needed without remote peers too: this rank's MPI may still have to send a handshake's message. A
        # matched probe, since MPICH's Recv from any source may never find the probed synchronous message
        # between nodes.
        while (found := self._comm.Improbe()) is not None:
            notice = bytearray(_NOTICE.size)
            found.Recv([notice, MPI.BYTE])
            failed, text = _NOTICE.unpack(notice)
            self.failures.setdefault(failed, text.rstrip(b"\0").decode(errors="replace"))

    def check(self, reason: Callable[[], WaitReason] | None = None) -> None:
        """Raise ``PeerFailedError`` if this or another rank is known to have failed."""
        for rank, cause in self.failures.items():
            self.raise_for(rank, cause, reason() if reason else None, LOST)
        if self._own:
            # A rank that continues after its failure receives nothing more from the others.
            self.raise_for(self.rank, self._own, reason() if reason else None, LOST)

    def raise_for(self, rank: int, cause: str, reason: WaitReason | None, state: str = "") -> NoReturn:
        """Raise ``PeerFailedError`` for a rank that failed or left; ``state`` is that of the machine."""
        here = f"; rank {self.rank} waited {reason}" if reason else ""
        raise append_state(PeerFailedError(f"rank {rank} failed: {cause}{here}", rank, cause), state)

    def send(self, cause: str, rank: int | None = None) -> None:
        """Notify all ranks of a failure of this rank, or of ``rank`` if given; once, not blocking."""
        if self.failed:
            return
        self.failed = True
        failed = self.rank if rank is None else rank
        self._own = cause if failed == self.rank else ""
        self._header.write(RankState.FAILED, cause, origin=failed)
        notice = _NOTICE.pack(failed, clip(cause, _NOTICE_BYTES))
        with self._lock:
            for position, peer in enumerate(self._ranks):
                if peer not in (self.rank, failed):
                    # A synchronous send is complete once the peer has received the notice.
                    self._sent.append((self._comm.Issend([notice, MPI.BYTE], position), notice))

    def pass_on(self) -> None:
        """Notify all ranks of the first known failure, once."""
        for rank, cause in tuple(self.failures.items())[:1]:
            self.send(cause, rank)

    def noticed(self) -> bool:
        """Whether all ranks have received this rank's notice; makes progress."""
        with self._lock:
            self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
            self.poll()
        return not self._sent

    def wait_until_noticed(self, seconds: float) -> None:
        """Wait until all ranks have received the notice or another rank fails, at most ``seconds``."""
        is_true_within(seconds, lambda: self.noticed() or bool(self.failures), comm=self._comm)

    def close(self) -> None:
        """Free the communicator; collective."""
        self._comm.Free()


class PeerWatch:
    """Reads the headers of other ranks, writes this rank's waits to its own, adds failures to ``notices``.

    A look holds the segment's lock, since it may call MPI and changes what earlier looks have found. A
    suspicion is of one wait: ``end_wait`` drops all of them, since a rank that does not come to one operation
    may have done its part in the next.
    """

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], header: HeaderWriter, notices: FailureNotices
    ) -> None:
        self._segment, self._header, self._notices = segment, header, notices
        self.rank = notices.rank
        self.others = tuple(rank for rank in ranks if rank != self.rank)
        self._headers, self._left = PeerHeaders(segment), ""
        # The error that the ranks settle now, empty if none, and the rank on which it began.
        self._settling, self._origin = "", self.rank
        # Ring of ranks that wait for each other, this rank among them: their records, the time since which
        # these are unchanged, how often all have rewritten them since, and the last time of writing of each.
        self._ring: tuple[Any, float, int, list[float]] = (), 0.0, 0, []
        self._looks = 0
        # Ranks that a wait seems to be in vain for: since when, since which look, which rank failed, and the
        # cause.
        self._suspects: dict[int, tuple[float, int, int, str]] = {}
        # Virtual ranks do nothing between the turns of this one, however long that takes.
        self._fewest = 0 if segment.hand_over is None else _LOOKS_BEFORE_ERROR
        self._watched = 0
        # Number of collective calls that raised here.
        self._raised, self.has_raised = 0, False
        # Ranks whose process has ended, with a clause for messages: their headers may become unreadable.
        self._ended: dict[int, str] = {}

    def look(self, reason: WaitReason) -> None:
        """Write a long wait to the header, and raise ``PeerFailedError`` if the wait is in vain."""
        self._notices.check(lambda: reason)
        with self._segment.lock:
            self._look(reason)

    def _look(self, reason: WaitReason) -> None:
        self._looks += 1
        self._write(reason)
        if not (self._left or self._settling):
            if self._looks > _LOOKS_BEFORE_ERROR:
                self._join_settlement(reason)
            if reason.in_step:
                self._check_ring(reason)
        now = time.monotonic()
        ranks = [rank for rank in reason.ranks if rank != self.rank]
        for rank in self._some(ranks):
            failed, cause, alive = self._diagnose(rank, reason)
            if not cause:
                self._suspects.pop(rank, None)
                continue
            since, *_ = self._suspects.setdefault(rank, (now, self._looks, failed, cause))
            if now - since > _SUSPICION_SECONDS and not alive:
                # The rank failed: no operation in which it takes part can complete.
                self._notices.failures.setdefault(failed, cause)
                self._notices.raise_for(failed, cause, reason, LOST)
        gone = [rank for rank in ranks if rank in self._suspects and self._is_gone(*self._suspects[rank])]
        if gone and (not reason.anyone or len(gone) == len(ranks)):
            *_, failed, cause = self._suspects[gone[0]]
            self._notices.raise_for(failed, cause, reason)

    def _is_gone(self, since: float, looks: int, *_: object) -> bool:
        # Its last messages have arrived by now.
        long_ago = time.monotonic() - since > _SUSPICION_SECONDS
        return long_ago and self._looks - looks >= self._fewest

    def _join_settlement(self, reason: WaitReason) -> None:
        # Ranks that raised wait for this rank to raise too, while it may wait for other ranks.
        for rank in self._some([rank for rank in self.others if self._headers.is_near(rank)]):
            record = self._headers.glance(rank)
            if record is not None and record.state is RankState.SETTLING and self.rank in record.waits_for:
                self._notices.raise_for(_origin(rank, record), record.text, reason)

    def _check_ring(self, reason: WaitReason) -> None:
        # Ranks of a ring that has lasted this long wait for ever: on one node, all sent data has arrived.
        ring = self._ring_through(reason.ranks)
        states = [(rank, record.since, record.text) for rank, record in ring]
        written = [record.written for _, record in ring]
        known, since, times, last = self._ring
        if not ring or states != known:
            self._ring = states, time.monotonic(), 0, written
            return
        # A rank that does not run, as on a crowded machine, neither sees new data nor rewrites its record.
        if all(now != before for now, before in zip(written, last, strict=True)):
            times, last = times + 1, written
        self._ring = known, since, times, last
        seconds = time.monotonic() - since
        if seconds > _SUSPICION_SECONDS and times > _LOOKS_BEFORE_ERROR:
            mutual = replace(reason, hint=f"they wait for each other: {reason.hint}")
            raise ExchangeTimeout(self.timeout_message(mutual, seconds))

    def _ring_through(self, ranks: tuple[int, ...]) -> tuple[tuple[int, HeaderRecord], ...]:
        # Shortest chain of ranks that wait in step, from this rank back to itself, with their records.
        ways: dict[int, tuple[tuple[int, HeaderRecord], ...]] = dict.fromkeys(ranks, ())
        pending = list(ways)
        while pending and len(ways) < _LONGEST_RING:
            rank = pending.pop(0)
            record = self._headers.glance(rank) if self._headers.is_near(rank) else None
            if record is None or record.state is not RankState.WAITING_IN_STEP:
                continue
            way = (*ways[rank], (rank, record))
            if self.rank in record.waits_for:
                return way
            for other in record.waits_for:
                if other not in ways:
                    ways[other] = way
                    pending.append(other)
        return ()

    def _some(self, ranks: list[int]) -> list[int]:
        # A few of many ranks at a time, in turn: each costs a look at its header.
        if len(ranks) <= _WATCHED:
            return ranks
        self._watched = (self._watched + _WATCHED) % len(ranks)
        return (ranks + ranks)[self._watched : self._watched + _WATCHED]

    def _diagnose(self, rank: int, reason: WaitReason) -> tuple[int, str, bool]:
        # The table at the head of this file, for one rank.
        # The rank that failed, why a wait for ``rank`` is in vain ("" if it is not), whether ``rank`` lives.
        record = self._headers.glance(rank)
        if record is None:
            return rank, "", False
        # Records the time, for the message of a wait that reaches its deadline.
        self._headers.unchanged(rank, record)
        if record.state is RankState.FAILED:
            return _origin(rank, record), record.text, False
        raised = record.state is RankState.RAISED and record.waits_for > (self._raised,)
        if (raised or record.state is RankState.SETTLING) and not self._settling:
            return _origin(rank, record), record.text, True
        if record.state is RankState.LEFT and not (self._left or reason.leavers):
            return rank, f"it left, {record.text}", True
        return rank, self._end_of(rank, record), False

    def _end_of(self, rank: int, record: HeaderRecord) -> str:
        if not self._headers.process_has_ended(rank, record):
            return ""
        self._ended[rank] = f"it is silent, its process {record.process} has ended"
        return self._ended[rank]

    def end_wait(self) -> None:
        """Forget what was seen during a wait, and write to the header that the wait is over."""
        self._suspects.clear()
        self._ring, self._looks = ((), 0.0, 0, []), 0
        self._headers.forget()
        self.write_end_of_wait()

    def write_end_of_wait(self) -> None:
        """Write to the header that the wait is over, while another thread may continue to watch ranks."""
        if self._left or self._settling or not self._notices.failed:
            self._write(WaitReason((), ""))

    def _write(self, reason: WaitReason) -> None:
        # The state that other ranks see: leaving and settling last longer than the waits meanwhile.
        if self._left:
            self._header.write(RankState.LEFT, self._left, reason.ranks)
        elif self._settling:
            self._header.write(RankState.SETTLING, self._settling, reason.ranks, self._origin)
        else:
            waits = RankState.WAITING_IN_STEP if reason.in_step else RankState.WAITING
            self._header.write(waits if reason.what else RankState.RUNNING, reason.what, reason.ranks)

    def has_begun(self, rank: int, name: str, epoch: int) -> bool:
        """Whether a rank has begun an operation, by its header; False if the rank has not answered yet."""
        record = self._headers.glance(rank)
        return record is not None and record.operation == name and record.epoch >= epoch

    def announce_error(self, text: str) -> None:
        """Announce to other ranks that a collective call raised here.

        Their waits are in vain if it did not raise there. Ranks on which as many calls raised, as with equal
        arguments on all ranks, continue to wait.
        """
        self._raised, self.has_raised = self._raised + 1, True
        if not (self._left or self._notices.failed):
            # In place of the ranks waited for: the number of calls that raised.
            self._header.write(RankState.RAISED, text, (self._raised,))

    def settle(self, text: str, origin: int) -> None:
        """Announce that a collective call raised here, and that this rank waits for the others to raise too.

        Until ``resume``, a rank that waits for this one, or that this one waits for, raises
        ``PeerFailedError`` with the rank ``origin``, on which the error began.
        """
        self._settling, self._origin = text, origin
        self.write_end_of_wait()

    def resume(self) -> None:
        """Announce to other ranks that this rank continues after an error."""
        self.has_raised, self._settling = False, ""
        self.end_wait()

    def leave(self, text: str) -> None:
        """Write to the header that this rank has left."""
        if not self._notices.failed:
            self._left = text
            self._header.write(RankState.LEFT, text)

    def undo_leave(self) -> None:
        """Undo ``leave``, for ranks that have not raised because of it."""
        if self._left:
            self._left = ""
            self.end_wait()

    def missing(self) -> tuple[int, ...]:
        """Return some of the ranks for which all wait before they leave, most serious first; does not block.

        First come ranks whose process has ended, then ranks that have not left, then silent ranks: these do
        not answer, or have not rewritten their record for a while, as when they are stopped.
        """
        ended, there, silent = [], [], []
        for rank in self.others:
            record = self._headers.glance(rank)
            if record is None or self._headers.age(rank) > ANSWER_SECONDS:
                silent.append(rank)
            elif self._headers.process_has_ended(rank, record):
                ended.append(rank)
            elif record.state is not RankState.LEFT:
                there.append(rank)
            elif self._headers.unchanged(rank, record) > ANSWER_SECONDS:
                silent.append(rank)
        return (*ended, *there, *silent)[:_WATCHED]

    def ended(self) -> list[tuple[int, str]]:
        """Ranks of this node whose process has ended, each with a clause for messages."""
        for rank in self.others:
            record = self._headers.glance(rank)
            if record is not None:
                self._end_of(rank, record)
        return [(rank, self._ended[rank]) for rank in self.others if rank in self._ended]

    def timeout_message(self, reason: WaitReason, seconds: float) -> str:
        """Message for a wait that reached its deadline; raises ``PeerFailedError`` if a rank has failed."""
        self._notices.check(lambda: reason)
        with self._segment.lock:
            return timeout_message(self._headers, self.rank, reason, seconds)


def _origin(rank: int, record: HeaderRecord) -> int:
    return rank if record.origin < 0 else record.origin
