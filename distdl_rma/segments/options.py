"""Options of segments: communicator, size, timeout, transport, progress; some by environment variables.

An argument comes before an environment variable, and this before the default. Checks are local and raise the
same on all ranks that have the same options; ``NodeMemory.agree_on_size`` compares those that have to agree,
so that a wrong option on one rank ends in an error on all, before any memory is taken.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import ArgumentError, ConfigurationError, ProtocolError

SEGMENT_SIZE_VARIABLE = "DISTDL_RMA_SEGMENT_SIZE"
TIMEOUT_VARIABLE = "DISTDL_RMA_TIMEOUT"
DEFAULT_TIMEOUT = 300.0
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TRANSPORTS = ("auto", "remote")
_PROGRESS = ("thread", "none")


@dataclass(frozen=True)
class SegmentOptions:
    """Arguments of a :class:`SegmentManager` as the user gave them; every rank calls ``check``."""

    nbytes: int | str | None = None
    timeout: float | None = None
    transport: str = "auto"
    progress: str | None = None
    node_size: int | None = None

    def check(self) -> None:
        """Raise ``ConfigurationError`` if an option is invalid; ``size`` checks the size."""
        if self.transport not in _TRANSPORTS:
            raise ConfigurationError(f"transport is one of {_TRANSPORTS}, got {self.transport!r}")
        chosen_timeout(self.timeout)
        chosen_progress(self.progress, has_remote=False)

    def size(self) -> int | None:
        """Segment size in bytes, from the argument or else the environment; None if neither gives one."""
        if self.nbytes is not None:
            return parse_size(self.nbytes)
        text = os.environ.get(SEGMENT_SIZE_VARIABLE)
        return None if text is None else parse_size(text, SEGMENT_SIZE_VARIABLE)


def check_communicator(comm: object) -> None:
    """Raise unless MPI runs and ``comm`` is a communicator of one group of ranks; local.

    ``ProtocolError`` before MPI has started and after its end, else ``ArgumentError``.
    """
    if not MPI.Is_initialized():
        raise ProtocolError(
            "MPI is not initialised in this process. A rank calls mpi4py.MPI.Init_thread() first. A process"
            " that multiprocessing starts by spawn or forkserver, such as a worker of a DataLoader, is no"
            " rank, and runs the script again: put all that is no import, function or class under"
            " if __name__ == '__main__':"
        )
    if MPI.Is_finalized():
        raise ProtocolError("MPI was finalised: no rank can be reached any more")
    got = f"{type(comm).__name__} {comm!r:.60}"
    if isinstance(comm, MPI.Comm):
        got = "MPI.COMM_NULL, or a communicator that was freed"
        # MPI may refuse one that was freed by another name.
        with suppress(MPI.Exception):
            if comm != MPI.COMM_NULL and comm.Get_size():
                if isinstance(comm, MPI.Intracomm):
                    return
                got = f"{type(comm).__name__}: comm.Merge() makes one of an intercommunicator's two groups"
    raise ArgumentError(f"comm is a communicator of one group of ranks (MPI.Intracomm), got {got}")


def parse_size(text: object, what: str = "a segment size") -> int:
    """Bytes of a size like ``2GiB``, ``512 MiB`` or ``4096``; ``ConfigurationError`` if it is invalid.

    Powers of 1024 alone: ``GB`` means either in different programs, so it is refused.
    """
    known = isinstance(text, (str, int, np.integer)) and not isinstance(text, bool)
    found = re.fullmatch(r"\s*(\d{1,18})\s*([A-Za-z]*)\s*", str(text)) if known else None
    if not found or found[2] not in _UNITS or int(found[1]) < 1:
        raise ConfigurationError(
            f"{what} is a whole number of bytes or one with a unit ({', '.join(list(_UNITS)[2:])}),"
            f" got {text!r}"
        )
    return int(found[1]) * _UNITS[found[2]]


def check_timeout(seconds: float | str | None, default: float = 0.0, what: str = "a timeout") -> float:
    """Return a timeout in seconds, the default if None; ``ConfigurationError`` if it is invalid.

    Infinity is valid. NaN is not: a wait compares the time with its deadline, and would never end.
    """
    try:
        value = default if seconds is None else float(seconds)
    except (TypeError, ValueError):
        value = -1.0
    if not value >= 0:
        raise ConfigurationError(f"{what} is a number of seconds, at least 0, got {seconds!r}")
    return value


def chosen_timeout(seconds: float | None) -> float:
    """Return the timeout: the argument, else the environment's, else 300 seconds; raise if invalid."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if seconds is not None or text is None:
        return check_timeout(seconds, DEFAULT_TIMEOUT)
    return check_timeout(text, what=TIMEOUT_VARIABLE)


def mpi_runs() -> bool:
    """Whether MPI has started and has not ended."""
    return MPI.Is_initialized() and not MPI.Is_finalized()


def thread_level() -> int:
    """Thread level of MPI; if MPI does not run, that of virtual ranks, which alone work then.

    With less than ``MPI_THREAD_MULTIPLE`` there is no progress thread: only waits move data between nodes.
    """
    return MPI.Query_thread() if mpi_runs() else MPI.THREAD_MULTIPLE


def chosen_progress(asked: str | None, has_remote: bool) -> str:
    """Progress engine: as asked, by default a thread if peers are remote and MPI allows threads.

    Between nodes data moves only while both ranks call MPI; on a node nothing has to be moved on.
    """
    threads = thread_level() == MPI.THREAD_MULTIPLE
    if asked is None:
        return "thread" if has_remote and threads else "none"
    if asked not in _PROGRESS:
        raise ConfigurationError(f"progress is one of {_PROGRESS}, got {asked!r}")
    if asked == "thread" and not threads:
        raise ConfigurationError("progress='thread' needs an MPI started with MPI_THREAD_MULTIPLE")
    return asked
