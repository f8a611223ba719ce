"""What a process says of itself while it makes a machine, in one short line that any other may read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

# Characters of a list of ranks, and of what is said about it: the launcher passes on short lines only.
_LONGEST_LIST, _LONGEST_TEXT = 72, 140


class State(StrEnum):
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

    state: State
    last: Refusal
    meeting: int = 0
    number: int = 0
    first: int = -1
    seconds: float = 0.0
    members: frozenset[int] = frozenset()
    text: str = ""

    def encoded(self, longest: int) -> str:
        """Line of so many bytes at most."""
        numbers = (self.state, self.meeting, self.number, self.first, f"{self.seconds:g}", self.last.number)
        words = (_spans(_sayable(self.members)), self.text, _spans(self.last.members), self.last.text)
        line = "\n".join([*map(str, numbers), *words])
        return line.encode(errors="backslashreplace")[:longest].decode(errors="ignore")

    @classmethod
    def parsed(cls, line: str) -> Announcement | None:
        """What a line says; None if it is none."""
        with suppress(ValueError):
            state, meeting, number, first, seconds, refusals, members, text, whom, why = line.split("\n", 9)
            last = Refusal(int(refusals), frozenset(_ranks(whom)), why)
            where = int(meeting), int(number), int(first), float(seconds)
            return cls(State(state), last, *where, frozenset(_ranks(members)), text)
        return None

    def waits_for(self, rank: int) -> bool:
        """Whether a rank of MPI_COMM_WORLD has to come before this process can go on."""
        return self.state is State.HERE and (self.first == rank or rank in self.members)

    @property
    def doing(self) -> str:
        """What the process does, as a clause of a sentence."""
        if self.state is State.LEFT:
            return self.text
        if self.state is State.REFUSED:
            return f"was refused: {self.last.text}"
        return f"makes a machine of M = {self.text}"


def shortened(ranks: tuple[int, ...]) -> str:
    """List of ranks as text, cut where it is long."""
    text = str(ranks)
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST]}...: {len(ranks)} ranks"


def _sayable(members: frozenset[int]) -> frozenset[int]:
    # Whole or not at all: a rank that is not named must not be taken for none of them, nor for another.
    return members if len(_spans(members)) <= _LONGEST_LIST else frozenset()


def _ranks(spans: str) -> Iterator[int]:
    for span in filter(None, spans.split(",")):
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _spans(ranks: Iterable[int]) -> str:
    """Ranks in ascending order as text: "0-3,7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
