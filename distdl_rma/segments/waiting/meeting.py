"""The ranks of a machine announce themselves at the launcher, and then create a communicator.

MPI creates a communicator by a collective call that cannot be interrupted: if one rank does not come, the
others hang for ever, without a word. So ranks meet first, on a board of lines that the launcher keeps, where
a rank can look for a while and give up. Rank 0 is the first rank::

    rank 0      HERE ........... CALLS ............ GOES      MPI call
    rank 1          HERE .............. COMES ..........      MPI call
    rank 2               HERE ............. COMES ......      MPI call
                        all are here     all are bound to come

Until COMES a rank may give up, and says LEFT. From COMES on it follows the first rank, which waits for all,
so no rank enters MPI unless all do. Two rounds are needed: after one, a rank that has read that all are here
could go, while another one gives up in the same moment. The first rank numbers its calls, so that a line from
before a timeout is not taken for one of the call that repeats it.

Ranks may also have different lists M. A rank that waits for this one with another list cannot be served, nor
can those that wait for it: the refusal spreads along the lines of ranks that wait for each other.
"""

from __future__ import annotations

import os
import threading
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, cast

from mpi4py import MPI

from distdl_rma.errors import ExchangeTimeout, PartitionError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import spans
from distdl_rma.segments.virtual_ranks.comm import is_virtual, while_blocked
from distdl_rma.segments.waiting.header import clip, numbered
from distdl_rma.segments.waiting.waiter import advance_other_machines, engines_paused

# Most bytes of a line: a launcher passes on the encoded line and its name in one piece.
_LONGEST = min(600, MPI.MAX_PORT_NAME - 1) * 3 // 4
# Most characters of a list of ranks and of a text, so that they fit into a line.
_LONGEST_LIST, _LONGEST_TEXT = 72, 140


class JobBoard:
    """One line of text for each process of MPI_COMM_WORLD, kept by the launcher until the job ends.

    MPI's name service (``MPI_Publish_name``) stores the lines. So a line can be read while its process makes
    no call, and no receive of the user can match a message. Each call asks the launcher, in about 0.1 ms: too
    long for a training step.

    Each process writes its own line only. To replace it, the process removes it first, so that a reader may
    find none in between: no line says nothing about a rank.
    """

    def __init__(self) -> None:
        self._written = ""
        self._usable: bool | None = None
        self._job = os.environ.get("PMIX_NAMESPACE", "")

    def usable(self) -> bool:
        """Whether there is a name service that separates the processes of this job from those of others."""
        if self._usable is None:
            # Spawned processes count ranks from 0 too: only a job name separates their lines from those of
            # others.
            separate = bool(self._job) or MPI.Comm.Get_parent() == MPI.COMM_NULL
            self._usable = separate and not _launched_by_srun() and self._tried()
        return self._usable

    def write(self, line: str) -> None:
        """Replace the line of this process; an empty one removes it."""
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
        """Line of a rank of MPI_COMM_WORLD; empty if it has none, or is about to replace it."""
        with _errors_returned(), suppress(MPI.Exception):
            encoded = MPI.Lookup_name(self._name(rank))
            return urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode(errors="replace")
        return ""

    def _tried(self) -> bool:
        # Some launchers accept a name and never find it again, or find one that was removed.
        try:
            self.write("-")
            written = self.read(MPI.COMM_WORLD.rank)
            self.write("")
            nothing = self.read(MPI.COMM_WORLD.rank)
        except (MPI.Exception, NotImplementedError, UnicodeError):
            return False
        return (written, nothing) == ("-", "")

    def _name(self, rank: int) -> str:
        return f"distdl_rma-{self._job}-{rank}"


def _launched_by_srun() -> bool:
    # Whether srun is the launcher, by PMI-2. If a name is not published, MPICH misreads srun's answer and
    # follows a stale pointer: to another line, to garbage, or to a crash. An mpiexec within a Slurm job is
    # another launcher; it sets MPI_LOCALNRANKS.
    words = os.environ
    return "SLURM_JOB_ID" in words and "PMI_FD" in words and "MPI_LOCALNRANKS" not in words


@contextmanager
def _errors_returned() -> Iterator[None]:
    # Looking up an unpublished name is an MPI error, and the error handler may end the job.
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
    """Stage of a process while a machine is created."""

    HERE = "h"  # has called, and may still give up
    CALLS = "c"  # the first rank only: all ranks are HERE
    COMES = "b"  # has read CALLS; gives up only if the first rank does, or falls silent
    GOES = "g"  # the first rank only: all ranks are at COMES
    LEFT = "l"  # gave up waiting
    REFUSED = "r"  # raised an error that concerns all ranks of M


@dataclass(frozen=True)
class Refusal:
    """An error of the ``members``, ranks of MPI_COMM_WORLD; without members, only the last number.

    Numbers of a process only grow. It acts on each refusal of another one once: only on one with a larger
    number than its own last, and its next refusal passes that number on.
    """

    number: int = 0
    members: frozenset[int] = frozenset()
    text: str = ""

    def followed_by(self, members: frozenset[int], text: str, number: int = 0) -> Refusal:
        """Next refusal of a process, cut to fit into a line; ``number`` is the one that another gave it."""
        return Refusal(max(self.number + 1, number), _fitting(members), text[:_LONGEST_TEXT])


@dataclass(frozen=True)
class Announcement:
    """Line of a process: its stage, and the machine that it wants to create.

    ``meeting`` identifies the list M; ``number`` counts the calls of the ``first`` rank. Ranks are those of
    MPI_COMM_WORLD. ``last`` is the last refusal since this process made a machine: others may read it late.
    """

    stage: Stage
    last: Refusal
    meeting: int = 0
    number: int = 0
    first: int = -1
    seconds: float = 0.0
    members: frozenset[int] = frozenset()
    text: str = ""

    def encoded(self) -> str:
        """Encode as a line; what is too long for a line of the board ends early."""
        numbers = (self.stage, self.meeting, self.number, self.first, f"{self.seconds:g}", self.last.number)
        words = (spans(_fitting(self.members), ","), self.text, spans(self.last.members, ","), self.last.text)
        return "\n".join([*map(str, numbers), *words])

    @classmethod
    def parsed(cls, line: str) -> Announcement | None:
        """Announcement in a line; None if there is none."""
        with suppress(ValueError):
            stage, meeting, number, first, seconds, refusals, members, text, ranks, why = line.split("\n", 9)
            last = Refusal(int(refusals), _ranks(ranks), why)
            where = int(meeting), int(number), int(first), float(seconds)
            return cls(Stage(stage), last, *where, _ranks(members), text)
        return None

    def waits_for(self, rank: int) -> bool:
        """Whether this process waits for a rank of MPI_COMM_WORLD."""
        return self.stage is Stage.HERE and (self.first == rank or rank in self.members)

    @property
    def doing(self) -> str:
        """State of the process, as a clause of a sentence."""
        if self.stage is Stage.LEFT:
            return self.text
        if self.stage is Stage.REFUSED:
            return f"was refused: {self.last.text}"
        return f"makes a machine of M = {self.text}"


def shortened(ranks: tuple[int, ...]) -> str:
    """List of ranks as text, cut if it is long."""
    text = str(ranks)
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST]}...: {len(ranks)} ranks"


def _fitting(members: frozenset[int]) -> frozenset[int]:
    # All members or none: readers must not mistake a part of the list for the whole.
    return members if len(spans(members, ",")) <= _LONGEST_LIST else frozenset()


def _ranks(text: str) -> frozenset[int]:
    ends = [span.partition("-") for span in text.split(",") if span]
    return frozenset(k for first, _, last in ends for k in range(int(first), int(last or first) + 1))


_CREATE_TAG = 7
_SLEEP_SECONDS = (1e-4, 5e-3)
# Limits how often all ranks of a large machine together ask the launcher.
_SLEEP_SECONDS_PER_RANK = 1e-4
# A rank at COMES waits longer than the first rank, which decides.
_GRACE_SECONDS = 10.0
_BETWEEN_SECONDS = 0.02
# Most ranks whose lines are read for the message of a timeout.
_LOOKED_UP = 64
_HINT = "do all ranks of M call Machine with the same ranks?"


class _Past:
    """What a process remembers between meetings: how often it called as the first rank, and a refusal."""

    calls = 0
    last = Refusal()


# One process has one line, and makes one machine at a time.
_board = JobBoard()
_lock = threading.RLock()
_past = _Past()


def meet(comm: MPI.Intracomm, ranks: tuple[int, ...], seconds: float) -> MPI.Intracomm:
    """Create a communicator of some ranks of ``comm``, in this order; collective over them, blocking.

    The ranks first announce themselves on the :class:`JobBoard`, without a message on ``comm``. Creating a
    communicator cannot be interrupted, so it begins once all ranks are bound to come; without a usable name
    service it begins at once, without a deadline. The caller owns the communicator.

    ``ExchangeTimeout`` if a rank does not come in time; names the rank and what it does instead. The call can
    be repeated. ``PartitionError`` on all ranks that wait for each other if their lists M differ, or one was
    refused.
    """
    group = comm.group.Incl(list(ranks))
    try:
        if is_virtual(comm):
            end = while_blocked(lambda: advance_other_machines(None))
            try:
                return comm.Create_group(group, _CREATE_TAG)
            finally:
                end()
        world = _in_world(group)
        if len(ranks) == 1 or world is None or not _board.usable():
            return _create(comm, group, ranks, world or (), 0)
        with _lock:
            number = _Meeting(comm.rank, ranks, world, seconds).hold()
            # Open MPI 5.0 loses the first message of another member where two threads call it: one receives
            # the message for an unknown communicator and keeps it for later, after the other has looked.
            with engines_paused():
                made = _create(comm, group, ranks, world, number)
            # Only now have all ranks read GOES.
            _board.write("")
            _past.last = Refusal(_past.last.number)
            return made
    finally:
        group.Free()


def refuse(comm: MPI.Intracomm, ranks: Iterable[int], problem: str) -> None:
    """Announce why this rank cannot make the machine to those of ``ranks`` that wait for it; local."""
    if is_virtual(comm) or not _board.usable():
        return
    group = comm.group.Incl(sorted({rank for rank in ranks if 0 <= rank < comm.size}))
    try:
        world = _in_world(group)
    finally:
        group.Free()
    with _lock:
        _past.last = _past.last.followed_by(frozenset(world or ()), f"rank {comm.rank}: {problem}")
        _board.write(Announcement(Stage.REFUSED, _past.last).encoded())


def _in_world(group: MPI.Group) -> tuple[int, ...] | None:
    # None if a process belongs to another MPI_COMM_WORLD.
    everyone = MPI.COMM_WORLD.Get_group()
    try:
        places = tuple(MPI.Group.Translate_ranks(group, None, everyone))
    finally:
        everyone.Free()
    return None if MPI.UNDEFINED in places else places


def _create(
    comm: MPI.Intracomm, group: MPI.Group, ranks: tuple[int, ...], world: tuple[int, ...], number: int
) -> MPI.Intracomm:
    if len(ranks) == 1:
        return MPI.COMM_SELF.Dup()
    # A collective call of all ranks of ``comm`` cannot match messages of the user.
    if len(ranks) == comm.size:
        return cast(MPI.Intracomm, comm.Split(0, ranks.index(comm.rank)))
    # Open MPI's Create_group sends messages with tags that a user's receive from any source may match.
    try:
        return MPI.Intracomm.Create_from_group(group, f"distdl_rma-{fingerprint(ranks, world):014x}-{number}")
    except NotImplementedError:
        pass
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_UNSUPPORTED_OPERATION:
            raise
    # MPI is older than version 4, or the launcher does not support the call.
    return comm.Create_group(group, _CREATE_TAG)


class _Meeting:
    """One rank's part in a meeting: the first rank calls when all are here, and goes when all come."""

    def __init__(self, me: int, ranks: tuple[int, ...], world: tuple[int, ...], seconds: float) -> None:
        self._me, self._ranks, self._seconds = me, ranks, seconds
        self._world = dict(zip(ranks, world, strict=True))
        self._others = [rank for rank in ranks if rank != me]
        self._first = min(ranks, key=self._world.__getitem__)
        self._members, self._meeting = frozenset(world), fingerprint(ranks, world)
        self._deadline = time.monotonic() + seconds

    def hold(self) -> int:
        """Wait until all ranks are bound to come; return a number that is equal on all of them."""
        self._announce(Stage.HERE)
        try:
            return self._lead() if self._me == self._first else self._follow()
        except (ExchangeTimeout, PartitionError):
            raise
        except BaseException:
            _board.write("")
            raise

    def _lead(self) -> int:
        # The first rank: its HERE, CALLS and GOES of the picture at the head of this file.
        self._wait_for_all(lambda peer: peer.stage is Stage.HERE)
        _past.calls += 1
        number = _past.calls
        self._announce(Stage.CALLS, number, seconds=max(0.0, self._deadline - time.monotonic()))
        self._wait_for_all(lambda peer: peer.stage is Stage.COMES and peer.number == number)
        self._announce(Stage.GOES, number)
        return number

    def _wait_for_all(self, ready: Callable[[Announcement], bool]) -> None:
        # The time is read before the lines, so that a rank looks once more after its deadline.
        late = self._others
        for pause in self._turns():
            over = time.monotonic() > self._deadline
            still = [rank for rank in late if (peer := self._ours(rank)) is None or not ready(peer)]
            if not still:
                return
            if over:
                self._give_up()
            pause(len(still) < len(late))
            late = still

    def _follow(self) -> int:
        called, deadline = 0, self._deadline
        for pause in self._turns():
            over = time.monotonic() > deadline
            peer = self._ours(self._first)
            stage = peer.stage if peer else None
            moved = False
            if peer and stage is Stage.CALLS and peer.number != called:
                moved = True
                # From here on the first rank decides: it announces if it gives up.
                called = peer.number
                self._announce(Stage.COMES, called)
                deadline = time.monotonic() + peer.seconds + _GRACE_SECONDS
            elif peer and stage is Stage.GOES and peer.number == called:
                break
            elif called and stage in (Stage.HERE, Stage.LEFT):
                # The first rank called, but then not all ranks came.
                called, deadline = 0, self._deadline
                self._announce(Stage.HERE)
            elif over:
                self._give_up()
            pause(moved)
        return called

    def _ours(self, rank: int) -> Announcement | None:
        """Announcement of a rank about this machine; raise if the two ranks want different machines."""
        peer, me = self._read(rank), self._world[self._me]
        if peer is None:
            return None
        # Only refusals that this rank has not read count.
        if peer.last.number > _past.last.number and me in peer.last.members:
            self._refuse(peer.last.members, peer.last.text, peer.last.number)
        if peer.last.number < _past.last.number and self._world[rank] in _past.last.members:
            # The other rank has not read this rank's last refusal yet.
            return None
        if peer.meeting == self._meeting:
            return peer
        if peer.waits_for(me):
            # Both ranks wait for each other with different lists M, so waits for either are in vain.
            (low, listed), (high, other) = sorted([(self._me, shortened(self._ranks)), (rank, peer.text)])
            self._refuse(peer.members, f"rank {low} was given M = {listed} but rank {high} M = {other}")
        return None

    def _read(self, rank: int) -> Announcement | None:
        return Announcement.parsed(_board.read(self._world[rank]))

    def _announce(self, stage: Stage, number: int = 0, text: str = "", seconds: float = 0.0) -> None:
        first, text = self._world[self._first], text or shortened(self._ranks)
        line = Announcement(stage, _past.last, self._meeting, number, first, seconds, self._members, text)
        _board.write(line.encoded())

    def _refuse(self, also: frozenset[int], problem: str, number: int = 0) -> NoReturn:
        self._members |= also
        _past.last = _past.last.followed_by(self._members, problem, number)
        self._announce(Stage.REFUSED)
        raise PartitionError(problem)

    def _turns(self) -> Iterator[Callable[[bool], None]]:
        """Yield a function that pauses, once per turn of a wait; pauses grow while nothing changes."""
        longest = max(_SLEEP_SECONDS[1], _SLEEP_SECONDS_PER_RANK * len(self._ranks))
        seconds = _SLEEP_SECONDS[0]

        def pause(moved: bool) -> None:
            nonlocal seconds
            seconds = _SLEEP_SECONDS[0] if moved else min(1.5 * seconds, longest)
            time.sleep(seconds)

        while True:
            # Ranks that wait in another machine may need this rank's progress.
            MPI.COMM_SELF.Iprobe()
            advance_other_machines(None)
            yield pause

    def _give_up(self) -> NoReturn:
        self._announce(Stage.LEFT, text=f"gave up after {self._seconds:g} s")
        asked = [rank for rank in (self._first, *self._others[:_LOOKED_UP]) if rank != self._me]
        lines = {rank: self._read(rank) for rank in asked}
        # Ranks that give up at the same moment have no line while they replace it.
        time.sleep(_BETWEEN_SECONDS)
        lines = {rank: line or self._read(rank) for rank, line in lines.items()}
        late = [rank for rank, line in lines.items() if line is None or line.meeting != self._meeting]
        # Ranks that gave up come second: they waited for the others as well.
        late = late or [rank for rank, line in lines.items() if line and line.stage is Stage.LEFT]
        late = sorted(late or lines)
        doing = [f"rank {rank} {line.doing}" for rank in late[:4] if (line := lines[rank]) is not None]
        waited = f"rank {self._me} waited {self._seconds:g} s for {numbered(tuple(late))} to make the machine"
        raise ExchangeTimeout("; ".join([waited, *doing, _HINT]))
