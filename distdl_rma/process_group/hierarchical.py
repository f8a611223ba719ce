"""Collectives of a group with several ranks on several nodes: one rank of each node talks to others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from distdl_rma.geometry.intervals import Listed
from distdl_rma.process_group.inter_node import TURN_BYTES, InterNodeCollectives, store, window
from distdl_rma.process_group.node_slots import Call, NodeSlots
from distdl_rma.process_group.on_node import NodeCollectives
from distdl_rma.process_group.reducers import Reducer
from distdl_rma.segments.collectives.between_nodes import Messages, Plan, Script, in_pieces, slices
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.waiting.header import WaitReason


class HierarchicalCollectives(InterNodeCollectives):
    """Scripts as those of :class:`InterNodeCollectives`; each element travels to a node once.

    First all ranks compare by MPI what they call. Then the ranks of each node work in rounds; their first
    rank, the leader, also takes part in MPI's collectives of the leaders. A reduction is in the order of the
    ranks on each node, then in the order of the nodes, without rounding in between, and bitwise the same on
    all ranks. Only leaders have ``leaders``.
    """

    def __init__(
        self, messages: Messages, leaders: Messages | None, rounds: NodeSlots, layout: NodeLayout
    ) -> None:
        self._rounds, self._node = rounds, NodeCollectives(rounds)
        # Positions of the ranks of each node, and where this one is among them.
        self._teams = [tuple(map(layout.ranks.index, node)) for node in layout.nodes]
        self._team, self._place = layout.my_node, rounds.me
        # Only leaders take part between the nodes.
        self._across = None if leaders is None else InterNodeCollectives(leaders, self._team, rounds.name)
        self._order = tuple(chain.from_iterable(self._teams))
        super().__init__(messages, layout.ranks.index(layout.me), rounds.name)
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

    def _agree(self) -> Script:
        self._reason = super().waiting
        return super()._agree()

    def reduce(self, x: Array, reducer: Reducer, root: int | None) -> Script:
        """Reduce a vector in place, on all ranks if there is no root; else the others' stay as they are."""
        yield from self._agree()
        part, of_root = reducer.unrounded, None if root is None else self._team_of(root)
        turns = -(-x.size // max(1, TURN_BYTES // part.storage.itemsize))

        def plan(piece: Array) -> Plan:
            total = reducer.widened(piece, root is not None)
            yield self._on_node(self._node.reduce(total, part, 0))
            yield from ((), ()) if self._across is None else self._across.chunk(total, part, of_root)
            result = piece if root in (None, self.me) else np.empty_like(piece)
            if self._across is not None and of_root in (None, self._team):
                reducer.finish(total, result)
            if root is None or (of_root == self._team and self._teams[self._team][0] != root):
                data = result.view(np.uint8)
                yield self._from_place(0, data, data if root in (None, self.me) else None)

        yield from in_pieces(plan(x[at]) for at in slices(x.size, turns))

    def reduce_scatter(self, parts: Sequence[Array], out: Array, reducer: Reducer) -> Script:
        """Reduce a part for every rank; ``out`` gets this rank's, and may be it."""
        yield from self._agree()
        part, team = reducer.unrounded, self._teams[self._team]
        most = max(1, TURN_BYTES // out.itemsize // self.size)

        def plan(begin: int) -> Plan:
            each = [some[begin : begin + most] for some in parts]
            total = reducer.widened(np.concatenate([each[at] for at in self._order]), False)
            yield self._on_node(self._node.reduce(total, part, 0))
            lengths, made = [0] * len(team), np.empty(0, out.dtype)
            if self._across is None:
                yield ()
            else:
                counts = [sum(each[at].size for at in some) for some in self._teams]
                rows, script = self._across.exchanged(total, counts)
                yield script
                lengths = [each[at].nbytes for at in team]
                block, made = np.empty(rows.shape[1], rows.dtype), np.empty(rows.shape[1], out.dtype)
                part.reduce(list(rows), block)
                reducer.finish(block, made)
            target = out[begin : begin + most].view(np.uint8)
            outs = [target, *[target[:0]] * (len(team) - 1)]
            yield self._on_node(self._node.deal(_cut(made.view(np.uint8), lengths), outs))

        yield from in_pieces(map(plan, range(0, max(some.size for some in parts), most)))

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
        here, place = of_root == self._team, self._teams[of_root].index(root)
        data = mine if self.me == root or out is None else out

        def plan(begin: int) -> Plan:
            piece = data[begin : begin + TURN_BYTES]
            yield self._from_place(place, piece, piece) if here else ()
            yield () if self._across is None else self._across.given(piece, of_root)
            yield () if here else self._from_place(0, piece, piece)

        yield from in_pieces(map(plan, range(0, data.size, TURN_BYTES)))
        if out is not None and out is not data:
            out[...] = data

    def _from_all(self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None]) -> Script:
        yield from self._agree()
        most, team = TURN_BYTES // self.size, self._teams[self._team]
        ordered = [outs[at] for at in self._order]

        def plan(begin: int) -> Plan:
            counts = window(sizes, begin, most)
            of_team = [counts[at] for at in team]
            block, whole = np.empty(sum(of_team), np.uint8), np.empty(sum(counts), np.uint8)
            part = mine[begin : begin + most]
            yield self._on_node(self._node.spread(of_team, part, _cut(block, of_team)))
            if self._across is None:
                yield ()
            else:
                of_teams = [sum(counts[at] for at in some) for some in self._teams]
                yield self._across.gathered(block, whole, of_teams)
            yield self._from_place(0, whole, whole)
            store(whole, [counts[at] for at in self._order], ordered, begin)

        yield from in_pieces(map(plan, range(0, max(sizes), most)))

    def _team_of(self, rank: int) -> int:
        return next(at for at, team in enumerate(self._teams) if rank in team)

    def _from_place(self, place: int, data: Array, out: Array | None) -> Script:
        # Bytes from one rank of this node to those that have a target.
        sizes = [data.size if at == place else 0 for at in range(self._node.size)]
        outs = [out if at == place else None for at in range(self._node.size)]
        return self._on_node(self._node.spread(sizes, data if self._place == place else data[:0], outs))

    def _on_node(self, script: Script) -> Script:
        self._reason = self._rounds.waiting
        yield from script
        if self._across is not None:
            self._reason = self._across.waiting


def _cut(data: Array, lengths: Sequence[int]) -> list[Array]:
    # Views of vectors that lie one behind the other.
    split = Listed(tuple(lengths))
    return [data[slice(*split.interval(at))] for at in range(len(lengths))]
