"""What a rank reads of the others while it waits: who failed, who has left, who is missing."""

from __future__ import annotations

import time

from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiting.failure_notices import FailureNotices
from distdl_rma.segments.waiting.header import HeaderRecord, HeaderWriter, RankState
from distdl_rma.segments.waiting.peer_headers import PeerHeaders
from distdl_rma.segments.waiting.timeout_message import ANSWER_SECONDS, timeout_message
from distdl_rma.segments.waiting.wait_reason import WaitReason

# What a rank sent before it left must have the time to arrive.
_SUSPICION_SECONDS = 1.0
# Of many ranks that are waited for, so many are looked at each time.
_WATCHED = 8


class PeerWatch:
    """Reads what the ranks say in the headers of their segments, and says there what this one waits for.

    Failures that it finds out so are added to the ``notices``.
    """

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], header: HeaderWriter, notices: FailureNotices
    ) -> None:
        self._segment, self._header, self._notices = segment, header, notices
        self.rank = notices.rank
        self.others = tuple(rank for rank in ranks if rank != self.rank)
        self._headers = PeerHeaders(segment)
        self._left = ""
        # Ranks that seem to have gone: since when, and why.
        self._suspects: dict[int, tuple[float, str]] = {}
        self._watched = 0
        # Ranks whose process was seen to have ended, which their headers may not tell a second time.
        self._ended: dict[int, str] = {}

    def look(self, reason: WaitReason) -> None:
        """Tell others about a wait that takes long, and raise ``PeerFailedError`` if it is in vain."""
        self._notices.check(lambda: reason)
        with self._segment.lock:
            self._look(reason)

    def _look(self, reason: WaitReason) -> None:
        if self._left:
            self._header.write(RankState.LEFT, self._left, reason.ranks)
        else:
            self._header.write(RankState.WAITING, reason.what, reason.ranks)
        now = time.monotonic()
        # This rank itself does nothing while it waits.
        ranks = [rank for rank in reason.ranks if rank != self.rank]
        for rank in self._some(ranks):
            cause, left = self._gone(rank, reason)
            if not cause:
                self._suspects.pop(rank, None)
                continue
            since, _ = self._suspects.setdefault(rank, (now, cause))
            if now - since > _SUSPICION_SECONDS and not left:
                # It failed: nothing that it takes part in can go on.
                self._notices.failures.setdefault(rank, cause)
                self._notices.raise_for(rank, cause, reason)
        gone = [
            (rank, self._suspects[rank][1])
            for rank in ranks
            if rank in self._suspects and now - self._suspects[rank][0] > _SUSPICION_SECONDS
        ]
        if gone and (not reason.anyone or len(gone) == len(ranks)):
            self._notices.raise_for(*gone[0], reason)

    def _some(self, ranks: list[int]) -> list[int]:
        # Of many ranks some after the others: each costs a look at its header.
        if len(ranks) <= _WATCHED:
            return ranks
        self._watched = (self._watched + _WATCHED) % len(ranks)
        return (ranks + ranks)[self._watched : self._watched + _WATCHED]

    def done(self) -> None:
        """Tell others that the wait is over."""
        self._suspects.clear()
        self._headers.forget()
        if self._left:
            self._header.write(RankState.LEFT, self._left)
        elif not self._notices.failed:
            self._header.write(RankState.RUNNING)

    def timeout_message(self, reason: WaitReason, seconds: float) -> str:
        """Text for a wait that reached its deadline; raises ``PeerFailedError`` if it was in vain."""
        self._notices.check(lambda: reason)
        with self._segment.lock:
            return timeout_message(self.rank, self._headers, reason, seconds)

    def has_begun(self, rank: int, name: str, epoch: int) -> bool:
        """Whether a rank's header says that it began an operation; False if it has not answered yet."""
        record = self._headers.glance(rank)
        return record is not None and record.operation == name and record.epoch >= epoch

    def leave(self, text: str) -> None:
        """Say in the header that this rank will do nothing more."""
        if not self._notices.failed:
            self._left = text
            self._header.write(RankState.LEFT, text)

    def stay(self) -> None:
        """Undo ``leave``, as far as others have not yet drawn conclusions."""
        if self._left:
            self._left = ""
            self.done()

    def missing(self) -> tuple[int, ...]:
        """Some of the ranks without which all cannot leave together, the worst first; does not block.

        Those whose process has ended, then those that have not said that they leave, then those that do not
        answer any more, or have said nothing new for a while, as when they are stopped.
        """
        ended, there, silent = [], [], []
        for rank in self.others:
            record = self._headers.glance(rank)
            if record is None or self._headers.age(rank) > ANSWER_SECONDS:
                silent.append(rank)
            elif self._headers.process_is_gone(rank, record):
                ended.append(rank)
            elif record.state is not RankState.LEFT:
                there.append(rank)
            elif self._headers.unchanged(rank, record) > ANSWER_SECONDS:
                silent.append(rank)
        return (*ended, *there, *silent)[:_WATCHED]

    def gone(self) -> list[tuple[int, str]]:
        """Ranks of this node whose process has ended, and a clause that says so."""
        found = []
        for rank in self.others:
            record = self._headers.glance(rank)
            if record is not None and self._headers.process_is_gone(rank, record):
                self._ended[rank] = _ended(record)
            if rank in self._ended:
                found.append((rank, self._ended[rank]))
        return found

    def _gone(self, rank: int, reason: WaitReason) -> tuple[str, bool]:
        # Why nothing more can come from a rank, "" while it can; and whether it left of its own accord.
        record = self._headers.glance(rank)
        if record is None:
            return "", False
        # Noted, for the message of a wait that reaches its deadline.
        self._headers.unchanged(rank, record)
        if record.state is RankState.FAILED:
            return record.text, False
        if record.state is RankState.LEFT and rank != self.rank and not (self._left or reason.leavers):
            return f"it left, {record.text}", True
        if self._headers.process_is_gone(rank, record):
            self._ended[rank] = _ended(record)
            return self._ended[rank], False
        return "", False


def _ended(record: HeaderRecord) -> str:
    return f"it is silent, its process {record.process} has ended"
