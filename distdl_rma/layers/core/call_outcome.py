"""What became of a call, for ranks that have no part in it and yet wait for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from distdl_rma import errors
from distdl_rma.errors import DistdlError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange, fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.error_exchange import row_text, text_row
from distdl_rma.machine import Machine
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.all_push import AllPush

_NBYTES = 1024


class CallOutcome:
    """One message per call, from one rank of a layer to ranks outside: all is well, or why it was refused.

    No row of every rank to every rank: those inside do not wait for those who hear, and who tells only when
    they are two calls behind. Local to make.
    """

    def __init__(self, machine: Machine, teller: int, listeners: Sequence[int], name: str) -> None:
        rank, shape = machine.rank, (_NBYTES,)
        root = Decomposition.replicated(Partition((teller,), (1,), rank), shape)
        others = Decomposition.replicated(Partition(tuple(listeners), (len(listeners),), rank), shape)
        self._tells = rank == teller
        self._channel = Channel(machine.segments, Exchange(rank, root, others), np.uint8, f"{name} (outcome)")
        weakref.finalize(self, self._channel.close)

    @classmethod
    def among(
        cls, machine: Machine, inside: Sequence[int], holders: Sequence[int], name: str
    ) -> CallOutcome | None:
        """Outcome for those that keep copies of a layer's weights without a part in its calls.

        Collective over ``holders``, the rank ids that gradients are summed over; blocking. ``inside`` takes
        part in calls, and its first rank tells. None on ranks that neither tell nor hear.
        """
        # Those that keep copies for a layer of other ranks, a replica, take part in that one's calls instead.
        meeting = AllPush(machine.segments, holders, 2, np.int64, f"{name} (audience)")
        meeting.start(np.array([fingerprint(tuple(inside)), machine.rank in inside], np.int64))
        views = {rank: tuple(row) for rank, row in zip(holders, meeting.wait().tolist(), strict=True)}
        meeting.close()
        layer, _ = views[machine.rank]
        listeners = [rank for rank in sorted(holders) if views[rank] == (layer, False)]
        if not listeners or machine.rank not in (inside[0], *listeners):
            return None
        return cls(machine, inside[0], listeners, name)

    def connect(self) -> None:
        """Exchange addresses, once; blocking."""
        self._channel.connect()

    def tell(self, error: DistdlError | None = None) -> None:
        """Say that a call was refused, or that it was not; nothing on ranks that hear."""
        if self._tells:
            text = "" if error is None else f"{type(error).__name__} {error}"
            self._channel.move(text_row(text, _NBYTES))

    def hear(self) -> None:
        """Wait for what became of the next call, and raise the error that its ranks raise, if they do."""
        text = row_text(self._channel.move(np.zeros(0, np.uint8)))
        if text:
            kind, _, what = text.partition(" ")
            raise getattr(errors, kind, ShapeError)(what)
