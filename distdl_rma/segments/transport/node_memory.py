"""Shared memory of a node for segments: its size per rank, and windows over it.

Linux gives addresses at once and pages at the first store to them. So a segment that is larger than what is
free can be made, and the job is killed by SIGBUS much later, in a store that no code can catch. This file
looks before it allocates::

    room      = min(free bytes of /dev/shm - segments not touched yet, addresses left) of the node
    default   = room / 2 / ranks of the node, at least 32 MiB, less in a control group with a limit,
                4 GiB at most where pages are consumed at once
    all ranks   take the smallest of what they asked for, or found

Segments that exist and are not touched yet look free, so each process remembers its own (``_untouched``).
What another job takes after that look is not known.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np
from mpi4py import MPI

from distdl_rma.errors import ConfigurationError, SegmentError
from distdl_rma.segments.options import DEFAULT_TIMEOUT, SEGMENT_SIZE_VARIABLE, SegmentOptions, chosen_timeout
from distdl_rma.segments.transport.arena import addresses_left
from distdl_rma.segments.transport.heap import Bytes, aligned
from distdl_rma.segments.virtual_ranks.comm import is_true_within, is_virtual, windows_of

_TICK_SECONDS = 1.0


@contextmanager
def ends_process_after(seconds: float, why: str) -> Iterator[None]:
    """End this process, with a line on standard error and status 1, if the block takes longer; local.

    The launcher then ends the job: a process that hangs in MPI can neither continue nor finalise MPI.

    A thread ends it, as no signal handler of Python runs while the main thread is in a call of MPI.
    """
    over = threading.Event()

    def watch() -> None:
        # Counts ticks, which stop while the job is suspended, unlike a clock.
        for ticks in count(1):
            if over.wait(_TICK_SECONDS):
                return
            if ticks * _TICK_SECONDS > seconds:
                break
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"distdl_rma: {why}\n")
            sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, name="distdl_rma deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()


SHARED_MEMORY = Path("/dev/shm")
_LARGEST_DEFAULT = 4 << 30
# A smaller default would only fail later. Users may choose less.
_SMALLEST_DEFAULT = 32 << 20
_SMALLEST = 4096
_CHUNK_BYTES = 1 << 20
# Memory of this process's control group and container, of versions 2 and 1; pages of segments count there.
_GROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
# Addresses left for what MPI and others map later.
_SPARE_ADDRESSES = 256 << 20
# More than any machine has: no limit is known.
_ENDLESS = 1 << 50
# Memory that MPI keeps beside each segment of a window, in two pages.
_BESIDE_BYTES = 2 * mmap.PAGESIZE
# Ranks return from creating a window within much less time than this of each other.
_TOGETHER_SECONDS = 10.0
_REMEDY = (
    f"set {SEGMENT_SIZE_VARIABLE} or Machine(segment_size=...) to less, or give the node or container more"
    " shared memory (for example --shm-size)"
)
# Bytes of this process's segments, which look free until their pages are touched.
_untouched: dict[int, int] = {}


class NodeMemory:
    """Memory for one segment per rank of ``comm``; ``node`` is the communicator of this rank's node.

    ``ranks`` are the rank ids by position. Every method is collective unless it says local; an error on one
    rank is raised on all. In tests, ``node_size`` consecutive ranks of a node count as a node.

    A rank that finds a problem does not raise at once, since the others would wait for it in the next
    collective call: it passes the problem to ``_first_problem``, and all raise the same one.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: tuple[int, ...], node_size: int | None) -> None:
        self._comm, self._ranks = comm, ranks
        self.node = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
        if node_size is not None:
            whole = self.node
            self.node = cast(MPI.Intracomm, whole.Split(whole.rank // node_size))
            whole.Free()
        self._timeout = DEFAULT_TIMEOUT

    def agree_on_size(self, options: SegmentOptions) -> int:
        """Bytes of a segment, equal on all ranks; an invalid option raises before memory is reserved."""
        asked, problem = None, ""
        try:
            options.check()
            asked = options.size()
            if asked is not None and aligned(asked) < _SMALLEST:
                raise ConfigurationError(f"a segment has at least {_SMALLEST} bytes, got {asked} bytes")
        except ConfigurationError as error:
            problem = str(error)
        answers = self._comm.allgather((problem, asked, options.transport))
        for rank, (theirs, *_) in zip(self._ranks, answers, strict=True):
            if theirs:
                raise ConfigurationError(f"rank {rank}: {theirs}")
        for rank, (_, _, transport) in zip(self._ranks, answers, strict=True):
            if transport != answers[0][2]:
                first = f"transport is {answers[0][2]!r} on rank {self._ranks[0]}"
                raise ConfigurationError(f"{first} and {transport!r} on rank {rank}; give all the same")
        self._timeout = chosen_timeout(options.timeout)
        sizes = [size for _, size, *_ in answers if size is not None]
        if len(sizes) < len(answers):
            sizes.append(self._default_size())
        return aligned(min(sizes))

    def check_room(self, nbytes: int) -> None:
        """Raise ``SegmentError`` if a node lacks ``nbytes`` for each of its ranks."""
        # Memory is consumed when touched: without this check a full file system ends in SIGBUS, much later.
        ranks = self.node.size
        room, where = self._room()
        short = ""
        if (nbytes + _BESIDE_BYTES) * ranks > room:
            wanted = f"{nbytes * ranks} bytes ({ranks} ranks x {nbytes} bytes) wanted"
            short = f"{wanted}, {room} bytes {where}"
        lacking = self._first_problem(short)
        if lacking:
            raise SegmentError(f"not enough shared memory: {lacking[1]}; {_REMEDY}")

    def allocate(self, nbytes: int) -> tuple[MPI.Win, list[Bytes]]:
        """Create a window over the node; return it and the memory of each of the node's ranks, all zeros."""
        memories: list[Bytes] = []

        def make() -> MPI.Win:
            if self.node.size > 1:
                return windows_of(self.node, MPI.Win).Allocate_shared(nbytes, 1, comm=self.node)
            # For a single rank, MPI uses malloc, whose memory is not zero.
            memories.append(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8))
            return windows_of(self.node, MPI.Win).Create(memories[0], 1, comm=self.node)

        window = self.make_window(self.node, make, nbytes)
        if not memories:
            buffers = [cast(memoryview, window.Shared_query(at)[0]) for at in range(self.node.size)]
            memories += [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        return window, memories

    def window_over(self, memory: Bytes) -> MPI.Win:
        """Create a window over such memory of every rank of ``comm``."""
        windows = windows_of(self._comm, MPI.Win)
        return self.make_window(self._comm, lambda: windows.Create(memory, 1, comm=self._comm), memory.nbytes)

    def make_window(self, comm: MPI.Intracomm, make: Callable[[], MPI.Win], nbytes: int) -> MPI.Win:
        """Create a window of ``nbytes`` on each rank of ``comm``, by the collective function ``make``.

        ``SegmentError`` on all ranks if MPI refuses. For lack of memory, Open MPI may refuse on one rank and
        never return on others of the node: these processes end after the timeout, and the job with them.
        """
        window, problem, me = None, "", self._ranks[self._comm.rank]
        refused, limit = f"no window of {nbytes} bytes can be had", self._timeout + _TOGETHER_SECONDS
        why = (
            f"rank {me} ends: MPI has not made a window of {nbytes} bytes in {limit:g} s; Open MPI does not"
            f" return where another rank of the node was refused, as for lack of memory in {SHARED_MEMORY};"
            f" {_REMEDY}"
        )
        # Of virtual ranks none is left in MPI when another one is refused: they use memory of this process.
        with nullcontext() if is_virtual(comm) else ends_process_after(limit, why):
            try:
                window = make()
            except (MPI.Exception, MemoryError, OSError, OverflowError) as error:
                problem = f"{error}".partition("\n")[0] or type(error).__name__
            made = np.zeros(comm.size, np.uint8)
            together = comm.Iallgather(np.array([window is not None], np.uint8), made)
            # The others come later, or never if MPI has refused this one.
            if not is_true_within(_TOGETHER_SECONDS if problem else math.inf, together.Test, 1e-4, comm):
                others = "MPI does not return on other ranks of its node, and the job cannot go on"
                raise SegmentError(f"rank {me}: {refused}: {problem}; {others}; {_REMEDY}")
        lacking = self._first_problem(problem)
        if window is not None and lacking is None:
            return window
        # Freeing is collective: it would wait for ever for a rank without a window.
        if window is not None and made.all():
            window.Free()
        rank, why = lacking or (me, problem)
        raise SegmentError(f"rank {rank}: {refused}: {why}; {_REMEDY}")

    def record_untouched(self, nbytes: int) -> None:
        """Record that ``nbytes`` will be consumed although they still look free; local.

        Virtual ranks are left out: they use no shared memory, and one that fails does not free its own.
        """
        if not is_virtual(self.node):
            _untouched[id(self)] = nbytes

    def free(self) -> None:
        """Free the communicator of the node, and undo ``record_untouched``; collective over the node."""
        _untouched.pop(id(self), None)
        self.node.Free()

    def _room(self) -> tuple[int, str]:
        # Bytes that the node's ranks can have together, and where these are. Collective over the node.
        known = self.node.allgather((sum(_untouched.values()), addresses_left()))
        # Every rank maps the segments of all ranks of its node.
        left = min(addresses for _, addresses in known) - _SPARE_ADDRESSES
        rooms = [(max(0, left), "of addresses left to a process (ulimit -v)")]
        if not is_virtual(self.node):
            rooms.append((max(0, _free() - sum(used for used, _ in known)), f"free in {SHARED_MEMORY}"))
        return min(rooms)

    def _default_size(self) -> int:
        share = self._room()[0] // 2 // self.node.size
        if share > _ENDLESS:
            share = _LARGEST_DEFAULT // (self._comm.size if is_virtual(self._comm) else 1)
        for file in _GROUP_LIMITS:
            with suppress(OSError, ValueError):
                share = min(share, int(Path(file).read_text()) // 2 // self.node.size)
        # Nodes may have different shares; the smallest fits everywhere.
        share = int(self._comm.allreduce(share, MPI.MIN))
        # Pages that are consumed only when touched allow a large default; a network that registers memory
        # consumes all at once. And no peer reads the segment of a single rank.
        if share > _LARGEST_DEFAULT and (self._comm.size == 1 or self._windows_take_pages()):
            share = _LARGEST_DEFAULT
        # ``check_room`` follows, and raises if the smallest default does not fit.
        return max(_SMALLEST_DEFAULT, min(share, sys.maxsize // 4))

    def _windows_take_pages(self) -> bool:
        # Whether MPI consumes the pages of a window at its creation, on any rank.
        memory = np.frombuffer(mmap.mmap(-1, _CHUNK_BYTES), np.uint8)
        self.window_over(memory).Free()
        return bool(self._comm.allreduce(has_pages(memory), MPI.LOR))

    def _first_problem(self, problem: str) -> tuple[int, str] | None:
        # Rank id and problem of the first rank that has one.
        answers = zip(self._ranks, self._comm.allgather(problem), strict=True)
        return next(((rank, theirs) for rank, theirs in answers if theirs), None)


def has_pages(memory: Bytes) -> bool:
    """Whether the kernel has provided any page of page-aligned memory; True if that is unknown."""
    known = (ctypes.c_ubyte * -(-memory.nbytes // mmap.PAGESIZE))()
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):
        return True
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return mincore(memory.ctypes.data, memory.nbytes, known) != 0 or any(known)


def _free() -> int:
    # As if without a limit if shared memory is no file system of its own.
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else sys.maxsize
