"""Collectives that load and store on a node and use MPI between nodes; their steps are generators.

A step is a list of *phases*. A rank that is through with a phase stores the number of the step into a word
of each rank that waits for this; words only grow, so that nobody resets them. Two ranks of a node, in the
two phases of a reduction::

    rank 0                                         rank 1
    has written its vector: READY -> 0, 1          has written its vector: READY -> 0, 1
    READY of 0, 1?  reduces the first half,        READY of 0, 1?  reduces the second half,
    stores it to both vectors                      stores it to both vectors
    DONE -> 0, 1                                   DONE -> 0, 1
    DONE of 0, 1?  the result is complete          DONE of 0, 1?  the result is complete

The words of a rank are a table: a row for each phase, a column for each rank of the node. Between READY and
DONE the holders of the same share on other nodes may combine what they have, by MPI. There is no phase for
"I have read the result": READY of the next step but one says so, and comes before any store to that vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from distdl_rma.errors import ExchangeTimeout, MismatchError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.between_nodes import Messages, Script
from distdl_rma.segments.collectives.collective import CollectiveSite
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.collectives.scripted import Scripted
from distdl_rma.segments.large_arrays import copy
from distdl_rma.segments.transport.heap import aligned
from distdl_rma.segments.waiting.header import WaitReason

_PARITIES = 2
# Most phases of a step: for each, a rank may notify every other rank of its node.
_PHASES = 4


class SteppedAlgorithm(Scripted, ABC):
    """Algorithm whose step is a generator, ``script``, that yields while it has to wait.

    Each rank has two vectors of ``count`` elements in the segment, which the ranks of its node load and
    store. MPI's collectives combine the ranks ``across`` the nodes, which may include this one. ``terms`` has
    a line ``name=value`` for each fact that must be equal on all ranks.

    Every subclass has to see to it that a rank does not return from a step while another rank may still load
    from its operand of this step: the caller writes the operand of the next step but one there.
    """

    needs_progress = True

    def __init__(
        self, site: CollectiveSite, count: int, dtype: np.dtype[Any], across: Sequence[int], terms: str
    ) -> None:
        manager, layout, name = site
        super().__init__(manager)
        self.site, self.manager, self.layout = site, manager, layout
        self._count, self._dtype = count, dtype
        self._terms = f"count={count}\ndtype={dtype}\n{terms}\nranks={layout.ranks}"
        self._stride = aligned(count * dtype.itemsize)
        here = layout.here
        self.memory = manager.get_segment_buffer(_PARITIES * self._stride, _PHASES * len(here), name)
        self._words, self._me = self.memory.flags, here.index(layout.me)
        self._at = {rank: at for at, rank in enumerate(here)}
        # This rank's vectors for even and odd steps: operands and results, unless a subclass sets others.
        vectors = tuple(self.memory.view(dtype, (count,), k * self._stride) for k in range(_PARITIES))
        self.vectors = self.operands = self.results = vectors
        # For even and odd steps the vectors of the node's ranks, in their order, once connected.
        self.rows: tuple[list[Array], ...] = ()
        self._peer_words: list[memoryview] = []
        self.between = Messages(manager, across if layout.me in across else (), name, self._terms)
        self._operation, self._counters = manager.operation(name), manager.counters
        self._fence, self._acquire = manager.segment.store_fence, manager.segment.acquire
        self._step = 0
        # Ranks that the step waits for; the phase on this node and its value, or None between nodes.
        self._waits_for: tuple[int, ...] = ()
        self._phase: int | None = None
        self._wanted = 0

    @abstractmethod
    def script(self, parity: int) -> Iterator[None]:
        """One step on the vectors of its parity."""

    def connect(self, timeout: float | None) -> None:
        """Exchange addresses on the node, and make the communicator between nodes; once, blocking."""
        if not self.rows:
            others, name, terms = self.layout.others_here, self.site.name, self._terms
            try:
                remotes = self.memory.exchange(others, name, fingerprint(terms), timeout, terms=terms)
            except MismatchError:
                # The other nodes would wait for this one.
                with suppress(MismatchError, ExchangeTimeout):
                    self.between.announce()
                raise
            remotes[self.layout.me] = self.memory.here
            here = [remotes[rank] for rank in self.layout.here]
            direct = [
                [remote.direct(self._dtype, self._count, k * self._stride) for remote in here]
                for k in range(_PARITIES)
            ]
            self.rows = tuple([row for row in rows if row is not None] for rows in direct)
            self._peer_words = [words for remote in here if (words := remote.flags) is not None]
        self.between.connect(timeout)

    def begin(self, step: int) -> None:
        """Begin a step, and advance it until it has to wait."""
        self.manager.begin(self._operation, step)
        self._step = step
        self._running = self.script(step & 1)
        self.advance()

    def close(self) -> None:
        """Free memory and communicator once the running step is complete."""

        def idle() -> bool:
            # Other ranks and MPI may still write in a broken step, so its memory is not used again.
            complete = self.advance() and not self.broken
            if complete:
                self.between.close()
            return complete

        if not self.manager.closed:
            self.manager.retire(self.memory, idle)

    def waiting(self) -> WaitReason:
        """Ranks that the step waits for, for messages."""
        ranks, where = self._waits_for, "between nodes"
        if self._phase is not None:
            first, where = self._phase * len(self._at), "on this node"
            ranks = tuple(rank for rank in ranks if self._words[first + self._at[rank]] < self._wanted)
        what = f"in {self.site.name!r} (step {self._step}, {where})"
        return WaitReason(ranks, what, "did every rank make the same calls?")

    def notify(self, phase: int, ranks: Sequence[int]) -> None:
        """Notify ranks of the node that a phase of this step is over on this rank.

        They then see all earlier stores of this rank.
        """
        if self._fence is not None:
            self._fence()
        word, value = phase * len(self._at) + self._me, self._step
        for rank in ranks:
            self._peer_words[self._at[rank]][word] = value

    def wait_for(self, phase: int, ranks: Sequence[int]) -> Iterator[None]:
        """Wait until ranks of the node have notified this one that a phase of this step is over."""
        words, value, first = self._words, self._step, phase * len(self._at)
        self._waits_for, self._phase, self._wanted = tuple(ranks), phase, value
        # One rank after the other: each look reads one word.
        for rank in ranks:
            word = first + self._at[rank]
            while words[word] < value:
                yield
        self._acquire()

    def across(self, script: Script, nbytes: int) -> Script:
        """Count a collective of ``between`` that was begun, of ``nbytes`` bytes here; return its script."""
        self._counters.collectives += 1
        self._counters.bytes_collective += nbytes
        self._waits_for = tuple(rank for rank in self.between.ranks if rank != self.layout.me)
        self._phase = None
        return script

    def load(self, target: Array, source: Array) -> None:
        """Load from a peer's vector, and count it."""
        copy(target, source)
        self.count_gets(1, source.nbytes)

    def count_gets(self, number: int, nbytes: int) -> None:
        """Count loads from peers."""
        self._counters.gets += number
        self._counters.bytes_got += nbytes
