"""Small vectors of all ranks to all ranks, in one round of notifications.

Memory of rank 1 of three, and who writes to it::

    slots of even epochs   | from rank 0 | own | from rank 2 |       a vector of ``count`` elements each
    slots of odd epochs    | from rank 0 | own | from rank 2 |
    words                  | from rank 0 |  -  | from rank 2 |       the last epoch whose vector is there

A rank writes its own vector into its own slot, from where it copies it to the others: this slot is also the
source of puts to other nodes, which read it later. In a step of a few microseconds each call of Python
counts, so addresses, slots and functions are looked up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distdl_rma.errors import ProtocolError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.array_bytes import as_bytes
from distdl_rma.segments.memory.remote_buffer import RemoteBuffer
from distdl_rma.segments.waiting.header import WaitReason

_PARITIES = 2
_ALL = slice(None)


class AllPush:
    """Every rank pushes a vector of ``count`` elements to every rank, with one notification for each.

    For small vectors, whose latency counts. Construction is local; the first start connects the ``ranks``,
    which include this one. An epoch has to be waited for before the next one starts.

    Nothing is acknowledged, since two slots per rank suffice: a rank starts epoch k+2 after it has received
    epoch k+1 from all ranks, and each rank sent its epoch k+1 after it had read epoch k. ``terms`` has a line
    ``name=value`` for each fact that must be equal on all ranks.
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int,
        dtype: DTypeLike,
        name: str,
        terms: str = "",
    ) -> None:
        self._manager, self._ranks, self._name = manager, tuple(ranks), name
        kind, size = np.dtype(dtype), len(self._ranks)
        self._terms = f"count={count}\ndtype={kind}\n{terms}\nranks={self._ranks}"
        self._me = self._ranks.index(manager.rank)
        self._nbytes = count * kind.itemsize
        self._memory = manager.get_segment_buffer(_PARITIES * size * self._nbytes, size, name)
        self._slots = self._memory.view(kind, (_PARITIES, size, count))
        # For even and odd epochs, the vectors of all ranks in the order of ``ranks``, in the segment.
        self.rows: tuple[list[NDArray[Any]], ...] = tuple(list(slots) for slots in self._slots)
        self._words = self._memory.flags
        self._others = [at for at in range(size) if at != self._me]
        # For each peer within reach of stores: its slots for this rank's vector, and its words.
        self._direct: list[tuple[tuple[memoryview, ...], memoryview]] = []
        # This rank's vectors, as bytes.
        self._sources = tuple(as_bytes(rows[self._me], name) for rows in self.rows)
        self._remote: list[RemoteBuffer] = []
        self._fence, self._acquire = manager.segment.fence, manager.segment.acquire
        self._counters, self._puts = manager.counters, 0
        self._connected = size == 1
        self._closed, self.epoch = False, 0
        self._waited = 0

    def connect(self, timeout: float | None = None) -> None:
        """Exchange addresses with the other ranks, once; blocking."""
        if self._connected:
            return
        peers, plan = [self._ranks[at] for at in self._others], fingerprint("all push", self._terms)
        remotes = self._memory.exchange(peers, self._name, plan, timeout, terms=self._terms)
        for remote in remotes.values():
            words = remote.flags
            if words is None:
                self._remote.append(remote)
                continue
            slots = [remote.direct(np.uint8, self._nbytes, self._slot(k)) for k in range(_PARITIES)]
            self._direct.append(
                (tuple(as_bytes(slot, self._name) for slot in slots if slot is not None), words)
            )
        self._puts = len(self._direct)
        self._connected = True

    def start(self, row: NDArray[Any]) -> None:
        """Push a copy of this rank's vector; does not wait. The first start connects, which blocks."""
        if self._closed or self._manager.closed:
            raise self._manager.closed_error(f"vectors {self._name!r}")
        if self.epoch != self._waited:
            # An error may have interrupted the epoch: raise its cause first.
            self._manager.notices.check()
            raise ProtocolError(f"{self._name!r}: started again before the last epoch was waited for")
        if not self._connected:
            self.connect()
        self.rows[(self.epoch + 1) & 1][self._me][...] = row
        self.push()

    def push(self) -> None:
        """Begin the next epoch with the vector in this rank's own row; call ``connect`` before."""
        self.epoch = epoch = self.epoch + 1
        parity, me = epoch & 1, self._me
        for remote in self._remote:
            remote.put_stable(self._slots[parity, me].view(np.uint8), self._slot(parity))
            remote.raise_flag(me, epoch)
        if self._puts:
            source, fence = self._sources[parity], self._fence
            for slots, words in self._direct:
                slots[parity][_ALL] = source
                fence()
                words[me] = epoch
            counters = self._counters
            counters.puts += self._puts
            counters.bytes_put += self._puts * self._nbytes

    def arrived(self) -> bool:
        """Whether all vectors have arrived here, and this rank's vector was sent; does not block."""
        words, epoch = self._words, self.epoch
        for at in self._others:
            if words[at] < epoch:
                return False
        # This rank's own row must not change until it is sent.
        for remote in self._remote:
            if not remote.delivered():
                return False
        self._acquire()
        return True

    def waiting(self) -> WaitReason:
        """Ranks whose vectors are missing, for messages."""
        silent = tuple(self._ranks[at] for at in self._others if self._words[at] < self.epoch)
        late = silent or tuple(remote.peer for remote in self._remote if not remote.delivered())
        what = f"to send in {self._name!r} (epoch {self.epoch}, last seen {self.epoch - 1})"
        return WaitReason(late, what, "did every rank call the same layers?", in_step=True)

    def wait(self, timeout: float | None = None) -> NDArray[Any]:
        """All vectors, one row per rank in the order of ``ranks``; blocking.

        They lie in the segment, and are valid until the next start but one.
        """
        if self._closed or self._manager.closed:
            raise self._manager.closed_error(f"vectors {self._name!r}")
        if not self.arrived():
            self._manager.waiter.until(self.arrived, self.waiting, timeout)
        self._waited = self.epoch
        return self._slots[self.epoch & 1]

    def close(self) -> None:
        """Free the memory once no rank writes to it any more; local, idempotent."""
        if not self._closed:
            self._closed = True
            if not self._manager.closed:
                self._manager.retire(self._memory, self.arrived)

    def _slot(self, parity: int) -> int:
        return (parity * len(self._ranks) + self._me) * self._nbytes
