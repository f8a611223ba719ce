"""What ends a process without being caught is told to its peers, and to its user when nobody can catch it."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from distdl_rma.errors import DistdlError, PeerFailedError
from distdl_rma.segments.lifecycle.short_tracebacks import place_of, short_traceback
from distdl_rma.segments.waiting.peer_watch import FailureNotices, cause_of

# How long a rank that fails stays for its peers to notice, and then to say so themselves.
_NOTICE_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.2
# So long it looks whether one before it fails alike, which then says all of it; who says less stays longer.
_ALIKE_SECONDS = 0.4
_FULL = "DISTDL_RMA_FULL_TRACEBACKS"


class Failing(Protocol):
    """What can fail: the segment manager of a machine."""

    closed: bool
    notices: FailureNotices

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on."""


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# With the process that they were made in: a forked one is none of their ranks.
_managers: weakref.WeakKeyDictionary[Failing, int] = weakref.WeakKeyDictionary()
_previous_hooks: list[_Hook] = []
_telling: list[BaseException] = []
_said: set[str] = set()


def tell_peers_of_uncaught_errors(manager: Failing) -> None:
    """Have an exception that nobody catches reported to the ranks of a machine, from now on."""
    if sys.excepthook is not _tell_peers:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _tell_peers
    _managers[manager] = os.getpid()


def say_once(line: str) -> None:
    """Write to stderr, at the end of a process: nobody is left to catch an exception, or it may not end."""
    if line not in _said:
        _said.add(line)
        _write(f"distdl_rma: {line}\n")


def _write(text: str) -> None:
    # At once: other ranks write to the same terminal.
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _tell_peers(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A hook that was installed in between may call this one, which then was called before it.
    if _telling:
        _previous_hooks[0](kind, error, trace)
        return
    _telling.append(error)
    try:
        still_open = [one for one, process in _managers.items() if not one.closed and process == os.getpid()]
        for manager in still_open:
            manager.fail(error)
        shows = _previous_hooks[-1]
        elsewhere = ""
        if still_open and shows is sys.__excepthook__ and isinstance(error, Exception) and not _wants_all():
            elsewhere = _said_elsewhere(error, still_open[0])
            _write(elsewhere or short_traceback(error))
        else:
            shows(kind, error, trace)
        # What ends this process may end the job: the peers shall learn why before that.
        deadline, told = time.monotonic() + _NOTICE_SECONDS, bool(still_open)
        while still_open and time.monotonic() < deadline:
            still_open = [manager for manager in still_open if not manager.notices.noticed()]
            time.sleep(1e-3)
        if told:
            time.sleep(_LAST_WORDS_SECONDS + (_NOTICE_SECONDS if elsewhere else 0))
    finally:
        _telling.clear()


def _wants_all() -> bool:
    return bool(os.environ.get(_FULL))


def _said_elsewhere(error: Exception, manager: Failing) -> str:
    # A line in place of the traceback, if another rank shows it: the one that failed first, or one that fails
    # alike, the first in M.
    notices, name, at = manager.notices, type(error).__name__, place_of(error)
    ended = f"distdl_rma: rank {notices.rank} ended{f' at {at}' if at else ''} by "
    if isinstance(error, PeerFailedError):
        return "" if error.rank == notices.rank else f"{ended}{name}: {error}\n"
    deadline = time.monotonic() + _ALIKE_SECONDS
    before = notices.before
    while before:
        notices.noticed()
        for rank, cause in notices.failures.items():
            if rank not in before:
                continue
            if cause_of(error).startswith(cause):
                return f"{ended}the same {name} as rank {rank}\n"
            if isinstance(error, DistdlError) and cause.startswith(name):
                return f"{ended}{name}: {error}\n"
        if time.monotonic() > deadline:
            break
        time.sleep(1e-3)
    return ""
