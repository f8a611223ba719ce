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
from distdl_rma.geometry.exchange import Exchange, Piece
from distdl_rma.segments.lanes import SLOTS, Lane
from distdl_rma.segments.memory.buffer import SegmentBuffer
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.transport.arena import Arena
from distdl_rma.segments.transport.heap import Bytes

Array = NDArray[Any]
# Copying fewer bytes than these takes less time than looking up the address of a result.
_SMALLEST_NBYTES = 1 << 20


class PostedResults:
    """Memory for the results of the next two epochs of a channel; writers of the node know the offsets.

    The results lie in the ``arena`` of this process, and have the shape of ``need``. Their offsets lie at the
    start of the channel's ``buffer``, one for odd and one for even epochs. The acknowledgement of an epoch
    announces the offset for the epoch two later. ``lanes`` are those of the writers of the node.

    Once its epoch is received, a taken result belongs to its taker: no peer writes to it any more, and other
    memory is posted. Memory of a cancelled epoch stays posted: each writer overwrites its part.
    """

    def __init__(
        self, arena: Arena, buffer: SegmentBuffer, lanes: Sequence[Lane], need: Box, dtype: np.dtype[Any]
    ) -> None:
        self._arena, self._lanes, self._need, self._dtype = arena, lanes, need, dtype
        self._table = buffer.view(np.int64, (SLOTS,)).data
        self._results: dict[int, Array] = {}
        self._taken = 0
        # Before any writer has the address of the offsets.
        for epoch in range(SLOTS):
            self._post(epoch)

    def take(self, epoch: int) -> Array:
        """Result of an epoch; it belongs to the caller once the epoch is received."""
        self._taken = epoch
        return self._results[epoch % SLOTS]

    def finish(self, epoch: int) -> None:
        """If the result was taken, post memory for the epoch two later, before this epoch is acknowledged."""
        if epoch == self._taken:
            self._post(epoch)

    def _post(self, epoch: int) -> None:
        result = self._results[epoch % SLOTS] = self._arena.array(self._need.shape, self._dtype)
        self._table[epoch % SLOTS] = self._arena.offset(result)
        for lane in self._lanes:
            lane.views[epoch % SLOTS] = [result[piece.box.slices(self._need)] for piece in lane.pieces]


def places_in_results(
    remote: RemoteBuffer, arena: Bytes, pieces: Sequence[Piece], need: Box, dtype: np.dtype[Any]
) -> Callable[[int], list[Array]]:
    """Function of an epoch: where its pieces belong in a peer's result, which it has acknowledged for that.

    ``remote`` is the buffer of the peer's channel, ``arena`` the memory that its results lie in.
    """
    nbytes, slices = need.volume * dtype.itemsize, [piece.box.slices(need) for piece in pieces]
    table: Any = remote.direct(np.int64, SLOTS, 0)

    def places(epoch: int) -> list[Array]:
        offset = table[epoch % SLOTS]
        whole = arena[offset : offset + nbytes].view(dtype).reshape(need.shape)
        return [whole[where] for where in slices]

    return places


def receives_directly(exchange: Exchange, itemsize: int, near: Callable[[int], bool]) -> bool:
    """Whether peers put a rank's pieces directly into its results.

    True if nothing is summed or left unwritten, and near ranks send half of the result and 1 MiB at least.

    The result is new memory without zeros: an element that nobody writes would be garbage. And a sum needs a
    second place for what is added.
    """
    nbytes = itemsize * sum(piece.box.volume for piece in exchange.receives if near(piece.peer))
    enough = nbytes >= _SMALLEST_NBYTES and 2 * nbytes >= itemsize * exchange.need.volume
    return enough and exchange.complete and not exchange.images
