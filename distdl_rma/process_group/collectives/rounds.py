"""Rounds: how the ranks of a group on one node show each other data, in memory of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distdl_rma.errors import MismatchError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.waiting.header import WaitReason, clip

Array = NDArray[Any]

# Up to so many bytes everyone reduces everything itself, in one round.
WHOLE_BYTES = 64 << 10
_PARITIES = 2
_TEXT_BYTES = 256
# What a rank shows the others in one round at most: a rank that shares its core with others waits for them in
# each. And of a segment, so that there is room for many groups.
_SLOT_BYTES = 4 << 20
_SHARE_OF_SEGMENT = 512
_PAGE = 4096
# A word that announces a round: its number, then a part of the fingerprint of what is called.
_PRINT_BITS = 24
_PRINT = (1 << _PRINT_BITS) - 1


class Call(NamedTuple):
    """What a rank calls, alike on all ranks of the group: as a text, and as the end of a word."""

    text: str
    encoded: bytes
    print: int

    @classmethod
    def of(cls, text: str, *facts: object) -> Call:
        """Call that reads so in messages; ``facts``, more than can be read, are alike on all ranks too."""
        return cls(text, clip(text, _TEXT_BYTES - 1) + b"\0", fingerprint(text, *facts) & _PRINT)

    @classmethod
    def refused(cls, what: str, error: BaseException) -> Call:
        """In place of a call that a rank refuses, whatever its reason: the same where all refuse it."""
        return cls.of(f"nothing, since it refuses {error}")._replace(
            print=fingerprint("refused", what) & _PRINT
        )


class Views(NamedTuple):
    """Memory of all ranks by position, twice each, for even and odd rounds, as elements of one type."""

    shown: list[tuple[Array, Array]]
    reduced: list[tuple[Array, Array]]


class Rounds:
    """Memory of the ranks of a group, and how far each of them is.

    In a round every rank shows something in its slot of the round's parity, says so to all, reads what the
    others show, and says that it has read. A slot is written again two rounds later, once all have read it.
    What is reduced lies beside the slots: it is written again two rounds later as well, by a rank that knows
    from the others' next word that they are through with it.

    The word that announces a round carries a fingerprint of what its rank calls: who sees another one raises
    ``MismatchError``, on all ranks, since all ranks see the first word of a call of all.

    Collective over ``ranks`` to construct, blocking.
    """

    def __init__(self, manager: SegmentManager, ranks: Sequence[int], name: str) -> None:
        self.manager, self.ranks, self.name = manager, tuple(ranks), name
        self.size, self.me = len(self.ranks), self.ranks.index(manager.rank)
        room = min(_SLOT_BYTES, manager.segment.nbytes // _SHARE_OF_SEGMENT)
        self.slot_bytes = max(_PAGE, room // _PAGE * _PAGE)
        self._table = _PARITIES * (_TEXT_BYTES + 16 * self.size + 64)
        self._table += -self._table % 64
        # What one rank reduces is a part of a slot.
        self._reduced_bytes = -(-self.slot_bytes // self.size // 64) * 64
        nbytes = self._table + _PARITIES * (self.slot_bytes + self._reduced_bytes)
        label = f"process group {name}"
        self.memory = manager.get_segment_buffer(nbytes, 3 * self.size, label)
        others = [rank for rank in self.ranks if rank != manager.rank]
        remotes = {}
        if others:
            plan = fingerprint("rounds", self.ranks)
            terms = f"ranks={self.ranks}\nslots={self.slot_bytes}"
            remotes = self.memory.exchange(others, label, plan, terms=terms)
        remotes[manager.rank] = self.memory.here
        everyone = [remotes[rank] for rank in self.ranks]
        memories = [remote.direct(np.uint8, nbytes, 0) for remote in everyone]
        self._memories = [memory for memory in memories if memory is not None]
        self._mine = self._memories[self.me].data
        size, me = self.size, self.me
        # Words that this rank reads, and those of others that it writes: of even rounds, of odd ones, read.
        self.words = self.memory.flags
        self.others = [at for at in range(size) if at != me]
        flags = [remote.flags for remote in everyone]
        self.peer_words = [words for at in self.others if (words := flags[at]) is not None]
        self.ready_at = tuple([(at, k * size + at) for at in self.others] for k in range(_PARITIES))
        self.read_at = [2 * size + at for at in self.others]
        self.my_ready, self.my_read = (me, size + me), 2 * size + me
        self._tables = [
            [m[k * self._table // 2 :][: self._table // 2] for k in range(_PARITIES)] for m in self._memories
        ]
        self._views: dict[np.dtype[Any], Views] = {}
        self._fence, self._acquire = manager.segment.fence, manager.segment.acquire
        self.number = 0
        self.call = Call.of("nothing")
        self._late: tuple[int, ...] = ()

    def views(self, dtype: np.dtype[Any]) -> Views:
        """Everyone's slots as arrays of a type; kept."""
        found = self._views.get(dtype)
        if found is None:
            sizes = [self.slot_bytes] * _PARITIES + [self._reduced_bytes] * _PARITIES
            ends = list(accumulate(sizes, initial=self._table))
            places = list(pairwise(ends))
            cut = [[memory[a:b].view(dtype) for a, b in places] for memory in self._memories]
            found = Views([(c[0], c[1]) for c in cut], [(c[2], c[3]) for c in cut])
            self._views[dtype] = found
        return found

    def numbers(self, number: int, position: int) -> Array:
        """Integers, two for each rank, that a rank shows in a round beside its data."""
        begin = _TEXT_BYTES
        table = self._tables[position][number & 1]
        found: Array = table[begin : begin + 16 * self.size].view(np.int64)
        return found

    def free(self, number: int) -> bool:
        """Whether all ranks are through with the round two before; then the slots can be written."""
        words, before = self.words, number - _PARITIES
        for at in self.read_at:  # noqa: SIM110
            if words[at] < before:
                return False
        return True

    def opened(self) -> Iterator[None]:
        """Wait until the next round can begin, and begin it."""
        number = self.number + 1
        while not self.free(number):
            words, before = self.words, number - _PARITIES
            self._late = tuple(self.ranks[at - 2 * self.size] for at in self.read_at if words[at] < before)
            yield
        self.number = number

    def announce(self, number: int, first: bool) -> None:
        """Tell all ranks that this one shows what it shows in a round."""
        if first:
            begin = (number & 1) * self._table // 2
            encoded = self.call.encoded
            self._mine[begin : begin + len(encoded)] = encoded
        word, value = self.my_ready[number & 1], number << _PRINT_BITS | self.call.print
        self._fence()
        for words in self.peer_words:
            words[word] = value

    def shown(self, number: int, position: int) -> bool:
        """Whether a rank shows what it has for a round; ``MismatchError`` if that is of another call."""
        word = self.words[(number & 1) * self.size + position]
        if word == number << _PRINT_BITS | self.call.print:
            return True
        if word >> _PRINT_BITS >= number:
            raise self._mismatch(number, position)
        return False

    def all_shown(self, number: int) -> bool:
        """Whether all ranks do."""
        words, value = self.words, number << _PRINT_BITS | self.call.print
        for position, at in self.ready_at[number & 1]:
            if words[at] != value and not self.shown(number, position):
                return False
        self._acquire()
        return True

    def seen(self, number: int, positions: Sequence[int] | None = None) -> Iterator[None]:
        """Wait until some ranks, all of them if None, show what they have for a round."""
        asked = self.others if positions is None else [at for at in positions if at != self.me]
        while True:
            late = [at for at in asked if not self.shown(number, at)]
            if not late:
                break
            self._late = tuple(self.ranks[at] for at in late)
            yield
            asked = late
        self._acquire()

    def read(self, number: int) -> None:
        """Tell all ranks that this one has read what they showed in a round."""
        self._fence()
        word = self.my_read
        for words in self.peer_words:
            words[word] = number

    def all_read(self, number: int) -> Iterator[None]:
        """Wait until all ranks have read a round, and what they reduced in it can be read."""
        words = self.words
        late = [at for at in self.read_at if words[at] < number]
        while late:
            self._late = tuple(self.ranks[at - 2 * self.size] for at in late)
            yield
            late = [at for at in late if words[at] < number]
        self._acquire()

    def waiting(self) -> WaitReason:
        """Which ranks the round waits for."""
        what = f"in {self.call.text} of group {self.name!r}"
        return WaitReason(self._late, what, "did every rank make the same calls?")

    def idle(self) -> bool:
        """Whether no rank writes here any more: all have read the last round of this one."""
        words, number = self.words, self.number
        return all(words[at] >= number for at in self.read_at)

    def _mismatch(self, number: int, position: int) -> MismatchError:
        table = self._tables[position][number & 1]
        theirs = table[:_TEXT_BYTES].tobytes().partition(b"\0")[0].decode(errors="replace")
        return MismatchError(
            f"group {self.name!r}: rank {self.ranks[self.me]} calls {self.call.text}, but rank"
            f" {self.ranks[position]} calls {theirs}: all ranks of a group make the same calls in the same"
            " order, with tensors of the same sizes and types"
        )
