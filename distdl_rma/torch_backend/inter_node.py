"""Collectives of a group on several nodes: rounds of the ranks of a node, and MPI between nodes.

A collective has three phases, as here an all-reduce of five ranks on two nodes. Ranks 0 and 3 are leaders::

    node 0                                   node 1
    0   1   2                                3   4
    0 <-+---+   rounds: the node's sum       3 <-+
    0 <===================================>  3       MPI: each leader sums a share, all get the result
    0 --+-->+   rounds: the result           3 --+

A vector goes through them in turns of ``TURN_BYTES``, as a pipeline: while one turn is between the nodes, the
next one is in the rounds of each node, since the first phase of a turn does not wait for the last phase of
the turn before. Each phase is a *stage* of the generator of a turn (``in_pieces`` in
``segments/collectives/between_nodes.py``). A rank that has no part in a phase yields an empty stage, ``()``:
all ranks have the same number of stages, so that all call MPI's collectives in the same order.

A handle of ``segments/collectives/allreduce.py`` has the same three phases. But its sum between nodes is
MPI's reduce-scatter: fewer messages, and MPI chooses the order, the type that travels, and the minimum of a
NaN. Here the order is that of the ranks of a node, then of the nodes, for every length, and a NaN stays one.
So the two share the pipeline, and not what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain

import numpy as np

from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.segments.collectives.between_nodes import Messages, Script, Stages, in_pieces, slices
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.segments.collectives.reduction import Array, Reduction
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.torch_backend.calls import CALL_BYTES, DIGEST_BYTES, Callers
from distdl_rma.torch_backend.node_slots import NodeSlots
from distdl_rma.torch_backend.on_node import NodeCollectives

# Bytes of all ranks in one turn of a long vector. While one turn travels, the one before is reduced or
# stored: the memory beside the tensors is a few times this.
TURN_BYTES = 8 << 20
_BYTE = np.dtype(np.uint8)


class InterNodeCollectives(Callers):
    """Scripts as those of :class:`NodeCollectives`; each element travels to a node once.

    ``compare`` comes before each of them: by MPI all ranks compare what they call. Then the ranks of each
    node work in rounds; their first rank, the leader, also takes part in MPI's collectives of the leaders. A
    rank alone on its node has no rounds. A reduction is in the order of the ranks on each node, then in the
    order of the nodes, without rounding in between, and bitwise the same on all ranks. ``messages`` are those
    of all ranks. Collective to construct, blocking.
    """

    def __init__(self, manager: SegmentManager, messages: Messages, layout: NodeLayout, name: str) -> None:
        super().__init__(manager, layout.ranks, name)
        self._messages = messages
        # Positions of the ranks of each node.
        self._teams = [tuple(map(layout.ranks.index, node)) for node in layout.nodes]
        # Between nodes vectors lie in the order of the nodes, and there in the order of the ranks.
        self._team, self._order = layout.my_node, tuple(chain.from_iterable(self._teams))
        self._mine = self._teams[self._team]
        self.rounds = NodeSlots(manager, layout.here, name) if len(layout.here) > 1 else None
        self._node = NodeCollectives(self.rounds) if self.rounds is not None else None
        # Whether each rank is alone on its node: there are no partial results, which would need a wider type.
        self._flat = len(self._teams) == self.size
        # Only leaders take part between the nodes.
        self._across: Messages | None = None
        heads = layout.leaders(self.ranks[0])
        if self._flat:
            self._across = messages
        elif layout.me in heads:
            self._across = Messages(manager, heads, f"leaders of process group {name}")
            self._across.connect()
        # Whose messages are waited for, or the rounds, which know of whom.
        self._asked: Messages | NodeSlots = messages

    def late(self) -> tuple[int, ...]:
        """Ranks that are waited for, as far as this one knows: of this node, other leaders, or all."""
        if isinstance(self._asked, NodeSlots):
            return self._asked.late()
        return tuple(rank for rank in self._asked.ranks if rank != self.ranks[self.me])

    def close(self) -> None:
        """Give the communicator of the leaders back; local."""
        if self._across is not None:
            self._across.close()

    def compare(self) -> Script:
        """All ranks make the same call, or all raise ``MismatchError``; waits for all."""
        self._asked = self._messages
        if self.rounds is not None:
            self.rounds.call = self.call
        row = np.frombuffer(self.call.digest, np.int64)
        table = np.empty((self.size, row.size), np.int64)
        yield from self._messages.gather_all(row, table.reshape(-1), [DIGEST_BYTES] * self.size)
        others = (table != row).any(1)
        if others.any():
            # Only now the texts, which are ten times as long. If one rank differs from another, then every
            # rank differs from some rank, and comes here too.
            encoded = np.zeros(CALL_BYTES, _BYTE)
            encoded[: len(self.call.encoded)] = np.frombuffer(self.call.encoded, _BYTE)
            all_encoded = np.empty((self.size, CALL_BYTES), _BYTE)
            yield from self._messages.gather_all(encoded, all_encoded.reshape(-1), [CALL_BYTES] * self.size)
            other = int(np.argmax(others))
            raise self.mismatch(other, all_encoded[other].tobytes())

    def barrier(self) -> Script:
        """Nothing more: ``compare`` has waited for all."""
        return iter(())

    def reduce(self, x: Array, reducer: Reduction, root: int | None) -> Script:
        """Reduce a vector in place, on all ranks if there is no root; else the others' stay as they are."""
        of_root = None if root is None else self._team_of(root)
        turns = -(-x.size // max(1, TURN_BYTES // self._unfinished(reducer).element.storage.itemsize))

        def stages(piece: Array) -> Stages:
            total = self._widened(reducer, piece, root is not None)
            counts = Balanced(piece.size, len(self._teams)).lengths
            made = yield from self._summed(total, counts, reducer)
            result = piece if root in (None, self.me) else np.empty_like(piece)
            sizes = [count * piece.itemsize for count in counts]
            if self._across is None:
                yield ()
            elif of_root is None:
                yield self._across.gather_all(made, result, sizes)
            else:
                yield self._across.gather(made, result, sizes, of_root)
            # A root that leads its node has it already.
            wanted = root is None or (of_root == self._team and self._mine[0] != root)
            data = result.view(_BYTE)
            out = data if root in (None, self.me) else None
            yield self._from_place(0, data, out) if wanted else ()

        return in_pieces(stages(x[at]) for at in slices(x.size, turns))

    def reduce_scatter(self, parts: Sequence[Array], out: Array, reducer: Reduction) -> Script:
        """Reduce a part for every rank; ``out`` gets this rank's, and may be it."""
        most = max(1, TURN_BYTES // out.itemsize // self.size)

        def stages(begin: int) -> Stages:
            each, target = [some[begin : begin + most] for some in parts], out[begin : begin + most]
            total = self._widened(reducer, np.concatenate([each[at] for at in self._order]), False)
            counts = [sum(each[at].size for at in some) for some in self._teams]
            made = yield from self._summed(total, counts, reducer, target if self._node is None else None)
            lengths = [each[at].nbytes if made.size else 0 for at in self._mine]
            outs = [target.view(_BYTE), *[target[:0].view(_BYTE)] * (len(lengths) - 1)]
            yield self._on_node(lambda node: node.deal(_cut(made.view(_BYTE), lengths), outs))

        return in_pieces(map(stages, range(0, max(some.size for some in parts), most)))

    def _summed(
        self, total: Array, counts: Sequence[int], reducer: Reduction, out: Array | None = None
    ) -> Generator[Iterable[None], None, Array]:
        # Two stages: sums of the nodes, then the sum of all, of which each leader makes a part of ``counts``
        # elements and returns it. It is rounded here, once, before it travels on. Others return nothing.
        part, storage = self._unfinished(reducer), reducer.element.storage
        yield self._on_node(lambda node: node.reduce(total, part, 0))
        if self._across is None:
            yield ()
            return np.empty(0, storage)
        rows = np.empty((len(self._teams), counts[self._team]), total.dtype)
        sent, taken = [count * total.itemsize for count in counts], [rows[0].nbytes] * len(rows)
        yield self._across.exchange(total, sent, rows.reshape(-1), taken)
        made = np.empty(rows.shape[1], storage) if out is None else out
        summed = made if total.dtype == storage else np.empty(rows.shape[1], total.dtype)
        part.reduce(list(rows), summed)
        if not self._flat:
            reducer.finish(summed, made)
        return made

    def spread(
        self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None], reader: int | None = None
    ) -> Script:
        """Copy the data of some ranks to all, or to a ``reader``; to that each rank sends its data itself."""
        if reader is not None:
            # No phases on a node: all data of the other nodes would pass one rank beside the reader.
            sends = [mine if at == reader else mine[:0] for at in range(self.size)]
            here = sizes if reader == self.me else [0] * self.size
            return self._exchange(sends, here, outs, max(sizes))
        filled = [at for at, size in enumerate(sizes) if size]
        if len(filled) == 1:
            return self._from_one(filled[0], mine, outs[filled[0]])
        return self._from_all(sizes, mine, outs)

    def _from_one(self, root: int, mine: Array, out: Array | None) -> Script:
        # As a tree: to the first rank of each node, and from there to its ranks.
        of_root = self._team_of(root)
        here, place = of_root == self._team, self._teams[of_root].index(root)
        data = mine if self.me == root or out is None else out

        def stages(begin: int) -> Stages:
            piece = data[begin : begin + TURN_BYTES]
            yield self._from_place(place, piece, piece) if here else ()
            yield () if self._across is None else self._across.broadcast(piece, of_root)
            yield () if here else self._from_place(0, piece, piece)

        yield from in_pieces(map(stages, range(0, data.size, TURN_BYTES)))
        if out is not None and out is not data:
            out[...] = data

    def _from_all(self, sizes: Sequence[int], mine: Array, outs: Sequence[Array | None]) -> Script:
        most, ordered = TURN_BYTES // self.size, [outs[at] for at in self._order]

        def stages(begin: int) -> Stages:
            counts, part = _window(sizes, begin, most), mine[begin : begin + most]
            of_team, whole = [counts[at] for at in self._mine], np.empty(sum(counts), _BYTE)
            block = part if self._node is None else np.empty(sum(of_team), _BYTE)
            yield self._on_node(lambda node: node.spread(of_team, part, _cut(block, of_team)))
            of_teams = [sum(counts[at] for at in some) for some in self._teams]
            yield () if self._across is None else self._across.gather_all(block, whole, of_teams)
            yield self._from_place(0, whole, whole)
            _store(whole, [counts[at] for at in self._order], ordered, begin)

        return in_pieces(map(stages, range(0, max(sizes), most)))

    def deal(self, sends: Sequence[Array], outs: Sequence[Array]) -> Script:
        """Give each rank what this one has for it; ``outs`` takes what every rank has for this one."""
        sizes = [out.size for out in outs]
        lengths = np.array([*(send.size for send in sends), *sizes], np.int64)
        table = np.empty((self.size, lengths.size), np.int64)
        yield from self._messages.gather_all(lengths, table.reshape(-1), [lengths.nbytes] * self.size)
        self.check_pairs(table[:, : self.size], table[:, self.size :].T)
        yield from self._exchange(sends, sizes, outs, int(table.max()))

    def _exchange(
        self, sends: Sequence[Array], sizes: Sequence[int], outs: Sequence[Array | None], longest: int
    ) -> Script:
        # Each rank sends to each rank by itself; ``sizes`` come here. The longest vector of any rank has as
        # many turns on all ranks.
        most = TURN_BYTES // self.size

        def stages(begin: int) -> Stages:
            cut, counts = [send[begin : begin + most] for send in sends], _window(sizes, begin, most)
            taken, given = np.empty(sum(counts), _BYTE), [part.size for part in cut]
            filled = [part for part in cut if part.size]
            data = filled[0] if len(filled) == 1 else np.concatenate(cut)
            yield self._messages.exchange(data, given, taken, counts)
            _store(taken, counts, outs, begin)

        return in_pieces(map(stages, range(0, longest, most)))

    def _unfinished(self, reducer: Reduction) -> Reduction:
        # The reduction of a phase. Where no node has several ranks, the only phase rounds and divides.
        return reducer if self._flat else reducer.unrounded

    def _widened(self, reducer: Reduction, x: Array, copied: bool) -> Array:
        # The sum of a node begins with these elements, in the type of partial results; it overwrites them, so
        # they are a copy if asked for.
        if self._flat or reducer.element.exact:
            return x.copy() if copied and not self._flat else x
        return reducer.element.widen(x)

    def _team_of(self, rank: int) -> int:
        return next(at for at, team in enumerate(self._teams) if rank in team)

    def _from_place(self, place: int, data: Array, out: Array | None) -> Script:
        # Bytes from one rank of this node to those that have a target.
        def begin(node: NodeCollectives) -> Script:
            sizes = [data.size if at == place else 0 for at in range(node.size)]
            outs = [out if at == place else None for at in range(node.size)]
            return node.spread(sizes, data if node.me == place else data[:0], outs)

        return self._on_node(begin)

    def _on_node(self, begin: Callable[[NodeCollectives], Script]) -> Script:
        if self._node is not None:
            self._asked = self._node.rounds
            yield from begin(self._node)
        self._asked = self._across or self._asked


def _window(sizes: Sequence[int], begin: int, most: int) -> list[int]:
    """Of vectors of some sizes, how much each has of at most so many elements from ``begin``.

    >>> _window([5, 2, 9], 4, 3)
    [1, 0, 3]
    """
    return [max(0, min(size - begin, most)) for size in sizes]


def _store(taken: Array, counts: Sequence[int], outs: Sequence[Array | None], begin: int) -> None:
    """Store vectors that lie one behind the other to those with targets, from ``begin``."""
    for out, count, data in zip(outs, counts, _cut(taken, counts), strict=True):
        if out is not None and count:
            out[begin : begin + count] = data


def _cut(data: Array, lengths: Sequence[int]) -> list[Array]:
    """Views of vectors that lie one behind the other."""
    split = Listed(tuple(lengths))
    return [data[slice(*split.interval(at))] for at in range(len(lengths))]
