"""The ranks of a machine find each other, and get a communicator, without touching the one they come from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, cast

from mpi4py import MPI

from distdl_rma.errors import ExchangeTimeout, PartitionError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.lifecycle.job_board import JobBoard
from distdl_rma.segments.waiting.header import numbered
from distdl_rma.segments.waiting.open_machines import others_go_on

_CREATE_TAG = 7
_SLEEP_SECONDS = (1e-4, 5e-3)
# All ranks of a large machine together shall not ask the launcher more often than it can answer.
_SLEEP_SECONDS_PER_RANK = 1e-4
# What a rank that is bound to come may wait longer than the first rank, which decides.
_GRACE_SECONDS = 10.0
_BETWEEN_SECONDS = 0.02
# Of the ranks that may be late, so many are looked at for a message.
_LOOKED_UP = 64
# Characters of a list of ranks, and of what is said about it: the launcher passes on short lines only.
_LONGEST_LIST, _LONGEST_TEXT = 72, 140
_HINT = "do all ranks of M call Machine with the same ranks?"


class _State(StrEnum):
    HERE = "h"  # wants to make a machine, and may still give up
    CALLS = "c"  # the first rank: all are here
    COMES = "b"  # heard the call, and does not give up any more
    GOES = "g"  # the first rank: all come
    LEFT = "l"  # gave up waiting
    REFUSED = "r"  # raised an error that concerns all ranks of M


@dataclass(frozen=True)
class _Refusal:
    """An error that concerns the ``members``, ranks of MPI_COMM_WORLD; without them the last number."""

    number: int = 0
    members: str = ""
    text: str = ""

    def names(self, rank: int) -> bool:
        """Whether a rank is a member; not known, and False, if there are too many to say."""
        return any(rank in span for span in _ranges(self.members))


@dataclass(frozen=True)
class _Line:
    """What a process says while it makes a machine, and after it failed to.

    ``meeting`` tells lists M apart, ``number`` the calls of the first rank, which is one of MPI_COMM_WORLD.
    ``last`` is what this process was refused for since it made a machine: others may not have heard of it
    when it tries again.
    """

    state: _State
    meeting: int
    number: int
    first: int
    seconds: float
    members: str
    text: str
    last: _Refusal

    def encoded(self, longest: int) -> str:
        facts = (self.state, self.meeting, self.number, self.first, f"{self.seconds:g}", self.last.number)
        words = (self.members, self.text, self.last.members, self.last.text)
        line = "\n".join([*map(str, facts), *words])
        return line.encode(errors="backslashreplace")[:longest].decode(errors="ignore")

    @classmethod
    def parsed(cls, line: str) -> _Line | None:
        with suppress(ValueError):
            state, meeting, number, first, seconds, refusals, members, text, whom, why = line.split("\n", 9)
            last = _Refusal(int(refusals), whom, why)
            return cls(
                _State(state), int(meeting), int(number), int(first), float(seconds), members, text, last
            )
        return None

    def waits_for(self, rank: int) -> bool:
        """Whether a rank of MPI_COMM_WORLD has to come before this process can go on."""
        here = self.state is _State.HERE
        return here and (self.first == rank or _Refusal(members=self.members).names(rank))


class _Memory:
    """What this process keeps from one meeting for the next."""

    def __init__(self) -> None:
        self.calls = self.refusals = 0
        self.last = _Refusal()

    def refused(self, members: str, text: str, number: int = 0) -> None:
        """Count a refusal, which another process may have given a number."""
        self.refusals = max(self.refusals + 1, number)
        self.last = _Refusal(self.refusals, _clipped(members), text[:_LONGEST_TEXT])


# One process has one line, and makes one machine at a time.
_bulletin = JobBoard()
_lock = threading.RLock()
_memory = _Memory()


def meet(comm: MPI.Intracomm, ranks: tuple[int, ...], seconds: float) -> MPI.Intracomm:
    """Communicator of some ranks of another one, in this order; collective over them, blocking.

    No message travels on ``comm``. Ranks first say that they are there where the launcher keeps it for them
    (:class:`JobBoard`); the communicator, whose making cannot be interrupted, is made once all are bound to
    come. Where the launcher keeps nothing, it is made at once, without a deadline.

    Parameters
    ----------
    comm
        Gives ``ranks`` their meaning.
    ranks
        Ranks of it, this one included.
    seconds
        Deadline.

    Returns
    -------
    MPI.Intracomm
        Owned by the caller.

    Raises
    ------
    ExchangeTimeout
        If a rank does not come in time; names it, and what it does instead. The call can be repeated.
    PartitionError
        On all ranks that wait for each other, if they do not mean the same ranks, or one of them was
        refused.
    """
    group = comm.group.Incl(list(ranks))
    try:
        world = _in_world(group)
        number = 0
        if len(ranks) > 1 and world is not None and _bulletin.usable():
            with _lock:
                meeting = _Meeting(comm.rank, ranks, world, seconds)
                number = meeting.hold()
                made = _create(comm, group, ranks, world, number)
                # Only now have all heard that they go.
                _bulletin.write("")
                _memory.last = _Refusal(_memory.refusals)
                return made
        return _create(comm, group, ranks, world or (), number)
    finally:
        group.Free()


def refuse(comm: MPI.Intracomm, ranks: Iterable[int], problem: str) -> None:
    """Have those of ``ranks`` that wait for this one learn why it cannot make the machine; local."""
    if not _bulletin.usable():
        return
    group = comm.group.Incl(sorted({rank for rank in ranks if 0 <= rank < comm.size}))
    try:
        world = _in_world(group)
    finally:
        group.Free()
    with _lock:
        _memory.refused(_spans(world or ()), f"rank {comm.rank}: {problem}")
        line = _Line(_State.REFUSED, 0, 0, -1, 0.0, "", "", _memory.last)
        _bulletin.write(line.encoded(_bulletin.longest))


def _in_world(group: MPI.Group) -> tuple[int, ...] | None:
    # None if there are processes of another MPI_COMM_WORLD among them.
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
    # A collective of all its ranks meets no message of the user's.
    if len(ranks) == comm.size:
        return cast(MPI.Intracomm, comm.Split(0, ranks.index(comm.rank)))
    # Open MPI sends what Create_group needs with the user's tags, where a receive from anyone takes it.
    with suppress(NotImplementedError), _unsupported_passed():
        return MPI.Intracomm.Create_from_group(group, f"distdl_rma-{fingerprint(ranks, world):014x}-{number}")
    # An MPI before version 4, or a launcher that cannot help with it.
    return comm.Create_group(group, _CREATE_TAG)


@contextmanager
def _unsupported_passed() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_UNSUPPORTED_OPERATION:
            raise


class _Meeting:
    """How one rank finds the others: the first of them calls once all are there, and goes once all come."""

    def __init__(self, me: int, ranks: tuple[int, ...], world: tuple[int, ...], seconds: float) -> None:
        self._me, self._ranks, self._seconds = me, ranks, seconds
        self._world = dict(zip(ranks, world, strict=True))
        self._first = min(ranks, key=self._world.__getitem__)
        self._members = _spans(world)
        self._meeting = fingerprint(ranks, world)
        self._deadline = time.monotonic() + seconds

    def hold(self) -> int:
        """Return a number that all ranks have in common as soon as all of them are bound to go on."""
        self._say(_State.HERE)
        try:
            return self._lead() if self._me == self._first else self._follow()
        except (ExchangeTimeout, PartitionError):
            raise
        except BaseException:
            _bulletin.write("")
            raise

    def _lead(self) -> int:
        others = [rank for rank in self._ranks if rank != self._me]
        self._wait_for(others, lambda line: line.state is _State.HERE)
        _memory.calls += 1
        number = _memory.calls
        self._say(_State.CALLS, number, seconds=max(0.0, self._deadline - time.monotonic()))
        self._wait_for(others, lambda line: line.state is _State.COMES and line.number == number)
        self._say(_State.GOES, number)
        return number

    def _wait_for(self, late: list[int], ready: Callable[[_Line], bool]) -> None:
        for pause in self._turns():
            over = time.monotonic() > self._deadline
            still = [rank for rank in late if (line := self._ours(rank)) is None or not ready(line)]
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
            line = self._ours(self._first)
            state = None if line is None else line.state
            moved = False
            if line is not None and state is _State.CALLS and line.number != called:
                moved = True
                # From here on only the first rank may give up, which it says.
                called = line.number
                self._say(_State.COMES, called)
                deadline = time.monotonic() + line.seconds + _GRACE_SECONDS
            elif line is not None and state is _State.GOES and line.number == called:
                break
            elif called and state in (_State.HERE, _State.LEFT):
                # It called, and then not all came.
                called, deadline = 0, self._deadline
                self._say(_State.HERE)
            elif over:
                self._give_up()
            pause(moved)
        return called

    def _ours(self, rank: int) -> _Line | None:
        """What a rank says of this machine; raise if it and this rank will never make the same one."""
        line, me = self._heard(rank), self._world[self._me]
        if line is None:
            return None
        # What both have known of is no news.
        if line.last.number > _memory.refusals and line.last.names(me):
            self._members = _united(self._members, line.last.members)
            self._refuse(line.last.text, line.last.number)
        if line.last.number < _memory.refusals and _memory.last.names(self._world[rank]):
            # It has yet to hear of what this rank was refused for before.
            return None
        if line.meeting == self._meeting:
            return line
        if line.waits_for(me):
            # Each waits for the other one, and whoever waits for either of them does so in vain.
            (low, listed), (high, other) = sorted([(self._me, _short(self._ranks)), (rank, line.text)])
            self._members = _united(self._members, line.members)
            self._refuse(f"rank {low} was given M = {listed} but rank {high} M = {other}")
        return None

    def _heard(self, rank: int) -> _Line | None:
        return _Line.parsed(_bulletin.read(self._world[rank]))

    def _say(self, state: _State, number: int = 0, text: str = "", seconds: float = 0.0) -> None:
        first, members = self._world[self._first], _clipped(self._members)
        text = text or _short(self._ranks)
        line = _Line(state, self._meeting, number, first, seconds, members, text, _memory.last)
        _bulletin.write(line.encoded(_bulletin.longest))

    def _refuse(self, problem: str, number: int = 0) -> NoReturn:
        _memory.refused(self._members, problem, number)
        self._say(_State.REFUSED)
        raise PartitionError(problem)

    def _turns(self) -> Iterator[Callable[[bool], None]]:
        """Turns of a wait, each with how to end it: the longer nothing happens, the longer the pause."""
        longest = max(_SLEEP_SECONDS[1], _SLEEP_SECONDS_PER_RANK * len(self._ranks))
        seconds = _SLEEP_SECONDS[0]

        def pause(moved: bool) -> None:
            nonlocal seconds
            seconds = _SLEEP_SECONDS[0] if moved else min(1.5 * seconds, longest)
            time.sleep(seconds)

        while True:
            # What other ranks wait for, in a machine that both have already, may need this rank.
            MPI.COMM_SELF.Iprobe()
            others_go_on(None)
            yield pause

    def _give_up(self) -> NoReturn:
        self._say(_State.LEFT, text=f"gave up after {self._seconds:g} s")
        others = [rank for rank in self._ranks if rank != self._me][:_LOOKED_UP]
        heard = {rank: self._heard(rank) for rank in (self._first, *others) if rank != self._me}
        # Others give up at the same moment, and say nothing between two lines.
        time.sleep(_BETWEEN_SECONDS)
        heard = {rank: line or self._heard(rank) for rank, line in heard.items()}
        late = [rank for rank, line in heard.items() if line is None or line.meeting != self._meeting]
        # Those that gave up have been here: they waited for the others as well.
        late = late or [rank for rank, line in heard.items() if line and line.state is _State.LEFT]
        late = sorted(late or heard)
        doing = [f"rank {rank} {_doing(line)}" for rank in late[:4] if (line := heard[rank]) is not None]
        waited = f"rank {self._me} waited {self._seconds:g} s for {numbered(tuple(late))} to make the machine"
        raise ExchangeTimeout("; ".join([waited, *doing, _HINT]))


def _doing(line: _Line) -> str:
    if line.state is _State.LEFT:
        return line.text
    if line.state is _State.REFUSED:
        return f"was refused: {line.last.text}"
    return f"makes a machine of M = {line.text}"


def _short(ranks: tuple[int, ...]) -> str:
    text = str(ranks)
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST]}...: {len(ranks)} ranks"


def _clipped(members: str) -> str:
    # Whole or not at all: a rank that is not named must not be taken for none of them, nor for another.
    return members if len(members) <= _LONGEST_LIST else ""


def _united(*members: str) -> str:
    return _spans({rank for some in members for span in _ranges(some) for rank in span})


def _ranges(members: str) -> Iterator[range]:
    for span in members.split(","):
        if span:
            first, _, last = span.partition("-")
            yield range(int(first), int(last or first) + 1)


def _spans(ranks: Iterable[int]) -> str:
    """Ranks in ascending order as text: "0-3,7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
