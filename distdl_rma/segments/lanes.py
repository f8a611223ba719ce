"""The lanes of a channel: one per peer and direction, with its pieces, slots and flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from distdl_rma.errors import ProtocolError
from distdl_rma.geometry.exchange import Exchange, Piece, by_peer
from distdl_rma.geometry.split import Balanced
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.transport.heap import aligned

Array = npt.NDArray[Any]
SLOTS = 2
# A large message is announced bit by bit: its reader begins while its writer goes on.
_STEP_NBYTES = 1 << 20


@dataclass
class Lane:
    """One peer's share of a channel in one direction; a message is all pieces for that peer.

    Attributes
    ----------
    offset
        Of the first slot, or of the staging area, in this rank's buffer.
    notification
        Of this rank's buffer: the data flag of what is received, or the acknowledge flag of what is sent.
    ends
        Behind which pieces the data flag rises, the last one included.
    views
        The pieces of both slots, once the peer's buffer is known.
    staged
        Both staging areas, where the peer's slots are out of reach.
    """

    peer: int
    pieces: tuple[Piece, ...]
    nbytes: int
    offset: int
    notification: int
    ends: tuple[int, ...]
    views: tuple[tuple[Array, ...], ...] = ()
    staged: tuple[Array, ...] = ()
    remote: RemoteBuffer | None = None

    @property
    def stride(self) -> int:
        """Bytes from one slot to the other."""
        return aligned(self.nbytes)

    @property
    def there(self) -> RemoteBuffer:
        """The peer's buffer; its note says where its slots are, its data flag, and its acknowledge flag."""
        if self.remote is None:
            raise ProtocolError(f"not connected to rank {self.peer}")
        return self.remote

    def flag_after(self, epoch: int, steps: int | None = None) -> int:
        """Value of the data flag after some steps of an epoch, or all of them."""
        every = len(self.ends)
        return (epoch - 1) * every + (every if steps is None else steps)

    def read_from(self, remote: RemoteBuffer, buffer: SegmentBuffer, dtype: np.dtype[Any]) -> None:
        """Read what the peer puts into the slots of this rank's buffer."""
        self.remote = remote
        self._cut([self._own_slot(buffer, dtype, parity) for parity in range(SLOTS)])

    def write_to(self, remote: RemoteBuffer, buffer: SegmentBuffer, dtype: np.dtype[Any]) -> None:
        """Write to the peer's slots, or else to a staging area in this rank's buffer."""
        self.remote = remote
        length, slots = self.nbytes // dtype.itemsize, []
        for parity in range(SLOTS):
            slot = remote.direct(dtype, length, remote.note[0] + parity * self.stride)
            slots.append(self._own_slot(buffer, dtype, parity) if slot is None else slot)
            self.staged = (*self.staged, slots[-1]) if slot is None else ()
        self._cut(slots)

    def announce(self, epoch: int) -> None:
        """Raise the peer's data flag behind a whole message, which leaves the staging area now."""
        offset, flag = self.there.note[:2]
        if self.staged:
            parity = epoch % SLOTS
            self.there.put_stable(self.staged[parity].view(np.uint8), offset + parity * self.stride)
        self.there.raise_flag(flag, self.flag_after(epoch))

    def announce_step(self, epoch: int, step: int) -> None:
        """Raise the peer's data flag behind a part of a message; to another node it travels as a whole."""
        if not self.staged:
            self.there.raise_flag(self.there.note[1], self.flag_after(epoch, step))

    def announce_nothing(self, epoch: int) -> None:
        """Raise the peer's data flag for an epoch that nothing is put for."""
        self.there.raise_flag(self.there.note[1], self.flag_after(epoch))

    def acknowledge(self, epoch: int) -> None:
        """Raise the peer's acknowledge flag: the slot of that epoch was read, and may be written again."""
        self.there.acknowledge(self.there.note[2], epoch)

    def _own_slot(self, buffer: SegmentBuffer, dtype: np.dtype[Any], parity: int) -> Array:
        return buffer.view(dtype, (self.nbytes // dtype.itemsize,), self.offset + parity * self.stride)

    def _cut(self, slots: list[Array]) -> None:
        # A slot holds the pieces of one message one behind the other, each row-major.
        begins = np.cumsum([0, *(piece.box.volume for piece in self.pieces)]).tolist()
        self.views = tuple(
            tuple(
                slot[begin : begin + piece.box.volume].reshape(piece.box.shape)
                for begin, piece in zip(begins, self.pieces, strict=False)
            )
            for slot in slots
        )


class Lanes:
    """All lanes of a channel on one rank, and how they lie in its buffer; planned without any peer.

    ``near`` tells whether a peer's memory can be stored to, so that no staging area is needed.

    Attributes
    ----------
    sends, receives
        Pieces of the exchange as they move, large ones in several.
    outgoing, incoming
        Lanes to peers and from peers, in the order of the plan.
    nbytes, flags
        Size of the buffer, and number of its notifications.
    """

    def __init__(self, exchange: Exchange, itemsize: int, near: Callable[[int], bool]) -> None:
        self.sends, self.receives = in_steps(exchange.sends, itemsize), in_steps(exchange.receives, itemsize)
        self.outgoing: list[Lane] = []
        self.incoming: list[Lane] = []
        self.nbytes = 0
        flags = count()
        for lanes, pieces in ((self.incoming, self.receives), (self.outgoing, self.sends)):
            for peer, message in by_peer(pieces):
                nbytes = itemsize * sum(piece.box.volume for piece in message)
                lane = Lane(peer, message, nbytes, self.nbytes, next(flags), _ends(message, itemsize))
                lanes.append(lane)
                if lanes is self.incoming or not near(peer):
                    self.nbytes += SLOTS * lane.stride
        self.flags = next(flags)


def in_steps(pieces: tuple[Piece, ...], itemsize: int) -> tuple[Piece, ...]:
    """Pieces, the large ones cut along their first dimension; alike for whoever sends and receives them."""
    found = []
    for piece in pieces:
        parts = -(-piece.box.volume * itemsize // _STEP_NBYTES)
        if parts <= 1:
            found.append(piece)
            continue
        dim = next((d for d, extent in enumerate(piece.box.shape) if extent > 1), 0)
        start, stop = piece.box.bounds[dim]
        blocks = Balanced(stop - start, min(parts, stop - start))
        for part in range(blocks.parts):
            low, high = blocks.interval(part)
            found.append(Piece(piece.peer, piece.box.replace(dim, start + low, start + high)))
    return tuple(found)


def _ends(pieces: tuple[Piece, ...], itemsize: int) -> tuple[int, ...]:
    # Last piece of each step of a message.
    ends, nbytes = [], 0
    for at, piece in enumerate(pieces):
        nbytes += piece.box.volume * itemsize
        if nbytes >= _STEP_NBYTES or at == len(pieces) - 1:
            ends.append(at)
            nbytes = 0
    return tuple(ends)
