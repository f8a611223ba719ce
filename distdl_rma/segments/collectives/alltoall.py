"""Double-buffered all-to-alls: every rank has a block for every rank.

The vector of rank 1 of three, with room for the longest operand and the longest result of all ranks, so that
all ranks compute the place of any block in any vector::

    | for 0 | for 1 | for 2 | . . |  from 0 | from 1 | from 2 | . . |
    operand                          result

On a node the target loads its block from the source's operand. Between nodes a holder packs the blocks of
several ranks of its node into one message to each node, and its partner there stores them into the results.
Ranks 0 and 1 share a node, rank 2 is alone on another one::

    0 packs what 0 and 1 have for 2         ==== blocks 0 to 2, 1 to 2 ====>   2 stores both into its result
    0 stores them into 0's and 1's results  <==== blocks 2 to 0, 2 to 1 ====   2 has both in its operand
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.intervals import Listed
from distdl_rma.segments.collectives.collective import Collective, CollectiveSite
from distdl_rma.segments.collectives.node_layout import NodeLayout, check_count, check_lengths
from distdl_rma.segments.collectives.reduction import Array
from distdl_rma.segments.collectives.stepped_algorithm import SteppedAlgorithm
from distdl_rma.segments.manager import SegmentManager
from distdl_rma.segments.memory.array_bytes import ArrayLayout

_READY, _DONE = range(2)


class Alltoall(Collective):
    """A block from every rank to every rank: all write ``active``, start and wait, and read ``result``.

    ``active`` holds this rank's blocks for all ranks, ``result`` the blocks of all ranks for this one, both
    in the order of ``ranks``. On a node every rank loads its blocks from the others. Between nodes some ranks
    of each node send the blocks of a share of its ranks, by MPI's ``Ialltoallv``, and store the received
    blocks to the ranks of their node.

    ``count`` is the length of every block; or a table, equal on all ranks, whose row for each sender has the
    length of its block for each receiver. On all ranks the memory fits the longest operand and the longest
    result. ``sends`` and ``receives`` are the lengths of the blocks in ``active`` and in ``result``.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> blocks = machine.group().alltoall(1)
    >>> blocks.active[:] = [10 * machine.rank, 10 * machine.rank + 1]  # for rank 0, for rank 1
    >>> blocks.start()
    >>> blocks.wait()
    array([ 0., 10.], dtype=float32)
    """

    def __init__(
        self,
        manager: SegmentManager,
        ranks: Sequence[int],
        count: int | Sequence[Sequence[int]],
        dtype: DTypeLike = np.float32,
        name: str = "alltoall",
    ) -> None:
        site = CollectiveSite.checked(manager, ranks, name)
        layout, size = site.layout, len(site.layout.ranks)
        if isinstance(count, Sequence):
            if len(count) != size or not all(isinstance(row, Sequence) for row in count):
                wanted = f"{size} ranks need {size} rows of numbers of elements"
                raise ShapeError(f"{name!r}: {wanted}, got {count}")
            counts = tuple(check_lengths(row, size, name) for row in count)
        else:
            counts = ((check_count(count, name),) * size,) * size
        blocks = AlltoallBlocks(layout, counts)
        self.dtype = ArrayLayout(dtype, blocks.longest_operand + blocks.longest_result).dtype
        self.sends, self.receives = blocks.sends(layout.me), blocks.receives(layout.me)
        super().__init__(_AlltoallByNodes(site, blocks, self.dtype))


class Route(NamedTuple):
    """A block that travels between nodes: its source, its target, and its number of elements."""

    source: int
    target: int
    size: int


class AlltoallBlocks:
    """Places of all blocks in the vectors, and the blocks that one rank sends between nodes; without MPI.

    Between two nodes the holders split the work: with n holders, the k-th one sends the blocks of the k-th
    rank of its node, and of every n-th rank after it.

    ``counts[i][j]`` are the elements of the block from the i-th to the j-th rank. A rank's vector has room
    for the longest operand of all ranks, and behind it for the longest result.
    """

    def __init__(self, layout: NodeLayout, counts: tuple[tuple[int, ...], ...]) -> None:
        self.counts, self._layout = counts, layout
        self._at = {rank: at for at, rank in enumerate(layout.ranks)}
        self.longest_operand = max(map(sum, counts))
        self.longest_result = max(map(sum, zip(*counts, strict=True)))
        self._operands: dict[int, Listed] = {}
        self._results: dict[int, Listed] = {}

    def sends(self, rank: int) -> tuple[int, ...]:
        """Elements of the blocks from a rank to each."""
        return self.counts[self._at[rank]]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Elements of the blocks from each rank to one."""
        at = self._at[rank]
        return tuple(row[at] for row in self.counts)

    def in_operand(self, source: int, target: int) -> slice:
        """Place of a block in the operand of its source."""
        if source not in self._operands:
            self._operands[source] = Listed(self.sends(source))
        return slice(*self._operands[source].interval(self._at[target]))

    def in_result(self, source: int, target: int) -> slice:
        """Place of a block in the vector of its target, behind the operand."""
        if target not in self._results:
            self._results[target] = Listed((self.longest_operand, *self.receives(target)))
        return slice(*self._results[target].interval(1 + self._at[source]))

    def outgoing(self) -> tuple[tuple[Route, ...], ...]:
        """For every node, the blocks that this rank sends there, in order."""
        return tuple(tuple(self._routes(self._layout.here, node)) for node in self._layout.nodes)

    def incoming(self) -> tuple[tuple[Route, ...], ...]:
        """For every node, the blocks that this rank receives from there, in order."""
        return tuple(tuple(self._routes(node, self._layout.here)) for node in self._layout.nodes)

    @property
    def crosses(self) -> bool:
        """Whether any rank with the same share sends a block between nodes; equal on all these ranks."""
        nodes = self._layout.nodes
        return any(True for source in nodes for target in nodes for _ in self._routes(source, target))

    def _routes(self, source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Route]:
        layout = self._layout
        if layout.my_share is None or source == target:
            return
        for rank in source[layout.my_share :: layout.shares]:
            for there in target:
                if size := self.sends(rank)[self._at[there]]:
                    yield Route(rank, there, size)


class _AlltoallByNodes(SteppedAlgorithm):
    def __init__(self, site: CollectiveSite, blocks: AlltoallBlocks, dtype: np.dtype[Any]) -> None:
        layout, me = site.layout, site.layout.me
        begin, terms = blocks.longest_operand, f"collective=Alltoall\ncounts={blocks.counts}"
        super().__init__(site, begin + blocks.longest_result, dtype, layout.same_share, terms)
        self.operands = tuple(vector[: sum(blocks.sends(me))] for vector in self.vectors)
        self.results = tuple(vector[begin : begin + sum(blocks.receives(me))] for vector in self.vectors)
        self._loads = [
            (at, source, blocks.in_result(rank, me))
            for at, rank in enumerate(layout.here)
            if (source := blocks.in_operand(rank, me)).start < source.stop
        ]
        self._crosses = blocks.crosses
        outgoing, incoming = blocks.outgoing(), blocks.incoming()
        self._sent = [sum(route.size for route in routes) for routes in outgoing]
        self._received = [sum(route.size for route in routes) for routes in incoming]
        # Rank of the node and place in its vector, in the order of the messages.
        routes = list(chain.from_iterable(outgoing))
        self._packs = [(self._at[r.source], blocks.in_operand(r.source, r.target)) for r in routes]
        self._gets = [route.size for route in routes if route.source != me]
        routes = list(chain.from_iterable(incoming))
        self._stores = [(self._at[r.target], blocks.in_result(r.source, r.target)) for r in routes]
        self._puts = [route.size for route in routes if route.target != me]

    def script(self, parity: int) -> Iterator[None]:
        others, rows, mine = self.layout.others_here, self.rows[parity], self.vectors[parity]
        self.notify(_READY, others)
        yield from self.wait_for(_READY, others)
        for at, source, target in self._loads:
            if at == self._me:
                mine[target] = mine[source]
            else:
                self.load(mine[target], rows[at][source])
        if self._crosses:
            yield from self._exchange_across(rows)
        # Then all have read this rank's operand, which it may overwrite, and its result is complete.
        self.notify(_DONE, others)
        yield from self.wait_for(_DONE, others)

    def _exchange_across(self, rows: list[Array]) -> Iterator[None]:
        # Sends blocks of ranks of this node to other nodes, and stores received blocks on this node.
        sent = np.concatenate([rows[0][:0], *(rows[at][place] for at, place in self._packs)])
        received, itemsize = np.empty(sum(self._received), sent.dtype), sent.itemsize
        self.count_gets(len(self._gets), itemsize * sum(self._gets))
        out, back = ([itemsize * count for count in counts] for counts in (self._sent, self._received))
        yield from self.across(self.between.exchange(sent, out, received, back), sent.nbytes)
        begin = 0
        for at, place in self._stores:
            target = rows[at][place]
            target[...] = received[begin : begin + target.size]
            begin += target.size
        self.count_puts(len(self._puts), itemsize * sum(self._puts))
