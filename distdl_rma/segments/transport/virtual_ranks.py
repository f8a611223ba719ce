"""Virtual ranks: threads of one process that take turns, with the part of mpi4py that a node's ranks use.

One rank runs at a time. It runs until it waits for another rank, and then hands over to the next one, in an
order that a seed determines, or to the first one that can go on. So a run can be repeated, and 64 ranks need
no cores of their own.
"""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import ArgumentError, ProtocolError
from distdl_rma.segments.transport.heap import Bytes

# Rounds in which no rank did more than wait, after which ranks sleep: they wait for a time to pass.
_IDLE_ROUNDS = 20
_IDLE_SECONDS = 2e-4
# Most turns in a row that are skipped since a rank still waits.
_SKIPPED = 8


class RunAbandoned(BaseException):
    """Ends the thread of a rank that would never run again."""


class _Here(threading.local):
    """The communicator of this thread's virtual rank; None in other threads."""

    comm: VirtualComm | None = None


_here = _Here()


# Lists with state of the process that belongs to the rank which runs.
_OF_EACH_RANK: list[list[Any]] = []


def of_each_rank() -> list[Any]:
    """A new list, empty at first, whose items are those of the virtual rank that runs."""
    items: list[Any] = []
    _OF_EACH_RANK.append(items)
    return items


def world(comm: MPI.Intracomm | None = None) -> MPI.Intracomm:
    """The communicator that a call means: ``comm``, or all ranks of the run if it is None or COMM_WORLD.

    In a thread of a virtual rank, these are all virtual ranks; otherwise those of COMM_WORLD. Local.
    """
    if comm is None or comm is MPI.COMM_WORLD:
        return MPI.COMM_WORLD if _here.comm is None else cast(MPI.Intracomm, _here.comm)
    return comm


def is_virtual(comm: object) -> bool:
    """Whether a communicator is one of virtual ranks."""
    return isinstance(comm, VirtualComm)


def hand_over_of(comm: object) -> Callable[[Callable[[], bool] | None], bool] | None:
    """``VirtualComm.hand_over`` of a communicator of virtual ranks; None for one of processes."""
    return comm.hand_over if isinstance(comm, VirtualComm) else None


def at_end_of_rank(end: Callable[[BaseException | None], object]) -> Callable[[], object]:
    """Call ``end(error)`` when this thread's virtual rank ends; the result undoes this, idempotent.

    ``error`` is that of a rank that failed, otherwise None.
    """
    comm = _here.comm
    if comm is None:
        raise ArgumentError("a machine of virtual ranks can be made only in the thread of one of them")
    comm.at_end.append(end)

    def undo() -> None:
        if end in comm.at_end:
            comm.at_end.remove(end)

    return undo


def virtual_rank() -> object:
    """The virtual rank of this thread, compared by identity; None in other threads."""
    return _here.comm


def wait_ended() -> None:
    """Tell the keeper of this thread's virtual rank that its wait is over: it needs its memory again."""
    comm = _here.comm
    if comm is not None and comm._together.turns.keeper is not None:
        comm._together.turns.keeper.wait_ended(comm._whole)


class Keeper(Protocol):
    """Keeps the memory of ranks that wait; each method is called in the thread of its rank."""

    def wait_begun(self, rank: int) -> None:
        """The rank hands over, and uses none of its memory until ``wait_ended``."""

    def wait_ended(self, rank: int) -> None:
        """The rank goes on. It may have handed over several times, or never."""


class Turns:
    """Which virtual rank runs; the others wait for their turn.

    Every round gives each rank that has not ended one turn, in an order drawn by ``seed``. If that is None,
    the first rank that can go on has the next turn. ``swaps`` are pairs of functions that get and set state
    of the process, such as the state of a random generator; each rank has its own copy of this state, which
    begins as that of the caller. The ``keeper`` is told of waits.
    """

    def __init__(
        self,
        size: int,
        seed: int | None,
        swaps: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]],
        keeper: Keeper | None = None,
    ) -> None:
        self._random, self._swaps, self.keeper = random.Random(seed), swaps, keeper
        self._next = self._first_ready if seed is None else self._next_of_round
        self._events = [threading.Semaphore(0) for _ in range(size)]
        self._ended: set[int] = set()
        self._round: list[int] = []
        # Turns that ended in a wait since a rank last did more than wait.
        self._idle = 0
        # For each rank that waits: the test for what it waits for, None once it was true, and how many turns
        # it may still be skipped.
        self._waits: dict[int, list[Any]] = {}
        # Ranks in calls without a deadline: the test for their end, and the call.
        self._blocked: dict[int, tuple[Callable[[], bool], str]] = {}
        self.abandoned = False
        # Held by the caller of ``run`` until the last rank has ended.
        self._over = threading.Semaphore(0)

    def run(self, ranks: Sequence[Callable[[], None]]) -> None:
        """Run these functions as the ranks, each in its own thread; blocking until all have ended."""
        begin = [get() for get, _ in self._swaps]
        threads = [
            threading.Thread(target=self._play, args=(rank, play, begin), name=f"rank {rank}", daemon=True)
            for rank, play in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            self._events[self._next()].release()
            self._over.acquire()
        except BaseException:
            # Such as KeyboardInterrupt: each rank ends at its next turn.
            self.abandoned = True
            self._over.acquire()
            raise
        finally:
            for thread in threads:
                thread.join()
            self._set(begin)

    def _play(self, rank: int, play: Callable[[], None], begin: Sequence[Any]) -> None:
        self._events[rank].acquire()
        self._set(begin)
        try:
            with suppress(RunAbandoned):
                if not self.abandoned:
                    play()
        finally:
            for items in _OF_EACH_RANK:
                items.clear()
            self._ended.add(rank)
            self._idle = 0
            if len(self._ended) == len(self._events):
                self._over.release()
            else:
                self._events[self._next()].release()

    def hand_over(self, rank: int, ready: Callable[[], bool] | None = None) -> bool:
        """Let the other ranks run first; returns at the next turn of ``rank``.

        With ``ready``, most turns in which it is not true are skipped; returns whether it was true.
        """
        self._idle += 1
        if self._idle > _IDLE_ROUNDS * (len(self._events) - len(self._ended)):
            time.sleep(_IDLE_SECONDS)
        self._waits[rank] = [ready, _SKIPPED if ready else 0]
        following = self._next()
        if following != rank:
            if self.keeper is not None:
                self.keeper.wait_begun(rank)
            mine, lists = [get() for get, _ in self._swaps], [items[:] for items in _OF_EACH_RANK]
            for items in _OF_EACH_RANK:
                items.clear()
            self._events[following].release()
            self._events[rank].acquire()
            self._set(mine)
            for items, before in zip(_OF_EACH_RANK, lists, strict=False):
                items[:] = before
        if self.abandoned:
            raise RunAbandoned
        found, _ = self._waits.pop(rank)
        if isinstance(found, Exception):
            raise found
        return found is None and ready is not None

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()`` is true, in a call without a deadline.

        ``ProtocolError`` if all ranks that have not ended wait in such calls in vain.
        """
        self._blocked[rank] = ready, what
        try:
            while not ready():
                self.hand_over(rank, ready)
                alive = len(self._events) - len(self._ended)
                if len(self._blocked) == alive and not any(each() for each, _ in self._blocked.values()):
                    waits = [f"rank {each} in {call}" for each, (_, call) in sorted(self._blocked.items())]
                    ended = f"; ranks {sorted(self._ended)} have ended" if self._ended else ""
                    raise ProtocolError(f"virtual ranks wait in vain: {', '.join(waits[:8])}{ended}")
        finally:
            del self._blocked[rank]
        wait_ended()

    def ran(self) -> None:
        """Note that the rank which runs has done more than wait."""
        self._idle = 0

    def _first_ready(self) -> int:
        alive = [rank for rank in range(len(self._events)) if rank not in self._ended]
        for rank in alive:
            if rank not in self._waits or self._can_go_on(rank):
                return rank
        # Each in turn takes steps of operations that others wait for.
        self._round = [rank for rank in self._round if rank not in self._ended] or alive[::-1]
        return self._round.pop()

    def _next_of_round(self) -> int:
        while True:
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
        # Tests what a rank waits for, if there is a test.
        wait = self._waits[rank]
        if not callable(wait[0]):
            return bool(wait[1])
        try:
            wait[0] = None if wait[0]() else wait[0]
        except Exception as error:  # noqa: BLE001
            # Its own thread raises it.
            wait[0] = error
        if wait[0] is None or isinstance(wait[0], Exception):
            self._idle = 0
            return True
        return False

    def _set(self, values: Sequence[Any]) -> None:
        for (_, put), value in zip(self._swaps, values, strict=True):
            put(value)


class NoLock:
    """In place of a lock where one rank runs at a time; its thread tests what other ranks wait for."""

    def acquire(self, blocking: bool = True) -> bool:
        """Return True."""
        return True

    def release(self) -> None:
        """Do nothing."""

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class VirtualRequest:
    """A request that is complete once ``done()`` is true."""

    def __init__(self, done: Callable[[], bool], cancel: Callable[[], object] = bool) -> None:
        self._done: Callable[[], bool] | None = done
        self._cancel = cancel

    def __bool__(self) -> bool:
        return self._done is not None

    def Test(self) -> bool:  # noqa: N802
        """Whether the operation is complete."""
        if self._done is not None and self._done():
            self._done = None
        return self._done is None

    def Cancel(self) -> None:  # noqa: N802
        """Cancel a receive that no message has matched."""
        if self._done is not None:
            self._cancel()
            self._done = None


class _Letter:
    """A message, and whether it was received."""

    def __init__(self, source: int, tag: int, data: bytes) -> None:
        self.source, self.tag, self.data, self.received = source, tag, data, False


class _FoundLetter:
    """A message that a matched probe has taken from the mailbox."""

    def __init__(self, letter: _Letter) -> None:
        self._letter = letter

    def Recv(self, target: Any) -> None:  # noqa: N802
        """Copy the message to a buffer."""
        _fill(target, self._letter)


class _Together:
    """What the ranks of a communicator share."""

    def __init__(self, turns: Turns, size: int) -> None:
        self.turns, self.size = turns, size
        self.values: defaultdict[object, dict[int, Any]] = defaultdict(dict)
        self.read: defaultdict[object, set[int]] = defaultdict(set)
        self.mail: list[deque[_Letter]] = [deque() for _ in range(size)]


class VirtualGroup:
    """An ordered list of ranks of a communicator."""

    def __init__(self, members: Iterable[int]) -> None:
        self.members = tuple(members)

    def Incl(self, ranks: Iterable[int]) -> VirtualGroup:  # noqa: N802
        """The group of these ranks of the group."""
        return VirtualGroup(self.members[rank] for rank in ranks)

    def Free(self) -> None:  # noqa: N802
        """Do nothing."""


class VirtualComm:
    """Communicator of virtual ranks, as one of them sees it.

    Its methods behave as those of ``mpi4py.MPI.Intracomm`` with the same names. All ranks share a node.
    Collective calls match in their order on the communicator.
    """

    def __init__(self, rank: int, whole: int, together: _Together) -> None:
        # ``whole`` is the rank among all virtual ranks of the run.
        self.rank, self.size, self._whole, self._together = rank, together.size, whole, together
        self.group = VirtualGroup(range(self.size))
        self._calls: defaultdict[object, int] = defaultdict(int)
        self._attributes: dict[int, Any] = {}
        # Called when the rank ends, the last one first.
        self.at_end: list[Callable[[BaseException | None], object]] = []

    @classmethod
    def all_of(cls, turns: Turns, size: int) -> list[Self]:
        """The communicator of all virtual ranks, as each of them sees it."""
        together = _Together(turns, size)
        return [cls(rank, rank, together) for rank in range(size)]

    def hand_over(self, ready: Callable[[], bool] | None = None) -> bool:
        """Let other ranks run; with ``ready``, returns whether it was found to be true meanwhile.

        ``ProtocolError`` in the thread of another rank, whose turn would be lost.
        """
        self._check_thread()
        return self._together.turns.hand_over(self._whole, ready)

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until ``ready()`` is true; ``ProtocolError`` if all ranks wait in vain."""
        self._check_thread()
        self._together.turns.wait(self._whole, ready, what)

    def _check_thread(self) -> None:
        here = _here.comm
        if here is None or here._whole != self._whole:
            other = "another thread" if here is None else f"rank {here._whole}"
            raise ProtocolError(
                f"virtual ranks: {other} uses what rank {self._whole} has made, such as its model or machine;"
                " make it in the function, on each rank"
            )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which this rank is that of the current thread."""
        _here.comm = self
        try:
            yield
        finally:
            _here.comm = None

    def end(self, error: BaseException | None) -> None:
        """Call the functions of ``at_end_of_rank``."""
        while self.at_end:
            self.at_end.pop()(error)

    def _gathered(self, value: Any, kind: object = "all", count: int = 0) -> list[Any]:
        # Values of all ranks, or of ``count`` of them, in one call of this kind; blocking.
        count = count or self.size
        key = kind, self._calls[kind]
        self._calls[kind] += 1
        values, read = self._together.values[key], self._together.read[key]
        values[self.rank] = value
        self._together.turns.ran()
        self._check_thread()
        self._together.turns.wait(self._whole, lambda: len(values) == count, "a collective call")
        read.add(self.rank)
        if len(read) == count:
            del self._together.values[key], self._together.read[key]
        return [values[rank] for rank in sorted(values)]

    def _copies(self, value: Any) -> list[Any]:
        # As mpi4py does, through pickle: ranks do not share objects by accident.
        return [pickle.loads(each) for each in self._gathered(pickle.dumps(value))]

    def allgather(self, value: Any) -> list[Any]:
        """Copies of the values of all ranks."""
        return self._copies(value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Copies of the values of all ranks on ``root``, None elsewhere."""
        values = self._copies(value)
        return values if self.rank == root else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Copy of the value of ``root``."""
        return self._copies(value if self.rank == root else None)[root]

    def allreduce(self, value: Any, op: MPI.Op = MPI.SUM) -> Any:
        """Values of all ranks, combined by ``op``."""
        return reduce(op, self._copies(value))

    def Barrier(self) -> None:  # noqa: N802
        """Wait until all ranks have made the call."""
        self._gathered(None)

    barrier = Barrier

    def Get_rank(self) -> int:  # noqa: N802
        """This rank."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        """Number of ranks."""
        return self.size

    def Ibarrier(self) -> VirtualRequest:  # noqa: N802
        """Request that is complete once all ranks have made the call."""
        key = "barrier", self._calls["barrier"]
        self._calls["barrier"] += 1
        values = self._together.values[key]
        values[self.rank] = None
        self._together.turns.ran()
        return VirtualRequest(lambda: len(values) == self.size)

    def Split(self, color: int = 0, key: int = 0) -> VirtualComm:  # noqa: N802
        """Communicator of the ranks with the same color, ordered by key."""
        rows = self._gathered((color, key, self.rank))
        members = [rank for theirs, _, rank in sorted(rows) if theirs == color]
        return self._of(members, ("split", self._calls["all"]))

    def Split_type(self, kind: int) -> VirtualComm:  # noqa: N802
        """Communicator of all ranks, which share a node."""
        return self.Split()

    def Dup(self) -> VirtualComm:  # noqa: N802
        """Another communicator of the same ranks."""
        return self.Split()

    def Create_group(self, group: VirtualGroup, tag: int) -> VirtualComm:  # noqa: N802
        """Communicator of some ranks; collective over these."""
        kind = "group", group.members
        self._gathered(None, kind, len(group.members))
        return self._of(group.members, (kind, self._calls[kind]))

    def _of(self, members: Sequence[int], key: object) -> VirtualComm:
        # The first member that comes makes what they share.
        made = self._together.values["made", key, tuple(members)]
        if not made:
            made[0] = _Together(self._together.turns, len(members))
        together = made[0]
        made[1] = made.get(1, 0) + 1
        if made[1] == len(members):
            del self._together.values["made", key, tuple(members)]
        return VirtualComm(members.index(self.rank), self._whole, cast(_Together, together))

    def Isend(self, data: Any, dest: int, tag: int = 0) -> VirtualRequest:  # noqa: N802
        """Send a copy of the data."""
        self._post(data, dest, tag)
        return VirtualRequest(lambda: True)

    def Issend(self, data: Any, dest: int, tag: int = 0) -> VirtualRequest:  # noqa: N802
        """Send a copy of the data; complete once it was received."""
        letter = self._post(data, dest, tag)
        return VirtualRequest(lambda: letter.received)

    def _post(self, data: Any, dest: int, tag: int) -> _Letter:
        letter = _Letter(self.rank, tag, bytes(_buffer(data)))
        self._together.mail[dest].append(letter)
        self._together.turns.ran()
        return letter

    def Irecv(self, target: Any, source: int, tag: int = 0) -> VirtualRequest:  # noqa: N802
        """Receive the first message from ``source`` with this tag."""
        mail = self._together.mail[self.rank]

        def done() -> bool:
            for letter in mail:
                if (letter.source, letter.tag) == (source, tag):
                    mail.remove(letter)
                    _fill(target, letter)
                    return True
            return False

        return VirtualRequest(done)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of an object."""
        self._post(pickle.dumps(value), dest, tag)

    def recv(self, *, source: int, tag: int = 0) -> Any:
        """Receive a copy of an object from ``source``; blocking."""
        mail = self._together.mail[self.rank]

        def found() -> list[_Letter]:
            return [letter for letter in mail if (letter.source, letter.tag) == (source, tag)][:1]

        self._check_thread()
        self._together.turns.wait(self._whole, lambda: bool(found()), f"a receive from rank {source}")
        (letter,) = found()
        mail.remove(letter)
        letter.received = True
        return pickle.loads(letter.data)

    def Improbe(self, *, status: MPI.Status | None = None) -> _FoundLetter | None:  # noqa: N802
        """The first message, if there is one."""
        mail = self._together.mail[self.rank]
        if not mail:
            return None
        letter = mail.popleft()
        if status is not None:
            status.Set_elements(MPI.BYTE, len(letter.data))
        return _FoundLetter(letter)

    def Get_attr(self, key: int) -> Any:  # noqa: N802
        """Value that is stored under a key; None if there is none."""
        return self._attributes.get(key)

    def Set_attr(self, key: int, value: Any) -> None:  # noqa: N802
        """Store a value under a key."""
        self._attributes[key] = value

    def Delete_attr(self, key: int) -> None:  # noqa: N802
        """Delete the value of a key."""
        self._attributes.pop(key, None)

    def Free(self) -> None:  # noqa: N802
        """Do nothing: the communicator has no memory but what refers to it."""


class VirtualWindow:
    """Window over memory of virtual ranks; every operation completes at once, and no rank has to help."""

    model: ClassVar[int] = MPI.WIN_UNIFIED

    def __init__(self, memories: Sequence[Bytes]) -> None:
        self._memories = memories

    @classmethod
    def Allocate_shared(cls, nbytes: int, unit: int, *, comm: VirtualComm) -> Self:  # noqa: N802
        """Window of new memory, all zeros; its pages are consumed when they are touched. Collective."""
        return cls.Create(np.zeros(nbytes, np.uint8), unit, comm=comm)

    @classmethod
    def Create(cls, memory: Bytes, unit: int, *, comm: VirtualComm) -> Self:  # noqa: ARG003, N802
        """Window over memory of each rank. Collective."""
        return cls(comm._gathered(memory))

    def Shared_query(self, rank: int) -> tuple[Bytes, int]:  # noqa: N802
        """Memory of a rank, and the unit of displacements in bytes."""
        return self._memories[rank], 1

    def Fetch_and_op(  # noqa: N802
        self, operand: memoryview, before: memoryview, target: int, at: int, op: MPI.Op
    ) -> None:
        """Change a word of a rank."""
        word = self._memories[target][at : at + 8].view(np.int64)
        before[0] = int(word[0])
        if op == MPI.SUM:
            word[0] += operand[0]
        elif op == MPI.REPLACE:
            word[0] = operand[0]

    def Compare_and_swap(  # noqa: N802
        self, new: Sequence[Any], expected: Sequence[Any], before: Sequence[Any], target: int, at: int
    ) -> None:
        """Set a word of a rank if it has the expected value."""
        word = self._memories[target][at : at + 8].view(np.int64)
        before[0][0] = int(word[0])
        if word[0] == expected[0][0]:
            word[0] = new[0][0]

    def Flush(self, target: int) -> None:  # noqa: N802
        """Do nothing."""

    def Sync(self) -> None:  # noqa: N802
        """Do nothing."""

    def Lock_all(self) -> None:  # noqa: N802
        """Do nothing."""

    def Unlock_all(self) -> None:  # noqa: N802
        """Do nothing."""

    def Free(self) -> None:  # noqa: N802
        """Forget the memory, which is freed with its last view."""
        self._memories = ()


def windows_of(comm: MPI.Intracomm, of_processes: type[MPI.Win]) -> type[MPI.Win]:
    """The class that makes windows over memory of a communicator's ranks; ``of_processes`` if not virtual."""
    return cast(type[MPI.Win], VirtualWindow) if is_virtual(comm) else of_processes


def _buffer(data: Any) -> memoryview:
    # The bytes of an array, or of an array with its MPI datatype.
    return memoryview(data[0] if isinstance(data, list) else data).cast("B")


def _fill(target: Any, letter: _Letter) -> None:
    letter.received = True
    _buffer(target)[: len(letter.data)] = letter.data
