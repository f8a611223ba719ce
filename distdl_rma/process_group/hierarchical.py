"""Collectives of a group with several ranks on several nodes: one rank of each node talks to others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.process_group.inter_node import TURN_BYTES, Chunk, InterNodeCollectives
from distdl_rma.process_group.node_slots import Call, NodeSlots
from distdl_rma.process_group.on_node import NodeCollectives
from distdl_rma.process_group.reducers import Reducer
from distdl_rma.segments.collectives.between_nodes import Messages, in_pieces, slices
from distdl_rma.segments.waiting.header import WaitReason

Array = NDArray[Any]
Script = Iterator[None]


class HierarchicalCollectives(InterNodeCollectives):
    """Scripts as those of :class:`InterNodeCollectives`; each element travels to a node once.

    First all ranks compare by MPI what they call. Then the ranks of each node work in rounds; their first
    rank, the leader, also takes part in MPI's collectives of the leaders. A reduction is in the order of the
    ranks on each node, then in the order of the nodes, without rounding in between, and bitwise the same on
    all ranks. ``teams`` are the positions of the ranks of each node; only leaders have ``leaders``.
    """

    def __init__(
        self,
        messages: Messages,
        leaders: Messages | None,
        rounds: NodeSlots,
        teams: Sequence[tuple[int, ...]],
        me: int,
    ) -> None:
        self._rounds, self._node, self._teams = rounds, NodeCollectives(rounds), tuple(teams)
        self._team = self._team_of(me)
        self._place = self._teams[self._team].index(me)
        # Only leaders take part between the nodes.
        self._across = None if leaders is None else InterNodeCollectives(leaders, self._team, rounds.name)
        self._order = tuple(chain.from_iterable(teams))
        super().__init__(messages, me, rounds.name)
        self._reason = super().waiting

    @property
    def call(self) -> Call:
        """What is called."""
        return self._call

    @call.setter
    def call(self, call: Call) -> None:
        self._call = self._rounds.call = call
        if self._across is not None:
            self._across.call = call

    def waiting(self) -> WaitReason:
        """Which ranks are waited for: of this node, other leaders, or all."""
        return self._reason()

    def close(self) -> None:
        """Give back the communicator of the leaders."""
        if self._across is not None:
            self._across.close()

    def _agree(self) -> Script:
        self._reason = super().waiting
        return super()._agree()

    def _reduce(self, x: Array, reducer: Reducer, root: int | None) -> Script:
        yield from self._agree()
        part, of_root = reducer.unrounded, None if root is None else self._team_of(root)
        turns = -(-x.size // max(1, TURN_BYTES // part.storage.itemsize))
        pieces = [x[at] for at in slices(x.size, turns)] if turns else []
        totals: dict[int, Array] = {}
        chunks: dict[int, Chunk] = {}

        def on_node(turn: int) -> Script:
            totals[turn] = reducer.widened(pieces[turn], root is not None)
            return self._on_node(self._node.reduce(totals[turn], part, 0))

        def exchange(turn: int) -> Script:
            if self._across is None:
                return iter(())
            chunks[turn] = self._across.chunk(totals[turn], part, of_root)
            return chunks[turn].exchange()

        def give(turn: int) -> Script:
            return iter(()) if self._across is None else chunks.pop(turn).give()

        def spread(turn: int) -> Script:
            piece, total = pieces[turn], totals.pop(turn)
            result = piece if root in (None, self.me) else np.empty_like(piece)
            if self._across is not None and of_root in (None, self._team):
                reducer.finish(total, result)
            if root is None or (of_root == self._team and self._teams[self._team][0] != root):
                target = result if root in (None, self.me) else None
                return self._from_leader(result.view(np.uint8), target)
            return iter(())

        yield from in_pieces(turns, [on_node, exchange, give, spread])

    def reduce_scatter(self, parts: Sequence[Array], out: Array, reducer: Reducer) -> Script:
        """Reduce a part for every rank; ``out`` gets this rank's, and may be it."""
        yield from self._agree()
        part, team = reducer.unrounded, self._teams[self._team]
        most = max(1, TURN_BYTES // out.itemsize // self.size)
        totals: dict[int, Array] = {}
        rows: dict[int, Array] = {}

        def cut(turn: int) -> list[Array]:
            return [parts[at][turn * most : (turn + 1) * most] for at in range(self.size)]

        def on_node(turn: int) -> Script:
            each = cut(turn)
            totals[turn] = reducer.widened(np.concatenate([each[at] for at in self._order]), False)
            return self._on_node(self._node.reduce(totals[turn], part, 0))

        def exchange(turn: int) -> Script:
            total, each = totals.pop(turn), cut(turn)
            if self._across is None:
                return iter(())
            counts = [sum(each[at].size for at in some) for some in self._teams]
            rows[turn], script = self._across.exchanged(total, counts)
            return script

        def deal(turn: int) -> Script:
            each = cut(turn)
            lengths = [each[at].nbytes if self._across is not None else 0 for at in team]
            made = np.empty(sum(lengths), np.uint8)
            if self._across is not None:
                mine = rows.pop(turn)
                block = np.empty(mine.shape[1], mine.dtype)
                part.reduce(list(mine), block)
                reducer.finish(block, made.view(out.dtype))
            ends = list(pairwise(np.cumsum([0, *lengths]).tolist()))
            target = out[turn * most : (turn + 1) * most].view(np.uint8)
            outs = [target, *[target[:0]] * (len(team) - 1)]
            return self._on_node(self._node.deal([made[a:b] for a, b in ends], outs))

        turns = -(-max(part.size for part in parts) // most)
        yield from in_pieces(turns, [on_node, exchange, deal])

    def spread(
        self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None], reader: int | None = None
    ) -> Script:
        """Copy the data of some ranks to all, or to a ``reader``; to that each rank sends its data itself."""
        if reader is not None:
            return super().spread(sizes, mine, outs, reader)
        filled = [at for at, size in enumerate(sizes) if size]
        if len(filled) == 1:
            return self._from_one(filled[0], mine, outs[filled[0]])
        return self._from_all(sizes, mine, outs)

    def _from_one(self, root: int, mine: Array, out: Array | None) -> Script:
        yield from self._agree()
        of_root = self._team_of(root)
        data = mine if self.me == root or out is None else out
        turns = -(-data.size // TURN_BYTES)

        def piece(turn: int) -> Array:
            found: Array = data[turn * TURN_BYTES : (turn + 1) * TURN_BYTES]
            return found

        def on_node(turn: int) -> Script:
            if of_root != self._team:
                return iter(())
            place = self._teams[of_root].index(root)
            return self._on_node(self._from_place(place, piece(turn), piece(turn)))

        def across(turn: int) -> Script:
            return iter(()) if self._across is None else self._across.given(piece(turn), of_root)

        def spread(turn: int) -> Script:
            return iter(()) if of_root == self._team else self._from_leader(piece(turn), piece(turn))

        yield from in_pieces(turns, [on_node, across, spread])
        if out is not None and out is not data:
            out[...] = data

    def _from_all(self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None]) -> Script:
        yield from self._agree()
        most, team = TURN_BYTES // self.size, self._teams[self._team]
        blocks: dict[int, Array] = {}
        wholes: dict[int, Array] = {}

        def counted(turn: int) -> list[int]:
            begin = turn * most
            return [len(range(begin, min(size, begin + most))) for size in sizes]

        def on_node(turn: int) -> Script:
            counts = counted(turn)
            of_team = [counts[at] for at in team]
            block = blocks[turn] = np.empty(sum(of_team), np.uint8)
            places = [block[a:b] for a, b in pairwise(np.cumsum([0, *of_team]).tolist())]
            part = mine[turn * most : (turn + 1) * most]
            return self._on_node(self._node.spread(of_team, part, places))

        def across(turn: int) -> Script:
            counts, block = counted(turn), blocks.pop(turn)
            wholes[turn] = np.empty(sum(counts), np.uint8)
            if self._across is None:
                return iter(())
            of_teams = [sum(counts[at] for at in some) for some in self._teams]
            return self._across.gathered(block, wholes[turn], of_teams)

        def spread(turn: int) -> Script:
            return self._from_leader(wholes[turn], wholes[turn])

        def store(turn: int) -> Script:
            counts = counted(turn)
            ordered = [counts[at] for at in self._order], [outs[at] for at in self._order]
            self._store(wholes.pop(turn), *ordered, turn * most)
            return iter(())

        yield from in_pieces(-(-max(sizes) // most), [on_node, across, spread, store])

    def _team_of(self, rank: int) -> int:
        return next(at for at, team in enumerate(self._teams) if rank in team)

    def _from_leader(self, data: Array, out: Array | None) -> Script:
        return self._on_node(self._from_place(0, data, None if out is None else out.view(np.uint8)))

    def _from_place(self, place: int, data: Array, out: Array | None) -> Script:
        # From one rank of this node to those that have a target.
        sizes = [data.size if at == place else 0 for at in range(self._node.size)]
        outs = [out if at == place else None for at in range(self._node.size)]
        return self._node.spread(sizes, data if self._place == place else data[:0], outs)

    def _on_node(self, script: Script) -> Script:
        self._reason = self._rounds.waiting
        yield from script
        if self._across is not None:
            self._reason = self._across.waiting
