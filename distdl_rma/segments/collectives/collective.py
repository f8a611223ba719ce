"""Interface of all double-buffered collectives: write ``active``, start, compute, wait, read ``result``.

Two buffers take turns, here of an allreduce, whose result replaces its operand. Time goes to the right::

    buffer 1   write 1 | start 1  ...  wait 1 | read 1                | write 3 | start 3
    buffer 0                write 2           | start 2  ...  wait 2  | read 2
                            while step 1 is under way

Nobody acknowledges a result. A rank's start of step k+2 says that it reads the result of step k no more, and
no other rank stores to its buffer of step k+2 before that. Nor does a rank return from step k while another
one may still load its operand: a rank that waits for no result, as the root of a broadcast, waits for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from distdl_rma.errors import ProtocolError, ShapeError
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.array_bytes import as_array
from distdl_rma.segments.waiting.header import WaitReason

# Looks at the flags of a small step before the rank waits by ``Waiter.until``.
_LOOKS = 300


class CollectiveSite(NamedTuple):
    """Segment manager, ranks by node, and name of a collective."""

    manager: SegmentManager
    layout: NodeLayout
    name: str

    @classmethod
    def checked(cls, manager: SegmentManager, ranks: Sequence[int], name: str) -> CollectiveSite:
        """Site from a caller's arguments; ``PartitionError`` as :meth:`NodeLayout.checked`."""
        layout = NodeLayout.checked(ranks, manager.segment.direct_nodes, manager.rank, name)
        return cls(manager, layout, name)


class Algorithm(Protocol):
    """One way to carry out the steps of a collective, numbered from 1."""

    site: CollectiveSite
    # Vectors that the caller writes and reads, for even and odd steps.
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    # Whether other ranks wait for what this one does in ``advance``.
    needs_progress: bool
    # The error that interrupted a step, which cannot be continued; empty if none did.
    broken: str

    def connect(self, timeout: float | None) -> None:
        """Exchange addresses, once; blocking."""

    def begin(self, step: int) -> None:
        """Begin a step; does not wait."""

    def advance(self) -> bool:
        """Advance the step; return whether it is complete, or broken and so never complete."""

    def waiting(self) -> WaitReason:
        """Ranks that the step waits for, for messages."""

    def close(self) -> None:
        """Free the memory once the running step is complete."""


class Collective:
    """A collective of some ranks that is carried out repeatedly, in steps.

    A step: write ``active``, ``start()``, compute, ``wait()``, read ``result``. ``start()`` makes another
    buffer ``active``, so that the operand of step k+1 can be written while step k is under way. Both buffers
    lie in the segment; a result stays valid until the second start after it. All ranks construct the
    collective in the same order with the same arguments. Only its ranks start and wait, and they may wait for
    several collectives in different orders. A call with values is a whole step.

    Calls out of order raise ``ProtocolError``. Calls that wait take a ``timeout`` in seconds, 0 to look once,
    None for the machine's default. At the deadline they raise ``ExchangeTimeout`` with the missing ranks, and
    can be repeated. An exception during a step, such as one of a signal handler, leaves the step incomplete:
    it is raised, and later calls raise ``ProtocolError``. Then close the collective and make it anew on all
    ranks.

    Every collective is made with the segment ``manager`` of a machine, ``ranks`` (rank ids, this one
    included) and a ``name`` for messages, the same on all ranks. ``count`` is a number of elements, which may
    be 0, ``dtype`` any type of numpy without Python objects, for reductions those of ``Allreduce``, and
    ``root`` a rank id, the first of ``ranks`` if None. Construction raises ``PartitionError`` if ranks are
    listed twice, are not of the machine or lack this one or the root, ``ShapeError`` if a number of elements
    or a dtype is invalid, and ``ArgumentError`` if an operation is unknown.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._manager, layout, self.name = algorithm.site
        self.ranks, self._algorithm = layout.ranks, algorithm
        self._operands, self._results = algorithm.operands, algorithm.results
        self._advance = algorithm.advance
        spins = self._manager.waiter.spins and not algorithm.needs_progress
        self._looks = range(_LOOKS if spins else 1)
        self._steps, self._running = 0, False
        self._unfetched = False  # whether ``test`` completed the last step, and ``wait`` was not called since
        self._connected, self._closed = False, False
        # The garbage collection of the collective frees its memory too.
        self._close = weakref.finalize(self, algorithm.close)

    @property
    def active(self) -> Array:
        """Buffer to write the next operand to, in the segment; not cleared."""
        if self._closed or self._manager.closed or self._algorithm.broken:
            self._check()
        return self._operands[(self._steps + 1) & 1]

    @property
    def result(self) -> Array:
        """Result of the last step, in the segment; valid until the second start after it."""
        self._check()
        if self._running or not self._steps:
            raise ProtocolError(f"{self.name!r}: result was asked for before a step was waited for")
        return self._results[self._steps & 1]

    @property
    def running(self) -> bool:
        """Whether a step was started and not yet waited for."""
        return self._running

    def connect(self, timeout: float | None = None) -> None:
        """Exchange addresses with the other ranks, once; collective, blocking.

        Otherwise the first ``start`` connects. Ranks that may start several collectives in different orders
        connect these before, in the same order. Between nodes the call makes a communicator once all its
        ranks are there. ``MismatchError`` if the ranks do not mean the same collective.
        """
        self._check()
        if not self._connected:
            self._algorithm.connect(timeout)
            self._connected = True

    def start(self) -> None:
        """Begin a step on ``active`` and flip it; does not wait. The first start connects, which blocks."""
        if self._running or self._closed or self._manager.closed:
            self._check()
            raise ProtocolError(f"{self.name!r}: started while a step is running; wait for it first")
        if not self._connected:
            self.connect()
        self._begin()

    def __call__(self, values: ArrayLike) -> Array:
        """Carry out a step on values: write, start and wait; blocking. Returns ``result``.

        ``ShapeError`` if the values are masked, floats where the elements are not, or complex where these are
        real.
        """
        active = self.active
        alike = values.__class__ is np.ndarray and values.dtype == active.dtype
        if not alike and isinstance(values, np.ma.MaskedArray):
            as_array(values, repr(self.name))
        if not alike and (kind := _lossy(values, active.dtype)) is not None:
            raise ShapeError(f"{self.name!r}: values of {kind} do not fit into {active.dtype}")
        active[...] = values
        self.start()
        return self.wait()

    def test(self) -> bool:
        """Advance the running step; return whether it is complete. Does not block.

        Once True, it stays True until ``wait``, which returns at once.
        """
        self._check()
        if not self._running:
            if self._unfetched:
                return True
            raise ProtocolError(f"{self.name!r}: test without a start")
        if not self._advance():
            self._manager.progress()
            if not self._advance():
                return False
        self._end()
        self._unfetched = True
        return True

    def wait(self, timeout: float | None = None) -> Array:
        """Wait for the running step and return ``result``; blocking."""
        if self._closed or self._manager.closed:
            self._check()
        if self._running:
            if self._manager.trace.recording is None:
                self._finish(timeout)
            else:
                with self._manager.trace.span("wait", self.name):
                    self._finish(timeout)
            self._end()
        elif not self._unfetched:
            raise ProtocolError(f"{self.name!r}: wait without a start")
        self._unfetched = False
        return self._results[self._steps & 1]

    def _finish(self, timeout: float | None) -> None:
        advance = self._advance
        for _ in self._looks:
            if advance():
                return
        self._manager.waiter.until(advance, self._algorithm.waiting, timeout)

    def close(self) -> None:
        """Free the memory once no rank uses it any more; local, idempotent.

        A running step continues for the other ranks whenever this rank waits for something. Garbage
        collection closes a collective too.
        """
        self._closed = True
        self._close()

    def _begin(self) -> None:
        algorithm, trace = self._algorithm, self._manager.trace
        if trace.recording is not None:
            self._advance = trace.watched(type(self).__name__.lower(), self.name, algorithm.advance)
        try:
            self._steps, self._running, self._unfetched = self._steps + 1, True, False
            if trace.recording is None:
                algorithm.begin(self._steps)
            else:
                with trace.span("start", self.name):
                    algorithm.begin(self._steps)
            if algorithm.needs_progress:
                # Every wait advances it: ranks may wait for their steps in different orders.
                self._manager.defer(self._advance)
        except BaseException as error:
            algorithm.broken = algorithm.broken or repr(error)
            raise

    def _end(self) -> None:
        algorithm = self._algorithm
        if algorithm.broken:
            self._check()
        self._running = False
        if algorithm.needs_progress:
            self._manager.withdraw(self._advance)
        self._advance = algorithm.advance

    def _check(self) -> None:
        if self._closed or self._manager.closed:
            raise self._manager.closed_error(f"{type(self).__name__} {self.name!r}")
        if self._algorithm.broken:
            raise ProtocolError(
                f"{self.name!r}: step {self._steps} was interrupted by {self._algorithm.broken}; "
                "close it and make it anew on all ranks"
            )


def _lossy(values: Any, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    # Type of values whose fractions or imaginary parts would be lost; None if there are none.
    kind = np.asarray(values).dtype
    if kind.kind not in "fc" or np.can_cast(kind, dtype, "same_kind"):
        return None
    if isinstance(values, (list, tuple)):
        # numpy makes floats of integers of which some need uint64.
        return next((found for value in values if (found := _lossy(value, dtype)) is not None), None)
    return kind
