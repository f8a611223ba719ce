"""Collectives of a group whose ranks share a node, by load and store in rounds.

A slot has a part for each rank. A long vector of three ranks, of which two rounds are needed::

    vector of each rank      | 0 | 1 | 2 | 0 | 1 | 2 |     which rank reduces the part
                             '- round 1 -'- round 2 -'
    slot of rank 0           | . | 1 | 2 |                 shows others what they reduce
    slot of rank 1           | 0 | . | 2 |
    slot of rank 2           | 0 | 1 | . |

Rank 0 reduces its own part 0 with those in the slots of 1 and 2, stores the result where its own slot has a
gap (of two ranks, in the place of the part that the other one has read), and announces it; the others copy it
from there. So each element is reduced once, by one rank, and each rank does an equal part of the work. Rounds
overlap, since slots have two parities::

    turn       1          2               3               4
    show       round 1    round 2         round 3
    take                  from round 1    from round 2    from round 3

A vector of up to ``WHOLE_BYTES`` is cheaper to reduce whole, by every rank: that saves a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from distdl_rma.segments.collectives.between_nodes import Script
from distdl_rma.segments.collectives.reduction import Array, Reduction
from distdl_rma.segments.large_arrays import LARGE_NBYTES, copy, number_of_threads
from distdl_rma.torch_backend.node_slots import WHOLE_BYTES, NodeSlots

# Two slots of so many bytes fit into the cache of a core. But a rank that shares its core with other
# processes waits for its turn in each round: long vectors take few rounds.
_CACHED_BYTES, _ROUNDS = 256 << 10, 16
_BYTE = np.dtype(np.uint8)


class NodeCollectives:
    """Scripts of collectives, which yield as long as they have to wait; one at a time.

    Data are flat arrays, of bytes where nothing is reduced, by position of the ranks. All ranks call the same
    script with the same sizes, where nothing else is said: each computes from these how many rounds there
    are. A script ends when this rank has what it gets; others may still read its slots, which the next rounds
    wait for.
    """

    def __init__(self, rounds: NodeSlots) -> None:
        self.rounds, self.size, self.me = rounds, rounds.size, rounds.me
        # In whose slot the result of the rank at each position lies: in its own, where it shows nothing to
        # itself. Of two ranks, in place of the data that the other one showed: the cache has these already.
        self.places = [1, 0] if self.size == 2 else list(range(self.size))

    def piece(self, nbytes: int, parts: int) -> int:
        """Most bytes of a part in one round, of so many parts with ``nbytes`` each."""
        room = self.rounds.slot_bytes // parts // 8 * 8
        return room if self.rounds.crowded else min(room, max(_CACHED_BYTES, nbytes // _ROUNDS // 8 * 8))

    def barrier(self) -> Script:
        """Wait for all."""
        rounds = self.rounds
        while not rounds.opened():
            yield
        number = rounds.number
        rounds.announce(number, True)
        while not rounds.seen(number):
            yield
        rounds.read(number)

    def reduce(self, x: Array, reducer: Reduction, root: int | None) -> Script:
        """Reduce a vector in place, on all ranks if there is no root; else the others' stay as they are."""
        return self.reduce_cut(Cuts(self, x, reducer), root)

    def reduce_cut(self, cuts: Cuts, root: int | None = None, _owner: object = None) -> Script:
        """As ``reduce``, of a vector that has been cut; the script keeps the owner of the vector's memory."""
        rounds, wanted = self.rounds, root in (None, self.me)

        def show(turn: int, _: Array) -> None:
            for shown in cuts[turn, rounds.number & 1].show:
                shown()

        def take(turn: int, number: int, _: Sequence[Array]) -> Script:
            cut = cuts[turn, number & 1]
            if wanted or not cuts.whole:
                cut.reduce()
            if not cuts.whole:
                rounds.made(number)
                if wanted:
                    cut.own()
                    while not rounds.all_made(number):
                        yield
                    for taken in cut.take:
                        taken()

        return self._in_turns(cuts.turns, rounds.slots(_BYTE), show, take)

    def reduce_scatter(self, parts: Sequence[Array], out: Array, reducer: Reduction) -> Script:
        """Reduce a part for every rank; ``out`` gets this rank's, and may be it."""
        me, most = self.me, self.rounds.slot_bytes // out.itemsize // self.size
        turns = max(1, -(-max(part.size for part in parts) // most))

        def show(turn: int, slot: Array) -> None:
            self._show(slot, parts, turn * most, most)

        def take(turn: int, _: int, shown: Sequence[Array]) -> None:
            begin = turn * most
            target = out[begin : begin + most]
            rows = [slot[me * most : me * most + target.size] for slot in shown]
            rows[me] = parts[me][begin : begin + most]
            reducer.reduce(rows, target)

        return self._in_turns(turns, self.rounds.slots(out.dtype), show, take)

    def spread(
        self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None], reader: int | None = None
    ) -> Script:
        """Copy data of some ranks to those with targets: the ``sizes``, this rank's data, and the targets."""
        me, most = self.me, self.piece(max(sizes), 1)
        turns = max(1, -(-max(sizes) // most))

        def show(turn: int, slot: Array) -> None:
            shown = mine[turn * most : (turn + 1) * most]
            if shown.size and self.size > 1:
                copy(slot[: shown.size], shown)

        def take(turn: int, _: int, shown: Sequence[Array]) -> None:
            begin = turn * most
            for position in self.rounds.others:
                out = outs[position]
                if out is not None and begin < out.size:
                    target = out[begin : begin + most]
                    copy(target, shown[position][: target.size])

        yield from self._in_turns(turns, self.rounds.slots(_BYTE), show, take)
        own = outs[me]
        if own is not None and not _same_memory(own, mine):
            copy(own, mine)

    def deal(self, sends: Sequence[Array], outs: Sequence[Array]) -> Script:
        """Give each rank what this one has for it; ``outs`` takes what every rank has for this one.

        Only here sizes differ between ranks. The first round shows these beside the data: all ranks check
        them, and know how many rounds follow.
        """
        rounds, me, size = self.rounds, self.me, self.size
        slots, most = rounds.slots(_BYTE), rounds.slot_bytes // size // 8 * 8
        while not rounds.opened():
            yield
        number = rounds.number
        lengths = rounds.numbers(number, me)
        lengths[:size] = [send.size for send in sends]
        lengths[size:] = [out.size for out in outs]

        def show(turn: int, slot: Array) -> None:
            self._show(slot, sends, turn * most, most)

        def take(turn: int, _: int, shown: Sequence[Array]) -> None:
            begin = turn * most
            for position in rounds.others:
                target = outs[position][begin : begin + most]
                if target.size:
                    copy(target, shown[position][me * most : me * most + target.size])

        show(0, slots[number & 1][me])
        rounds.announce(number, True)
        while not rounds.seen(number):
            yield
        table = np.stack([rounds.numbers(number, position) for position in range(size)])
        rounds.check_pairs(table[:, :size], table[:, size:].T)
        turns = max(1, -(-int(table.max()) // most))
        yield from self._in_turns(turns, slots, show, take, [number])
        if not _same_memory(outs[me], sends[me]):
            copy(outs[me], sends[me])

    def _in_turns(
        self,
        turns: int,
        slots: Sequence[Sequence[Array]],
        show: Callable[[int, Array], None],
        take: Callable[[int, int, Sequence[Array]], Script | None],
        begun: Sequence[int] = (),
    ) -> Script:
        """One round for each part: a rank shows the next part in its slot, then takes from the one before.

        ``take`` gets the number of the round, and everyone's slots. ``begun`` are the numbers of the rounds
        of the first parts, if these are shown already.
        """
        rounds, numbers = self.rounds, [*begun]
        for turn in range(len(numbers), turns + 1):
            if turn < turns:
                while not rounds.opened():
                    yield
                numbers.append(rounds.number)
                show(turn, slots[rounds.number & 1][self.me])
                rounds.announce(rounds.number, turn == 0)
            if turn:
                number = numbers[turn - 1]
                while not rounds.seen(number):
                    yield
                yield from take(turn - 1, number, slots[number & 1]) or ()
                rounds.read(number)

    def _show(self, slot: Array, sends: Sequence[Array], begin: int, most: int) -> None:
        for position in self.rounds.others:
            shown = sends[position][begin : begin + most]
            if shown.size:
                copy(slot[position * most : position * most + shown.size], shown)


class Cut(NamedTuple):
    """What a rank does with a vector in one round: functions without arguments, most of them copies.

    It shows the others' parts in its slot and reduces its own part. Then it copies its own result into the
    vector, and takes those of the others.
    """

    show: list[Callable[[], object]]
    reduce: Callable[[], object]
    own: Callable[[], object]
    take: list[Callable[[], object]]


class Cuts(dict[tuple[int, int], Cut]):
    """A vector that is reduced, cut for its rounds, by turn and parity of the round.

    Each entry is made at its first use, and kept: a training loop reduces the same vectors in each step, and
    would slice arrays each time.
    """

    def __init__(self, node: NodeCollectives, x: Array, reducer: Reduction) -> None:
        super().__init__()
        self.node, self._x, self._reducer = node, x, reducer
        slot_bytes, size = node.rounds.slot_bytes, node.size
        # Whether every rank reduces the whole vector.
        self.whole = x.nbytes <= min(WHOLE_BYTES, slot_bytes)
        most = x.size if self.whole else node.piece(x.nbytes // size, size) // x.itemsize * size
        self.turns = -(-x.size // most) if most else 1
        self._share = -(-x.size // (self.turns * size))

    def __missing__(self, key: tuple[int, int]) -> Cut:
        turn, parity = key
        node, x = self.node, self._x
        me, size, slots = node.me, node.size, node.rounds.slots(x.dtype)[parity]
        if self.whole:
            rows = [slot[: x.size] for slot in slots]
            shown, rows[me] = _copying(rows[me], x), x
            cut = Cut([shown], self._reducer.bound(rows, x), bool, [])
        else:
            share = self._share
            parts = [x[(turn * size + at) * share :][:share] for at in range(size)]

            def place(position: int, part: int) -> Array:
                return slots[position][part * share :][: parts[part].size]

            made = [place(node.places[at], at) for at in range(size)]
            rows = [parts[me] if at == me else place(at, me) for at in range(size)]
            others = node.rounds.others
            cut = Cut(
                [_copying(place(me, at), parts[at]) for at in others],
                self._reducer.bound(rows, made[me]),
                _copying(parts[me], made[me]),
                [_copying(parts[at], made[at]) for at in others],
            )
        self[key] = cut
        return cut


def _copying(target: Array, source: Array) -> Callable[[], object]:
    # By numpy's method itself, unless there are several threads: ``copy`` is a call of Python more.
    if target.nbytes >= LARGE_NBYTES and number_of_threads() > 1:
        return partial(copy, target, source)
    return partial(target.__setitem__, ..., source)


def _same_memory(a: Array, b: Array) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])
