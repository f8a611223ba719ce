"""Uncaught errors: the peers are notified, and the user sees one short traceback.

What happens when the programs of two ranks raise, rank 1 first, or rank 1 alone::

    rank 1   uncaught error > notice to all > looks whether rank 0 has the same > prints, waits, ends
    rank 0   uncaught error > notice to all > first in M: prints its traceback > ends
    or       waits for 1 > receives the notice > PeerFailedError > prints one line > ends

With N ranks an error on all of them would print N tracebacks, in pieces that mix. So a rank prints a line in
place of its traceback if an earlier rank in M has the same error, or has failed first. And the end of one
process makes the launcher kill the others: a rank stays for a second, until its notice has been received and
the others have printed theirs.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath
from types import TracebackType
from typing import Protocol

import mpi4py

from distdl_rma.errors import DistdlError, PeerFailedError
from distdl_rma.segments.virtual_ranks.comm import is_true_within
from distdl_rma.segments.waiting.error_texts import cause_of
from distdl_rma.segments.waiting.liveness import NOTICE_SECONDS, FailureNotices

_FULL = "DISTDL_RMA_FULL_TRACEBACKS"
_LEFT_OUT = f"({_FULL}=1 shows the frames of torch and of distdl_rma as well)\n"
_OWN = f"{Path(__file__).parents[2]}/"
_LAUNCHERS = f"{Path(mpi4py.__file__).parent}/", runpy.__file__, "<frozen runpy>", contextlib.__file__


def short_traceback(error: BaseException) -> str:
    """Traceback as Python prints it, with the frames of the user's program only.

    If an error of another library was raised in a hidden frame, a last line says how to see all frames.
    """
    whole = traceback.TracebackException.from_exception(error)
    hides = bool(whole.stack) and _is_inner(whole.stack[-1]) and not isinstance(error, DistdlError)
    each: traceback.TracebackException | None = whole
    while each is not None:
        users = [frame for frame in each.stack if not _is_inner(frame)]
        hides = hides and (each is not whole or bool(users))
        # All stay if nothing would be left.
        each.stack = traceback.StackSummary.from_list(users) if users else each.stack
        # As Python prints them.
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "".join(whole.format()) + (_LEFT_OUT if hides else "")


def place_of(error: BaseException) -> str:
    """File and line of the user's innermost frame; empty if there is none.

    Ranks that raise the same error at one place are alike for the user, whatever the frames below.
    """
    users = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_inner(frame)]
    return f"{PurePath(users[-1].filename).name}:{users[-1].lineno}" if users else ""


def _is_inner(frame: traceback.FrameSummary) -> bool:
    # Whether a frame is one of this package, of torch or of what starts the program: not of the user.
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    hidden = (_OWN, *_LAUNCHERS, *([] if torch is None else [f"{Path(torch).parent}/"]))
    return frame.filename.startswith(hidden)


# How long a rank then waits for its peers to print their errors.
_PRINT_SECONDS = 0.2
# How long a rank checks whether an earlier rank fails with the same error, and so shows the traceback.
_ALIKE_SECONDS = 0.4


class Failing(Protocol):
    """The part of a segment manager that this module needs."""

    closed: bool
    notices: FailureNotices

    def fail(self, error: BaseException) -> None:
        """Notify all ranks that this one failed."""


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# In the order in which they were made, equal on all ranks.
_managers: weakref.WeakKeyDictionary[Failing, None] = weakref.WeakKeyDictionary()
_previous_hooks: list[_Hook] = []
_under_way: list[BaseException] = []
_written: set[str] = set()
# Types of uncaught errors after which ``python -m mpi4py`` ends the whole job, when this process ends.
_last_errors: list[type[BaseException]] = []


def report_uncaught_errors(manager: Failing) -> None:
    """Report this process's uncaught exceptions to the ranks of a machine, from now on.

    By ``sys.excepthook``: the only place that sees an exception which nobody catches. The hook that was there
    before, such as that of ``python -m mpi4py``, which ends the job, or of a debugger, is called by it.
    """
    if sys.excepthook is not _excepthook:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _excepthook
    _managers[manager] = None


def write_once(line: str) -> None:
    """Write a line to stderr, the same line once only; for the end of a process, which cannot raise.

    Nothing if the whole job ends by an uncaught error: all ranks have printed it.
    """
    if line not in _written and not _last_errors:
        _written.add(line)
        _write(f"distdl_rma: {line}\n")


def _write(text: str) -> None:
    # In one write with a flush: other ranks write to the same terminal.
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A hook that was installed later may call this hook again.
    if _under_way:
        _previous_hooks[0](kind, error, trace)
        return
    _under_way.append(error)
    if "mpi4py.run" in sys.modules:
        _last_errors.append(kind)
    try:
        still_open = [one for one in _managers if not one.closed]
        for manager in still_open:
            manager.fail(error)
        shows = _previous_hooks[-1]
        elsewhere = ""
        shortens = shows is sys.__excepthook__ and not os.environ.get(_FULL)
        if still_open and shortens:
            elsewhere = _shown_elsewhere(error, still_open[0])
            _write(elsewhere or short_traceback(error))
        else:
            shows(kind, error, trace)
        # The end of this process may end the job: before that, the peers must learn the reason.
        is_true_within(NOTICE_SECONDS, lambda: not [one for one in still_open if not one.notices.noticed()])
        if still_open:
            time.sleep(_PRINT_SECONDS + (NOTICE_SECONDS if elsewhere else 0))
    finally:
        _under_way.clear()


def _shown_elsewhere(error: BaseException, manager: Failing) -> str:
    # Line to print if another rank shows the traceback: the rank that failed first, or the first rank in M
    # with the same error. Else empty.
    notices, name, at = manager.notices, type(error).__name__, place_of(error)
    ended = f"distdl_rma: rank {notices.rank} ended{f' at {at}' if at else ''} by "
    if isinstance(error, PeerFailedError):
        return "" if error.rank == notices.rank else f"{ended}{name}: {error}\n"
    deadline = time.monotonic() + _ALIKE_SECONDS
    found, before = "", notices.before
    while before and time.monotonic() < deadline:
        notices.noticed()
        # The first rank in M shows the traceback, and its notice may arrive last.
        for rank in [rank for rank in before if rank in notices.failures]:
            if cause_of(error).startswith(notices.failures[rank]):
                found = f"{ended}the same {name} as rank {rank}\n"
            elif isinstance(error, DistdlError) and notices.failures[rank].startswith(name):
                found = f"{ended}{name}: {error}\n"
            if found and rank == before[0]:
                return found
            if found:
                break
        time.sleep(1e-3)
    return found
