"""The blocks of an all-to-all: where they lie, and who hands on which between nodes; no MPI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdl_rma.geometry.split import Listed
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout


@dataclass(frozen=True)
class Route:
    """A block that a rank hands on between nodes: whose it is, for whom, and its elements."""

    source: int
    target: int
    size: int


class AlltoallBlocks:
    """Where the block of each rank for each lies, and which of them one rank hands on.

    On a node every rank takes its blocks from the others itself. Between two nodes the holders split the
    work: the first rank of a node, say, sends what every so-many-th of its ranks has for the other node.

    ``counts`` are, for every rank, in the order of its ranks, the elements of its blocks for each. A rank's
    vector has room for the longest operand of all ranks, and behind it for the longest result.
    """

    def __init__(self, layout: NodeLayout, counts: tuple[tuple[int, ...], ...]) -> None:
        self.counts, self._layout = counts, layout
        self._at = {rank: at for at, rank in enumerate(layout.ranks)}
        self.longest_operand = max(map(sum, counts))
        self.longest_result = max(map(sum, zip(*counts, strict=True)))
        self._operands: dict[int, Listed] = {}
        self._results: dict[int, Listed] = {}

    def sends(self, rank: int) -> tuple[int, ...]:
        """Elements of a rank's blocks for each."""
        return self.counts[self._at[rank]]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Elements of everyone's blocks for a rank."""
        at = self._at[rank]
        return tuple(row[at] for row in self.counts)

    def in_operand(self, source: int, target: int) -> slice:
        """Where the block of a rank for another lies in the operand of the first."""
        if source not in self._operands:
            self._operands[source] = Listed(self.sends(source))
        return slice(*self._operands[source].interval(self._at[target]))

    def in_result(self, source: int, target: int) -> slice:
        """Where the block of a rank for another lies behind the operand of the second."""
        if target not in self._results:
            self._results[target] = Listed((self.longest_operand, *self.receives(target)))
        return slice(*self._results[target].interval(1 + self._at[source]))

    def outgoing(self) -> tuple[tuple[Route, ...], ...]:
        """For every node the blocks that this rank sends there, in order."""
        here = self._layout.here
        return tuple(tuple(self._routes(here, node)) for node in self._layout.nodes)

    def incoming(self) -> tuple[tuple[Route, ...], ...]:
        """For every node the blocks that come to this rank from there, in order."""
        here = self._layout.here
        return tuple(tuple(self._routes(node, here)) for node in self._layout.nodes)

    @property
    def crosses(self) -> bool:
        """Whether any rank with this one's share sends anything between nodes; alike on all of them."""
        nodes = self._layout.nodes
        return any(True for source in nodes for target in nodes for _ in self._routes(source, target))

    def _routes(self, source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Route]:
        layout = self._layout
        if layout.my_share is None or source == target:
            return
        for rank in source[layout.my_share :: layout.shares]:
            sizes = self.sends(rank)
            for there in target:
                if sizes[self._at[there]]:
                    yield Route(rank, there, sizes[self._at[there]])
