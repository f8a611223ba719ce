"""Lanes of a channel: one per peer and direction, with its pieces, slots and flags.

A lane whose message has two pieces::

    sender                                           receiver
    +---------------+                                +---------+---------+
    | block         |   to a near peer: each piece   | piece 0 | piece 1 |   slot 0: even epochs
    |   +-------+   |   is copied into the slot      +---------+---------+
    |   |piece 0|   | -----------------------------> | piece 0 | piece 1 |   slot 1: odd epochs
    |   +-------+   |   to a far one: into a         +---------+---------+
    |   |piece 1|   |   staging area at the sender,
    +---+-------+---+   and from there in one put    data flag, raised by the sender
    ack flag, raised by the receiver

The data flag is raised once for a small message, and after several pieces of a large one, so that the
receiver begins to read before the sender has ended. Where the receiver's result lies in memory that the
sender reaches, pieces *land* in the result itself, and there are no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.geometry.exchange import Exchange, Piece, by_peer
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments.large_arrays import LARGE_NBYTES, copy, copy_small
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.transport.heap import aligned

Array = NDArray[Any]
SLOTS = 2
# In place of a slot's offset: the receiver takes the data directly in its result.
LANDS = -2
# The receiver reads a large message in steps, while the sender continues: one step per MiB for a piece above
# 1 MiB, at most four, or one per 4 MiB above 16 MiB. More steps cost calls, whose code the copies evict.
_STEPS, _STEP_NBYTES, _LARGEST_STEP_NBYTES = 4, 1 << 20, 4 << 20


@dataclass
class Lane:
    """Message of a channel to or from one peer in each epoch: all pieces for that peer.

    ``offset`` is that of the first slot, or of the staging area, in this rank's buffer. ``notification`` is
    the index of the data flag of a received message, or of the acknowledge flag of a sent message. The sender
    raises the data flag after each piece listed in ``ends``, the last piece included.

    The data flag counts steps over all epochs: with three steps an epoch it is 3 after epoch 1, and 4 after
    the first step of epoch 2. So one word tells the epoch and how far its message is.

    The other fields are set once the peer's buffer ``remote`` is known. ``views`` are the pieces in both
    slots, or of a received message that ``lands`` in the results, without slots. ``staged`` are both staging
    areas if this rank cannot store to the peer's slots. ``remote.note`` has the offset of the slots and the
    indices of the data flag and of the acknowledge flag. ``raise_data_flag(value)`` raises the receiver's
    data flag.
    ``acknowledge(epoch)`` raises the sender's acknowledge flag: the slot of that epoch may be overwritten.
    """

    peer: int
    pieces: tuple[Piece, ...]
    nbytes: int
    offset: int
    notification: int
    ends: tuple[int, ...]
    lands: bool = False
    views: list[Sequence[Array]] = field(default_factory=lambda: [()] * SLOTS)
    staged: tuple[Array, ...] = ()
    remote: RemoteBuffer = field(init=False)
    # Of a sent message that lands: where its pieces of an epoch belong in the peer's result.
    places: Callable[[int], Sequence[Array]] = field(init=False)
    # Copies a piece.
    copy: Callable[[Array, Array], object] = field(init=False)
    acknowledge: Callable[[int], None] = field(init=False)
    raise_data_flag: Callable[[int], None] = field(init=False)

    def __post_init__(self) -> None:
        self.copy = copy if self.nbytes >= LARGE_NBYTES else copy_small

    @property
    def stride(self) -> int:
        """Bytes from one slot to the other."""
        return aligned(self.nbytes)

    def flag_after(self, epoch: int) -> int:
        """Value of the data flag after all steps of an epoch."""
        return epoch * len(self.ends)

    def bind_incoming(self, remote: RemoteBuffer, buffer: SegmentBuffer, dtype: np.dtype[Any]) -> None:
        """Bind a received message to the slots of this rank's buffer."""
        self.remote = remote
        self.acknowledge = remote.flag_raiser(remote.note[2], ordered=False)
        if not self.lands:
            self._cut([self._own_slot(buffer, dtype, parity) for parity in range(SLOTS)])

    def bind_outgoing(self, remote: RemoteBuffer, buffer: SegmentBuffer, dtype: np.dtype[Any]) -> None:
        """Bind a sent message to the peer's slots, or to a staging area in this rank's buffer."""
        self.remote = remote
        self.raise_data_flag = remote.flag_raiser(remote.note[1])
        self.lands = remote.note[0] == LANDS
        if self.lands:
            return
        length, slots = self.nbytes // dtype.itemsize, []
        for parity in range(SLOTS):
            slot = remote.direct(dtype, length, remote.note[0] + parity * self.stride)
            slots.append(self._own_slot(buffer, dtype, parity) if slot is None else slot)
            self.staged = (*self.staged, slots[-1]) if slot is None else ()
        self._cut(slots)

    def announce(self, epoch: int) -> None:
        """Put a staged message, and raise the peer's data flag after the whole of it."""
        parity = epoch % SLOTS
        there = self.remote.note[0] + parity * self.stride
        self.remote.put_stable(self.staged[parity].view(np.uint8), there)
        self.raise_data_flag(self.flag_after(epoch))

    def _own_slot(self, buffer: SegmentBuffer, dtype: np.dtype[Any], parity: int) -> Array:
        return buffer.view(dtype, (self.nbytes // dtype.itemsize,), self.offset + parity * self.stride)

    def _cut(self, slots: list[Array]) -> None:
        # A slot holds the pieces of one message back to back, each row-major.
        ends = np.cumsum([piece.box.volume for piece in self.pieces]).tolist()
        self.views = [
            tuple(
                slot[end - piece.box.volume : end].reshape(piece.box.shape)
                for end, piece in zip(ends, self.pieces, strict=True)
            )
            for slot in slots
        ]


class Lanes:
    """All lanes of a channel on one rank, and their offsets in its buffer; planning is local.

    ``near(peer)`` is whether this rank can store to a peer's memory; a message to such a peer needs no
    staging area. ``sends`` and ``receives`` are the pieces of the exchange, large ones cut into parts.
    ``outgoing`` and ``incoming`` are the lanes to and from peers, in the order of the plan. ``nbytes`` and
    ``flags`` are the size of the buffer and the number of its notifications. With ``land`` near peers put
    directly into results: they have no slots, and the buffer begins with a word for each of two epochs.
    """

    def __init__(
        self, exchange: Exchange, itemsize: int, near: Callable[[int], bool], land: bool = False
    ) -> None:
        self.sends, self.receives = in_steps(exchange.sends, itemsize), in_steps(exchange.receives, itemsize)
        self.outgoing: list[Lane] = []
        self.incoming: list[Lane] = []
        self.nbytes = aligned(SLOTS * 8) if land else 0
        flags = count()
        for lanes, pieces in ((self.incoming, self.receives), (self.outgoing, self.sends)):
            for peer, message in by_peer(pieces):
                nbytes = itemsize * sum(piece.box.volume for piece in message)
                lane = Lane(peer, message, nbytes, self.nbytes, next(flags), _ends(message, itemsize))
                lanes.append(lane)
                lane.lands = land and lanes is self.incoming and near(peer)
                if not lane.lands if lanes is self.incoming else not near(peer):
                    self.nbytes += SLOTS * lane.stride
        self.flags = next(flags)


def in_steps(pieces: tuple[Piece, ...], itemsize: int) -> tuple[Piece, ...]:
    """Cut large pieces along their first dimension longer than 1; equal at sender and receiver.

    Both cut their own list of the same pieces, and never tell each other how: the parts follow from shape and
    size of element alone. Along the first dimension, since a part of a row-major array is then contiguous.
    """
    found = []
    for piece in pieces:
        nbytes = piece.box.volume * itemsize
        parts = min(-(-nbytes // _STEP_NBYTES), max(_STEPS, -(-nbytes // _LARGEST_STEP_NBYTES)))
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
    # Index of the last piece of each step of a message.
    ends, nbytes = [], 0
    for at, piece in enumerate(pieces):
        nbytes += piece.box.volume * itemsize
        if nbytes >= _STEP_NBYTES or at == len(pieces) - 1:
            ends.append(at)
            nbytes = 0
    return tuple(ends)
