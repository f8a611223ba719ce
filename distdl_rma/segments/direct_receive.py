"""Direct receive: ranks of the node put into the results of a channel, which saves a copy from slots.

In place of two slots the reader posts two results, and tells their offsets in a table in its segment::

    table in the reader's buffer        arena of the reader
    | even: offset | odd: offset |      |  result of epoch 1  |  result of epoch 2  |   ...
           |              +--------------^ writers put pieces of odd epochs here
           +-----------------------------------------------------^ and of even ones here

    reader: receives epoch 1 > gives the result to its caller > posts memory for epoch 3: table[odd]
            > acknowledges epoch 1
    writer: waits for the acknowledgement of epoch 1 > reads table[odd] > puts epoch 3

The acknowledgement comes after the store to the table, so a writer that may write never sees an old offset.
From then on the result of epoch 1 belongs to the reader's caller, and no peer has a reason to touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.segments.lanes import SLOTS, Lane
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.transport.arena import Landing
from distdl_rma.segments.transport.heap import Bytes

Array = NDArray[Any]
# Copying fewer bytes than these takes less time than looking up the address of a result.
_SMALLEST_NBYTES = 1 << 20
# Most results of a peer whose views a writer keeps: the peer reuses their memory.
_KNOWN = 8


class PostedResults:
    """Memory for the results of the next two epochs of a channel; writers of the node know the offsets.

    ``make`` allocates memory for one result, of the shape ``need``. The offsets of the posted memory lie at
    the start of the channel's buffer, one for odd and one for even epochs. The acknowledgement of an epoch
    announces the offset for the epoch two later. ``lanes`` are those of the writers of the node.

    Once its epoch is received, a taken result belongs to its taker: no peer writes to it any more, and other
    memory is posted. Memory of a cancelled epoch stays posted: each writer overwrites its part.
    """

    def __init__(self, make: Callable[[], Landing], lanes: Sequence[Lane], need: Box) -> None:
        self._make, self._lanes, self._need = make, lanes, need
        self._posted: dict[int, Landing] = {}
        self._taken: set[int] = set()

    def connect(self, buffer: SegmentBuffer) -> None:
        """Post memory for the first two epochs, before any writer has the address of the offsets."""
        self._table = buffer.view(np.int64, (SLOTS,)).data
        for epoch in range(1, SLOTS + 1):
            if epoch % SLOTS not in self._posted:
                self._post(epoch)

    def take(self, epoch: int) -> object:
        """Owner of the memory of an epoch's result; it belongs to the caller once the epoch is received."""
        self._taken.add(epoch)
        return self._posted[epoch % SLOTS].owner

    def finish(self, epoch: int) -> None:
        """If the result was taken, post memory for the epoch two later, before this epoch is acknowledged."""
        if epoch in self._taken:
            self._post(epoch + SLOTS)
            self._taken.discard(epoch)

    def _post(self, epoch: int) -> None:
        landing = self._posted[epoch % SLOTS] = self._make()
        self._table[epoch % SLOTS] = landing.offset
        for lane in self._lanes:
            lane.views[epoch % SLOTS] = views_in(landing.array, lane, self._need)


class ResultsOfPeer:
    """Views of the results of a peer, for a rank of its node that puts into them."""

    def __init__(
        self, lane: Lane, remote: RemoteBuffer, arena: Bytes, need: Box, dtype: np.dtype[Any]
    ) -> None:
        self._lane, self._arena, self._need, self._dtype = lane, arena, need, dtype
        table = remote.direct(np.int64, SLOTS, 0)
        self._table = memoryview(b"") if table is None else table.data
        self._known: dict[int, tuple[Array, ...]] = {}

    def views(self, epoch: int) -> tuple[Array, ...]:
        """Targets of the pieces of an epoch, once the peer has acknowledged the epoch two before."""
        offset = self._table[epoch % SLOTS]
        if offset not in self._known:
            if len(self._known) == _KNOWN:
                self._known.clear()
            nbytes = self._need.volume * self._dtype.itemsize
            whole = self._arena[offset : offset + nbytes].view(self._dtype).reshape(self._need.shape)
            self._known[offset] = views_in(whole, self._lane, self._need)
        return self._known[offset]


def views_in(whole: Array, lane: Lane, need: Box) -> tuple[Array, ...]:
    """Views of a lane's pieces in a result."""
    return tuple(whole[piece.box.slices(need)] for piece in lane.pieces)


def receives_directly(exchange: Exchange, itemsize: int, near: Callable[[int], bool]) -> bool:
    """Whether peers put a rank's pieces directly into its results.

    True if nothing is summed or left unwritten, and near ranks send half of the result and 1 MiB at least.

    The result is new memory without zeros: an element that nobody writes would be garbage. And a sum needs a
    second place for what is added.
    """
    nbytes = itemsize * sum(piece.box.volume for piece in exchange.receives if near(piece.peer))
    enough = nbytes >= _SMALLEST_NBYTES and 2 * nbytes >= itemsize * exchange.need.volume
    return enough and exchange.complete and not exchange.images
