"""Small vectors of all ranks to all ranks, in one round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.patience import Waiting

__all__ = ["AllGather"]


class AllGather:
    """Every rank pushes a vector of ``count`` elements to every rank; one notification round.

    For messages where latency counts. Construction is local and alike on all ``ranks``; the first start
    connects them.

    Parameters
    ----------
    manager
        Segment manager of the machine.
    ranks
        Rank ids that take part, this one included.
    count
        Elements of one vector.
    dtype
        Type of the elements.
    name
        For messages.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: npt.DTypeLike,
        name: str,
    ) -> None:
        self._ranks = tuple(ranks)
        line = Partition(self._ranks, (len(self._ranks),), manager.rank)
        shape = (line.size, count)
        rows = Decomposition(line, (Balanced(line.size, line.size), Balanced(count, 1)), (0,))
        exchange = Exchange(manager.rank, rows, Decomposition.replicated(line, shape))
        self._channel = Channel(manager, exchange, dtype, name)
        self._me = self._ranks.index(manager.rank)
        self._shape = shape
        self._epoch = 0
        self._row: npt.NDArray[Any] = np.empty(0, dtype)

    def connect(self, timeout: float | None = None) -> None:
        """Exchange addresses with the other ranks, once; blocking."""
        self._channel.connect(timeout)

    def start(self, row: npt.NDArray[Any]) -> None:
        """Push this rank's vector, which must stay unchanged until it was received; does not wait."""
        self._row = row
        self._epoch = self._channel.start([row[None]] * len(self._channel.exchange.sends))

    def ready(self) -> bool:
        """Whether all vectors have arrived; does not block."""
        return self._channel.ready(self._epoch)

    def missing(self) -> Waiting:
        """Which rank is still missing; for messages."""
        return self._channel.missing(self._epoch)

    def wait(self, timeout: float | None = None) -> npt.NDArray[Any]:
        """All vectors, one row per rank in the order of ``ranks``; blocking. An array of its own."""
        rows = np.empty(self._shape, self._row.dtype)
        rows[self._me] = self._row
        for piece, view in self._channel.receive(self._epoch, timeout):
            rows[piece.box.start[0]] = view[0]
        return rows

    def close(self) -> None:
        """Give the memory back when no rank writes to it any more; local, idempotent."""
        self._channel.close()
