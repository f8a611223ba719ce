"""One outcome for all ranks of a call in which each of them may fail, or be told something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distdl_rma import errors
from distdl_rma.checks.consensus import gather_words
from distdl_rma.errors import DataError, DistdlError, MismatchError, PeerFailedError
from distdl_rma.machine import Machine
from distdl_rma.segments.waiting.error_texts import OF_SEVERAL_RANKS


@contextmanager
def together(
    machine: Machine,
    ranks: Sequence[int],
    title: str,
    *,
    failed: type[DistdlError] = DataError,
    differs: type[DistdlError] = MismatchError,
    advice: str = "do all ranks pass the same?",
) -> Iterator[dict[str, Any]]:
    """Local work of each rank, which succeeds on all ranks or raises on all; its end is collective, blocking.

    If the work of some rank raises, this rank raises its own error, and the others one of the same type that
    names it; ``failed`` if it is not of the library. The context gets a dict for facts of this rank, by name,
    in JSON's types. If ranks state another value of a fact, all raise ``differs`` with both, and ``advice``.
    All ranks pass the same ``ranks`` and ``title``, which says what they do here.
    """
    facts: dict[str, Any] = {}
    error: Exception | None = None
    try:
        yield facts
    except Exception as found:  # noqa: BLE001 - raised on all ranks
        error = found
    problem = None if error is None else (type(error).__name__, str(error))
    try:
        answers = gather_words(machine.segments, [problem, facts], title, ranks)
    except OF_SEVERAL_RANKS as failure:
        machine.settle(failure, ranks)
        raise
    if isinstance(error, DistdlError):
        raise error
    if error is not None:
        raise failed(f"{title}: rank {machine.rank}: {type(error).__name__}: {error}") from error
    for rank, (its, _) in answers.items():
        if its:
            kind, text = its
            known = kind in errors.__all__ and kind != PeerFailedError.__name__
            # The error may begin with the title already.
            text = text.removeprefix(f"{title}: ") if known else f"{kind}: {text}"
            raise (getattr(errors, kind) if known else failed)(f"{title}: rank {rank}: {text}")
    first: dict[str, tuple[int, Any]] = {}
    for rank, (_, stated) in answers.items():
        for name, value in stated.items():
            one, its = first.setdefault(name, (rank, value))
            if its != value:
                raise differs(f"{title}: {name}: {its} on rank {one}, but {value} on rank {rank}; {advice}")
