"""Collectives of a group with several ranks on several nodes: by way of a rank of each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl_rma.process_group.collectives.between_nodes import TURN_BYTES, WideCollectives
from distdl_rma.process_group.collectives.calls import Call
from distdl_rma.process_group.collectives.on_node import NodeCollectives
from distdl_rma.process_group.collectives.reducers import Reducer
from distdl_rma.process_group.collectives.rounds import Rounds
from distdl_rma.segments.messages import Messages
from distdl_rma.segments.waiting.header import WaitReason

Array = NDArray[Any]
Script = Iterator[None]


class LedCollectives(WideCollectives):
    """Scripts of collectives as of :class:`WideCollectives`, of which each element comes to a node once.

    All ranks first see by MPI that all call the same. Then the ranks of a node go in rounds, of which the
    first one, their leader, has a part in what MPI does between the leaders. What is reduced is reduced on
    each node in the order of its ranks, then in the order of the nodes, unrounded, and bitwise alike on all
    ranks. ``teams`` are the positions of the ranks of each node, and ``leaders`` is None but on leaders.
    """

    def __init__(
        self,
        messages: Messages,
        leaders: Messages | None,
        rounds: Rounds,
        teams: Sequence[tuple[int, ...]],
        me: int,
    ) -> None:
        self._rounds, self._node, self._teams = rounds, NodeCollectives(rounds), tuple(teams)
        self._team = next(at for at, team in enumerate(teams) if me in team)
        self._place = self._teams[self._team].index(me)
        # Who is led by others has nothing to do between the nodes.
        self._across = None if leaders is None else WideCollectives(leaders, self._team, rounds.name)
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
        """Give the communicator of the leaders back."""
        if self._across is not None:
            self._across.close()

    def _agree(self) -> Script:
        self._reason = super().waiting
        return super()._agree()

    def _reduce(self, x: Array, reducer: Reducer, root: int | None) -> Script:
        yield from self._agree()
        part, most = reducer.unrounded, TURN_BYTES // x.itemsize
        of_root = None if root is None else next(at for at, team in enumerate(self._teams) if root in team)
        for begin in range(0, x.size, most):
            piece = x[begin : begin + most]
            total = reducer.widened(piece, root is not None)
            yield from self._on_node(self._node.reduce(total, part, 0))
            result = piece if root in (None, self.me) else np.empty_like(piece)
            if self._across is not None:
                yield from self._across.reduced(total, part, of_root)
                if of_root in (None, self._team):
                    reducer.finish(total, result)
            if root is None or (of_root == self._team and self._teams[self._team][0] != root):
                target = result if root in (None, self.me) else None
                yield from self._from_leader(result.view(np.uint8), target)

    def reduce_scatter(self, parts: Sequence[Array], out: Array, reducer: Reducer) -> Script:
        """Reduce a part for every rank; ``out`` gets this rank's, and may be it."""
        yield from self._agree()
        part, team = reducer.unrounded, self._teams[self._team]
        most = max(1, TURN_BYTES // out.itemsize // self.size)
        for begin in range(0, max(part.size for part in parts), most):
            cut = [parts[at][begin : begin + most] for at in range(self.size)]
            total = reducer.widened(np.concatenate([cut[at] for at in self._order]), False)
            yield from self._on_node(self._node.reduce(total, part, 0))
            lengths = [cut[at].nbytes if self._across is not None else 0 for at in team]
            made = np.empty(sum(lengths), np.uint8)
            if self._across is not None:
                counts = [sum(cut[at].size for at in each) for each in self._teams]
                block = np.empty(counts[self._team], total.dtype)
                yield from self._across.reduced_part(total, counts, block, part)
                reducer.finish(block, made.view(out.dtype))
            ends = list(pairwise(np.cumsum([0, *lengths]).tolist()))
            target = out[begin : begin + most].view(np.uint8)
            outs = [target, *[target[:0]] * (len(team) - 1)]
            yield from self._on_node(self._node.deal([made[a:b] for a, b in ends], outs))

    def spread(
        self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None], reader: int | None = None
    ) -> Script:
        """Give what ranks have to all, or to one ``reader``, to whom each rank sends what it has."""
        if reader is not None:
            return super().spread(sizes, mine, outs, reader)
        filled = [at for at, size in enumerate(sizes) if size]
        if len(filled) == 1:
            return self._from_one(filled[0], mine, outs[filled[0]])
        return self._from_all(sizes, mine, outs)

    def _from_one(self, root: int, mine: Array, out: Array | None) -> Script:
        yield from self._agree()
        of_root = next(at for at, team in enumerate(self._teams) if root in team)
        data = mine if self.me == root or out is None else out
        for begin in range(0, data.size, TURN_BYTES):
            piece = data[begin : begin + TURN_BYTES]
            if of_root == self._team:
                yield from self._on_node(self._from_place(self._teams[of_root].index(root), piece, piece))
            if self._across is not None:
                yield from self._across.given(piece, of_root)
            if of_root != self._team:
                yield from self._from_leader(piece, piece)
        if out is not None and out is not data:
            out[...] = data

    def _from_all(self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None]) -> Script:
        yield from self._agree()
        most, team = TURN_BYTES // self.size, self._teams[self._team]
        for begin in range(0, max(sizes), most):
            counts = [len(range(begin, min(size, begin + most))) for size in sizes]
            of_team = [counts[at] for at in team]
            block, whole = np.empty(sum(of_team), np.uint8), np.empty(sum(counts), np.uint8)
            ends = pairwise(np.cumsum([0, *of_team]).tolist())
            places = [block[a:b] for a, b in ends]
            yield from self._on_node(self._node.spread(of_team, mine[begin : begin + most], places))
            if self._across is not None:
                yield from self._across.gathered(
                    block, whole, [sum(counts[at] for at in t) for t in self._teams]
                )
            yield from self._from_leader(whole, whole)
            self._store(whole, [counts[at] for at in self._order], [outs[at] for at in self._order], begin)

    def _from_leader(self, data: Array, out: Array | None) -> Script:
        return self._on_node(self._from_place(0, data, None if out is None else out.view(np.uint8)))

    def _from_place(self, place: int, data: Array, out: Array | None) -> Script:
        # Of one rank of this node to those that have a place for it.
        sizes = [data.size if at == place else 0 for at in range(self._node.size)]
        outs = [out if at == place else None for at in range(self._node.size)]
        return self._node.spread(sizes, data if self._place == place else data[:0], outs)

    def _on_node(self, script: Script) -> Script:
        self._reason = self._rounds.waiting
        yield from script
        if self._across is not None:
            self._reason = self._across.waiting
