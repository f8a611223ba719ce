"""Memory segments, one per rank, which every rank of a machine can reach.

The memory of a node with two ranks; segments begin at a cache line, behind the dots::

    shared window, of the ranks of the node (load, store, atomics of a node)
    +-----------------------------------------+-----------------------------------------+
    | ..|header|buffer|gap|buffer|buffer| gap | ..|header|buffer|  gap                  |
    +-----------------------------------------+-----------------------------------------+
        |<---------- segment of rank 0 ------>|   |<---------- segment of rank 1 ------>|
        window of all ranks of the machine (MPI's puts, gets and atomics)

Each rank's heap (``heap.py``) allocates offsets in its own segment; nobody else allocates there. The header
(``waiting/header.py``) is the first block, at offset 0 in every segment, so that peers find it without a
message. A buffer elsewhere is known to a peer only by an exchange of addresses.

There are two windows since neither does all: a shared window spans one node only, and MPI moves data between
nodes only through a window that all ranks have made. They cover the same bytes, so a rank that stores to a
peer and one that puts to it write to the same buffer.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import DistdlError
from distdl_rma.geometry.partition import grouped
from distdl_rma.segments.options import SegmentOptions
from distdl_rma.segments.transport.arena import attach, own_arena
from distdl_rma.segments.transport.heap import ALIGNMENT, Bytes
from distdl_rma.segments.transport.links import MOVING_WORD, Atomics, Link, RemoteLink, RmaPeer, SharedLink
from distdl_rma.segments.transport.node_memory import NodeMemory
from distdl_rma.segments.virtual_ranks.comm import NoLock, hand_over_of
from distdl_rma.trace import Counters

# These processors never reorder a store with an earlier store, nor a load with an earlier load.
_TOTAL_STORE_ORDER = {"x86_64", "amd64", "AMD64", "i686"}
# Calls of MPI between two looks of a wait while large transfers are under way.
_CALLS = 64
# A wait looks so often for this long after what is under way has changed, and as long as a slow transport
# takes: nobody tells the end of a transfer if its other rank has died.
_MOST_SECONDS, _LEAST_BYTES_PER_SECOND = 1.0, 16 << 20
# It looks so often for a little longer after the last transfer: a notification follows, and often one back.
_AFTER_SECONDS = 2e-3
# Does nothing, without a Python frame: every put and notification calls it.
_NO_FENCE: Callable[[], object] = bool


class Segment:
    """One block of memory per rank, reachable by every rank of the machine.

    Two windows cover the same memory. A shared window gives the ranks of a node load and store. The other
    window gives every rank of the machine puts, gets and atomics. Memory is consumed only when it is touched.
    Collective to create and to close.

    ``ranks`` are the rank ids by position in ``comm``. All ranks raise if options are invalid on one of them.
    ``arenas`` maps rank ids of the node's other ranks to their arenas, if this rank can store to them.

    Both windows are locked for all ranks from the beginning to the end, since a lock for each operation costs
    more than the operation. So visibility is a matter of the four barriers here:

    - ``fence()`` between a store of data and the store of its flag, at the writer;
    - ``store_fence`` is the same, or None where the processor needs none, so that a hot path skips a call;
    - ``acquire()`` between the load of a flag and the loads of its data, at the reader;
    - ``load_fence`` is the same, or None.

    On x86 without ranks on other nodes both are None, and data and flag are two plain assignments.
    """

    # Bytes that were under way at the last look, and until when they may be.
    _moved, _moves_until = 0, 0.0

    def __init__(
        self, comm: MPI.Intracomm, ranks: tuple[int, ...], options: SegmentOptions, counters: Counters
    ) -> None:
        # Keeps the node's communicator to the end: MPICH 5.0 would reuse its context and hang in Unlock_all.
        self._comm, self._node_memory = comm, NodeMemory(comm, ranks, options.node_size)
        node = self._node_memory.node
        self.node_ranks = tuple(ranks[p] for p in node.allgather(comm.rank))
        try:
            self.nbytes = self._node_memory.agree_on_size(options)
            self._node_memory.check_room(self.nbytes)
            self._shared, memories = self._node_memory.allocate(self.nbytes + ALIGNMENT)
            self._node_memory.record_untouched(self.nbytes)
            try:
                # MPI aligns to less than a cache line: each owner sends the offset of its first one.
                begins = node.allgather(-memories[node.rank].ctypes.data % ALIGNMENT)
                views = {
                    rank: memory[begin : begin + self.nbytes]
                    for rank, memory, begin in zip(self.node_ranks, memories, begins, strict=True)
                }
                self.memory: Bytes = views[ranks[comm.rank]]
                self._window = self._node_memory.window_over(self.memory)
            except DistdlError:
                # All ranks free their memory if one rank cannot get its own.
                self._shared.Free()
                raise
        except DistdlError:
            self._node_memory.free()
            raise
        # Lets the other ranks run where they are threads that take turns; None for processes.
        self.hand_over = hand_over_of(comm)
        # Protects pending operations: the progress engine is another thread.
        self.lock = threading.RLock() if self.hand_over is None else NoLock()
        self._shared.Lock_all()
        self._window.Lock_all()
        # Memory barrier between data and its flag, the only one of the library.
        ordered = platform.machine() in _TOTAL_STORE_ORDER
        self.fence: Callable[[], object] = _NO_FENCE if ordered else self._shared.Sync
        # ``fence``, but None if none is needed, so that callers can skip the call.
        self.store_fence = None if ordered else self.fence
        self.cores = len(set().union(*node.allgather(os.sched_getaffinity(0))))
        self.words = self.memory.data.cast("q")
        # Ranks by node, in the order of M: ranks with the same first rank share a node.
        firsts = dict(zip(ranks, comm.allgather(self.node_ranks[0]), strict=True))
        self.nodes = grouped(ranks, firsts.__getitem__)
        # ``nodes``, but ranks share a node only if they load and store each other's memory.
        direct = options.transport == "auto"
        self.direct_nodes = self.nodes if direct else tuple((rank,) for rank in ranks)
        self.arenas = self._attached() if direct else {}
        self._links, self._busy = dict[int, Link](), set[RemoteLink]()
        for position, rank in enumerate(ranks):
            if rank in views and (direct or position == comm.rank):
                self._links[rank] = SharedLink(views[rank], self.fence)
            else:
                rma = RmaPeer(self._window, position, counters)
                self._links[rank] = RemoteLink(rank, rma, self.lock, self._busy)
        self.has_remote = any(isinstance(link, RemoteLink) for link in self._links.values())
        if self.has_remote:
            positions = {rank: (at, 0) for at, rank in enumerate(ranks)}
            self.atomics = Atomics(self._window, positions, False, self.lock)
        else:
            # Atomics in shared memory need no help of the target, but all ranks must share the memory.
            positions = {rank: (at, begins[at]) for at, rank in enumerate(self.node_ranks)}
            self.atomics = Atomics(self._shared, positions, True, self.lock)
        # Loads see data that MPI put here only after a Sync, on any processor.
        self.acquire: Callable[[], object] = self._window.Sync if self.has_remote else self.fence
        self.load_fence = self.acquire if self.has_remote else self.store_fence

    def _attached(self) -> dict[int, Bytes]:
        # Arenas of the node's other ranks, by rank id; none if one rank cannot reach all of them.
        node, arena = self._node_memory.node, None if self.hand_over else own_arena()
        places = node.allgather(None if arena is None else arena.place)
        found = {
            self.node_ranks[at]: attach(place)
            for at, place in enumerate(places)
            if place is not None and at != node.rank
        }
        reached = {rank: memory for rank, memory in found.items() if memory is not None}
        return reached if min(node.allgather(len(reached))) == node.size - 1 else {}

    @property
    def crowded(self) -> bool:
        """Whether the ranks of this node outnumber its cores, or take turns."""
        return self.hand_over is not None or len(self.node_ranks) > self.cores

    def link(self, rank: int) -> Link:
        """Link to the segment of a rank id."""
        return self._links[rank]

    @property
    def unified(self) -> bool:
        """Whether MPI's puts and this processor's loads see one memory (MPI_WIN_UNIFIED)."""
        return bool(self._window.model == MPI.WIN_UNIFIED)

    def progress(self) -> bool:
        """Advance all pending deliveries; return whether none is left. Does not block.

        A link enters ``_busy`` when it gets work, and leaves it only here: so a call costs nothing for peers
        to which nothing is under way, of which a large machine has many.
        """
        with self.lock:
            for link in tuple(self._busy):
                if link.advance():
                    self._busy.discard(link)
        if self.has_remote:
            self._window.Sync()
        return not self._busy

    @property
    def moving(self) -> int:
        """Bytes of large transfers under way, to other nodes or from there, at most."""
        return self.words[MOVING_WORD] + sum(link.moving for link in tuple(self._busy))

    def keep_moving(self) -> bool:
        """Call MPI often if large transfers are under way; return whether they are. Does not block.

        Not for longer than they may take: the rank that would tell of their end may have died.

        The target of a put has to call MPI as well: a transport in software moves a few KiB in each call of
        either side. The origin has therefore added the bytes to a word of this rank's header.
        """
        nbytes = self.moving
        if nbytes != self._moved:
            self._moved = nbytes
            longest = _MOST_SECONDS + nbytes / _LEAST_BYTES_PER_SECOND if nbytes else _AFTER_SECONDS
            self._moves_until = time.monotonic() + longest
        moving = time.monotonic() < self._moves_until
        if moving:
            with self.lock:
                for _ in range(_CALLS):
                    self._comm.Iprobe()
        return moving

    def abandon(self) -> None:
        """Count pages that were not touched as free, where ranks are lost and nothing can be freed; local."""
        # The pages that were touched stay: a rank that has not noticed the failure may still read them.
        self._node_memory.record_untouched(0)

    def close(self) -> None:
        """Free both windows; collective. Every view of the memory dangles afterwards."""
        self.words.release()
        self.memory = np.empty(0, np.uint8)
        self.arenas.clear()
        # The window over the memory goes before the window that owns the memory.
        for window in (self._window, self._shared):
            window.Unlock_all()
            window.Free()
        # Only now: the links keep targets of gets, which may be pending until here.
        self._links.clear()
        self._busy.clear()
        self._node_memory.free()
