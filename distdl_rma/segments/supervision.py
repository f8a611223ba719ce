"""What a rank learns of the others while it waits: who waits for whom, who failed, who has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import ExchangeTimeout, PeerFailedError
from distdl_rma.segments.patience import Waiting
from distdl_rma.segments.segment import Segment
from distdl_rma.segments.status import (
    HEADER_BYTES,
    Board,
    Record,
    State,
    clip,
    is_gone,
    namespace,
    numbered,
    parse,
)
from distdl_rma.segments.wire import Bytes, Runs

__all__ = ["Supervision"]

_NOTICE_BYTES = 1024
# How long a rank of another node may take to answer before it counts as silent in a message.
_ANSWER_SECONDS = 1.0
# What a rank sent before it left must have the time to arrive.
_SUSPICION_SECONDS = 1.0
_LONGEST_CHAIN = 16
# Of many ranks that are waited for, so many are looked at.
_WATCHED = 8


class Supervision:
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
        self.board = Board(segment.memory[:HEADER_BYTES].data)
        self._namespace = namespace()
        self.failures: dict[int, str] = {}
        self.failed = False
        self._left = ""
        self._sent: list[tuple[MPI.Request, object]] = []
        self._suspects: dict[int, float] = {}
        # Records of ranks of other nodes, as last seen in this wait.
        self._seen: dict[int, Record] = {}
        self._asked: dict[int, tuple[list[MPI.Request], Bytes]] = {}

    def advance(self, waiting: Callable[[], Waiting]) -> None:
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

    def check(self, waiting: Waiting | None = None) -> None:
        """Raise ``PeerFailedError`` if a notice of a failed rank has arrived."""
        if self.failures:
            rank, cause = next(iter(self.failures.items()))
            self._raise(rank, cause, waiting)

    def look(self, waiting: Waiting) -> None:
        """Tell others about a wait that takes long, and raise if a rank that it waits for has gone."""
        self.check(waiting)
        with self._segment.lock:
            self._look(waiting)

    def _look(self, waiting: Waiting) -> None:
        if self._left:
            self.board.write(State.LEFT, self._left, waiting.ranks)
        else:
            self.board.write(State.WAITING, waiting.what, waiting.ranks)
        now, gone = time.monotonic(), []
        for rank in waiting.ranks[:_WATCHED]:
            cause, left = self._gone(rank)
            if not cause:
                self._suspects.pop(rank, None)
            elif now - self._suspects.setdefault(rank, now) > _SUSPICION_SECONDS:
                gone.append((rank, cause))
                if not left:
                    # It failed: nothing that it takes part in can go on.
                    self.failures.setdefault(rank, cause)
                    self._raise(rank, cause, waiting)
        if gone and (not waiting.anyone or len(gone) == len(waiting.ranks)):
            self._raise(*gone[0], waiting)

    def done(self) -> None:
        """Tell others that the wait is over."""
        self._suspects.clear()
        self._seen.clear()
        if self._left:
            self.board.write(State.LEFT, self._left)
        elif not self.failed:
            self.board.write(State.RUNNING)

    def give_up(self, waiting: Waiting, seconds: float) -> NoReturn:
        """Raise ``ExchangeTimeout`` with the chain of those who wait for each other."""
        self.check(waiting)
        message = f"rank {self.rank} waited {seconds:g} s {_for(waiting)}"
        # Who only looks once does not want to know why nothing has come yet.
        with self._segment.lock:
            parts = self.chain(waiting, min(seconds, _ANSWER_SECONDS)) if seconds else []
        if waiting.hint:
            parts.append(waiting.hint)
        raise ExchangeTimeout("; ".join([message, *parts]))

    def chain(self, waiting: Waiting, seconds: float = _ANSWER_SECONDS) -> list[str]:
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
            record = self.read(rank, deadline)
            if record is None:
                said.append(f"rank {rank} is silent: no answer within {seconds:g} s")
            elif self._process_is_gone(rank, record):
                said.append(f"rank {rank} is silent: its process {record.process} has ended")
            else:
                said.append(f"rank {rank} {record.doing}")
                if record.state is State.WAITING:
                    open_ranks += record.waits_for
        return said

    def read(self, rank: int, deadline: float) -> Record | None:
        """What a rank is doing; None if it does not answer. Blocking, until the deadline at most."""
        link = self._segment.link(rank)
        if link.memory is not None:
            record = None
            while record is None:
                record = parse(bytes(link.memory[:HEADER_BYTES].data))
            return record
        requests, header = self._ask(rank)
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-3)
        self._asked.pop(rank, None)
        return parse(header.tobytes())

    def has_begun(self, rank: int, name: str, epoch: int) -> bool:
        """Whether a rank's header says that it began an operation; False if it has not answered yet."""
        record = self._glance(rank)
        return record is not None and record.operation == name and record.epoch >= epoch

    def fail(self, cause: str, rank: int | None = None) -> None:
        """Tell all ranks that this one failed, or that it found another one failed; once, not blocking."""
        if self.failed:
            return
        self.failed = True
        failed = self.rank if rank is None else rank
        self.board.write(State.FAILED, cause)
        notice = np.zeros(_NOTICE_BYTES, np.uint8)
        notice[:8].view(np.int64)[0] = failed
        text = clip(cause, _NOTICE_BYTES - 8)
        notice[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        with self._segment.lock:
            for position, peer in enumerate(self._ranks):
                if peer not in (self.rank, failed):
                    # Synchronous: complete once the peer has taken it in.
                    self._sent.append((self._comm.Issend([notice, MPI.BYTE], position), notice))

    def leave(self, text: str) -> None:
        """Say in the header that this rank will do nothing more."""
        if not self.failed:
            self._left = text
            self.board.write(State.LEFT, text)

    def present(self) -> tuple[int, ...]:
        """Some of the ranks that have not said that they leave; does not block."""
        there: list[int] = []
        for rank in self._ranks:
            record = self._glance(rank) if rank != self.rank else None
            if rank != self.rank and (record is None or record.state is not State.LEFT):
                there.append(rank)
            if len(there) == _WATCHED:
                break
        return tuple(there)

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

    def _raise(self, rank: int, cause: str, waiting: Waiting | None) -> NoReturn:
        here = f"; rank {self.rank} waited {_for(waiting)}" if waiting else ""
        raise PeerFailedError(f"rank {rank} failed: {cause}{here}", rank, cause)

    def _glance(self, rank: int) -> Record | None:
        # Record of a rank without waiting for it: None as long as its node has not answered.
        if self._segment.link(rank).memory is not None:
            return self.read(rank, 0.0)
        with self._segment.lock:
            requests, header = self._ask(rank)
            if MPI.Request.Testall(requests):
                self._asked.pop(rank)
                record = parse(header.tobytes())
                if record is not None:
                    self._seen[rank] = record
            return self._seen.get(rank)

    def _gone(self, rank: int) -> tuple[str, bool]:
        # Why nothing more can come from a rank, "" while it can; and whether it left of its own accord.
        record = self._glance(rank)
        if record is None:
            return "", False
        if record.state is State.FAILED:
            return record.text, False
        if record.state is State.LEFT and rank != self.rank and not self._left:
            return f"it left, {record.text}", True
        if self._process_is_gone(rank, record):
            return f"it is silent, its process {record.process} has ended", False
        return "", False

    def _process_is_gone(self, rank: int, record: Record) -> bool:
        near = rank in self._segment.node_ranks and record.namespace == self._namespace
        return near and bool(record.namespace) and is_gone(record.process)

    def _ask(self, rank: int) -> tuple[list[MPI.Request], Bytes]:
        if rank not in self._asked:
            header = np.empty(HEADER_BYTES, np.uint8)
            requests = self._segment.link(rank).get(Runs((0,), HEADER_BYTES), header)
            self._asked[rank] = requests, header
        return self._asked[rank]


def _for(waiting: Waiting) -> str:
    whom = numbered(waiting.ranks) if waiting.ranks else "the other ranks"
    return f"for {whom} {waiting.what}"


def cause_of(error: BaseException) -> str:
    """Error as one line for the notice of a failure."""
    with suppress(Exception):
        first = str(error).strip().splitlines()
        return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
    return type(error).__name__
