"""The one-time exchange of addresses between neighbours."""

from __future__ import annotations

import time
from operator import index as as_int
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.errors import MismatchError, PartitionError, ProtocolError, ShapeError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.waiter import check_timeout
from distdl_rma.segments.waiting.wait_reason import WaitReason

if TYPE_CHECKING:
    from distdl_rma.segments.manager import SegmentManager

_TAG = 1
_LABEL = 120
# A message: fingerprint, place of the buffer (4 numbers), note for the peer (4 numbers), hash of the whole
# label, beginning of the label and of the terms.
_NOTE = slice(5, 9)
_HASH = 9
_TEXT = 10
# What the fingerprint stands for, as far as it fits, to say what differs.
_TERMS = _TEXT + _LABEL // 8
_TERMS_BYTES = 240
_WORDS = _TERMS + _TERMS_BYTES // 8

# Requests that MPI still works on, and the memory that it reads and writes, whatever became of the buffer,
# the handshake and the machine that they were for.
_UNFINISHED: dict[int, tuple[list[MPI.Request], object]] = {}


class Handshake:
    """Messages under way to some peers and from them; can be waited for again after a timeout.

    The n-th handshake of a pair of ranks meets the n-th one of the other side; the label and the
    fingerprint tell whether both mean the same.

    Raises
    ------
    PartitionError
        If a peer is no rank of the machine; nothing was sent.
    ShapeError
        If a label, fingerprint or note cannot be sent; nothing was sent.

    Notes
    -----
    "On the first call they exchange a pointer to the exchange buffers with all their neighbors":
    interface document, section 3.2; requirement A8.
    """

    def __init__(
        self,
        manager: SegmentManager,
        comm: MPI.Intracomm,
        buffer: SegmentBuffer,
        notes: dict[int, tuple[int, ...]],
        label: str,
        fingerprint: int,
        terms: str = "",
    ) -> None:
        self._purpose = _checked(manager.ranks, notes, label, fingerprint)
        self._manager, self._label, self._fingerprint = manager, label, fingerprint
        self._terms = terms
        self._incoming = {peer: np.zeros(_WORDS, np.int64) for peer in notes}
        self._outgoing = {
            peer: _message(fingerprint, buffer.place, note, label, terms)
            for peer, note in self._purpose[2].items()
        }
        self._sends: dict[int, MPI.Request] = {}
        self._receives: dict[int, MPI.Request] = {}
        self._requests: list[MPI.Request] = []
        with manager.segment.lock:
            _UNFINISHED[id(self)] = self._requests, (self._incoming, self._outgoing)
            manager.defer(self.test)
            for peer in notes:
                position = manager.ranks.index(peer)
                self._sends[peer] = comm.Isend(self._outgoing[peer], position, _TAG)
                self._requests.append(self._sends[peer])
                self._receives[peer] = comm.Irecv(self._incoming[peer], position, _TAG)
                self._requests.append(self._receives[peer])

    def test(self) -> bool:
        """Whether no message is under way any more; does not block. The manager's work until then."""
        with self._manager.segment.lock:
            if not MPI.Request.Testall(self._requests):
                return False
            _UNFINISHED.pop(id(self), None)
        return True

    def check_same(self, notes: dict[int, tuple[int, ...]], label: str, fingerprint: int) -> None:
        """Raise ``ProtocolError`` if a call that shall go on with this handshake is for something else."""
        if _checked(self._manager.ranks, notes, label, fingerprint) != self._purpose:
            raise ProtocolError(
                f"an exchange of {self._label!r} with ranks {sorted(self._incoming)} is unfinished and has to"
                f" be repeated as it was, got one of {label!r} with ranks {sorted(notes)}"
                + (" and another plan or notes" if label == self._label else "")
            )

    def finish(self, timeout: float | None) -> dict[int, RemoteBuffer]:
        """Wait for all peers, until one deadline; their buffers, by rank id."""
        manager = self._manager
        seconds = manager.waiter.timeout if timeout is None else check_timeout(timeout)
        deadline = time.perf_counter() + seconds
        for requests in (self._receives, self._sends):
            for peer, request in requests.items():
                manager.waiter.until(
                    lambda request=request: self._over(request),  # type: ignore[misc]
                    lambda peer=peer: self._about(peer),  # type: ignore[misc]
                    max(0.0, deadline - time.perf_counter()),
                )
        self.test()
        manager.withdraw(self.test)
        return {peer: self._remote(peer, reply) for peer, reply in self._incoming.items()}

    def _over(self, request: MPI.Request) -> bool:
        # The progress thread may look at the same request.
        with self._manager.segment.lock:
            return request.Test()

    def _about(self, peer: int) -> WaitReason:
        return WaitReason(
            (peer,),
            f"to connect {self._label!r}",
            "did every rank build and call the same things in the same order?",
        )

    def _remote(self, peer: int, reply: npt.NDArray[np.int64]) -> RemoteBuffer:
        same = int(reply[_HASH]) == fingerprint(self._label)
        if not same or int(reply[0]) != self._fingerprint:
            theirs = reply[_TEXT:_TERMS].tobytes().rstrip(b"\0").decode(errors="replace")
            what = "the same name, another plan" if same else f"{theirs!r}"
            if not same and theirs == _clip(self._label).decode(errors="replace"):
                what = f"another name with the same first {_LABEL} bytes"
            which = self._difference(peer, reply) if same else ""
            raise MismatchError(
                f"rank {self._manager.rank} connects {self._label!r} but rank {peer} connects {what}{which}:"
                " do all ranks build and call the same things in the same order, with the same arguments?"
            )
        place = (int(reply[1]), int(reply[2]), int(reply[3]), int(reply[4]))
        note = tuple(int(value) for value in reply[_NOTE])
        return RemoteBuffer(self._manager, peer, place, note)

    def _difference(self, peer: int, reply: npt.NDArray[np.int64]) -> str:
        mine = _listed(_clipped(self._terms, _TERMS_BYTES))
        theirs = _listed(reply[_TERMS:].tobytes().rstrip(b"\0"))
        different = [
            f"{key} is {mine.get(key)} on rank {self._manager.rank} and {theirs.get(key)} on rank {peer}"
            for key in dict.fromkeys((*mine, *theirs))
            if mine.get(key) != theirs.get(key)
        ]
        if different:
            return f" ({', '.join(different)})"
        return f" (plans {self._fingerprint:014x} and {int(reply[0]):014x})"


def _listed(terms: bytes) -> dict[str, str]:
    lines = terms.decode(errors="replace").splitlines()
    return {key: value for key, equals, value in (line.partition("=") for line in lines) if equals}


def _checked(
    ranks: tuple[int, ...], notes: dict[int, tuple[int, ...]], label: str, fingerprint: int
) -> tuple[str, int, dict[int, tuple[int, ...]]]:
    # What a handshake is for, in a form that can be compared; raises before anything is sent.
    if not isinstance(label, str):
        raise ShapeError(f"an exchange's label is a string, got {label!r}")
    for peer in notes:
        if peer not in ranks:
            raise PartitionError(f"exchange {label!r}: {peer!r} is none of the machine's ranks {ranks}")
    (plan,) = _int64s((fingerprint,), 1, f"exchange {label!r}: a fingerprint")
    size = _NOTE.stop - _NOTE.start
    listed = {
        peer: _int64s(note, size, f"exchange {label!r}: the note for rank {peer}")
        for peer, note in notes.items()
    }
    return label, plan, listed


def _int64s(values: Any, most: int, what: str) -> tuple[int, ...]:
    try:
        numbers = tuple(as_int(value) for value in values)
    except TypeError:
        numbers = None
    if numbers is None or len(numbers) > most or any(not -(1 << 63) <= n < 1 << 63 for n in numbers):
        raise ShapeError(f"{what} is made of at most {most} integer(s) of 64 bits, got {values!r}")
    return numbers


def _encoded(label: str) -> bytes:
    return label.encode(errors="backslashreplace")


def _clip(label: str) -> bytes:
    return _clipped(label, _LABEL)


def _clipped(text: str, nbytes: int) -> bytes:
    return _encoded(text)[:nbytes]


def _message(
    plan: int, place: tuple[int, int, int, int], note: tuple[int, ...], label: str, terms: str
) -> npt.NDArray[np.int64]:
    message = np.zeros(_WORDS, np.int64)
    message[0] = plan
    message[1 : _NOTE.start] = place
    message[_NOTE.start : _NOTE.start + len(note)] = note
    message[_HASH] = fingerprint(label)
    for first, text in ((_TEXT, _clip(label)), (_TERMS, _clipped(terms, _TERMS_BYTES))):
        message[first:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    return message
