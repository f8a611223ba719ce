"""The machine: an ordered list of ranks, their communicator and segments, and names of its layers."""

from __future__ import annotations

import atexit
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any, Protocol, TextIO

from mpi4py import MPI

from distdl_rma.errors import ConfigurationError, DistdlError, PartitionError, PeerFailedError
from distdl_rma.geometry.distribution import Distribution
from distdl_rma.geometry.partition import Partition, integers
from distdl_rma.segments.collectives.equality_check import EqualityCheck
from distdl_rma.segments.collectives.group import Group
from distdl_rma.segments.mailbox import Mailbox
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.context import SharedByCopies, refuse_fork
from distdl_rma.segments.options import DEFAULT_TIMEOUT, chosen_timeout
from distdl_rma.segments.virtual_ranks.comm import at_end_of_rank, is_virtual, world
from distdl_rma.segments.waiting.error_texts import USABLE, append_state, cause_of, ends_with_state
from distdl_rma.segments.waiting.meeting import meet, refuse
from distdl_rma.segments.waiting.uncaught_errors import report_uncaught_errors, write_once
from distdl_rma.trace import Recording

# How long a rank waits for the others to raise too; ranks that wait in vain notice this after a second.
GRACE_SECONDS = 5.0
# Names from ``new_name``, also of copies of layers.
_NAME = re.compile(r"\b[A-Za-z_]\w*#\d+(?: \(copy \d+\))?")


class Labelled(Protocol):
    """A layer with a label for people, besides its name between ranks."""

    @property
    def label(self) -> str:
        """Name for people."""


class Labels:
    """Names of the layers of one machine, and their labels for texts.

    Ranks match messages by names, since each rank may wrap its model differently.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._owners: weakref.WeakValueDictionary[str, Labelled] = weakref.WeakValueDictionary()

    def new_name(self, kind: str) -> str:
        """Name for the next layer, equal on all ranks that build the same layers in the same order."""
        return f"{kind}#{next(self._numbers)}"

    def register(self, name: str, owner: Labelled) -> None:
        """Set the layer whose label replaces a name from ``new_name``, or a copy's name."""
        self._owners[name] = owner

    def readable(self, text: str) -> str:
        """The text with labels in place of layers' names."""
        return _NAME.sub(self._label_of, text)

    def make_readable(self, error: BaseException) -> None:
        """Replace layers' names by labels in the text of an error."""
        if error.args and isinstance(error.args[0], str):
            error.args = (self.readable(error.args[0]), *error.args[1:])

    def _label_of(self, found: re.Match[str]) -> str:
        owner = self._owners.get(found[0])
        return found[0] if owner is None else owner.label


# Variables with the number of processes that a launcher started: of MPICH, Open MPI, Slurm.
_LAUNCHERS = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"


def print0(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
    """Print on the first rank of COMM_WORLD, flushed, and nothing elsewhere; local, needs no machine.

    All ranks compute the arguments. Guard other actions of one rank, such as writing a file, by
    ``MPI.COMM_WORLD.rank == 0``.

    Examples
    --------
    >>> print0("on the first rank")
    on the first rank
    """
    if world().rank == 0:
        print(*values, sep=sep, end=end, file=file, flush=True)


def single_rank_problem() -> str:
    """Message if the job has one rank, unless its launcher started one; empty otherwise; local."""
    started = [int(text) for text in map(os.environ.get, _LAUNCHERS) if text is not None and text.isdecimal()]
    if is_virtual(world()) or MPI.COMM_WORLD.size > 1 or 1 in started:
        return ""
    if started:
        return (
            f"this process is the only rank, though a launcher started {max(started)}: launcher and mpi4py"
            " are of different MPIs; use the mpiexec of this Python's environment"
        )
    return "1 rank, nothing is split; several are started by mpiexec -n RANKS python -m mpi4py script.py"


class Machine(SharedByCopies):
    """An ordered list of ranks M that work together, this rank, and their segments.

    Creating and closing it is collective over the ranks of M; ranks of ``comm`` outside of M make no call.
    As a context manager it closes itself. Copies of objects that refer to it share it; it cannot be pickled.

    Parameters
    ----------
    comm
        A communicator; COMM_WORLD if None. The machine duplicates it for its messages.
    ranks
        M: rank ids, that is ranks of ``comm``, unique, in any order; all of ``comm`` if None.
    segment_size
        Bytes of segment on each rank, a number or text such as ``"2GiB"``. None: the value of
        ``DISTDL_RMA_SEGMENT_SIZE``, or else a default that depends on the node's free shared memory. The
        kernel provides the memory at its first use; if the node has none left by then, SIGBUS ends the job.
    timeout
        Default timeout of waits, in seconds. None: ``DISTDL_RMA_TIMEOUT``, or else 300.
    transport
        ``"auto"``: direct load and store on a node, MPI RMA to other nodes. ``"remote"``: MPI RMA always.
    progress
        ``"thread"``: a thread moves data while this rank computes. ``"none"``: data to and from other nodes
        moves only within calls of the library. None: a thread if the machine spans nodes.

    Raises
    ------
    ArgumentError, ProtocolError
        If ``comm`` is an intercommunicator, null or freed; if MPI is not initialised, or was finalised.
    PartitionError
        If an entry of M is no integer, out of range or listed twice, or this process is not in M.
    ConfigurationError, SegmentError
        If an option is invalid, or the segment does not fit into the node's shared memory; on all ranks.

    Notes
    -----
    Interface document, chapter 1: r, M and ``|M|``.

    Examples
    --------
    >>> with Machine(MPI.COMM_WORLD, segment_size="8MiB") as machine:
    ...     total = machine.group().allreduce(1)
    ...     total.active[:] = 1
    ...     total.start()
    ...     total.wait()
    array([2.], dtype=float32)
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        ranks: Iterable[int] | None = None,
        *,
        segment_size: int | str | None = None,
        timeout: float | None = None,
        transport: str = "auto",
        progress: str | None = None,
    ) -> None:
        base = world(comm)
        refuse_fork(base)
        self.ranks = _check_ranks(base, ranks)
        self.rank: int = base.rank
        self._origin: tuple[MPI.Intracomm, int] | None = None
        self._uses, self.labels = 0, Labels()
        # Objects of upper floors, by name, until the machine closes.
        self.kept: dict[str, Any] = {}
        # Of virtual ranks that run in their order, one after the other: what they send, without waiting for a
        # reader. ``layers/ops/core/order.py`` and ``layers/split/layout.py`` ask for it, and choose blocks of
        # results such that a rank needs data of earlier ranks only.
        self.mailbox: Mailbox | None = None
        # Called when ranks drop all that they keep for later calls.
        self.forgets: list[Callable[[], None]] = []
        # Whether upper floors keep more than that, such as layers, which a failed backward leaves unusable.
        self.lasting = False
        seconds = DEFAULT_TIMEOUT
        # All ranks raise for an invalid one, with errors of other options, after they have met.
        with suppress(ConfigurationError):
            seconds = chosen_timeout(timeout)
        comm = meet(base, self.ranks, seconds)
        try:
            self.segments = SegmentManager(comm, self.ranks, segment_size, timeout, transport, progress)
        finally:
            # The manager has its own duplicate.
            comm.Free()
        # Layers and collectives report to it, for ``record``.
        self.trace = self.segments.trace
        if is_virtual(base):
            self._not_at_exit = at_end_of_rank(self._end_with_rank)
        else:
            atexit.register(self._close_at_exit)
            _ended_by_mpi()[self] = None
            self._not_at_exit = partial(atexit.unregister, self._close_at_exit)
            report_uncaught_errors(self.segments)

    @classmethod
    def on(cls, comm: MPI.Intracomm | None = None) -> Machine:
        """The machine of a communicator, COMM_WORLD if None; repeated calls return the same one.

        The first call is collective, and the first one after it was closed.
        """
        comm = world(comm)
        machine = cls.known(comm)
        if machine is None:
            machine, key = cls(comm), _machine_key()
            machine._origin = (comm, key)
            comm.Set_attr(key, machine)
        return machine

    @classmethod
    def known(cls, comm: MPI.Intracomm | None = None) -> Machine | None:
        """The open machine that ``on`` would return for a communicator, or None; local."""
        machine = world(comm).Get_attr(_machine_key())
        return machine if isinstance(machine, Machine) else None

    @classmethod
    def of(cls, place: Partition | Machine) -> Machine:
        """The machine of a partition's ranks; a machine itself is returned unchanged; local.

        Raises ``PartitionError`` if the partition has no machine, ``ClosedError`` if the machine is closed.
        """
        machine = place.home if isinstance(place, Partition) else place
        if not isinstance(machine, Machine):
            raise PartitionError(
                f"{place} belongs to no machine; make it with MPIPartition or Machine.partition"
            )
        if machine.closed:
            raise machine.segments.closed_error("machine")
        return machine

    @property
    def size(self) -> int:
        """``|M|``, the number of ranks."""
        return len(self.ranks)

    def partition(self, shape: Iterable[int] | None = None) -> Partition:
        """All ranks of M in order, on a grid of the given shape (one-dimensional if None); local."""
        extents = (self.size,) if shape is None else integers(shape, "extents of a grid")
        return Partition(self.ranks, extents, self.rank, self)

    def distribute(self, distribution: Distribution) -> Partition:
        """Grid of the shards of a distributed tensor; local. ``PartitionError`` if it does not fit M."""
        return distribution.on(self.partition())

    def group(self, ranks: Iterable[int] | None = None, name: str = "group") -> Group:
        """A group of ranks of the machine with this rank, for a barrier and collectives; local.

        All of M if ``ranks`` is None. ``PartitionError`` if ranks are not unique, not in M, or lack this one.
        """
        chosen = None if ranks is None else integers(ranks, "ranks of a group")
        return Group(self.segments, chosen, name)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Context that records this rank's actions and its messages.

        Entering is collective: the ranks meet, so that second 0 is about the same on all of them. Leaving is
        local; then the recording is complete, and mpi4py can send it. ``ProtocolError`` if a recording is
        under way. ``docs/overlap.md`` shows how to look at recordings.
        """
        everyone = self.group(name="recording")
        everyone.barrier()
        try:
            recording = self.trace.begin(self.rank)
            try:
                yield recording
            finally:
                self.trace.end()
                recording.events[:] = [
                    replace(e, name=self.labels.readable(e.name)) for e in recording.events
                ]
        finally:
            everyone.close()

    def describe(self) -> dict[str, object]:
        """Facts about this machine, and how its ranks reach each other; local.

        Nodes, transport per peer, segment bytes, MPI with its thread level and memory model, progress.
        """
        return self.segments.describe()

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this rank cannot go on; their next wait raises ``PeerFailedError``.

        Local, not blocking. Leaving a ``with Machine(...)`` block by an exception calls it, and so does an
        uncaught exception. The machine cannot be used afterwards.
        """
        self.segments.fail(error)

    def settle(self, error: Exception, ranks: Sequence[int] | None = None) -> None:
        """Report an error in a call that all of ``ranks`` make, so that all raise; None: all of the machine.

        Ranks that wait in the call raise ``PeerFailedError``, and call this too. When all have called it,
        they drop what they keep for later calls, and the machine stays usable. If some do not come within
        seconds, it is lost. The end of the error's message says which.
        """
        # The innermost of nested calls has handled the error already.
        if self.closed or ends_with_state(error):
            return
        if raise_together(self.segments, error, self.ranks if ranks is None else ranks):
            for forget in self.forgets:
                forget()

    def close(self, timeout: float | None = None) -> None:
        """Free the segment and the communicators; collective, idempotent.

        If some ranks do not close in time, ``ExchangeTimeout`` names them; nothing is freed, and ``close``
        can be called again. After a failure it is local, and the memory is freed when the process ends.
        """
        if self.closed:
            return
        self.segments.close(timeout)
        self.kept.clear()
        self._not_at_exit()
        if self._origin is not None:
            comm, key = self._origin
            # Removes the references between communicator and machine.
            comm.Delete_attr(key)

    @property
    def closed(self) -> bool:
        """Whether the machine was closed."""
        return self.segments.closed

    def _close_at_exit(self) -> None:
        # Closing is collective, so every rank must get here.
        if self.closed or MPI.Is_finalized():
            return
        if self.segments.meet_at_exit(write_once):
            self.close()
        self.segments.stop()
        if not self.closed:
            self.segments.keep_until_process_ends()

    def _end_with_rank(self, error: BaseException | None) -> None:
        # As at the exit of a process; the memory is freed in any case.
        if error is not None:
            self.fail(error)
        if not self.closed and not self.segments.notices.any_failed:
            self.segments.meet_at_exit(write_once)
        self.close()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # The peers are in other calls: a collective close would hang.
            self.fail(error)

    def __repr__(self) -> str:
        return f"Machine(rank {self.rank} of {self.ranks})"


def launched(comm: MPI.Intracomm | None = None) -> tuple[int, int]:
    """Rank of this process in a communicator, COMM_WORLD if None, and the number of ranks there; local."""
    return world(comm).rank, world(comm).size


def MPIPartition(comm: MPI.Intracomm) -> Partition:  # noqa: N802
    """Partition of all ranks of a communicator, ``P_world`` of the layer documents.

    Repeated calls for a communicator return partitions of the same machine; the first call is collective. The
    machine closes when all these partitions were deactivated, or at exit, even if the communicator is freed.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))  # cuts the rows
    >>> P_world.size, P_x.shape
    (2, (1, 1, 2, 1))
    """
    machine = Machine.on(comm)
    return replace(machine.partition(), opened=_Use(machine))


class _Use(SharedByCopies):
    """One use of a machine, which closes with the last of its uses."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._over = machine, False
        machine._uses += 1

    def close(self) -> None:
        """End the use; idempotent. The last one closes the machine, collectively."""
        if self._over:
            return
        if self._machine._uses == 1:
            self._machine.close()
        self._machine._uses -= 1
        self._over = True


@cache
def _machine_key() -> int:
    # The communicator stores its machine under this key, made at the first use.
    return MPI.Comm.Create_keyval(copy_fn=None, delete_fn=_forget)


@cache
def _ended_by_mpi() -> weakref.WeakKeyDictionary[Machine, None]:
    # Machines that ``MPI.Finalize`` closes: it frees COMM_SELF first, while the ranks still reach each other.
    # In the order in which they were made, equal on all ranks.
    machines: weakref.WeakKeyDictionary[Machine, None] = weakref.WeakKeyDictionary()

    def end(*_: object) -> None:
        for machine in list(machines):
            machine._close_at_exit()
            # A lost machine's memory goes with MPI too.
            machine.segments.closed = True

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(copy_fn=None, delete_fn=end), machines)
    return machines


def _forget(_comm: MPI.Comm, _key: int, machine: Machine) -> None:
    # Called when the communicator is freed, which may be before the machine closes.
    machine._origin = None


def _check_ranks(comm: MPI.Intracomm, ranks: Iterable[int] | None) -> tuple[int, ...]:
    chosen = tuple(range(comm.size)) if ranks is None else integers(ranks, "the ranks of M")
    problem = "" if comm.rank in chosen else f"rank {comm.rank} made this call but is not in M = {chosen}"
    for rank, times in Counter(chosen).items():
        if not 0 <= rank < comm.size:
            problem = f"rank {rank} of M is out of range: the communicator has {comm.size} ranks"
        elif times > 1:
            problem = f"rank {rank} is listed more than once in M = {chosen}"
    if problem:
        # Ranks in ``chosen`` may already wait for this rank.
        refuse(comm, chosen, problem)
        raise PartitionError(problem)
    return chosen


def raise_together(manager: SegmentManager, error: Exception, ranks: Sequence[int]) -> bool:
    """Meet the other ranks that raised; True if all came, and the machine stays usable; else it is lost.

    Blocking, for seconds if not all ranks come. Ranks that wait for one that is here raise
    ``PeerFailedError`` after a second; so no rank waits for another once all are here. Operations that only
    some ranks have begun, such as handshakes, are given up: the callers drop whatever they have connected.
    The last sentence of the error says how it ended.
    """
    if not manager.notices.any_failed:
        began = error if isinstance(error, PeerFailedError) else None
        manager.watch.settle(began.cause if began else cause_of(error), began.rank if began else manager.rank)
        try:
            _meet(manager, tuple(sorted(ranks)))
            append_state(error, USABLE)
            return True
        except DistdlError:
            # Not all have come.
            pass
        finally:
            manager.watch.resume()
    manager.fail(error)
    return False


def _meet(manager: SegmentManager, ranks: tuple[int, ...]) -> None:
    others = [rank for rank in ranks if rank != manager.rank]
    given_up = manager.forget_handshakes(others)
    # Puts under way may reach memory that others will use again.
    manager.flush(others, GRACE_SECONDS)
    barrier = manager.shared_objects.pop((_meet, ranks), None)
    for key, shared in tuple(manager.shared_objects.items()):
        # Some ranks may have begun an epoch that others have not.
        if isinstance(shared, EqualityCheck) and {*shared.ranks} <= {*ranks}:
            del manager.shared_objects[key]
    if not isinstance(barrier, EqualityCheck):
        barrier = EqualityCheck(manager, ranks, "ranks that raise")
    manager.shared_objects[_meet, ranks] = barrier
    barrier.meet(GRACE_SECONDS)
    # A rank that gave up waiting there does not come here, so that no rank passes.
    barrier.meet()
    manager.handshakes.difference_update(given_up)
