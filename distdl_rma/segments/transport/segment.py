"""The memory that all ranks of a machine registered."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from typing import cast

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import ConfigurationError, DistdlError, SegmentError
from distdl_rma.geometry.rank_groups import grouped
from distdl_rma.segments.counters import Counters
from distdl_rma.segments.transport.atomics import Atomics
from distdl_rma.segments.transport.heap import ALIGNMENT, aligned
from distdl_rma.segments.transport.links import Link, RemoteLink, SharedLink, fence_for
from distdl_rma.segments.transport.reserving import SHARED_MEMORY, reserve_pages
from distdl_rma.segments.transport.rma_peer import Bytes, RmaPeer

SEGMENT_SIZE_VARIABLE = "DISTDL_RMA_SEGMENT_SIZE"
_LARGEST_DEFAULT = 4 << 30
# Less than this by default would only fail later; who wants less says so.
_SMALLEST_DEFAULT = 32 << 20
_SMALLEST = 4096
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TRANSPORTS = ("auto", "remote")
_REMEDY = (
    f"set {SEGMENT_SIZE_VARIABLE} or Machine(segment_size=...) to less, or give the node or container more"
    " shared memory (for example --shm-size)"
)


def parse_size(text: object) -> int:
    """Bytes of a size like ``2GiB``, ``512 MiB`` or ``4096``; with a unit from B to TiB, or none."""
    known = isinstance(text, (str, int, np.integer)) and not isinstance(text, bool)
    found = re.fullmatch(r"\s*(\d{1,18})\s*([A-Za-z]*)\s*", str(text)) if known else None
    if not found or found[2] not in _UNITS or int(found[1]) < 1:
        raise ConfigurationError(
            f"a segment size is a whole number of bytes or one with a unit ({', '.join(list(_UNITS)[2:])}),"
            f" got {text!r}"
        )
    return int(found[1]) * _UNITS[found[2]]


class Segment:
    """One block of memory per rank, reachable by every rank of the machine.

    The same memory has two doors: a shared window gives the ranks of a node direct load and store, a
    window over the same memory gives every rank of the machine puts and atomics. Memory is consumed only
    when touched, unless it is reserved. Collective to create and to close.

    ``ranks`` are the rank ids of the machine by position in ``comm``. Without ``nbytes`` the environment
    variable counts, or a default from the free shared memory. With ``transport="auto"`` peers of a node are
    reached directly, others by MPI; with ``"remote"`` all by MPI. ``check`` raises ``ConfigurationError`` for
    other options that are wrong on this rank: all ranks then refuse. For tests, ``node_size`` consecutive
    ranks of a node count as a node. ``reserve`` takes all of the memory from the node now.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: tuple[int, ...],
        nbytes: int | str | None,
        transport: str,
        check: Callable[[], object],
        node_size: int | None,
        counters: Counters,
        reserve: bool,
    ) -> None:
        node = _node_of(comm, node_size)
        self.node_ranks = tuple(ranks[p] for p in node.allgather(comm.rank))
        try:
            self.nbytes = _agree_on_size(comm, ranks, node, nbytes, transport, check, reserve)
            _check_room(comm, node, self.nbytes)
            self._shared = _allocate(comm, ranks, node, self.nbytes + ALIGNMENT)
        except DistdlError:
            node.Free()
            raise
        _reserved[id(self)] = self.nbytes
        # Held by whoever touches what is pending: the progress engine is another thread.
        self.lock = threading.RLock()
        buffers = [cast(memoryview, self._shared.Shared_query(at)[0]) for at in range(node.size)]
        memories: list[Bytes] = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        if reserve:
            self._reserve(comm, ranks, node, memories[node.rank])
        # MPI aligns to less than a cache line; each owner says where its first whole one begins.
        begins = node.allgather(-memories[node.rank].ctypes.data % ALIGNMENT)
        views = {
            rank: memory[begin : begin + self.nbytes]
            for rank, memory, begin in zip(self.node_ranks, memories, begins, strict=True)
        }
        self.memory: Bytes = views[ranks[comm.rank]]
        self._window = MPI.Win.Create(self.memory, 1, comm=comm)
        self._shared.Lock_all()
        self._window.Lock_all()
        self.fence = fence_for(self._shared)
        cores = set().union(*node.allgather(os.sched_getaffinity(0)))
        self.crowded = node.size > len(cores)
        self.words = self.memory.data.cast("q")
        # Ranks by node, in the order of M; every rank is told the first rank of every node.
        firsts = dict(zip(ranks, comm.allgather(self.node_ranks[0]), strict=True))
        self.nodes = grouped(ranks, firsts.__getitem__)
        # The same, where nodes are made of ranks that load and store each other's memory.
        self.direct_nodes = self.nodes if transport == "auto" else tuple((rank,) for rank in ranks)
        self._links: dict[int, Link] = {}
        self._busy: set[RemoteLink] = set()
        for position, rank in enumerate(ranks):
            if rank in views and (transport == "auto" or position == comm.rank):
                self._links[rank] = SharedLink(views[rank], self.fence)
            else:
                rma = RmaPeer(self._window, position, counters)
                self._links[rank] = RemoteLink(rma, self.lock, self._busy)
        self.has_remote = any(isinstance(link, RemoteLink) for link in self._links.values())
        self.atomics = self._choose_atomics(ranks, dict(zip(self.node_ranks, begins, strict=True)))
        # What MPI put here is only visible to loads after a Sync, on any processor.
        self.acquire: Callable[[], None] = self._window.Sync if self.has_remote else self.fence
        # Kept until the end: MPICH 5.0 gives its context to the next window and then hangs in Unlock_all.
        self._node = node

    def _reserve(
        self, comm: MPI.Intracomm, ranks: tuple[int, ...], node: MPI.Intracomm, memory: Bytes
    ) -> None:
        # Nobody keeps what it has if one rank cannot have it all.
        said = dict(zip(ranks, comm.allgather(reserve_pages(memory, node.size)), strict=True))
        lacking = [(rank, problem) for rank, problem in said.items() if problem]
        if lacking:
            del _reserved[id(self)]
            self._shared.Free()
            node.Free()
            rank, problem = lacking[0]
            raise SegmentError(f"rank {rank}: the segment could not be reserved: {problem}; {_REMEDY}")
        # What is taken is seen to be used.
        _reserved[id(self)] = 0

    def _choose_atomics(self, ranks: tuple[int, ...], begins: dict[int, int]) -> Atomics:
        # Shared memory needs no help of the target, but only serves where all ranks can use it.
        if not self.has_remote:
            positions = {rank: (at, begins[rank]) for at, rank in enumerate(self.node_ranks)}
            return Atomics(self._shared, positions, True, self.lock)
        return Atomics(self._window, {rank: (at, 0) for at, rank in enumerate(ranks)}, False, self.lock)

    def link(self, rank: int) -> Link:
        """Way to the segment of a rank id."""
        return self._links[rank]

    @property
    def unified(self) -> bool:
        """Whether MPI's puts and this processor's loads see one memory (MPI_WIN_UNIFIED)."""
        return bool(self._window.model == MPI.WIN_UNIFIED)

    def progress(self) -> bool:
        """Let all pending deliveries advance; return whether none is left. Does not block."""
        with self.lock:
            for link in tuple(self._busy):
                if link.advance():
                    self._busy.discard(link)
        if self.has_remote:
            self._window.Sync()
        return not self._busy

    def close(self) -> None:
        """Free both windows; collective. Every view of the memory dangles afterwards."""
        _reserved.pop(id(self), None)
        self.words.release()
        self.memory = np.empty(0, np.uint8)
        for window in (self._window, self._shared):
            window.Unlock_all()
            window.Free()
        # Not before: what a get of theirs reads to may be under way until then.
        self._links.clear()
        self._busy.clear()
        self._node.Free()


def _node_of(comm: MPI.Intracomm, node_size: int | None) -> MPI.Intracomm:
    node = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
    if node_size is None:
        return node
    part = cast(MPI.Intracomm, node.Split(node.rank // node_size))
    node.Free()
    return part


# Bytes of the segments of this process. What they reserve is consumed later, so that it still looks free.
_reserved: dict[int, int] = {}


def _room(node: MPI.Intracomm) -> int | None:
    # Collective over the node. None where shared memory is no file system of its own.
    promised: int = sum(node.allgather(sum(_reserved.values())))
    if not SHARED_MEMORY.is_dir():
        return None
    return max(0, int(shutil.disk_usage(SHARED_MEMORY).free) - promised)


def _agree_on_size(
    comm: MPI.Intracomm,
    ranks: tuple[int, ...],
    node: MPI.Intracomm,
    nbytes: int | str | None,
    transport: str,
    check: Callable[[], object],
    reserve: bool,
) -> int:
    # A wrong option on one rank only is an error on all of them, before anything is reserved.
    size, problem, room = 0, "", _room(node)
    try:
        if transport not in _TRANSPORTS:
            raise ConfigurationError(f"transport is one of {_TRANSPORTS}, got {transport!r}")
        check()
        if not isinstance(reserve, bool):
            raise ConfigurationError(f"reserve is True or False, got {reserve!r}")
        size = aligned(_size_for(room, node.size, nbytes))
        if size < _SMALLEST:
            raise ConfigurationError(f"a segment has at least {_SMALLEST} bytes, got {nbytes!r}")
    except ConfigurationError as error:
        problem = str(error)
    said = comm.allgather((problem, size, transport, reserve))
    for rank, (theirs, *_) in zip(ranks, said, strict=True):
        if theirs:
            raise ConfigurationError(f"rank {rank}: {theirs}")
    for at, option in ((2, "transport"), (3, "reserve")):
        for rank, theirs in zip(ranks, said, strict=True):
            if theirs[at] != said[0][at]:
                raise ConfigurationError(
                    f"{option} is {said[0][at]!r} on rank {ranks[0]} and {theirs[at]!r} on rank {rank};"
                    " give all the same"
                )
    # Different nodes may have different defaults; the smallest fits everywhere.
    return min(int(size) for _, size, *_ in said)


def _allocate(comm: MPI.Intracomm, ranks: tuple[int, ...], node: MPI.Intracomm, nbytes: int) -> MPI.Win:
    # Shared window over a node, or the same error on all ranks of all nodes.
    window, problem = None, ""
    try:
        window = MPI.Win.Allocate_shared(nbytes, 1, comm=node)
    except MPI.Exception as error:
        problem = str(error).splitlines()[0]
    whole = all(node.allgather(window is not None))
    said = comm.allgather(problem)
    if window is None or any(said):
        if window is not None and whole:
            window.Free()
        rank, why = next((rank, why) for rank, why in zip(ranks, said, strict=True) if why)
        raise SegmentError(f"rank {rank}: MPI allocates no shared window of {nbytes} bytes: {why}")
    return window


def _size_for(free: int | None, ranks: int, nbytes: int | str | None) -> int:
    asked = nbytes if nbytes is not None else os.environ.get(SEGMENT_SIZE_VARIABLE)
    if asked is not None:
        return parse_size(asked)
    share = _LARGEST_DEFAULT if free is None else free // 2 // ranks
    # Too little for the smallest default is found by the check of the room that follows.
    return max(_SMALLEST_DEFAULT, min(_LARGEST_DEFAULT, share, sys.maxsize // 4))


def _check_room(comm: MPI.Intracomm, node: MPI.Intracomm, nbytes: int) -> None:
    # Memory is consumed when touched: without this check a full file system ends in SIGBUS, much later.
    free = _room(node)
    wanted = nbytes * node.size
    short = f"{wanted} bytes ({node.size} ranks x {nbytes}) wanted, {free} bytes free in {SHARED_MEMORY}"
    lacking = [said for said in comm.allgather(short if free is not None and wanted > free else "") if said]
    if lacking:
        raise SegmentError(f"not enough shared memory: {lacking[0]}; {_REMEDY}")
