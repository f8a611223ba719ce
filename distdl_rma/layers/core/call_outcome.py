"""What became of a call, for ranks that have no part in it and yet wait for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np

from distdl_rma import errors
from distdl_rma.errors import DistdlError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange, fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.machine import Machine
from distdl_rma.segments.channel import Channel
from distdl_rma.segments.collectives.all_push import AllPush

_NBYTES = 1024


class CallOutcome:
    """One message per call, from one rank of a layer to ranks outside: all is well, or why it was refused.

    Who tells does not wait for those who hear, unless these are two calls behind. Local to make.

    Parameters
    ----------
    machine
        The machine.
    teller
        Rank id of the rank that tells.
    audience
        Rank ids of those that hear.
    name
        Name of the layer.
    """

    def __init__(self, machine: Machine, teller: int, audience: Sequence[int], name: str) -> None:
        rank, shape = machine.rank, (_NBYTES,)
        root = Decomposition.replicated(Partition((teller,), (1,), rank), shape)
        others = Decomposition.replicated(Partition(tuple(audience), (len(audience),), rank), shape)
        self._tells = rank == teller
        self._channel = Channel(machine.segments, Exchange(rank, root, others), np.uint8, f"{name} (outcome)")
        weakref.finalize(self, self._channel.close)

    def connect(self) -> None:
        """Exchange addresses, once; blocking."""
        self._channel.connect()

    def tell(self, error: DistdlError | None = None) -> None:
        """Say that a call was refused, or that it was not; nothing on ranks that hear."""
        if self._tells:
            row = np.zeros(_NBYTES, np.uint8)
            words = b"" if error is None else f"{type(error).__name__} {error}".encode()[:_NBYTES]
            row[: len(words)] = np.frombuffer(words, np.uint8)
            self._channel.move(row)

    def hear(self) -> None:
        """Wait for what became of the next call, and raise the error that its ranks raise, if they do."""
        words = self._channel.move(np.zeros(0, np.uint8)).tobytes().rstrip(b"\0").decode(errors="ignore")
        if words:
            kind, _, text = words.partition(" ")
            raise getattr(errors, kind, ShapeError)(text)


class OutcomeListeners:
    """Ranks that keep copies of a layer's weights without a part in its calls; local to make.

    Parameters
    ----------
    machine
        The machine.
    inside
        Rank ids that take part in calls; the first of them tells.
    summing
        Asked in every call, as its answer may change: rank ids that gradients are summed over.
    name
        Name of the layer.
    """

    def __init__(
        self, machine: Machine, inside: Sequence[int], summing: Callable[[], Sequence[int]], name: str
    ) -> None:
        self._machine, self._inside, self._summing, self._name = machine, tuple(inside), summing, name
        self._outcomes: dict[tuple[int, ...], CallOutcome | None] = {}

    def outcome(self) -> CallOutcome | None:
        """How those that will wait are told what becomes of a call; None where none do, or hear of it."""
        ranks = tuple(self._summing())
        if ranks not in self._outcomes:
            self._outcomes[ranks] = self._among(ranks)
        return self._outcomes[ranks]

    def _among(self, ranks: tuple[int, ...]) -> CallOutcome | None:
        # Those that keep copies for a layer of other ranks, a replica, take part in that one's calls instead.
        views = self._views(ranks)
        mine = views[self._machine.rank][0]
        hearing = [rank for rank in sorted(ranks) if views[rank] == (mine, False)]
        teller = self._inside[0]
        if not hearing or self._machine.rank not in (teller, *hearing):
            return None
        return CallOutcome(self._machine, teller, hearing, self._name)

    def _views(self, ranks: tuple[int, ...]) -> dict[int, tuple[int, bool]]:
        # Which ranks take part as each rank has it, and whether it is one of them; collective, blocking.
        meeting = AllPush(self._machine.segments, ranks, 2, np.int64, f"{self._name} (audience)")
        meeting.start(np.array([fingerprint(self._inside), self._machine.rank in self._inside], np.int64))
        rows = meeting.wait().tolist()
        meeting.close()
        return {rank: (view, bool(inside)) for rank, (view, inside) in zip(ranks, rows, strict=True)}
