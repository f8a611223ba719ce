"""What a rank learns of the others while it waits: who waits for whom, who failed, who has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import ExchangeTimeout, PeerFailedError
from distdl_rma.segments.transport.segment import Segment
from distdl_rma.segments.waiter import WaitReason, in_seconds
from distdl_rma.segments.waiting.header import (
    HEADER_BYTES,
    HeaderRecord,
    HeaderWriter,
    RankState,
    clip,
    numbered,
)
from distdl_rma.segments.waiting.peer_headers import PeerHeaders

_NOTICE_BYTES = 1024
# How long a rank of another node may take to answer before it counts as silent in a message.
_ANSWER_SECONDS = 1.0
# What a rank sent before it left must have the time to arrive.
_SUSPICION_SECONDS = 1.0
_LONGEST_CHAIN = 16
# Of many ranks that are waited for, so many are looked at each time.
_WATCHED = 8


class PeerWatch:
    """Watches over the waits of one rank, and tells the others when this one fails.

    Every rank keeps what it does in the header of its segment, where others read it one-sidedly. A rank
    that fails also sends a notice to every other, which they find in their next wait.

    Parameters
    ----------
    segment
        Segment of the machine; the header of this rank lies at its beginning.
    comm
        Communicator of its own for notices; freed by ``close``.
    ranks
        Rank id of every position.
    advance
        Makes progress for everyone.
    """

    def __init__(
        self,
        segment: Segment,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        advance: Callable[[], object],
    ) -> None:
        self._segment = segment
        self._comm = comm
        self._ranks = ranks
        self.rank = ranks[comm.rank]
        self._advance = advance
        self.board = HeaderWriter(segment.memory[:HEADER_BYTES].data, segment.fence)
        self._headers = PeerHeaders(segment)
        self.failures: dict[int, str] = {}
        self.failed = False
        self._left = ""
        self._sent: list[tuple[MPI.Request, object]] = []
        # Ranks that seem to have gone: since when, and why.
        self._suspects: dict[int, tuple[float, str]] = {}
        self._watched = 0
        # Ranks whose process was seen to have ended, which their headers may not tell a second time.
        self._ended: dict[int, str] = {}

    def advance(self, waiting: Callable[[], WaitReason]) -> None:
        """Make progress for everyone, and raise ``PeerFailedError`` if a rank failed."""
        self._advance()
        if self.failures:
            self.check(waiting())

    def poll(self) -> None:
        """Take in notices of failed ranks, and let MPI look at the network. Does not block."""
        # Also without remote peers: a handshake's message may still sit in this rank's MPI.
        while self._comm.Iprobe():
            status = MPI.Status()
            notice = np.zeros(_NOTICE_BYTES, np.uint8)
            self._comm.Recv([notice, MPI.BYTE], status=status)
            failed = int(notice[:8].view(np.int64)[0])
            text = notice[8:].tobytes().rstrip(b"\0").decode(errors="replace")
            self.failures.setdefault(failed, text)

    def check(self, waiting: WaitReason | None = None) -> None:
        """Raise ``PeerFailedError`` if a notice of a failed rank has arrived."""
        if self.failures:
            rank, cause = next(iter(self.failures.items()))
            self._raise(rank, cause, waiting)

    def look(self, waiting: WaitReason) -> None:
        """Tell others about a wait that takes long, and raise if a rank that it waits for has gone."""
        self.check(waiting)
        with self._segment.lock:
            self._look(waiting)

    def _look(self, waiting: WaitReason) -> None:
        if self._left:
            self.board.write(RankState.LEFT, self._left, waiting.ranks)
        else:
            self.board.write(RankState.WAITING, waiting.what, waiting.ranks)
        now = time.monotonic()
        # This rank itself does nothing while it waits.
        ranks = [rank for rank in waiting.ranks if rank != self.rank]
        for rank in self._some(ranks):
            cause, left = self._gone(rank, waiting)
            if not cause:
                self._suspects.pop(rank, None)
                continue
            since, _ = self._suspects.setdefault(rank, (now, cause))
            if now - since > _SUSPICION_SECONDS and not left:
                # It failed: nothing that it takes part in can go on.
                self.failures.setdefault(rank, cause)
                self._raise(rank, cause, waiting)
        gone = [
            (rank, self._suspects[rank][1])
            for rank in ranks
            if rank in self._suspects and now - self._suspects[rank][0] > _SUSPICION_SECONDS
        ]
        if gone and (not waiting.anyone or len(gone) == len(ranks)):
            self._raise(*gone[0], waiting)

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
            self.board.write(RankState.LEFT, self._left)
        elif not self.failed:
            self.board.write(RankState.RUNNING)

    def give_up(self, waiting: WaitReason, seconds: float) -> NoReturn:
        """Raise ``ExchangeTimeout`` with the chain of those who wait for each other."""
        self.check(waiting)
        message = f"rank {self.rank} waited {in_seconds(seconds)} {_for(waiting)}"
        # Who only looks once does not want to know why nothing has come yet.
        with self._segment.lock:
            parts = self.chain(waiting, min(seconds, _ANSWER_SECONDS)) if seconds else []
        if waiting.hint:
            parts.append(waiting.hint)
        raise ExchangeTimeout("; ".join([message, *parts]))

    def chain(self, waiting: WaitReason, seconds: float = _ANSWER_SECONDS) -> list[str]:
        """What the ranks are doing that this one waits for, those that they wait for, and so on.

        Blocking for so many seconds at most, for ranks of other nodes.
        """
        deadline = time.monotonic() + seconds
        told, open_ranks = {self.rank}, list(waiting.ranks)
        said: list[str] = []
        while open_ranks and len(said) < _LONGEST_CHAIN:
            rank = open_ranks.pop(0)
            if rank in told:
                continue
            told.add(rank)
            record = self._headers.read(rank, deadline)
            if record is None:
                why = f"no answer within {in_seconds(seconds)}"
                if self._segment.link(rank).memory is not None:
                    why = "its header could not be read"
                said.append(f"rank {rank} is silent: {why}")
            elif self._headers.process_is_gone(rank, record):
                said.append(f"rank {rank} is silent: its process {record.process} has ended")
            else:
                said.append(f"rank {rank} {record.doing}{self._silence(rank, record)}")
                if record.state is RankState.WAITING:
                    open_ranks += record.waits_for
        return said

    def has_begun(self, rank: int, name: str, epoch: int) -> bool:
        """Whether a rank's header says that it began an operation; False if it has not answered yet."""
        record = self._headers.glance(rank)
        return record is not None and record.operation == name and record.epoch >= epoch

    def fail(self, cause: str, rank: int | None = None) -> None:
        """Tell all ranks that this one failed, or that it found another one failed; once, not blocking."""
        if self.failed:
            return
        self.failed = True
        failed = self.rank if rank is None else rank
        self.board.write(RankState.FAILED, cause)
        notice = np.zeros(_NOTICE_BYTES, np.uint8)
        notice[:8].view(np.int64)[0] = failed
        text = clip(cause, _NOTICE_BYTES - 8)
        notice[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        with self._segment.lock:
            for position, peer in enumerate(self._ranks):
                if peer not in (self.rank, failed):
                    # Synchronous: complete once the peer has taken it in.
                    self._sent.append((self._comm.Issend([notice, MPI.BYTE], position), notice))

    def pass_on(self) -> None:
        """Tell all ranks of the first failure that this one has heard of, if they have not been told."""
        for rank, cause in tuple(self.failures.items())[:1]:
            self.fail(cause, rank)

    def leave(self, text: str) -> None:
        """Say in the header that this rank will do nothing more."""
        if not self.failed:
            self._left = text
            self.board.write(RankState.LEFT, text)

    def stay(self) -> None:
        """Undo ``leave``, as far as others have not yet drawn conclusions."""
        if self._left:
            self._left = ""
            self.done()

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return tuple(rank for rank in self._ranks if rank != self.rank)

    @property
    def in_vain(self) -> bool:
        """Whether this rank or another one has failed, so that nothing collective can work any more."""
        return self.failed or bool(self.failures)

    def missing(self) -> tuple[int, ...]:
        """Some of the ranks without which all cannot leave together, the worst first; does not block.

        Those whose process has ended, then those that have not said that they leave, then those that do not
        answer any more, or have said nothing new for a while, as when they are stopped.
        """
        ended, there, silent = [], [], []
        for rank in self.others:
            record = self._headers.glance(rank)
            if record is None or self._headers.age(rank) > _ANSWER_SECONDS:
                silent.append(rank)
            elif self._headers.process_is_gone(rank, record):
                ended.append(rank)
            elif record.state is not RankState.LEFT:
                there.append(rank)
            elif self._headers.unchanged(rank, record) > _ANSWER_SECONDS:
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

    def noticed(self) -> bool:
        """Whether all ranks have taken in the notice of this rank's failure; makes progress."""
        with self._segment.lock:
            self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
            self.poll()
        return not self._sent

    def close(self) -> None:
        """Free the communicator; collective."""
        self.board.close()
        self._comm.Free()

    def _raise(self, rank: int, cause: str, waiting: WaitReason | None) -> NoReturn:
        here = f"; rank {self.rank} waited {_for(waiting)}" if waiting else ""
        raise PeerFailedError(f"rank {rank} failed: {cause}{here}", rank, cause)

    def _silence(self, rank: int, record: HeaderRecord) -> str:
        seconds = self._headers.unchanged(rank, record)
        return f", and has said nothing for {in_seconds(seconds)}" if seconds > _ANSWER_SECONDS else ""

    def _gone(self, rank: int, waiting: WaitReason) -> tuple[str, bool]:
        # Why nothing more can come from a rank, "" while it can; and whether it left of its own accord.
        record = self._headers.glance(rank)
        if record is None:
            return "", False
        # Noted, for the message of a wait that reaches its deadline.
        self._headers.unchanged(rank, record)
        if record.state is RankState.FAILED:
            return record.text, False
        if record.state is RankState.LEFT and rank != self.rank and not (self._left or waiting.leavers):
            return f"it left, {record.text}", True
        if self._headers.process_is_gone(rank, record):
            self._ended[rank] = _ended(record)
            return self._ended[rank], False
        return "", False


def _ended(record: HeaderRecord) -> str:
    return f"it is silent, its process {record.process} has ended"


def _for(waiting: WaitReason) -> str:
    whom = numbered(waiting.ranks) if waiting.ranks else "the other ranks"
    return f"for {whom} {waiting.what}"


def cause_of(error: BaseException) -> str:
    """Error as one line for the notice of a failure."""
    with suppress(Exception):
        first = str(error).strip().splitlines()
        return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    return type(error).__name__
