"""Network between virtual ranks, and their RMA windows.

Operations on another rank's memory take effect at later turns, which a seed determines, in any order that MPI
allows. So a program that lacks a flush, or changes memory before MPI has read it, fails for some seed.

Two puts of a rank; each ``*`` is an event at a turn that is drawn::

    turn     0     1     2     3     4     5     6     7
    put a    Rput        * source is read, request complete
                                           * written to the peer's memory
    put b          Rput  * read * written                      before a, as MPI permits

A real network seldom reorders and never does in a test on one machine, which is why such faults reach users.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Test = Callable[[], bool]
Words = NDArray[np.int64]
Bytes = NDArray[np.uint8]
# Longest delay, in turns for each rank.
_TURNS = 4


class Event:
    """Something that happens once, at a turn of the network or earlier if ``happen`` is called.

    A flush calls ``happen`` for all events of a peer; the network then finds them over and skips them.
    """

    def __init__(self, action: Callable[[], object], due: int) -> None:
        self._action: Callable[[], object] | None = action
        self.due = due

    @property
    def over(self) -> bool:
        """Whether it has happened."""
        return self._action is None

    def happen(self) -> None:
        """Let it happen now, if it has not happened yet."""
        action, self._action = self._action, None
        if action is not None:
            action()


class Network:
    """Events under way between virtual ranks; ``seed`` draws delays, ``nodes`` has the node of each rank.

    Time is counted in turns of ranks, not in seconds: a run with the same seed has the same events at the
    same places of the program, on any machine and under a debugger.
    """

    def __init__(self, seed: int, nodes: Sequence[int]) -> None:
        # Other random numbers than those that draw the order of the ranks.
        self._random, self.nodes = random.Random(f"network {seed}"), tuple(nodes)
        self._longest = _TURNS * len(self.nodes)
        self._now, self._begun = 0, 0
        self._due: list[tuple[int, int, Event]] = []

    def later(self, action: Callable[[], object], after: int = 0) -> Event:
        """Call ``action()`` at a turn that is drawn, perhaps at once, but not before turn ``after``."""
        # Most delays are short, a few long: the last event of several is often far behind the others.
        due = max(after, self._now + int(self._longest * self._random.random() ** 3))
        event = Event(action, due)
        if due == self._now:
            event.happen()
        else:
            self._begun += 1
            heappush(self._due, (due, self._begun, event))
        return event

    def now(self, action: Callable[[], object]) -> Event:
        """Call ``action()`` at once; return an event that has happened."""
        event = Event(action, self._now)
        event.happen()
        return event

    def shuffled(self, events: list[Event]) -> list[Event]:
        """Shuffle a list of events; return it."""
        self._random.shuffle(events)
        return events

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._due

    def advance(self) -> bool:
        """Begin the next turn; return whether an event happened."""
        self._now += 1
        happened = False
        while self._due and self._due[0][0] <= self._now:
            event = heappop(self._due)[2]
            happened |= not event.over
            event.happen()
        return happened


class VirtualRequest:
    """A request: complete once ``done()`` is true; else a test calls ``look()``, a wait ``wait(done)``.

    ``done()`` may have effects, such as receiving a message: it is never called again after it was true. A
    loop that only tests would keep its turn for ever: ``look`` counts, and hands over after many tests.
    """

    def __init__(self, done: Test, look: Callable[[], object], wait: Callable[[Test], object]) -> None:
        self._done: Test | None = done
        self._look, self._wait = look, wait

    def __bool__(self) -> bool:
        return self._done is not None

    def _test(self) -> bool:
        if self._done is not None and self._done():
            self._done = None
        return self._done is None

    def Test(self) -> bool:
        if self._test():
            return True
        self._look()
        return False

    def Cancel(self) -> None:
        self._done = None

    def Wait(self) -> bool:
        self._wait(self._test)
        return True


class Ranks(Protocol):
    """Part of a communicator that a window needs."""

    size: int
    network: Network

    def shown(self, value: Any) -> list[Any]:
        """Return the values of all ranks, not copies of them; blocking, collective."""

    def request(self, done: Test) -> VirtualRequest:
        """Make a request that is complete once ``done()`` is true."""


class VirtualWindow:
    """One rank's window over memory of virtual ranks; its methods are those of ``MPI.Win``.

    A put reads its source at one turn, when its request completes, and writes the peer's memory at a later
    turn. Only accumulations of the same word are ordered, as in MPI. A flush completes all operations on a
    peer, in an order that is drawn. Atomic operations take effect at once, since a flush follows each of
    them.
    """

    model: ClassVar[int] = MPI.WIN_UNIFIED

    def __init__(self, memories: Sequence[Bytes], comm: Ranks) -> None:
        self._memories, self._comm, self._network = memories, comm, comm.network
        # By target: pending events; and pending accumulations, with their words. Those of one word happen in
        # the order in which they began, the only order that MPI promises.
        self._pending: defaultdict[int, list[Event]] = defaultdict(list)
        self._ordered: defaultdict[int, list[tuple[Event, range]]] = defaultdict(list)

    @classmethod
    def Allocate_shared(cls, nbytes: int, unit: int, *, comm: Ranks) -> Self:
        """Make a window over new memory, all zeros, whose pages are consumed when touched; collective.

        "Shared" means what it says in MPI: each rank gets the arrays of all.

        ``MemoryError`` on all ranks if one of them gets no memory.
        """
        try:
            memory = np.zeros(nbytes, np.uint8)
        except (MemoryError, ValueError):
            memory = np.empty(0, np.uint8)
        window = cls.Create(memory, unit, comm=comm)
        if any(each.nbytes < nbytes for each in window._memories):
            raise MemoryError(f"the process gets no {nbytes} bytes for each of {comm.size} ranks")
        return window

    @classmethod
    def Create(cls, memory: Bytes, unit: int, *, comm: Ranks) -> Self:  # noqa: ARG003
        return cls(comm.shown(memory), comm)

    def Shared_query(self, rank: int) -> tuple[Bytes, int]:
        return self._memories[rank], 1

    def Rput(self, data: Any, target: int, there: tuple[int, int, MPI.Datatype]) -> VirtualRequest:
        source, memory, place = flat(data), self._memories[target], _place(*there)

        def read() -> None:
            copy = source.copy()
            self._later(target, lambda: memory.__setitem__(place, copy))

        return self._request(self._later(target, read))

    def Rget(self, out: Any, target: int, there: tuple[int, int, MPI.Datatype]) -> VirtualRequest:
        into, memory, place = flat(out), self._memories[target], _place(*there)
        return self._request(self._later(target, lambda: into.__setitem__(..., memory[place])))

    def Rget_accumulate(
        self, values: Words, before: Words, target: int, there: tuple[int, int, MPI.Datatype], op: MPI.Op
    ) -> VirtualRequest:
        begin, count, _ = there
        words, span = self._words(target, begin, count), range(begin, begin + 8 * count)
        ordered = [each for each in self._ordered[target] if not each[0].over]
        before_it = (e.due for e, other in ordered if span.start < other.stop and other.start < span.stop)
        event = self._network.later(lambda: _change(words, values, before, op), max(before_it, default=0))
        self._ordered[target] = [*ordered, (event, span)]
        return self._request(event)

    def _words(self, target: int, begin: int, count: int) -> Words:
        return self._memories[target][begin : begin + 8 * count].view(np.int64)

    def _later(self, target: int, action: Callable[[], object]) -> Event:
        event = self._network.later(action)
        if not event.over:
            pending = self._pending[target]
            pending[:] = [*(each for each in pending if not each.over), event]
        return event

    def _request(self, event: Event) -> VirtualRequest:
        return self._comm.request(lambda: event.over)

    def Fetch_and_op(
        self, operand: Sequence[Any], before: Sequence[Any], target: int, at: int, op: MPI.Op
    ) -> None:
        self._accumulate(target)
        _change(self._words(target, at, 1), np.asarray(operand[0]), np.asarray(before[0]), op)

    def Compare_and_swap(
        self, new: Sequence[Any], expected: Sequence[Any], before: Sequence[Any], target: int, at: int
    ) -> None:
        self._accumulate(target)
        word = self._words(target, at, 1)
        before[0][0] = int(word[0])
        if word[0] == expected[0][0]:
            word[0] = new[0][0]

    def _accumulate(self, target: int) -> None:
        # Accumulations that have not happened yet, in their order.
        for event, _ in self._ordered.pop(target, ()):
            event.happen()

    def Flush(self, target: int) -> None:
        if self._ordered:
            self._accumulate(target)
        # Reads of sources add events that write: these happen now as well.
        while self._pending:
            for event in self._network.shuffled(self._pending.pop(target, [])):
                event.happen()
            if target not in self._pending:
                return

    def Sync(self) -> None:
        """Do nothing."""

    def Lock_all(self) -> None:
        """Do nothing."""

    def Unlock_all(self) -> None:
        for target in (*self._pending, *self._ordered):
            self.Flush(target)

    def Free(self) -> None:
        self._memories = ()


def _change(words: Words, values: Words, before: Words, op: MPI.Op) -> None:
    # Nothing else happens to the words meanwhile, since one rank runs at a time.
    before[:] = words
    if op == MPI.REPLACE:
        words[:] = values
    elif op == MPI.SUM:
        words += values


def _place(begin: int, count: int, kind: MPI.Datatype) -> slice | NDArray[np.int64]:
    # Key of the bytes in a memory: ``count`` bytes, or indices of those of a datatype.
    if kind == MPI.BYTE:
        return slice(begin, begin + count)
    *_, of_kind = kind.decode()
    runs = zip(of_kind["displacements"], of_kind["blocklengths"], strict=True)
    return np.concatenate([np.arange(begin + place, begin + place + length) for place, length in runs])


def flat(data: Any) -> Bytes:
    """View the bytes of an array, or of an array with its MPI datatype; no copy."""
    array = data[0] if isinstance(data, list) else data
    if isinstance(array, np.ndarray):
        return array.reshape(-1).view(np.uint8)
    return np.frombuffer(memoryview(array).cast("B"), np.uint8)


def reduced(arrays: Sequence[NDArray[Any]], op: MPI.Op) -> NDArray[Any]:
    """Combine arrays of the same shape by ``op``, in their order."""
    total = np.ascontiguousarray(arrays[-1]).copy()
    for array in reversed(arrays[:-1]):
        op.Reduce_local(np.ascontiguousarray(array), total)
    return total
