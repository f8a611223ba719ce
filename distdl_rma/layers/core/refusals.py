"""What the ranks of a layer refuse: one error on all of them, and on ranks outside that wait for them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma import errors
from distdl_rma.checks.consensus import gather_words
from distdl_rma.errors import DistdlError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.machine import Machine
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.staged import movement_between
from distdl_rma.ops.core.tensors import as_array, as_tensor

# Characters of a text that a rank sends, and bytes of an outcome.
_LONGEST, _OUTCOME_NBYTES = 512, 1024
# The operand of ranks that receive an outcome.
_NO_WORDS = torch.empty(0, dtype=torch.uint8)


def text_row(text: str, nbytes: int) -> NDArray[np.uint8]:
    """Row with a text, cut if it does not fit."""
    row = np.zeros(nbytes, np.uint8)
    words = text.encode()[:nbytes]
    row[: len(words)] = np.frombuffer(words, np.uint8)
    return row


def row_text(row: NDArray[np.uint8]) -> str:
    """Text of a row; empty if there is none."""
    return row.tobytes().rstrip(b"\0").decode(errors="ignore")


def clipped(text: str) -> str:
    """A text of one line and of limited length."""
    return " ".join(text.split())[:_LONGEST]


def refusal(name: str, problems: Mapping[int, str]) -> ShapeError:
    """Error of all ranks of a layer, of which some have a problem; it names the first of these."""
    found = {rank: problem for rank, problem in problems.items() if problem}
    rank, problem = next(iter(found.items()))
    others = f" ({len(found)} ranks of {len(problems)} complain)" if len(found) > 1 else ""
    return ShapeError(f"{name!r}: rank {rank}: {problem}{others}")


def told_refusal(machine: Machine, ranks: Sequence[int], name: str, problem: str, facts: str) -> ShapeError:
    """Error to raise where something does not fit, the same on all ranks; blocking until all have called.

    ``problem`` is what is wrong on this rank, empty if nothing is; ``facts`` are what it passes, which is
    to be alike on all ranks.
    """
    mine = [clipped(problem), "" if problem else clipped(facts)]
    said = gather_words(machine.segments, mine, f"{name} (complaints)", ranks)
    if any(its for its, _ in said.values()):
        return refusal(name, {rank: its for rank, (its, _) in said.items()})
    first, (_, expected) = next(iter(said.items()))
    for rank, (_, its) in said.items():
        if its != expected:
            return ShapeError(f"{name!r}: rank {first} passes {expected} but rank {rank} {its}")
    return ShapeError(f"{name!r}: the ranks' inputs do not fit together; each passes {facts}")


class CallOutcome:
    """One message per call, from one rank of a layer to ranks outside: all is well, or why it was refused.

    No row of every rank to every rank, and over nodes one message to each, by a tree of them: those inside do
    not wait for those who hear, and who tells only when they are two calls behind. Local to make.
    """

    def __init__(self, machine: Machine, teller: int, listeners: Sequence[int], name: str) -> None:
        rank, shape = machine.rank, (_OUTCOME_NBYTES,)
        root = Decomposition.replicated(Partition((teller,), (1,), rank), shape)
        others = Decomposition.replicated(Partition(tuple(listeners), (len(listeners),), rank), shape)
        self._tells = rank == teller
        self._movement = movement_between(CallSite(machine, name), root, others, torch.uint8, "outcome")
        weakref.finalize(self, self._movement.close)

    @classmethod
    def among(
        cls, machine: Machine, inside: Sequence[int], holders: Sequence[int], name: str
    ) -> CallOutcome | None:
        """Outcome for those that keep copies of a layer's weights without a part in its calls.

        Collective over ``holders``, the rank ids that gradients are summed over; blocking. ``inside`` takes
        part in calls, and its first rank tells. None on ranks that neither tell nor hear.
        """
        # Those that keep copies for a layer of other ranks, a replica, take part in that one's calls instead.
        mine = [fingerprint(tuple(inside)), machine.rank in inside]
        views = gather_words(machine.segments, mine, f"{name} (audience)", holders)
        layer, _ = mine
        listeners = [rank for rank in sorted(holders) if views[rank] == [layer, False]]
        concerned = listeners and machine.rank in (inside[0], *listeners)
        return cls(machine, inside[0], listeners, name) if concerned else None

    def connect(self) -> None:
        """Exchange addresses, once, with a message that all is well; blocking."""
        self.tell()
        self.hear()

    def tell(self, error: DistdlError | None = None) -> None:
        """Say that a call was refused, or that it was not; nothing on ranks that hear."""
        if self._tells:
            text = "" if error is None else f"{type(error).__name__} {error}"
            self._movement.move(as_tensor(text_row(text, _OUTCOME_NBYTES)))

    def hear(self) -> None:
        """Wait for what became of the next call, and raise the error that its ranks raise, if they do.

        Nothing on the rank that tells.
        """
        if self._tells:
            return
        text = row_text(as_array(self._movement.move(_NO_WORDS)))
        if text:
            kind, _, what = text.partition(" ")
            raise getattr(errors, kind, ShapeError)(what)
