"""Ways to a peer's segment: direct load and store on a node, MPI RMA elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import PeerFailedError
from distdl_rma.segments.transport.rma_peer import ByteRuns, Bytes, RmaPeer

# More transfers or notifications than these are looked through for those that are over.
_MANY_TRANSFERS = 64
# Notifications of words in a row that travel as one: more than these are no longer short. Of more than 4 KiB
# Open MPI refuses them between hosts.
_MOST_WORDS = 64


class SharedLink:
    """Peer on this node: a copy into its ``memory``, a barrier, a store to a flag; nothing stays pending."""

    def __init__(self, memory: Bytes, fence: Callable[[], object]) -> None:
        self.memory: Bytes | None = memory
        self._memory, self._words, self._fence = memory, memory.data.cast("q"), fence

    def put(self, runs: ByteRuns, data: Bytes) -> list[MPI.Request]:
        """Copy bytes into the peer's segment; complete on return."""
        for offset, part in runs.packed():
            self._memory[offset : offset + part.stop - part.start] = data[part]
        return []

    def get(
        self, runs: ByteRuns, out: Bytes, *, keep: bool = False, then: Callable[[], None] | None = None
    ) -> list[MPI.Request]:
        """Copy bytes out of the peer's segment; complete on return."""
        for offset, part in runs.packed():
            out[part] = self._memory[offset : offset + part.stop - part.start]
        if then is not None:
            then()
        return []

    def notify(self, word: int, value: int, *, ordered: bool = True, last: bool = False) -> None:
        """Set a word of the peer; stores become visible in their order."""
        self._fence()
        self._words[word] = value

    def close_delivery(self) -> None:
        """Do nothing."""

    def advance(self) -> bool:
        """Return True: nothing is left."""
        return True


# A transfer under way, and the memory that it reads or writes.
_Transfer = tuple[MPI.Request, Any]


@dataclass
class _Delivery:
    """Some puts, the notification behind them, and how far both have come."""

    transfers: list[_Transfer] = field(default_factory=list)
    # Whether there was any: complete at this end is not yet complete at the peer.
    begun: bool = False
    notice: tuple[int, int] | None = None
    # Whether that one waits for the notifications before it, too.
    last: bool = False
    # So many operations begun to that peer must have arrived; known once nothing is read here any more.
    upto: int | None = None


@dataclass
class _Get:
    """What remains of a get, and what is called when nothing does."""

    transfers: list[_Transfer]
    then: Callable[[], None] | None

    def over(self) -> bool:
        self.transfers = _under_way(self.transfers)
        if not self.transfers and self.then is not None:
            self.then()
        return not self.transfers


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _reaching(
    method: Callable[Concatenate[RemoteLink, _P], _T],
) -> Callable[Concatenate[RemoteLink, _P], _T]:
    # Some networks lose a rank that was killed before anybody has noticed: what MPI says of it then is no
    # error of this rank.
    @wraps(method)
    def call(self: RemoteLink, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(self, *args, **kwargs)
        except MPI.Exception as error:
            cause = f"MPI does not reach it any more: {error}"
            raise PeerFailedError(f"rank {self.rank}: {cause}", self.rank, cause) from error

    return call


class RemoteLink:
    """Peer on another node: request-based puts, a flush, then an atomic notification.

    Nothing here blocks for the length of a transfer, or on a peer that does not answer: ``notify`` leaves the
    remaining steps to ``advance``, which every wait and the progress engine call and a start never does.

    MPI orders nothing here but what sets one word, so that what must come later is begun later. Many
    notifications are under way at once: one waits for the puts before it, and for other notifications only
    if it is to be the last of them. Those of neighbouring words that waited for the same puts travel as one.
    The memory of puts is kept here until MPI is done with it.

    Each raises ``PeerFailedError`` where MPI does not reach the peer, whose id is ``rank``, any more.

    ``lock`` is held by whoever calls in: the progress engine is another thread. ``busy`` are the links that
    have something pending: this one adds itself, whoever advances them all takes it out.
    """

    # Not reachable by load and store.
    memory: Bytes | None = None

    def __init__(
        self, rank: int, rma: RmaPeer, lock: AbstractContextManager[Any], busy: set[RemoteLink]
    ) -> None:
        self.rank, self._rma, self._lock, self._busy = rank, rma, lock, busy
        self._open = _Delivery()
        self._pending: deque[_Delivery] = deque()
        self._notices: list[_Transfer] = []
        self._gets: list[_Get] = []
        self._tidy_at = self._tidy_notices_at = _MANY_TRANSFERS

    @_reaching
    def put(self, runs: ByteRuns, data: Bytes) -> list[MPI.Request]:
        """Begin to copy contiguous bytes into the peer's segment; they must not change until then."""
        with self._lock:
            self._busy.add(self)
            requests = self._rma.put(runs, data) if runs.total else []
            opened = self._open
            opened.begun |= bool(requests)
            opened.transfers += [(request, data) for request in requests]
            if len(opened.transfers) > self._tidy_at:
                # A rank may put for ever without a notification or a flush.
                opened.transfers = _under_way(opened.transfers)
                self._tidy_at = 2 * len(opened.transfers) + _MANY_TRANSFERS
            return requests

    @_reaching
    def get(
        self, runs: ByteRuns, out: Bytes, *, keep: bool = False, then: Callable[[], None] | None = None
    ) -> list[MPI.Request]:
        """Begin to copy bytes out of the peer's segment; they are there when the requests are complete.

        With ``keep`` the link holds on to ``out`` until then, and the requests are looked at only by who has
        the lock; it calls ``then()`` once they are there.
        """
        with self._lock:
            requests = self._rma.get(runs, out)
            if keep:
                self._busy.add(self)
                self._gets.append(_Get([(request, out) for request in requests], then))
            return requests

    @_reaching
    def notify(self, word: int, value: int, *, ordered: bool = True, last: bool = False) -> None:
        """Set a word of the peer, after all earlier puts arrived there if ``ordered``.

        And after all earlier words are set, if ``last``; otherwise after those that this same word was set
        to before.
        """
        with self._lock:
            self._busy.add(self)
            behind = self._open.begun or self._pending or (last and self._notices_under_way())
            if ordered and behind:
                self._open.notice, self._open.last = (word, value), last
                self._close_open()
            else:
                self._send_notices(word, [value])

    def close_delivery(self) -> None:
        """Have what was put so far flushed, with no notification behind it."""
        with self._lock:
            if self._open.begun:
                self._busy.add(self)
                self._close_open()

    @_reaching
    def advance(self) -> bool:
        """Advance what is pending; return whether nothing is left."""
        with self._lock:
            for delivery in self._pending:
                if delivery.upto is None:
                    delivery.transfers = _under_way(delivery.transfers)
                    if not delivery.transfers:
                        delivery.upto = self._rma.begun if delivery.begun else 0
            self._send_arrived()
            opened = self._open
            opened.transfers = _under_way(opened.transfers)
            self._gets = [get for get in self._gets if not get.over()]
            return not (self._pending or self._notices_under_way() or self._gets or opened.transfers)

    def _send_arrived(self) -> None:
        # Words in a row together: each message takes longer than all that it carries.
        first, values = 0, list[int]()
        while self._pending and self._arrived(self._pending[0]):
            if values and self._pending[0].last:
                break
            notice = self._pending.popleft().notice
            if notice is None:
                continue
            word, value = notice
            if values and (word != first + len(values) or len(values) == _MOST_WORDS):
                self._send_notices(first, values)
                values = []
            first = first if values else word
            values.append(value)
        if values:
            self._send_notices(first, values)

    def _close_open(self) -> None:
        self._pending.append(self._open)
        self._open, self._tidy_at = _Delivery(), _MANY_TRANSFERS

    def _arrived(self, delivery: _Delivery) -> bool:
        # Its puts are there, and the notifications before its own where that is the last.
        there = delivery.upto is not None and self._rma.arrived(delivery.upto)
        return there and not (delivery.last and self._notices_under_way())

    def _notices_under_way(self) -> bool:
        self._notices = _under_way(self._notices)
        return bool(self._notices)

    def _send_notices(self, word: int, values: list[int]) -> None:
        # What was there before comes back: only then the words are known to be set.
        source, before = np.array(values, np.int64), np.empty(len(values), np.int64)
        self._notices.append((self._rma.replace(word, source, before), (source, before)))
        if len(self._notices) > self._tidy_notices_at:
            # A rank may notify for ever and never wait.
            self._notices = _under_way(self._notices)
            self._tidy_notices_at = 2 * len(self._notices) + _MANY_TRANSFERS


def _under_way(transfers: list[_Transfer]) -> list[_Transfer]:
    return [transfer for transfer in transfers if not transfer[0].Test()] if transfers else transfers


# Way to the segment of one peer; all offsets are bytes from the start of that segment.
Link = SharedLink | RemoteLink
