"""Turns of the virtual ranks of a process: one rank runs at a time, with a state of its own.

Each rank is a thread; ``=`` is the one that runs, ``.`` one that waits for its turn, and ``|`` a turn that is
handed over where a rank would wait for others::

    rank 0   ====|...........|==|..............|=====
    rank 1   ....|====|.........|======|..............
    rank 2   .........|======|.........|=======|......

Only one rank runs at a time, so the segments of virtual ranks need no locks, and a seed repeats an order of
turns. A rank whose wait is not over is skipped. While no rank can go on, they wait for time to pass.

Each rank has a lock that it acquires to begin a turn, and that the rank before it releases: a baton that is
passed on. So there is no thread that schedules, and a turn costs one change of threads.

With a seed, each rank gets one turn in a round, in an order that the seed draws. There a rank may not be
skipped for ever, since time and the network go on by turns: after eight skipped turns it runs although its
test is false, and its wait looks at its deadline. Without a seed the first rank runs that can go on, which is
how slabs of a prediction end one after the other. If all ranks wait in calls without a deadline, and the
network is empty, nothing can happen any more: that is a deadlock, and the rank that notices raises an error
that lists all calls.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any, Protocol

from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.segments.virtual_ranks.network import Network
from distdl_rma.segments.virtual_ranks.stuck import LOOK_SECONDS, Watch

# After so many rounds in which all ranks only wait, they sleep: they wait for time to pass.
_IDLE_ROUNDS = 20
_IDLE_SECONDS = 2e-4
# Most consecutive turns of a rank that are skipped while it waits.
_SKIPPED = 8
# After so many looks in vain, such as tests of requests, a rank hands over even if it does not wait.
_LOOKS = 256


class RunAbandoned(BaseException):
    """Ends the thread of a rank that would never run again."""


# Lists of the process whose items belong to the rank that runs. Upper floors keep state of a rank in lists of
# their modules, which need no look-up of the thread; their items are exchanged here when ranks change.
_OF_EACH_RANK: list[list[Any]] = []


def of_each_rank() -> list[Any]:
    """Make a list that has other items for each virtual rank: those of the rank that runs."""
    items: list[Any] = []
    _OF_EACH_RANK.append(items)
    return items


@contextmanager
def _set_aside() -> Iterator[None]:
    # Within this context the lists of the caller are empty; behind it they are as before.
    before = [items[:] for items in _OF_EACH_RANK]
    for items in _OF_EACH_RANK:
        items.clear()
    try:
        yield
    finally:
        for items, own in zip(_OF_EACH_RANK, before, strict=False):
            items[:] = own


class Keeper(Protocol):
    """Keeps the memory of ranks that wait; each method is called in the thread of its rank."""

    def wait_begun(self, rank: int) -> None:
        """Note that the rank hands over: it uses none of its memory until ``wait_ended``."""

    def wait_ended(self, rank: int) -> None:
        """Note that the rank continues, after it has handed over several times, once or never."""


class Turns:
    """Decides which virtual rank runs; the others wait for their turn.

    The thread that has the turn is the only one that changes anything here, also what belongs to other ranks:
    it calls the tests of those that wait, to find one whose test is true. A test that raises does so for its
    own rank: the error is kept in ``_waits`` until that rank runs.

    In every round each rank that has not ended gets one turn, in an order that ``seed`` draws. If ``seed`` is
    None, the first rank that can continue gets the next turn. ``swaps`` are pairs of functions that get and
    set state of the process, such as that of a random generator; each rank has its own copy of this state,
    at first that of the caller. ``nodes`` has the node of each rank, None if all are on one. The ``keeper``
    is notified of waits.
    """

    def __init__(
        self,
        size: int,
        seed: int | None,
        swaps: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]],
        nodes: Sequence[int] | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.network = Network(seed or 0, nodes or (0,) * size)
        self._random, self._swaps, self.keeper = random.Random(seed), swaps, keeper
        self._chosen = self._first_ready if seed is None else self._next_of_round
        # A rank acquires its lock to begin a turn, which another rank releases: a semaphore takes longer.
        self._events = [threading.Lock() for _ in range(size)]
        self._ended: set[int] = set()
        self._round: list[int] = []
        # Turns that ended in a wait since a rank last did more than wait.
        self._idle = 0
        # Looks in vain in this turn; and whether the tests of waiting ranks are being called.
        self._looks, self.choosing = 0, False
        # For each rank that waits: its test, None once that was true, its error if it raised; and how many
        # more turns of the rank may be skipped.
        self._waits: dict[int, list[Any]] = {}
        # For each rank: functions to call while it waits in a call without a deadline.
        self.while_blocked: list[list[Callable[[], object]]] = [[] for _ in range(size)]
        # Ranks in such calls: the test for their end, and the call.
        self._blocked: dict[int, tuple[Callable[[], bool], str]] = {}
        # Whether all ranks end at their next turn, and whether they end without any turn.
        self.abandoned = self._called_off = False
        # The rank that has the turn, and how many turns there were.
        self._running, self._turns = 0, 0
        # Held until the last rank has ended.
        self._over = threading.Lock()
        for held in (*self._events, self._over):
            held.acquire()

    def run(self, ranks: Sequence[Callable[[], None]]) -> None:
        """Run these functions as the ranks, each in its own thread; blocking until all have ended.

        ``ConfigurationError`` if there cannot be so many threads, ``ProtocolError`` if a rank waits for a
        lock that one without a turn has.
        """
        begin = [get() for get, _ in self._swaps]
        threads = [
            threading.Thread(target=self._play, args=(rank, play, begin), name=f"rank {rank}", daemon=True)
            for rank, play in enumerate(ranks)
        ]
        with _set_aside():
            self._start(threads)
            try:
                self._events[self._next()].release()
                watch = Watch(threads, __file__)
                while not self._over.acquire(timeout=LOOK_SECONDS):
                    problem = watch.problem(self._running, self._turns, lambda: [*self._waits])
                    if problem:
                        # The others end, and release what they have: then this one ends at its next wait.
                        self._ended.add(self._running)
                        threads.pop(self._running)
                        self.abandoned = True
                        self._events[self._next()].release()
                        raise ProtocolError(problem)
            except BaseException:
                # For example KeyboardInterrupt: each rank ends at its next turn.
                self.abandoned = True
                self._over.acquire()
                raise
            finally:
                for thread in threads:
                    thread.join()
                self._set(begin)

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        # All threads start before the first one plays, so that none has done anything if one cannot start.
        try:
            for thread in threads:
                thread.start()
        except (RuntimeError, MemoryError) as error:
            self._called_off = True
            for event in self._events:
                event.release()
            raise ConfigurationError(
                f"each of {len(threads)} virtual ranks is a thread, and this process could not start one:"
                f" {error}; take fewer ranks, or raise its limits (ulimit -u, ulimit -v)"
            ) from error

    def _play(self, rank: int, play: Callable[[], None], begin: Sequence[Any]) -> None:
        self._events[rank].acquire()
        if self._called_off:
            return
        self._set(begin)
        try:
            with suppress(RunAbandoned):
                if not self.abandoned:
                    play()
        finally:
            for items in _OF_EACH_RANK:
                items.clear()
            # One that waited for a lock in vain may come back while the others end.
            if rank not in self._ended:
                self._ended.add(rank)
                self._idle = 0
                if len(self._ended) == len(self._events):
                    self._over.release()
                else:
                    self._events[self._next()].release()

    def hand_over(self, rank: int, ready: Callable[[], bool] | None = None) -> bool:
        """Let the other ranks run; return at the next turn of ``rank``.

        With ``ready``, most turns in which ``ready()`` is false are skipped; returns whether it was true.
        Does nothing while such a test is called.
        """
        if self.choosing:
            return False
        if rank in self._ended:
            raise RunAbandoned
        self._idle += 1
        if self._idle > _IDLE_ROUNDS * (len(self._events) - len(self._ended)):
            sleep(_IDLE_SECONDS)
        self._waits[rank] = [ready, _SKIPPED if ready else 0]
        following = self._next()
        if following != rank:
            if self.keeper is not None:
                self.keeper.wait_begun(rank)
            mine = [get() for get, _ in self._swaps]
            with _set_aside():
                self._events[following].release()
                self._events[rank].acquire()
            self._set(mine)
        self._looks = 0
        if self.abandoned:
            raise RunAbandoned
        found, _ = self._waits.pop(rank)
        if isinstance(found, BaseException):
            raise found
        return found is None and ready is not None

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()`` is true, in a call without a deadline.

        ``ProtocolError`` if all ranks that have not ended wait in such calls in vain.
        """
        self._blocked[rank] = ready, what
        try:
            while not ready():
                self.pause(rank, ready)
                alive = len(self._events) - len(self._ended)
                if len(self._blocked) < alive or self._idle < alive * _IDLE_ROUNDS or not self.network.idle:
                    continue
                if not any(each() for each, _ in self._blocked.values()):
                    waits = [f"rank {each} in {call}" for each, (_, call) in sorted(self._blocked.items())]
                    ended = f"; ranks {sorted(self._ended)} have ended" if self._ended else ""
                    raise ProtocolError(f"virtual ranks wait in vain: {', '.join(waits[:8])}{ended}")
        finally:
            del self._blocked[rank]
        if self.keeper is not None:
            self.keeper.wait_ended(rank)

    def pause(self, rank: int, ready: Callable[[], bool] | None = None) -> None:
        """Let the other ranks run while this one is in a call of another library."""
        for turn in tuple(self.while_blocked[rank]):
            turn()
        self.hand_over(rank, ready)

    def ran(self) -> None:
        """Record that the rank that runs has done more than wait."""
        self._idle = 0

    def look(self, rank: int) -> None:
        """Record that the rank that runs has looked in vain; after many looks it hands over."""
        self._looks += 1
        if self._looks > _LOOKS and not self.choosing:
            self.hand_over(rank)

    def _next(self) -> int:
        # Tests of waiting ranks are called meanwhile, in the thread of this one: they do not hand over.
        self.choosing = True
        try:
            self._running = self._chosen()
            self._turns += 1
            return self._running
        finally:
            self.choosing = False

    def _first_ready(self) -> int:
        if self.network.advance():
            self._idle = 0
        alive = [rank for rank in range(len(self._events)) if rank not in self._ended]
        for rank in alive:
            if rank not in self._waits or self._can_go_on(rank):
                return rank
        # No rank can continue: each in turn advances operations that others wait for.
        self._round = [rank for rank in self._round if rank not in self._ended] or alive[::-1]
        return self._round.pop()

    def _next_of_round(self) -> int:
        # The next rank of the round; one that waits only if its test is true, or its skips are used up.
        while True:
            if self.network.advance():
                self._idle = 0
            if not self._round:
                self._round = [rank for rank in range(len(self._events)) if rank not in self._ended]
                self._random.shuffle(self._round)
            rank = self._round.pop()
            if rank in self._ended:
                continue
            wait = self._waits.get(rank)
            if wait is None or self.abandoned or wait[1] == 0 or self._can_go_on(rank):
                return rank
            wait[1] -= 1

    def _can_go_on(self, rank: int) -> bool:
        # Calls the test of a rank that waits, if it has one.
        wait = self._waits[rank]
        if not callable(wait[0]):
            return bool(wait[1])
        try:
            wait[0] = None if wait[0]() else wait[0]
        except BaseException as error:  # noqa: BLE001
            # Its own thread raises it.
            wait[0] = error
        if wait[0] is None or isinstance(wait[0], BaseException):
            self._idle = 0
            return True
        return False

    def _set(self, values: Sequence[Any]) -> None:
        for (_, put), value in zip(self._swaps, values, strict=True):
            put(value)
