"""What of a traceback says something to a user: frames of the program, without launchers and libraries."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import TracebackType

import mpi4py

from distdl_rma.errors import DistdlError

_OWN = f"{Path(__file__).parents[2]}/"
_LAUNCHERS = f"{Path(mpi4py.__file__).parent}/", runpy.__file__, "<frozen runpy>", contextlib.__file__


def short_traceback(error: BaseException) -> str:
    """As Python prints an exception, with the frames of the user's program.

    What is behind the last of these stays, for errors that are not of this library: there it happened.
    """
    chain = [*_chain(error)]
    whole = [each.__traceback__ for each in chain]
    try:
        for each in chain:
            each.__traceback__ = _shortened(each)
        return "".join(traceback.format_exception(error))
    finally:
        for each, trace in zip(chain, whole, strict=True):
            each.__traceback__ = trace


def place_of(error: BaseException) -> str:
    """File and line of the user's innermost frame; empty if there is none."""
    found = [each for each in _entries(error.__traceback__) if not _is_inner(each)]
    return f"{PurePath(found[-1].tb_frame.f_code.co_filename).name}:{found[-1].tb_lineno}" if found else ""


def _shortened(error: BaseException) -> TracebackType | None:
    entries = [*_entries(error.__traceback__)]
    users = [at for at, each in enumerate(entries) if not _is_inner(each)]
    if not users:
        return error.__traceback__
    behind = [] if isinstance(error, DistdlError) else entries[users[-1] + 1 :]
    kept = [entries[at] for at in users] + [each for each in behind if not _is_call_of_a_module(each)]
    trace = None
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _torch() -> str:
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return "<no torch>" if file is None else f"{Path(file).parent}/"


def _is_inner(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith((_OWN, _torch(), *_LAUNCHERS))


def _is_call_of_a_module(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename == f"{_torch()}nn/modules/module.py"
