"""The blocks of an all-to-all, and who hands on which: numbers, as in ``schedule``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdl_rma.geometry.split import Listed
from distdl_rma.segments.collectives.engine.node_layout import NodeLayout, Traffic


@dataclass(frozen=True)
class Route:
    """A block that a rank hands on between nodes: whose it is, for whom, and its elements."""

    source: int
    target: int
    size: int


class AlltoallBlocks:
    """Where the block of each rank for each lies, and which of them one rank hands on.

    On a node every rank takes its blocks from the others itself. Between two nodes the lanes share the work:
    the first rank of a node, say, sends what every so-many-th of its ranks has for the other node.

    Parameters
    ----------
    layout
        The ranks by node, seen from one of them.
    rows
        For every rank, in the order of ``ranks``, the elements of its blocks for each.

    Attributes
    ----------
    longest_operand, longest_result
        Elements of the longest vectors of blocks.
    """

    def __init__(self, layout: NodeLayout, rows: tuple[tuple[int, ...], ...]) -> None:
        self.rows, self._layout = rows, layout
        self._at = {rank: at for at, rank in enumerate(layout.ranks)}
        self.longest_operand = max(map(sum, rows))
        self.longest_result = max(map(sum, zip(*rows, strict=True)))
        self._operands: dict[int, Listed] = {}
        self._results: dict[int, Listed] = {}

    def sends(self, rank: int) -> tuple[int, ...]:
        """Elements of a rank's blocks for each."""
        return self.rows[self._at[rank]]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Elements of everyone's blocks for a rank."""
        at = self._at[rank]
        return tuple(row[at] for row in self.rows)

    def in_operand(self, source: int, target: int) -> slice:
        """Where the block of a rank for another lies in the operand of the first."""
        if source not in self._operands:
            self._operands[source] = Listed(self.sends(source))
        return slice(*self._operands[source].interval(self._at[target]))

    def in_result(self, source: int, target: int) -> slice:
        """Where the block of a rank for another lies in the result of the second."""
        if target not in self._results:
            self._results[target] = Listed(self.receives(target))
        return slice(*self._results[target].interval(self._at[source]))

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
        """Whether any rank of this one's lane sends anything between nodes; alike on all of them."""
        nodes = self._layout.nodes
        return any(True for source in nodes for target in nodes for _ in self._routes(source, target))

    def _routes(self, source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Route]:
        layout = self._layout
        if layout.lane is None or source == target:
            return
        for rank in source[layout.lane :: layout.lanes]:
            sizes = self.sends(rank)
            for there in target:
                if sizes[self._at[there]]:
                    yield Route(rank, there, sizes[self._at[there]])


def alltoall_traffic(layout: NodeLayout, rows: tuple[tuple[int, ...], ...], itemsize: int) -> Traffic:
    """What one rank moves in one step of an all-to-all with so many elements from each rank to each."""
    blocks, me = AlltoallBlocks(layout, rows), layout.me
    receives = dict(zip(layout.ranks, blocks.receives(me), strict=True))
    out = [route for routes in blocks.outgoing() for route in routes]
    came = [route for routes in blocks.incoming() for route in routes]
    gets = [receives[rank] for rank in layout.here if rank != me and receives[rank]]
    gets += [route.size for route in out if route.source != me]
    puts = [route.size for route in came if route.target != me]
    across = blocks.crosses
    return Traffic(
        puts=len(puts),
        bytes_put=itemsize * sum(puts),
        gets=len(gets),
        bytes_got=itemsize * sum(gets),
        collectives=int(across),
        bytes_collective=itemsize * sum(route.size for route in out),
        across=len(layout.nodes) if across else 1,
    )
