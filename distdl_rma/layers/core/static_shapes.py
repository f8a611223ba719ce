"""Loops in which no rank's shapes change: the ranks of a layer agree on them once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distdl_rma.checks.consensus import gather_words
from distdl_rma.errors import ProtocolError
from distdl_rma.geometry.partition import Partition
from distdl_rma.machine import Machine

_KEY = "static shapes"


# What of a rank's calls that tell the others nothing must be alike on all ranks.
_MODES = ("records no gradients within static_shapes", "records gradients within static_shapes")


class Promise:
    """That no rank passes anything else to a layer than in its first call."""


def promise_on(machine: Machine, recording: bool = False) -> Promise | None:
    """What the ranks of a machine promise now; None if nothing.

    A call ``recording`` gradients, or not, asks: a wait in vain says if other ranks called otherwise.
    """
    found = machine.kept.get(_KEY)
    if not isinstance(found, Promise):
        return None
    machine.segments.watch.note(_MODES, recording)
    return found


@contextmanager
def static_shapes(place: Machine | Partition) -> Iterator[None]:
    """Context in which every rank passes to a layer what it passed in the layer's first call within.

    The same local shapes and types, the same that needs a gradient; calls with and without recording of
    gradients are told apart. Layers that take plain shards then agree in their first call only, and no rank
    waits for those that it needs no data of. A distributed model needs none of this: split tensors know their
    shapes. Collective over the machine to enter, blocking; local to leave.

    What changes all the same is a ``ShapeError`` on the rank that sees it; the others, which would wait for
    this one, raise ``PeerFailedError``, and the machine is over. Gradients are recorded on all ranks or on
    none: where they are not, a rank waits in vain, and ``ExchangeTimeout`` says so.

    Raises
    ------
    ProtocolError
        If shapes are promised already.
    """
    machine = Machine.of(place)
    if promise_on(machine) is not None:
        raise ProtocolError("static_shapes: this machine's shapes are promised already")
    gather_words(machine.segments, "", "static_shapes")
    machine.kept[_KEY] = Promise()
    try:
        yield
    finally:
        machine.kept.pop(_KEY, None)
        machine.segments.watch.note()
