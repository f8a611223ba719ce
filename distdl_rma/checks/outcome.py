"""One outcome for all ranks of a call in which each of them may fail alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distdl_rma.checks.consensus import gather_words
from distdl_rma.errors import DataError, DistdlError
from distdl_rma.machine import Machine
from distdl_rma.segments.waiting.liveness import OF_SEVERAL_RANKS


def agreed(
    machine: Machine, ranks: Sequence[int], title: str, error: Exception | None, facts: Any = None
) -> dict[int, Any]:
    """Facts of all ranks, in JSON's types, by rank id; collective over ``ranks``, blocking.

    Parameters
    ----------
    machine, ranks
        The ranks, in an order that all of them pass.
    title
        What the ranks do here, for messages; equal on all of them.
    error
        The exception with which this rank failed, or None.
    facts
        What the other ranks get to know of this one.

    Raises
    ------
    DataError
        If another rank has failed, with its message. A rank that has failed raises its own error, as it is if
        it is one of the library, else within a ``DataError``.
    """
    problem = "" if error is None else f"{type(error).__name__}: {error}"
    try:
        found = gather_words(machine.segments, [problem, facts], title, ranks)
    except OF_SEVERAL_RANKS as failure:
        machine.settle(failure, ranks)
        raise
    if isinstance(error, DistdlError):
        raise error
    if error is not None:
        raise DataError(f"{title}: rank {machine.rank}: {problem}") from error
    for rank, (its, _) in found.items():
        if its:
            raise DataError(f"{title}: rank {rank}: {its}")
    return {rank: its for rank, (_, its) in found.items()}
