"""What processes say while they make a machine: lines that all of the job read, without a message."""

from __future__ import annotations

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from mpi4py import MPI

from distdl_rma.segments.waiting.header import clip

# What a launcher passes on in one piece, with the name, in the encoding below.
_LONGEST = min(600, MPI.MAX_PORT_NAME - 1) * 3 // 4
# Characters of a list of ranks, and of what is said about it: the launcher passes on short lines only.
_LONGEST_LIST, _LONGEST_TEXT = 72, 140


class JobBoard:
    """What each process of MPI_COMM_WORLD says of itself at the moment, one line each, kept by the launcher.

    MPI's name service (``MPI_Publish_name``) carries it: whoever reads learns of a process that makes no
    call, and nothing of it meets what the processes send to each other. Not for a step: each call asks the
    launcher, in about 0.1 ms. What a process said last stays until the job ends.
    """

    longest = _LONGEST  # bytes of a line

    def __init__(self) -> None:
        self._written = ""
        self._usable: bool | None = None
        self._job = os.environ.get("PMIX_NAMESPACE", "")

    def usable(self) -> bool:
        """Whether there is a name service that tells the processes of this job from those of others."""
        if self._usable is None:
            # Spawned processes count their ranks from 0 as well, and may have the same launcher.
            alone = bool(self._job) or MPI.Comm.Get_parent() == MPI.COMM_NULL
            self._usable = alone and not _slurm_keeps_it() and self._tried()
        return self._usable

    def write(self, line: str) -> None:
        """Say another line, or nothing if it is empty."""
        me = self._name(MPI.COMM_WORLD.rank)
        encoded = urlsafe_b64encode(clip(line, _LONGEST)).decode().rstrip("=")
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
            nothing = self.read(MPI.COMM_WORLD.rank)
        except (MPI.Exception, NotImplementedError, UnicodeError):
            return False
        return (heard, nothing) == ("-", "")

    def _name(self, rank: int) -> str:
        return f"distdl_rma-{self._job}-{rank}"


def _slurm_keeps_it() -> bool:
    # Where srun is the launcher by PMI-2. MPICH takes its answer that a name is not there for one with a
    # line, and reads that from wherever an old pointer leads: another line, letters by chance, or a crash.
    # An mpiexec within a job of Slurm is a launcher of its own, and counts the ranks of a node.
    words = os.environ
    return "SLURM_JOB_ID" in words and "PMI_FD" in words and "MPI_LOCALNRANKS" not in words


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


class Stage(StrEnum):
    """How far a process is on the way to a machine."""

    HERE = "h"  # wants to make a machine, and may still give up
    CALLS = "c"  # the first rank: all are here
    COMES = "b"  # heard the call, and does not give up any more
    GOES = "g"  # the first rank: all come
    LEFT = "l"  # gave up waiting
    REFUSED = "r"  # raised an error that concerns all ranks of M


@dataclass(frozen=True)
class Refusal:
    """An error that concerns the ``members``, ranks of MPI_COMM_WORLD; without them the last number."""

    number: int = 0
    members: frozenset[int] = frozenset()
    text: str = ""

    @classmethod
    def made(cls, number: int, members: frozenset[int], text: str) -> Refusal:
        """Refusal as it can be said."""
        return cls(number, _sayable(members), text[:_LONGEST_TEXT])


@dataclass(frozen=True)
class Announcement:
    """``meeting`` tells lists M apart, ``number`` the calls of the ``first`` rank, one of MPI_COMM_WORLD.

    ``last`` is what this process was refused for since it made a machine: others may not have heard of it
    when it tries again.
    """

    stage: Stage
    last: Refusal
    meeting: int = 0
    number: int = 0
    first: int = -1
    seconds: float = 0.0
    members: frozenset[int] = frozenset()
    text: str = ""

    def encoded(self, longest: int) -> str:
        """Line of so many bytes at most."""
        numbers = (self.stage, self.meeting, self.number, self.first, f"{self.seconds:g}", self.last.number)
        words = (_spans(_sayable(self.members)), self.text, _spans(self.last.members), self.last.text)
        return clip("\n".join([*map(str, numbers), *words]), longest).decode()

    @classmethod
    def parsed(cls, line: str) -> Announcement | None:
        """What a line says; None if it is none."""
        with suppress(ValueError):
            stage, meeting, number, first, seconds, refusals, members, text, whom, why = line.split("\n", 9)
            last = Refusal(int(refusals), _ranks(whom), why)
            where = int(meeting), int(number), int(first), float(seconds)
            return cls(Stage(stage), last, *where, _ranks(members), text)
        return None

    def waits_for(self, rank: int) -> bool:
        """Whether a rank of MPI_COMM_WORLD has to come before this process can go on."""
        return self.stage is Stage.HERE and (self.first == rank or rank in self.members)

    @property
    def doing(self) -> str:
        """What the process does, as a clause of a sentence."""
        if self.stage is Stage.LEFT:
            return self.text
        if self.stage is Stage.REFUSED:
            return f"was refused: {self.last.text}"
        return f"makes a machine of M = {self.text}"


def shortened(ranks: tuple[int, ...]) -> str:
    """List of ranks as text, cut where it is long."""
    text = str(ranks)
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST]}...: {len(ranks)} ranks"


def _sayable(members: frozenset[int]) -> frozenset[int]:
    # Whole or not at all: a rank that is not named must not be taken for none of them, nor for another.
    return members if len(_spans(members)) <= _LONGEST_LIST else frozenset()


def _ranks(spans: str) -> frozenset[int]:
    ends = [span.partition("-") for span in spans.split(",") if span]
    return frozenset(k for first, _, last in ends for k in range(int(first), int(last or first) + 1))


def _spans(ranks: frozenset[int]) -> str:
    # Ranks in ascending order as text: "0-3,7".
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
