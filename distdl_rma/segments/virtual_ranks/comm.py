"""Virtual ranks: threads of one process that take turns, with the part of mpi4py that segments use.

One rank runs at a time, until it waits for another rank. Then it hands over to the next rank, in an order
that a seed determines, or to the first rank that can continue. So a run can be repeated, and 64 ranks need no
cores of their own. The ranks of a node load and store each other's memory; between nodes ``network.py`` moves
data.

The library above calls methods of communicators, requests and windows with the names and the meaning of
mpi4py's, on either kind. It asks which kind it has only where threads need something else than processes: to
let others run while a rank waits (``hand_over_of``), to make windows (``windows_of``), for locks (``NoLock``)
and for what happens at the end of a rank (``at_end_of_rank``).

A collective call has three steps. Each rank puts its value into a dict that the ranks share, lets others run
until the dict has all values, and reads. The last one to read removes the dict::

    rank 0   value[0] = a |...............................| reads
    rank 1                | value[1] = b |................|        reads
    rank 2                               | value[2] = c, reads |        removes
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Self, TypeVar, cast

from mpi4py import MPI
from numpy.typing import NDArray

from distdl_rma.errors import ArgumentError, ProtocolError
from distdl_rma.segments.options import check_communicator
from distdl_rma.segments.virtual_ranks.network import Event, VirtualRequest, VirtualWindow, flat, reduced
from distdl_rma.segments.virtual_ranks.turns import Turns

_F = TypeVar("_F")


class _Here(threading.local):
    """The communicator of this thread's virtual rank; None in other threads."""

    comm: VirtualComm | None = None


_here = _Here()


def world(comm: MPI.Intracomm | None = None) -> MPI.Intracomm:
    """Return ``comm``, or the communicator of all ranks if it is None or COMM_WORLD; local.

    In the thread of a virtual rank these are all virtual ranks, in other threads those of COMM_WORLD.
    ``ArgumentError`` if ``comm`` is no communicator of one group of ranks, ``ProtocolError`` where MPI has
    ended or was not started, as in a worker of a DataLoader.
    """
    if comm is None or comm is MPI.COMM_WORLD:
        comm = MPI.COMM_WORLD if _here.comm is None else cast(MPI.Intracomm, _here.comm)
    if not is_virtual(comm):
        check_communicator(comm)
    return comm


def is_virtual(comm: object) -> bool:
    """Whether a communicator is one of virtual ranks."""
    return isinstance(comm, VirtualComm)


def hand_over_of(comm: object) -> Callable[[Callable[[], bool] | None], bool] | None:
    """``VirtualComm.hand_over`` of a communicator of virtual ranks; None for one of processes."""
    return comm.hand_over if isinstance(comm, VirtualComm) else None


def is_true_within(
    seconds: float, ready: Callable[[], bool], pause: float = 1e-3, comm: object = None
) -> bool:
    """Look until ``ready()`` is true, at most for some seconds; return whether it was. Raises nothing itself.

    For waits that are no waits of an operation: while a machine is made, and while a process ends. A process
    sleeps meanwhile, for ``pause`` seconds at a time, and virtual ranks of ``comm`` take turns.
    """
    deadline, hand_over = time.monotonic() + seconds, hand_over_of(comm)
    while not ready():
        if time.monotonic() > deadline:
            return False
        if hand_over is None:
            time.sleep(pause)
        else:
            hand_over(None)
    return True


def at_end_of_rank(end: Callable[[BaseException | None], object]) -> Callable[[], object]:
    """Call ``end(error)`` when this thread's virtual rank ends, with the error of a rank that failed or None.

    Returns an idempotent function that undoes this.
    """
    comm = _here.comm
    if comm is None:
        raise ArgumentError("a machine of virtual ranks can be made only in the thread of one of them")
    return _appended(comm.at_end, end)


def while_blocked(turn: Callable[[], object]) -> Callable[[], object]:
    """Call ``turn()`` repeatedly while this thread's virtual rank waits in calls of other libraries.

    So does the progress thread of a process. Returns an idempotent function that ends this.
    """
    comm = cast(VirtualComm, _here.comm)
    return _appended(comm._together.turns.while_blocked[comm._whole], turn)


def _appended(functions: list[_F], function: _F) -> Callable[[], object]:
    # Appends to a list; returns an idempotent function that removes it again.
    functions.append(function)

    def remove() -> None:
        if function in functions:
            functions.remove(function)

    return remove


def virtual_rank() -> object:
    """Return this thread's virtual rank, to compare by identity; None in other threads."""
    return _here.comm


def wait_ended() -> None:
    """Notify the keeper that this thread's virtual rank has waited, and needs its memory again."""
    comm = _here.comm
    if comm is not None and comm._together.turns.keeper is not None:
        comm._together.turns.keeper.wait_ended(comm._whole)


class NoLock:
    """Replaces a lock where one rank runs at a time, whose thread calls the tests of other ranks.

    A real lock would be held by the thread of a rank that waits, and stop the thread that runs.
    """

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
    """A message; it has data once it has arrived, and is ``received`` once a receive has copied them.

    A sender may change its array after ``Isend`` completes, when ``data`` is set. ``Issend`` completes only
    with ``received``: the notices of a failure rely on that.
    """

    def __init__(self, source: int, tag: int) -> None:
        self.source, self.tag, self.received = source, tag, False
        self.data: bytes | None = None

    def Recv(self, target: Any) -> None:
        self.received = True
        data = cast(bytes, self.data)
        flat(target).data[: len(data)] = data


class _Mailbox(list[_Letter]):
    """Messages to a rank of a communicator, in the order in which they were sent."""

    def first(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> _Letter | None:
        """First message that has arrived, unless an earlier one of the same rank and tag has not."""
        late = set()
        for letter in self:
            sender = letter.source, letter.tag
            if source in (MPI.ANY_SOURCE, letter.source) and tag in (MPI.ANY_TAG, letter.tag):
                if letter.data is not None and sender not in late:
                    return letter
                late.add(sender)
        return None

    def take(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> _Letter | None:
        """Remove and return the message that ``first`` returns."""
        letter = self.first(source, tag)
        if letter is not None:
            self.remove(letter)
        return letter


class _Together:
    """State that the ranks of a communicator share; ``members`` are their numbers among all ranks.

    ``values`` and ``read`` are keyed by the kind and the number of a call: what each rank gave, and who has
    read it. So a rank that is ahead, in the next call, writes to another dict than one that still reads.
    """

    def __init__(self, turns: Turns, members: Sequence[int]) -> None:
        self.turns, self.members, self.size = turns, tuple(members), len(members)
        self.values: defaultdict[object, dict[int, Any]] = defaultdict(dict)
        self.read: defaultdict[object, set[int]] = defaultdict(set)
        # By number: the kind of each nonblocking collective, and the data of the ranks that have begun it.
        self.begun: dict[int, tuple[str, dict[int, Any]]] = {}
        self.mail = [_Mailbox() for _ in members]
        # Whether the ranks are on several nodes.
        self.wide = len({turns.network.nodes[member] for member in members}) > 1


class VirtualGroup:
    """An ordered list of ranks of a communicator, as ``MPI.Group``; a value, nothing to free."""

    def __init__(self, members: Iterable[int]) -> None:
        self.members = tuple(members)

    def Incl(self, ranks: Iterable[int]) -> VirtualGroup:
        return VirtualGroup(self.members[rank] for rank in ranks)

    def Free(self) -> None:
        """Do nothing."""


class VirtualComm:
    """One rank's communicator of virtual ranks.

    Its methods behave as those of ``mpi4py.MPI.Intracomm`` with the same names. Collective calls match in
    their order on the communicator. Blocking ones take effect at once, also between nodes. If the ranks are
    on several nodes, a nonblocking one reads each rank's data at a turn that is drawn: the data may not
    change before the request is complete.
    """

    def __init__(self, rank: int, together: _Together) -> None:
        self.rank, self.size, self._together = rank, together.size, together
        # The rank among all virtual ranks of the run.
        self._whole = together.members[rank]
        self.network = together.turns.network
        self.group = VirtualGroup(range(self.size))
        self._calls: defaultdict[object, int] = defaultdict(int)
        # Number of the last nonblocking collective.
        self._begun = 0
        self._attributes: dict[int, Any] = {}
        # Called when the rank ends, the last one first.
        self.at_end: list[Callable[[BaseException | None], object]] = []

    @classmethod
    def all_of(cls, turns: Turns, size: int) -> list[Self]:
        """Make the communicator of all virtual ranks, one object for each rank."""
        together = _Together(turns, range(size))
        return [cls(rank, together) for rank in range(size)]

    def hand_over(self, ready: Callable[[], bool] | None = None) -> bool:
        """Let other ranks run; with ``ready``, return whether ``ready()`` was true meanwhile.

        ``ProtocolError`` in the thread of another rank, which would lose its turn.
        """
        if not self._together.turns.choosing:
            self._check_thread()
        return self._together.turns.hand_over(self._whole, ready)

    def look(self) -> None:
        """Record that this rank has looked in vain for others; after many looks it hands over."""
        here = _here.comm
        if here is not None and here._whole == self._whole:
            self._together.turns.look(self._whole)

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until ``ready()`` is true; ``ProtocolError`` if all ranks wait in vain."""
        self._check_thread()
        self._together.turns.wait(self._whole, ready, what)

    def _check_thread(self) -> None:
        # A rank that lets others run in the turn of another one would end that turn, and never get it back.
        here = _here.comm
        if here is None or here._whole != self._whole:
            other = "another thread" if here is None else f"rank {here._whole}"
            raise ProtocolError(
                f"virtual ranks: {other} uses what rank {self._whole} has made, such as its model or machine;"
                " make it in the function, on each rank"
            )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which this rank is that of the current thread.

        COMM_WORLD then means all virtual ranks, so that programs for processes run unchanged (``world``).
        """
        _here.comm = self
        try:
            yield
        finally:
            _here.comm = None

    def shown(self, value: Any, kind: object = "all", count: int = 0) -> list[Any]:
        """Return the values of all ranks, not copies of them; blocking, collective.

        So ranks of a node get each other's memory, which ``allgather`` would copy. A call of another ``kind``
        is one of ``count`` ranks.
        """
        count = count or self.size
        key = kind, self._calls[kind]
        self._calls[kind] += 1
        values, read = self._together.values[key], self._together.read[key]
        values[self.rank] = value
        self._together.turns.ran()
        self.wait_until(lambda: len(values) == count, "a collective call")
        read.add(self.rank)
        if len(read) == count:
            del self._together.values[key], self._together.read[key]
        return [values[rank] for rank in sorted(values)]

    def _copies(self, value: Any) -> list[Any]:
        # Copied by pickle, as in mpi4py, so that ranks do not share objects by accident.
        return [pickle.loads(each) for each in self.shown(pickle.dumps(value))]

    def allgather(self, value: Any) -> list[Any]:
        return self._copies(value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        values = self._copies(value)
        return values if self.rank == root else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self._copies(value if self.rank == root else None)[root]

    def allreduce(self, value: Any, op: MPI.Op = MPI.SUM) -> Any:
        return reduce(op, self._copies(value))

    def Barrier(self) -> None:
        self.shown(None)

    barrier = Barrier

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def _later(self, action: Callable[[], object]) -> Event:
        self._together.turns.ran()
        return self.network.later(action) if self._together.wide else self.network.now(action)

    def request(self, done: Callable[[], bool]) -> VirtualRequest:
        """Request that is complete once ``done()`` is true."""
        return VirtualRequest(done, self.look, lambda over: self.wait_until(over, "a wait for a request"))

    def _begin(
        self,
        kind: str,
        give: Callable[[], Any] | None,
        needs: Iterable[int],
        targets: Sequence[NDArray[Any]] = (),
        values: Callable[[list[Any]], Sequence[NDArray[Any]]] = list,
    ) -> VirtualRequest:
        # This rank gives ``give()``. Once the ranks that it ``needs`` have given theirs, each target gets one
        # of the ``values`` that are made of these. Between nodes ``give`` is called at a later turn: data
        # that is changed too early travels as changed.
        number = self._begun = self._begun + 1
        begun, read, needed = self._together.begun, self._together.read, tuple(needs)
        first, given = begun.setdefault(number, (kind, {}))
        if kind != first:
            raise ProtocolError(
                f"virtual ranks: rank {self.rank} calls {kind} where another rank has called {first}; ranks"
                " make their collective calls in the same order"
            )
        event = self._later(lambda: given.__setitem__(self.rank, None if give is None else give()))

        def done() -> bool:
            if not event.over or any(rank not in given for rank in needed):
                return False
            found = values([given[rank] for rank in needed]) if targets else ()
            for target, value in zip(targets, found, strict=True):
                target[: value.size] = value
            read[number].add(self.rank)
            if len(read[number]) == self.size:
                del read[number], begun[number]
            return True

        return self.request(done)

    def Ibarrier(self) -> VirtualRequest:
        return self._begin("Ibarrier", None, range(self.size))

    def Ibcast(self, data: Any, root: int) -> VirtualRequest:
        array = flat(data)
        return self._begin("Ibcast", array.copy if self.rank == root else None, [root], [array])

    def Iallgather(self, data: Any, out: Any) -> VirtualRequest:
        return self.Iallgatherv(data, [flat(out), ([flat(data).size] * self.size, None)])

    def Iallgatherv(self, data: Any, out: list[Any]) -> VirtualRequest:
        into, places = flat(out), _places(out[1])
        return self._begin(
            "Iallgatherv", flat(data).copy, range(self.size), [into[place] for place in places]
        )

    def Ialltoallv(self, data: list[Any], out: list[Any]) -> VirtualRequest:
        source, into, parts = flat(data), flat(out), _places(data[1])
        return self._begin(
            "Ialltoallv",
            lambda: [source[part].copy() for part in parts],
            range(self.size),
            [into[place] for place in _places(out[1])],
            lambda found: [parts_of_rank[self.rank] for parts_of_rank in found],
        )

    def Ireduce_scatter(
        self, data: NDArray[Any], out: NDArray[Any], counts: Sequence[int], op: MPI.Op
    ) -> VirtualRequest:
        mine, everyone = _places((counts, None))[self.rank], range(self.size)
        return self._begin(
            "Ireduce_scatter", data.copy, everyone, [out], lambda all_: [reduced([x[mine] for x in all_], op)]
        )

    def Split(self, color: int = 0, key: int = 0) -> VirtualComm:
        rows = sorted(self.shown((color, key, self.rank, list[_Together]())))
        _, _, members, places = zip(*(row for row in rows if row[0] == color), strict=True)
        return self._of(members, places[0])

    def Split_type(self, kind: int) -> VirtualComm:
        return self.Split(self.network.nodes[self._whole])

    def Dup(self) -> VirtualComm:
        return self.Split()

    def Create_group(self, group: VirtualGroup, tag: int) -> VirtualComm:
        places = self.shown(list[_Together](), ("group", group.members), len(group.members))
        return self._of(group.members, places[0])

    def _of(self, members: Sequence[int], place: list[_Together]) -> VirtualComm:
        # The first member that comes here makes the state that the members share, in a place of one of them.
        if not place:
            place.append(_Together(self._together.turns, [self._together.members[each] for each in members]))
        return VirtualComm(members.index(self.rank), place[0])

    def Isend(self, data: Any, dest: int, tag: int = 0) -> VirtualRequest:
        _, read = self._post(data, dest, tag)
        return self.request(lambda: read.over)

    def Issend(self, data: Any, dest: int, tag: int = 0) -> VirtualRequest:
        letter, _ = self._post(data, dest, tag)
        return self.request(lambda: letter.received)

    def _post(self, data: Any, dest: int, tag: int) -> tuple[_Letter, Event]:
        letter, nodes, source = _Letter(self.rank, tag), self.network.nodes, flat(data)
        self._together.mail[dest].append(letter)
        self._together.turns.ran()
        near = nodes[self._whole] == nodes[self._together.members[dest]]
        travel = self.network.now if near else self.network.later
        return letter, travel(lambda: setattr(letter, "data", source.tobytes()))

    def Irecv(self, target: Any, source: int, tag: int = 0) -> VirtualRequest:
        mail = self._together.mail[self.rank]

        def done() -> bool:
            letter = mail.take(source, tag)
            if letter is not None:
                letter.Recv(target)
            return letter is not None

        return self.request(done)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        self._post(pickle.dumps(value), dest, tag)

    def recv(self, *, source: int, tag: int = 0) -> Any:
        mail = self._together.mail[self.rank]
        self.wait_until(lambda: mail.first(source, tag) is not None, f"a receive from rank {source}")
        letter = cast(_Letter, mail.take(source, tag))
        letter.received = True
        return pickle.loads(cast(bytes, letter.data))

    def Iprobe(
        self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: MPI.Status | None = None
    ) -> bool:
        letter = self._together.mail[self.rank].first(source, tag)
        if letter is None:
            self.look()
        elif status is not None:
            status.source, status.tag = letter.source, letter.tag
            status.Set_elements(MPI.BYTE, len(cast(bytes, letter.data)))
        return letter is not None

    def Improbe(self, *, status: MPI.Status | None = None) -> _Letter | None:
        found = self.Iprobe(status=status)
        return self._together.mail[self.rank].take() if found else None

    def Get_attr(self, key: int) -> Any:
        return self._attributes.get(key)

    def Set_attr(self, key: int, value: Any) -> None:
        self._attributes[key] = value

    def Delete_attr(self, key: int) -> None:
        self._attributes.pop(key, None)

    def Free(self) -> None:
        """Do nothing: the garbage collector frees the communicator."""


def windows_of(comm: MPI.Intracomm, of_processes: type[MPI.Win]) -> type[MPI.Win]:
    """Return the class of windows over memory of a communicator's ranks; ``of_processes`` if not virtual."""
    return cast(type[MPI.Win], VirtualWindow) if is_virtual(comm) else of_processes


def _places(layout: tuple[Sequence[int], Sequence[int] | None]) -> list[slice]:
    # Slices of given counts and begins, contiguous ones if there are no begins.
    counts, begins = layout
    begins = [sum(counts[:at]) for at in range(len(counts))] if begins is None else begins
    return [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
