"""The one-time exchange of addresses between neighbours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from itertools import count
from operator import index as as_int
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distdl_rma.errors import ArgumentError, MismatchError, PartitionError, ProtocolError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.memory.context import SegmentContext
from distdl_rma.segments.memory.remote_buffer import Location, RemoteBuffer
from distdl_rma.segments.options import check_timeout
from distdl_rma.segments.waiting.header import WaitReason, clip

# What was sent before the ranks settled an error meets nothing that is sent after it.
_TAGS = range(1, 1 << 14)
_LABEL_BYTES, _TERMS_BYTES = 120, 240
# A message: fingerprint, location of the buffer, note for the peer, hash of the whole label, beginning of the
# label and of the terms, which say what differs as far as they fit.
_LOCATION, _NOTE, _HASH = slice(1, 5), slice(5, 9), 9
_LABEL = slice(10, 10 + _LABEL_BYTES // 8)
_TERMS = slice(_LABEL.stop, _LABEL.stop + _TERMS_BYTES // 8)

Message = NDArray[np.int64]
# Requests that MPI still works on, and the memory that it reads and writes, whatever became of the buffer,
# the handshake and the machine that they were for.
_UNFINISHED: dict[int, tuple[list[MPI.Request], object]] = {}
_NUMBERS = count()


@dataclass
class Purpose:
    """What a handshake is for: a label and a fingerprint, alike on all sides, and a note for every peer.

    Takes what :meth:`SegmentBuffer.exchange` takes, and raises what is wrong with it.
    """

    ranks: tuple[int, ...]
    asked: InitVar[Mapping[int, tuple[int, ...]] | Iterable[int]]
    label: str
    fingerprint: int
    terms: str = field(compare=False)
    notes: dict[int, tuple[int, ...]] = field(init=False)

    def __post_init__(self, asked: Mapping[int, tuple[int, ...]] | Iterable[int]) -> None:
        if not isinstance(self.label, str):
            raise ArgumentError(f"an exchange's label is a string, got {self.label!r}")
        what, most = f"exchange {self.label!r}", _NOTE.stop - _NOTE.start
        notes = _as_notes(asked, what)
        for peer in notes:
            if peer not in self.ranks:
                raise PartitionError(f"{what}: {peer!r} is none of the machine's ranks {self.ranks}")
        (self.fingerprint,) = _int64s((self.fingerprint,), 1, f"{what}: a fingerprint")
        self.notes = {
            peer: _int64s(note, most, f"{what}: the note for rank {peer}") for peer, note in notes.items()
        }

    def message(self, location: Location, peer: int) -> Message:
        """What a peer is told, with the location of this rank's buffer."""
        message, note = np.zeros(_TERMS.stop, np.int64), self.notes[peer]
        message[0], message[_HASH] = self.fingerprint, fingerprint(self.label)
        message[_LOCATION] = location
        message[_NOTE][: len(note)] = note
        for there, text in ((_LABEL, self.label), (_TERMS, self.terms)):
            clipped = np.frombuffer(clip(text, 8 * (there.stop - there.start)), np.uint8)
            message[there].view(np.uint8)[: clipped.size] = clipped
        return message

    def difference(self, rank: int, peer: int, reply: Message) -> str:
        """What a peer's message was for, if not for the same; for an error on ``rank``. Else empty."""
        if int(reply[_HASH]) != fingerprint(self.label):
            theirs = _text(reply[_LABEL])
            if theirs == clip(self.label, _LABEL_BYTES).decode():
                return f"another name with the same first {_LABEL_BYTES} bytes"
            return repr(theirs)
        if int(reply[0]) == self.fingerprint:
            return ""
        mine, others = _listed(clip(self.terms, _TERMS_BYTES).decode()), _listed(_text(reply[_TERMS]))
        different = [
            f"{key} is {mine.get(key)} on rank {rank} and {others.get(key)} on rank {peer}"
            for key in dict.fromkeys((*mine, *others))
            if mine.get(key) != others.get(key)
        ]
        plans = f"plans {self.fingerprint:014x} and {int(reply[0]):014x}"
        return f"the same name, another plan ({', '.join(different) or plans})"


class Handshake:
    """Messages under way to some peers and from them; can be waited for again after a timeout.

    The n-th handshake of a pair of ranks meets the n-th one of the other side; the label and the
    fingerprint tell whether both mean the same. "On the first call they exchange a pointer to the exchange
    buffers with all their neighbors": interface document, section 3.2; requirement A8.
    """

    def __init__(self, context: SegmentContext, location: Location, purpose: Purpose) -> None:
        self._context, self._purpose = context, purpose
        self._incoming = {peer: np.zeros(_TERMS.stop, np.int64) for peer in purpose.notes}
        self._outgoing = {peer: purpose.message(location, peer) for peer in purpose.notes}
        self._sends: dict[int, MPI.Request] = {}
        self._receives: dict[int, MPI.Request] = {}
        self._requests: list[MPI.Request] = []
        # No address: those that a closed machine left behind stay, and another handshake may have theirs.
        self._number = next(_NUMBERS)
        with context.segment.lock:
            _UNFINISHED[self._number] = self._requests, (self._incoming, self._outgoing)
            context.waiter.defer(self.test)
            context.handshakes.add(self)
            for peer in purpose.notes:
                position = context.ranks.index(peer)
                tag = _TAGS[context.settled[peer] % len(_TAGS)]
                self._sends[peer] = context.comm.Isend(self._outgoing[peer], position, tag)
                self._requests.append(self._sends[peer])
                self._receives[peer] = context.comm.Irecv(self._incoming[peer], position, tag)
                self._requests.append(self._receives[peer])

    def test(self) -> bool:
        """Whether no message is under way any more; does not block. Every wait takes this step until then."""
        with self._context.segment.lock:
            if not MPI.Request.Testall(self._requests):
                return False
            _UNFINISHED.pop(self._number, None)
        return True

    def check_same(self, purpose: Purpose) -> None:
        """Raise ``ProtocolError`` if a call that shall go on with this handshake is for something else."""
        mine = self._purpose
        if purpose != mine:
            raise ProtocolError(
                f"an exchange of {mine.label!r} with ranks {sorted(mine.notes)} is unfinished and has to"
                f" be repeated as it was, got one of {purpose.label!r} with ranks {sorted(purpose.notes)}"
                + (" and another plan or notes" if purpose.label == mine.label else "")
            )

    def give_up(self, ranks: Iterable[int]) -> None:
        """End it if it is with one of these ranks, with which no handshake from before is gone on with."""
        if not self._incoming.keys() & set(ranks):
            return
        with self._context.segment.lock:
            self._context.waiter.withdraw(self.test)
            self._context.handshakes.discard(self)
            for request in self._receives.values():
                if request:
                    request.Cancel()

    def finish(self, timeout: float | None) -> dict[int, RemoteBuffer]:
        """Wait for all peers, until one deadline; their buffers, by rank id."""
        waiter = self._context.waiter
        deadline = time.perf_counter() + check_timeout(timeout, waiter.timeout)
        for requests in (self._receives, self._sends):
            for peer, request in requests.items():
                self._wait(peer, request, max(0.0, deadline - time.perf_counter()))
        self.test()
        waiter.withdraw(self.test)
        self._context.handshakes.discard(self)
        return {peer: self._remote(peer, reply) for peer, reply in self._incoming.items()}

    def _wait(self, peer: int, request: MPI.Request, seconds: float) -> None:
        hint = "did every rank build and call the same things in the same order?"

        def over(one: MPI.Request = request) -> bool:
            # The progress thread may look at the same request.
            with self._context.segment.lock:
                return one.Test()

        def reason() -> WaitReason:
            missing = tuple(rank for rank, one in self._receives.items() if not over(one)) or (peer,)
            return WaitReason(missing, f"to connect {self._purpose.label!r}", hint, in_step=True)

        self._context.waiter.until(over, reason, seconds)

    def _remote(self, peer: int, reply: Message) -> RemoteBuffer:
        context, label = self._context, self._purpose.label
        different = self._purpose.difference(context.rank, peer, reply)
        if different:
            raise MismatchError(
                f"rank {context.rank} connects {label!r} but rank {peer} connects {different}:"
                " do all ranks build and call the same things in the same order, with the same arguments?"
            )
        return RemoteBuffer(context, peer, Location(*reply[_LOCATION].tolist()), tuple(reply[_NOTE].tolist()))


def _as_notes(notes: Mapping[int, tuple[int, ...]] | Iterable[int], what: str) -> dict[int, tuple[int, ...]]:
    # By rank id; empty ones if only the rank ids are given.
    if isinstance(notes, Mapping):
        return dict(notes)
    try:
        peers = [as_int(peer) for peer in notes]
    except TypeError:
        raise ArgumentError(f"{what} takes rank ids, or notes by rank id, got {notes!r}") from None
    twice = [peer for at, peer in enumerate(peers) if peer in peers[:at]]
    if twice:
        raise PartitionError(f"{what}: rank {twice[0]} is listed more than once in {peers}")
    return dict.fromkeys(peers, ())


def _int64s(values: Any, most: int, what: str) -> tuple[int, ...]:
    try:
        numbers = tuple(as_int(value) for value in values)
    except TypeError:
        numbers = None
    if numbers is None or len(numbers) > most or any(not -(1 << 63) <= n < 1 << 63 for n in numbers):
        raise ArgumentError(f"{what} is made of at most {most} integer(s) of 64 bits, got {values!r}")
    return numbers


def _text(words: Message) -> str:
    return words.tobytes().rstrip(b"\0").decode(errors="replace")


def _listed(terms: str) -> dict[str, str]:
    lines = (line.partition("=") for line in terms.splitlines())
    return {key: value for key, equals, value in lines if equals}
