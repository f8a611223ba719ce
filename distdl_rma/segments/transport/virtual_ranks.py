"""Virtual ranks: threads of one process that take turns, with the part of mpi4py that segments use.

One rank runs at a time. It runs until it waits for another rank, and then hands over to the next one, in an
order that a seed determines, or to the first one that can go on. So a run can be repeated, and 64 ranks need
no cores of their own. The ranks of a node load and store each other's memory; between nodes,
``virtual_network`` moves data.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Self, cast

from mpi4py import MPI
from numpy.typing import NDArray

from distdl_rma.errors import ArgumentError, ProtocolError
from distdl_rma.segments.transport.turns import Turns
from distdl_rma.segments.transport.virtual_network import (
    Event,
    NonblockingCollectives,
    VirtualRequest,
    VirtualWindow,
    flat,
    reduced,
)


class _Here(threading.local):
    """The communicator of this thread's virtual rank; None in other threads."""

    comm: VirtualComm | None = None


_here = _Here()


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


def while_blocked(turn: Callable[[], object]) -> Callable[[], object]:
    """Call ``turn()`` repeatedly while this thread's virtual rank waits outside of this library's waits.

    As the progress thread of a process does; the result ends this, idempotent.
    """
    comm = cast(VirtualComm, _here.comm)
    turns = comm.turns_while_blocked
    turns.append(turn)

    def end() -> None:
        if turn in turns:
            turns.remove(turn)

    return end


def virtual_rank() -> object:
    """The virtual rank of this thread, compared by identity; None in other threads."""
    return _here.comm


def wait_ended() -> None:
    """Tell the keeper of this thread's virtual rank that its wait is over: it needs its memory again."""
    comm = _here.comm
    if comm is not None and comm._together.turns.keeper is not None:
        comm._together.turns.keeper.wait_ended(comm._whole)


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


class _Letter:
    """A message; it has data once it has arrived."""

    def __init__(self, source: int, tag: int) -> None:
        self.source, self.tag, self.received = source, tag, False
        self.data: bytes | None = None


class _FoundLetter:
    """A message that a matched probe has taken from the mailbox."""

    def __init__(self, letter: _Letter) -> None:
        self._letter = letter

    def Recv(self, target: Any) -> None:  # noqa: N802
        """Copy the message to a buffer."""
        _fill(target, self._letter)


class _Mailbox:
    """Messages to a rank of a communicator, in the order in which they were sent."""

    def __init__(self) -> None:
        self._letters: list[_Letter] = []

    def post(self, letter: _Letter) -> None:
        """Add a message, which may arrive later."""
        self._letters.append(letter)

    def first(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> _Letter | None:
        """The first message that has arrived, behind none of the same rank and tag that has not."""
        late = set()
        for letter in self._letters:
            sender = letter.source, letter.tag
            if source in (MPI.ANY_SOURCE, letter.source) and tag in (MPI.ANY_TAG, letter.tag):
                if letter.data is not None and sender not in late:
                    return letter
                late.add(sender)
        return None

    def take(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> _Letter | None:
        """``first``, and remove it."""
        letter = self.first(source, tag)
        if letter is not None:
            self._letters.remove(letter)
        return letter


class _Together:
    """What the ranks of a communicator share; ``members`` are these among all ranks of the run."""

    def __init__(self, turns: Turns, members: Sequence[int]) -> None:
        self.turns, self.members, self.size = turns, tuple(members), len(members)
        self.values: defaultdict[object, dict[int, Any]] = defaultdict(dict)
        self.read: defaultdict[object, set[int]] = defaultdict(set)
        # By number: collectives that do not block, with what their ranks have given.
        self.begun: dict[int, tuple[str, dict[int, Any]]] = {}
        self.mail = [_Mailbox() for _ in members]
        # Whether the ranks are on several nodes.
        self.wide = len({turns.network.nodes[member] for member in members}) > 1


class VirtualGroup:
    """An ordered list of ranks of a communicator."""

    def __init__(self, members: Iterable[int]) -> None:
        self.members = tuple(members)

    def Incl(self, ranks: Iterable[int]) -> VirtualGroup:  # noqa: N802
        """The group of these ranks of the group."""
        return VirtualGroup(self.members[rank] for rank in ranks)

    def Free(self) -> None:  # noqa: N802
        """Do nothing."""


class VirtualComm(NonblockingCollectives):
    """Communicator of virtual ranks, as one of them sees it.

    Its methods behave as those of ``mpi4py.MPI.Intracomm`` with the same names. Collective calls match in
    their order on the communicator; those that block take effect at once, also between nodes.
    """

    def __init__(self, rank: int, together: _Together) -> None:
        super().__init__()
        self.rank, self.size, self._together = rank, together.size, together
        # The rank among all virtual ranks of the run.
        self._whole = together.members[rank]
        self.network = together.turns.network
        self.group = VirtualGroup(range(self.size))
        self._calls: defaultdict[object, int] = defaultdict(int)
        self._attributes: dict[int, Any] = {}
        # Called when the rank ends, the last one first.
        self.at_end: list[Callable[[BaseException | None], object]] = []

    @classmethod
    def all_of(cls, turns: Turns, size: int) -> list[Self]:
        """The communicator of all virtual ranks, as each of them sees it."""
        together = _Together(turns, range(size))
        return [cls(rank, together) for rank in range(size)]

    def hand_over(self, ready: Callable[[], bool] | None = None) -> bool:
        """Let other ranks run; with ``ready``, returns whether it was found to be true meanwhile.

        ``ProtocolError`` in the thread of another rank, whose turn would be lost.
        """
        if not self._together.turns.choosing:
            self._check_thread()
        return self._together.turns.hand_over(self._whole, ready)

    @property
    def turns_while_blocked(self) -> list[Callable[[], object]]:
        """Functions that are called while this rank waits in a call that is none of this library's."""
        return self._together.turns.while_blocked[self._whole]

    def pause(self) -> None:
        """Let other ranks run, as a rank does that sleeps."""
        self._check_thread()
        self._together.turns.pause(self._whole)

    def look(self) -> None:
        """Note that this rank has looked in vain for what others do; after many looks, it hands over."""
        here = _here.comm
        if here is not None and here._whole == self._whole:
            self._together.turns.look(self._whole)

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

    def shown(self, value: Any) -> list[Any]:
        """The values of all ranks themselves, not copies of them; blocking, collective."""
        return self._gathered(value)

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

    def Allreduce(self, data: Any, out: NDArray[Any], op: MPI.Op = MPI.SUM) -> None:  # noqa: N802
        """Arrays of all ranks, combined by ``op`` in their order; ``data`` may be IN_PLACE."""
        mine = out if data is MPI.IN_PLACE else data
        out[...] = reduced(self._gathered(mine.copy()), op)

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

    def _together_with(self, kind: str, number: int) -> dict[int, Any]:
        begun = self._together.begun
        first, given = begun.setdefault(number, (kind, {}))
        if kind != first:
            raise ProtocolError(
                f"virtual ranks: rank {self.rank} calls {kind} where another rank has called {first}; ranks"
                " make their collective calls in the same order"
            )
        return given

    def _over(self, number: int) -> None:
        over = self._together.read[number]
        over.add(self.rank)
        if len(over) == self.size:
            del self._together.read[number], self._together.begun[number]

    def _later(self, action: Callable[[], object]) -> Event:
        self._together.turns.ran()
        return self.network.later(action) if self._together.wide else self.network.now(action)

    def request(self, done: Callable[[], bool]) -> VirtualRequest:
        """Request that is complete once ``done()`` is true."""
        return VirtualRequest(done, self.look, self._wait)

    def _wait(self, done: Callable[[], bool]) -> None:
        self._check_thread()
        self._together.turns.wait(self._whole, done, "a wait for a request")

    def Split(self, color: int = 0, key: int = 0) -> VirtualComm:  # noqa: N802
        """Communicator of the ranks with the same color, ordered by key."""
        rows = self._gathered((color, key, self.rank))
        members = [rank for theirs, _, rank in sorted(rows) if theirs == color]
        return self._of(members, ("split", self._calls["all"]))

    def Split_type(self, kind: int) -> VirtualComm:  # noqa: N802
        """Communicator of the ranks of this rank's node."""
        return self.Split(self.network.nodes[self._whole])

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
            made[0] = _Together(self._together.turns, [self._together.members[each] for each in members])
        together = made[0]
        made[1] = made.get(1, 0) + 1
        if made[1] == len(members):
            del self._together.values["made", key, tuple(members)]
        return VirtualComm(members.index(self.rank), cast(_Together, together))

    def Isend(self, data: Any, dest: int, tag: int = 0) -> VirtualRequest:  # noqa: N802
        """Send; complete once the data were read."""
        _, read = self._post(data, dest, tag)
        return self.request(lambda: read.over)

    def Issend(self, data: Any, dest: int, tag: int = 0) -> VirtualRequest:  # noqa: N802
        """Send; complete once they were received."""
        letter, _ = self._post(data, dest, tag)
        return self.request(lambda: letter.received)

    def _post(self, data: Any, dest: int, tag: int) -> tuple[_Letter, Event]:
        letter, nodes, source = _Letter(self.rank, tag), self.network.nodes, flat(data)
        self._together.mail[dest].post(letter)
        self._together.turns.ran()
        near = nodes[self._whole] == nodes[self._together.members[dest]]
        travel = self.network.now if near else self.network.later
        return letter, travel(lambda: setattr(letter, "data", source.tobytes()))

    def Irecv(self, target: Any, source: int, tag: int = 0) -> VirtualRequest:  # noqa: N802
        """Receive the first message from ``source`` with this tag."""
        mail = self._together.mail[self.rank]

        def done() -> bool:
            letter = mail.take(source, tag)
            if letter is not None:
                _fill(target, letter)
            return letter is not None

        return self.request(done)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of an object."""
        self._post(pickle.dumps(value), dest, tag)

    def recv(self, *, source: int, tag: int = 0) -> Any:
        """Receive a copy of an object from ``source``; blocking."""
        mail = self._together.mail[self.rank]
        self._check_thread()
        self._together.turns.wait(
            self._whole, lambda: mail.first(source, tag) is not None, f"a receive from rank {source}"
        )
        letter = cast(_Letter, mail.take(source, tag))
        letter.received = True
        return pickle.loads(cast(bytes, letter.data))

    def Iprobe(  # noqa: N802
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        """Whether a message has arrived; writes to ``status`` from whom, its tag and length."""
        letter = self._together.mail[self.rank].first(source, tag)
        if letter is None:
            self.look()
        else:
            _note(letter, status)
        return letter is not None

    def Improbe(self, *, status: MPI.Status | None = None) -> _FoundLetter | None:  # noqa: N802
        """The first message that has arrived, if there is one."""
        letter = self._together.mail[self.rank].take()
        if letter is None:
            self.look()
            return None
        _note(letter, status)
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


def windows_of(comm: MPI.Intracomm, of_processes: type[MPI.Win]) -> type[MPI.Win]:
    """The class that makes windows over memory of a communicator's ranks; ``of_processes`` if not virtual."""
    return cast(type[MPI.Win], VirtualWindow) if is_virtual(comm) else of_processes


def _fill(target: Any, letter: _Letter) -> None:
    letter.received = True
    data = cast(bytes, letter.data)
    flat(target).data[: len(data)] = data


def _note(letter: _Letter, status: MPI.Status | None) -> None:
    if status is not None:
        status.source, status.tag = letter.source, letter.tag
        status.Set_elements(MPI.BYTE, len(cast(bytes, letter.data)))
