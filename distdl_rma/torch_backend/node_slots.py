"""Slots in which the ranks of a group on one node show each other data, round by round.

Each rank has a slot for odd rounds and one for even rounds. Two ranks, time downwards::

    rank 0                                      rank 1
    shows data in its odd slot, announces 1     shows data in its odd slot, announces 1
    reads rank 1's odd slot, announces that     (is late)
    shows data in its even slot, announces 2    reads rank 0's odd slot, announces that
    waits until rank 1 has announced 2          shows data in its even slot, announces 2
    reads rank 1's even slot, announces that    reads rank 0's even slot, announces that
    waits until all have read round 1
    shows data in its odd slot, announces 3     ...

A slot is written again two rounds later, when all ranks have read it. So a rank goes on to the next round
while others still read this one, and no round ends with a barrier.

Memory of a rank, from which the others load, and its words, which only they write::

    tables   even | odd     text and digest of the call, and sizes, shown beside the data
    slots    even | odd     data, and results of this rank; of two ranks, those of the other one
    words    shown in even rounds | shown in odd rounds | read | made        one of each rank, in each part

A word of ``shown`` has the number of the round and the kind of the call (``calls.py``); so the look that
waits for a rank also compares what it calls. Each word has one writer and only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distdl_rma.errors import MismatchError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.torch_backend.calls import CALL_BYTES, DIGEST_BYTES, Call, Callers, Kinds

# Up to so many bytes every rank reduces the whole vector itself, in one round.
WHOLE_BYTES = 64 << 10
_PARITIES = 2
# Most bytes of a slot, also as a share of the segment, which has room for many groups.
_SLOT_BYTES = 4 << 20
_SHARE_OF_SEGMENT = 512
_PAGE = 4096
# A word that announces a round: the round's number, then the number of the kind of call.
_KIND_BITS = 16
# Number of the last round for a rank that has left.
_FOREVER = 1 << 62


class NodeSlots(Callers):
    """Slots of the ranks of a group, and the round that each rank has reached.

    In a round a rank, in this order,

    1. waits until all have read the round two before (``opened``), and writes its slot;
    2. announces that (``announce``), and waits for the others to do so (``seen``);
    3. reads their slots, and may store a result in a slot, announce it (``made``) and wait for theirs
       (``all_made``);
    4. announces that it has read the round (``read``).

    A wait is a look that is repeated. The announcements are written out three times: a small all-reduce takes
    a few microseconds, and each call of Python is a part of these.

    The word that announces a round has the number of the kind of call of its rank. A rank that sees another
    number raises ``MismatchError``; all ranks do, since each sees the first word of every rank's call. Kinds
    without a number are compared by their digests.

    Collective over ``ranks``, which all reach each other's memory, to construct; blocking.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str) -> None:
        super().__init__(manager, ranks, name)
        self.crowded = manager.segment.crowded
        room = min(_SLOT_BYTES, manager.segment.nbytes // _SHARE_OF_SEGMENT)
        self.slot_bytes = max(_PAGE, room // _PAGE * _PAGE)
        self._table = CALL_BYTES + 16 * self.size
        self._table += -self._table % 64
        nbytes = _PARITIES * (self._table + self.slot_bytes)
        label = f"process group {name}"
        self.memory = manager.get_segment_buffer(nbytes, 4 * self.size, label)
        others = [rank for rank in self.ranks if rank != manager.rank]
        plan, terms = fingerprint("rounds", self.ranks), f"ranks={self.ranks}\nslots={self.slot_bytes}"
        remotes = self.memory.exchange(others, label, plan, terms=terms)
        remotes[manager.rank] = self.memory.here
        everyone = [remotes[rank] for rank in self.ranks]
        memories = [remote.direct(np.uint8, nbytes, 0) for remote in everyone]
        self._memories = [memory for memory in memories if memory is not None]
        self._mine = self._memories[self.me].data
        size, me = self.size, self.me
        # Words that this rank reads, and words of others that it writes: the last round that was shown, even
        # or odd, the last that was read, and the last whose results are stored.
        self.words = self.memory.flags
        self.others = [at for at in range(size) if at != me]
        flags = [remote.flags for remote in everyone]
        self.peer_words = [words for at in self.others if (words := flags[at]) is not None]
        even, odd, self._read_at, self._made_at = ([k * size + at for at in self.others] for k in range(4))
        self._shown_at = even, odd
        self._my_shown, self._my_read, self._my_made = (me, size + me), 2 * size + me, 3 * size + me
        self._tables = [
            [m[k * self._table :][: self._table] for k in range(_PARITIES)] for m in self._memories
        ]
        self._slots: dict[np.dtype[Any], list[list[Array]]] = {}
        # None where no fence is needed.
        self._fence, self._acquire = manager.segment.store_fence, manager.segment.load_fence
        self.number, self._kinds = 0, Kinds()
        # First round of the call under way, the number of its kind, and the calls that the tables hold. All
        # ranks have read all rounds up to ``_past``.
        self._first = self._kind = self._past = 0
        self._written: list[Call | None] = [None] * _PARITIES
        self._closed = False
        # The words that the last look found too small, and what it looked for.
        self._awaited: tuple[Sequence[int], int] = (), 0

    def slots(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """For even and for odd rounds everyone's slots, as arrays of a type; kept."""
        found = self._slots.get(dtype)
        if found is None:
            begins = [_PARITIES * self._table + k * self.slot_bytes for k in range(_PARITIES)]
            found = self._slots[dtype] = [
                [memory[begin : begin + self.slot_bytes].view(dtype) for memory in self._memories]
                for begin in begins
            ]
        return found

    def numbers(self, number: int, position: int) -> Array:
        """Table of integers, two for each rank, that a rank shows in a round beside its data."""
        table = self._tables[position][number & 1]
        return table[CALL_BYTES : CALL_BYTES + 16 * self.size].view(np.int64)

    def opened(self) -> bool:
        """Begin the next round if all ranks have read the round two before; return whether it has begun."""
        number = self.number + 1
        before = number - _PARITIES
        if before > self._past and not self._reached(self._read_at, before):
            return False
        self.number = number
        return True

    def announce(self, number: int, first: bool) -> None:
        """Announce to all ranks this rank's data of a round; ``first`` of a call, or a later one."""
        parity = number & 1
        if first:
            call = self.call
            self._first, self._kind = number, self._kinds.number_of(call.digest, 0)
            if self._written[parity] is not call:
                begin = parity * self._table
                self._mine[begin : begin + len(call.encoded)] = call.encoded
                self._written[parity] = call
        word, value = self._my_shown[parity], number << _KIND_BITS | self._kind
        if self._fence is not None:
            self._fence()
        for words in self.peer_words:
            words[word] = value

    def seen(self, number: int) -> bool:
        """Whether the data of all ranks are there; ``MismatchError`` if a rank makes another call."""
        words, value = self.words, number << _KIND_BITS | self._kind
        places = self._shown_at[number & 1]
        for at in places:
            word = words[at]
            if word != value:
                if word >> _KIND_BITS < number:
                    self._awaited = places, number << _KIND_BITS
                    return False
                raise self._differs(number, at)
        if self._acquire is not None:
            self._acquire()
        if number == self._first:
            if not self._kind:
                self._compare(number)
            self._past = number - 1
        return True

    def made(self, number: int) -> None:
        """Announce to all ranks that this rank's results of a round can be read."""
        if self._fence is not None:
            self._fence()
        word = self._my_made
        for words in self.peer_words:
            words[word] = number

    def all_made(self, number: int) -> bool:
        """Whether the results of all ranks of a round can be read."""
        if not self._reached(self._made_at, number):
            return False
        if self._acquire is not None:
            self._acquire()
        return True

    def read(self, number: int) -> None:
        """Announce to all ranks that this one has read a round."""
        if self._fence is not None:
            self._fence()
        word = self._my_read
        for words in self.peer_words:
            words[word] = number

    def leave(self) -> None:
        """Announce to all ranks that this one reads and writes their memory no more."""
        self.read(_FOREVER)

    def left(self) -> bool:
        """Whether all others have left, so that this rank's memory can be freed."""
        words = self.words
        return all(words[at] == _FOREVER for at in self._read_at)

    def close(self, resting: Callable[[], bool]) -> None:
        """Leave once this rank is ``resting``, then free the memory once all have left; local, idempotent.

        Until all ranks have left, they may write to each other, also after a call that some of them did not
        make. So nobody writes to a rank whose memory is free.
        """
        has_left = False

        def all_left() -> bool:
            nonlocal has_left
            if not has_left and resting():
                has_left = True
                self.leave()
            return has_left and self.left()

        if not self._closed:
            self._closed = True
            all_left()
            self.manager.retire(self.memory, all_left)

    def _reached(self, places: Sequence[int], value: int) -> bool:
        # Whether words of all others are as large as this.
        words = self.words
        for at in places:
            if words[at] < value:
                self._awaited = places, value
                return False
        return True

    def late(self) -> tuple[int, ...]:
        """Ranks that the call waits for: those that had not reached what the last look was for."""
        places, value = self._awaited
        return tuple(self.ranks[at % self.size] for at in places if self.words[at] < value)

    def _compare(self, number: int) -> None:
        # Kinds without a number are compared by digest. If this rank agrees with all others, they agree with
        # each other.
        for at in self._shown_at[number & 1]:
            theirs = self._tables[at % self.size][number & 1][:DIGEST_BYTES].tobytes()
            if theirs != self.call.digest:
                raise self._differs(number, at)
        self._kinds.agree(self.call)

    def _differs(self, number: int, at: int) -> MismatchError:
        position = at % self.size
        return self.mismatch(position, self._tables[position][number & 1].tobytes())
