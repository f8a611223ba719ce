"""Errors of a layer's call: equal on all its ranks, and on ranks outside that wait for them.

Who raises what, if rank 1 of a layer on ranks 0 to 2 passes a wrong tensor, and rank 3 holds a replica of the
weights::

    rank 0    no problem   ─┐
    rank 1    its problem  ─┼─  facts or sums of all ranks  ─  "'conv': rank 1: ..." on ranks 0, 1 and 2
    rank 2    no problem   ─┘                                        │
    rank 3    waits for the outcome of the call   <──────────────────┘  one message: the same error

A rank that raised alone would leave the others waiting until their timeout, with an error about the wait in
place of its cause. Equal texts let a program catch the error, skip the batch, and go on together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from distdl_rma import errors
from distdl_rma.errors import DistdlError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.staged import movement_between
from distdl_rma.layers.ops.core.tensors import as_array, as_tensor
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.machine import Machine

# Maximum characters of a rank's text, and bytes of an outcome. An outcome has one size, as all movements.
_LONGEST, _OUTCOME_NBYTES = 512, 1024
# The operand of ranks that receive an outcome.
_NO_WORDS = torch.empty(0, dtype=torch.uint8)


def clipped(text: str) -> str:
    """The text in one line, of at most ``_LONGEST`` characters."""
    return " ".join(text.split())[:_LONGEST]


@contextmanager
def attributed(
    who: str, caught: type[DistdlError] = ShapeError, raised: type[DistdlError] | None = None
) -> Iterator[None]:
    """Context in which an error of the library begins with ``who`` raises it, or what it is about.

    What a function finds wrong with a tensor is named by its caller, who knows which tensor of which layer it
    is: ``ShapeError("shards form no grid")`` becomes ``ShapeError("input 1: shards form no grid")``. Errors
    of other types than ``caught`` pass; ``raised`` is the type of the new one, that of the old one if None.
    """
    try:
        yield
    except caught as error:
        raise (raised or type(error))(f"{who}: {error}") from None


def refusal(name: str, problems: Mapping[int, str]) -> ShapeError:
    """Error for all ranks of a layer; it names the first rank that has a problem.

    Examples
    --------
    >>> print(refusal("conv", {0: "", 1: "input is a list", 2: "input is a list"}))
    'conv': rank 1: input is a list (2 ranks of 3 complain)
    """
    found = {rank: problem for rank, problem in problems.items() if problem}
    rank, problem = next(iter(found.items()))
    others = f" ({len(found)} ranks of {len(problems)} complain)" if len(found) > 1 else ""
    return ShapeError(f"{name!r}: rank {rank}: {problem}{others}")


class CallOutcome:
    """Notification of ranks outside of a layer about each call: success, or the error.

    One rank of the layer sends one message, which travels along a tree of nodes. The other ranks of the layer
    do not wait for the receivers. The sender waits only if they are two calls behind. Local to construct.

    Ranks outside wait in the sum of gradients, whether or not the call succeeded. Without the outcome, a
    refused batch, which the layer's ranks skip, would leave them there. The sender sends exactly one outcome
    for each call that records gradients, and a receiver receives one before it returns from the call.
    """

    def __init__(self, machine: Machine, sender: int, receivers: Sequence[int], name: str) -> None:
        rank, shape = machine.rank, (_OUTCOME_NBYTES,)
        root = Decomposition.replicated(Partition((sender,), (1,), rank), shape)
        others = Decomposition.replicated(Partition(tuple(receivers), (len(receivers),), rank), shape)
        self._sends = rank == sender
        self._movement = movement_between(CallSite(machine, name), root, others, torch.uint8, "outcome")
        weakref.finalize(self, self._movement.close)

    @classmethod
    def among(
        cls, machine: Machine, inside: Sequence[int], holders: Sequence[int], name: str
    ) -> CallOutcome | None:
        """Outcome for ranks that hold replicas of a layer's weights but take no part in its calls.

        Collective over ``holders``, the rank ids that gradients are summed over; blocking. The ranks
        ``inside`` take part in calls, and their first one sends. None on ranks that neither send nor receive.
        """
        # Holders may belong to a replica of the layer on other ranks: they receive that replica's outcomes.
        mine = [fingerprint(tuple(inside)), machine.rank in inside]
        views = gather_words(machine.segments, mine, f"{name} (audience)", holders)
        layer, _ = mine
        receivers = [rank for rank in sorted(holders) if views[rank] == [layer, False]]
        concerned = receivers and machine.rank in (inside[0], *receivers)
        return cls(machine, inside[0], receivers, name) if concerned else None

    def connect(self) -> None:
        """Exchange addresses, once, by a message of success; blocking."""
        self.send()
        self.receive()

    def send(self, error: DistdlError | None = None) -> None:
        """Send the error of a call, or its success; does nothing on receivers."""
        if self._sends:
            text = "" if error is None else f"{type(error).__name__} {error}"
            row = np.frombuffer(text.encode()[:_OUTCOME_NBYTES].ljust(_OUTCOME_NBYTES, b"\0"), np.uint8)
            self._movement.move(as_tensor(row.copy()))

    def receive(self) -> None:
        """Wait for the outcome of the next call, and raise its error if there is one.

        Does nothing on the sender.
        """
        if self._sends:
            return
        row = as_array(self._movement.move(_NO_WORDS)).tobytes()
        text = row.rstrip(b"\0").decode(errors="ignore")
        if text:
            kind, _, what = text.partition(" ")
            raise getattr(errors, kind, ShapeError)(what)
