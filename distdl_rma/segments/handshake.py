"""The one-time exchange of addresses between neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from distdl_rma.errors import MismatchError
from distdl_rma.segments.buffer import SegmentBuffer
from distdl_rma.segments.patience import Waiting
from distdl_rma.segments.remote import RemoteBuffer

if TYPE_CHECKING:
    from distdl_rma.segments.manager import SegmentManager

__all__ = ["Handshake"]

_TAG = 1
_LABEL = 120
# A message: fingerprint, place of the buffer (4 numbers), note for the peer (4 numbers), label.
_NOTE = slice(5, 9)
_WORDS = 9 + _LABEL // 8


class Handshake:
    """Messages under way to some peers and from them; can be waited for again after a timeout.

    The n-th handshake of a pair of ranks meets the n-th one of the other side; the label and the
    fingerprint tell whether both mean the same.

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
    ) -> None:
        self._manager, self._label, self._fingerprint = manager, label, fingerprint
        self._incoming = {peer: np.zeros(_WORDS, np.int64) for peer in notes}
        self._outgoing = {
            peer: _message(fingerprint, buffer.place, note, label) for peer, note in notes.items()
        }
        self._sends: dict[int, Any] = {}
        self._receives: dict[int, Any] = {}
        for peer in notes:
            position = manager.ranks.index(peer)
            self._sends[peer] = comm.Isend(self._outgoing[peer], position, _TAG)
            self._receives[peer] = comm.Irecv(self._incoming[peer], position, _TAG)

    def finish(self, timeout: float | None) -> dict[int, RemoteBuffer]:
        """Wait for all peers; their buffers, by rank id."""
        for requests in (self._receives, self._sends):
            for peer, request in requests.items():
                self._manager.patience.until(request.Test, lambda peer=peer: self._about(peer), timeout)  # type: ignore[misc]
        return {peer: self._remote(peer, reply) for peer, reply in self._incoming.items()}

    def _about(self, peer: int) -> Waiting:
        return Waiting(
            (peer,),
            f"to connect {self._label!r}",
            "did every rank build and call the same things in the same order?",
        )

    def _remote(self, peer: int, reply: npt.NDArray[np.int64]) -> RemoteBuffer:
        theirs = reply[_NOTE.stop :].tobytes().rstrip(b"\0").decode(errors="replace")
        mine = _clip(self._label).decode(errors="replace")
        if theirs != mine or int(reply[0]) != self._fingerprint:
            what = "the same name, another plan" if theirs == mine else f"{theirs!r}"
            plans = self._fingerprint, int(reply[0])
            which = f" (plans {plans[0]:014x} and {plans[1]:014x})" if any(plans) else ""
            raise MismatchError(
                f"rank {self._manager.rank} connects {self._label!r} but rank {peer} connects {what}{which}:"
                " do all ranks build and call the same things in the same order, with the same arguments?"
            )
        place = (int(reply[1]), int(reply[2]), int(reply[3]), int(reply[4]))
        note = tuple(int(value) for value in reply[_NOTE])
        return RemoteBuffer(self._manager, peer, place, note)


def _clip(label: str) -> bytes:
    return label.encode()[:_LABEL]


def _message(
    fingerprint: int, place: tuple[int, int, int, int], note: tuple[int, ...], label: str
) -> npt.NDArray[np.int64]:
    message = np.zeros(_WORDS, np.int64)
    message[0] = fingerprint
    message[1 : _NOTE.start] = place
    message[_NOTE.start : _NOTE.start + len(note)] = note
    text = _clip(label)
    message[_NOTE.stop :].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
    return message
