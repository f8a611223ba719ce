"""A line of each process that all processes of the job can read, without a message of MPI."""

from __future__ import annotations

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpi4py import MPI

# What a launcher passes on in one piece, with the name, in the encoding below.
_LONGEST = min(600, MPI.MAX_PORT_NAME - 1) * 3 // 4


class JobBoard:
    """What each process of MPI_COMM_WORLD says of itself at the moment, one line each, kept by the launcher.

    MPI's name service (``MPI_Publish_name``) carries it: whoever reads learns of a process that makes no
    call, and nothing of it meets what the processes send to each other. Not for a step: each call asks the
    launcher, in about 0.1 ms. What a process said last stays until the job ends.
    """

    def __init__(self) -> None:
        self._written = ""
        self._usable: bool | None = None
        self._job = os.environ.get("PMIX_NAMESPACE", "")

    @property
    def longest(self) -> int:
        """Bytes that a line has at most."""
        return _LONGEST

    def usable(self) -> bool:
        """Whether there is a name service that tells the processes of this job from those of others."""
        if self._usable is None:
            # Spawned processes count their ranks from 0 as well, and may have the same launcher.
            alone = bool(self._job) or MPI.Comm.Get_parent() == MPI.COMM_NULL
            self._usable = alone and self._tried()
        return self._usable

    def write(self, line: str) -> None:
        """Say another line, or nothing if it is empty."""
        me = self._name(MPI.COMM_WORLD.rank)
        encoded = urlsafe_b64encode(line.encode(errors="backslashreplace")[:_LONGEST]).decode().rstrip("=")
        with _errors_returned():
            if self._written:
                MPI.Unpublish_name(me, self._written)
                self._written = ""
            if line:
                MPI.Publish_name(me, encoded)
                self._written = encoded

    def read(self, rank: int) -> str:
        """Line of a rank of MPI_COMM_WORLD; empty if it says nothing, or is about to say something else."""
        with _errors_returned(), suppress(MPI.Exception):
            encoded = MPI.Lookup_name(self._name(rank))
            return urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode(errors="replace")
        return ""

    def _tried(self) -> bool:
        try:
            self.write("-")
            heard = self.read(MPI.COMM_WORLD.rank)
            self.write("")
        except (MPI.Exception, NotImplementedError):
            return False
        return heard == "-"

    def _name(self, rank: int) -> str:
        return f"distdl_rma-{self._job}-{rank}"


@contextmanager
def _errors_returned() -> Iterator[None]:
    # A name that nobody published is an error to MPI, which may have been told to end the job at one.
    before = [(comm, comm.Get_errhandler()) for comm in (MPI.COMM_SELF, MPI.COMM_WORLD)]
    try:
        for comm, _ in before:
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        yield
    finally:
        for comm, handler in before:
            comm.Set_errhandler(handler)
            handler.Free()
