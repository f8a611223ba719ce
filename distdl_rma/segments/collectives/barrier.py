"""A barrier of some ranks that can be waited for again after a timeout.

Four ranks, in two turns; rank 0 knows of rank 3 after the first, and of ranks 1 and 2 after the second::

    turn 0    0 -> 1    1 -> 2    2 -> 3    3 -> 0      rank me has heard of me-1
    turn 1    0 -> 2    1 -> 3    2 -> 0    3 -> 1      ... and of all that me-2 had heard of

A notification has 64 bits: the epoch, and below it the largest number that its sender knows. So a rank that
waits needs no more than one comparison, and the number comes at no cost. A collective uses it to agree on
its next step, and communicators to agree on one that all ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason

_VALUE_BITS = 32
# Most ranks without a notification whose headers are read for a message.
_LOOKED_UP = 64


class Barrier:
    """No rank passes before all of some ranks have come; each of P ranks sends O(log P) notifications.

    A dissemination barrier: in turn k the rank at position ``me`` notifies ``me + 2**k`` and waits for
    ``me - 2**k``, both modulo P. Each rank may bring a number; all get the largest one. The barrier does not
    order puts: only ranks that were notified of an earlier put see it after the barrier.

    An epoch that began goes on to its end, whoever waits: a rank that gave up passes notifications on in its
    other waits, since ranks behind it may depend on these.

    Construction is local; the first wait connects O(log P) peers. ``ranks``, this one included, their order,
    ``name`` and ``terms``, a line ``name=value`` for each fact, are equal on all ranks.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str, terms: str = "") -> None:
        self._manager, self._ranks, self.name = manager, tuple(ranks), name
        self._terms = f"{terms}\nranks={self._ranks}"
        size, me = len(self._ranks), self._ranks.index(manager.rank)
        self._turns = (size - 1).bit_length()
        self._behind = [self._ranks[(me + (1 << k)) % size] for k in range(self._turns)]
        self._before = [self._ranks[(me - (1 << k)) % size] for k in range(self._turns)]
        # Two sets of words: a rank that has passed may come again before this one has looked.
        self._memory = manager.get_segment_buffer(0, 2 * self._turns, name)
        self._words = self._memory.flags
        # Functions that notify the rank of each turn, in both sets of words.
        self._notify: list[Callable[[int], None]] = []
        self._epoch = 0
        self._at = self._turns  # turn of the running epoch; all turns: none is running
        self._notified = -1
        self._largest = 0
        self._operation = manager.operation(name)
        # Ranks that have come, by their headers; ranks of other nodes take a while to answer.
        self._come: set[int] = set()
        self._closed = False

    def connect(self, timeout: float | None = None) -> None:
        """Exchange addresses with O(log P) peers, once; blocking."""
        if not self._notify and self._turns:
            peers = dict.fromkeys((*self._behind, *self._before), ())
            plan = fingerprint("barrier", self._terms)
            remotes = self._memory.exchange(peers, self.name, plan, timeout, terms=self._terms)
            targets = [remotes[rank] for rank in self._behind * 2]
            self._notify = [remote.flag_raiser(word, ordered=False) for word, remote in enumerate(targets)]

    def wait(self, timeout: float | None = None, value: int = 0) -> int:
        """Wait until all ranks have called, and return the largest number of any rank; blocking.

        A number is from 0 to 2**32 - 1. ``ExchangeTimeout`` at the deadline names ranks that have not come.
        The call can be repeated, and then the number of the first call counts. Meanwhile this rank counts as
        having come.
        """
        if self._closed or self._manager.closed:
            raise self._manager.closed_error(f"barrier {self.name!r}")
        if not self._notify:
            self.connect(timeout)
        if self._at == self._turns and self._notified < 0:
            self._epoch += 1
            self._at, self._largest = 0, value
            if self._come:
                self._come.clear()
            self._manager.begin(self._operation, self._epoch)
        # This rank also passes notifications on if it gives up waiting.
        self._manager.defer(self._advance)
        self._manager.waiter.until(self._advance, self._waiting, timeout)
        self._manager.withdraw(self._advance)
        self._at, self._notified = self._turns, -1
        return self._largest

    def close(self) -> None:
        """Free the memory once no rank writes to it any more; local, idempotent."""
        if not self._closed:
            self._closed = True
            if not self._manager.closed:
                self._manager.retire(self._memory, self._advance)

    def _advance(self) -> bool:
        with self._manager.segment.lock:
            first = (self._epoch & 1) * self._turns
            while self._at < self._turns:
                k = self._at
                if self._notified < k:
                    self._notified = k
                    self._notify[first + k](self._epoch << _VALUE_BITS | self._largest)
                received = self._words[first + k]
                if received >> _VALUE_BITS < self._epoch:
                    return False
                self._largest = max(self._largest, received & (1 << _VALUE_BITS) - 1)
                self._at += 1
            return True

    def _waiting(self) -> WaitReason:
        size, me = len(self._ranks), self._ranks.index(self._manager.rank)
        # After k turns 2**k ranks up to this one have come; the headers of others may say that they have.
        silent = [self._ranks[(me - distance) % size] for distance in range(1 << self._at, size)]
        has_begun = self._manager.watch.has_begun
        unknown = [rank for rank in silent[:_LOOKED_UP] if rank not in self._come]
        self._come.update(rank for rank in unknown if has_begun(rank, self.name, self._epoch))
        late = [rank for rank in silent if rank not in self._come]
        what = f"to reach {self.name!r} (epoch {self._epoch})"
        return WaitReason(
            tuple(sorted(late or silent)), what, "did every rank make the same calls?", in_step=True
        )
