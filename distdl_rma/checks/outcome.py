"""One outcome for all ranks of a call in which each of them may fail alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distdl_rma import errors
from distdl_rma.checks.consensus import gather_words
from distdl_rma.errors import DataError, DistdlError, PeerFailedError
from distdl_rma.machine import Machine
from distdl_rma.segments.waiting.liveness import OF_SEVERAL_RANKS


def agreed(
    machine: Machine,
    ranks: Sequence[int],
    title: str,
    error: Exception | None,
    facts: Any = None,
    otherwise: type[DistdlError] = DataError,
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
    otherwise
        Type of the error that ranks raise in place of one that is not of the library.

    Raises
    ------
    DistdlError
        If some rank has failed: on that rank its own error, on the others one of the same type that names it.
    """
    problem = None if error is None else (type(error).__name__, str(error))
    try:
        found = gather_words(machine.segments, [problem, facts], title, ranks)
    except OF_SEVERAL_RANKS as failure:
        machine.settle(failure, ranks)
        raise
    if isinstance(error, DistdlError):
        raise error
    if error is not None:
        raise otherwise(f"{title}: rank {machine.rank}: {type(error).__name__}: {error}") from error
    for rank, (its, _) in found.items():
        if its:
            kind, text = its
            known = (
                getattr(errors, kind) if kind in errors.__all__ and kind != PeerFailedError.__name__ else None
            )
            raise (known or otherwise)(f"{title}: rank {rank}: {text if known else f'{kind}: {text}'}")
    return {rank: its for rank, (_, its) in found.items()}
