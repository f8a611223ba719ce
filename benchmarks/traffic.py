"""What one rank moves in one step of a collective or an exchange, counted from the schedules."""

from __future__ import annotations

from dataclasses import dataclass

from distdl_rma.geometry.exchange import Exchange, by_peer
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments.collectives.allreduce import all_push_is_better
from distdl_rma.segments.collectives.between_nodes import number_of_pieces, slices
from distdl_rma.segments.collectives.equality_check import N_INTEGERS, turns_between_leaders
from distdl_rma.segments.collectives.node_layout import NodeLayout
from distdl_rma.trace import Counters


@dataclass(kw_only=True)
class Traffic(Counters):
    """Messages and bytes of one rank in one step; calls of MPI's collectives are ``across`` so many nodes."""

    across: int = 1

    @property
    def messages(self) -> int:
        """Messages of this rank, if MPI's collectives take as few as they can: a logarithm of the nodes."""
        return self.puts + self.gets + self.collectives * (self.across - 1).bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank moves; of those handed to MPI's collectives, each once."""
        return self.bytes_put + self.bytes_got + self.bytes_collective


def allreduce_traffic(
    layout: NodeLayout, count: int, itemsize: int, wide_itemsize: int | None = None, one_round: bool = False
) -> Traffic:
    """What one rank moves in one step of an allreduce of ``count`` elements."""
    nbytes, size, number = count * itemsize, len(layout.ranks), len(layout.nodes)
    if all_push_is_better(size, nbytes, one_round):
        return Traffic(puts=size - 1, bytes_put=(size - 1) * nbytes)
    cut = layout.share(count)
    share = cut.stop - cut.start
    # Loads from the others of the node, and as many stores to them.
    peers = (len(layout.here) - 1) * bool(share)
    across = number > 1 and share > 0
    wide = share * (wide_itemsize or itemsize)
    pieces = number_of_pieces(count * (wide_itemsize or itemsize) // layout.shares, number)
    # Of every piece a node finishes its part.
    parts = (Balanced(at.stop - at.start, number).lengths[layout.my_node] for at in slices(share, pieces))
    return Traffic(
        puts=peers,
        bytes_put=peers * share * itemsize,
        gets=peers,
        bytes_got=peers * share * itemsize,
        collectives=2 * pieces * across,
        bytes_collective=across * (wide + sum(parts) * itemsize),
        across=number if across else 1,
    )


def broadcast_traffic(layout: NodeLayout, root: int, nbytes: int) -> Traffic:
    """What one rank moves in one step of a broadcast of ``nbytes`` bytes."""
    leads = layout.me in layout.leaders(root)
    across = len(layout.nodes) > 1 and leads and nbytes > 0
    loads = not leads and nbytes > 0
    return Traffic(
        gets=int(loads),
        bytes_got=nbytes * loads,
        collectives=int(across),
        bytes_collective=nbytes * (across and layout.me == root),
        across=len(layout.nodes) if across else 1,
    )


def vote_traffic(layout: NodeLayout) -> Traffic:
    """What one rank moves in one vote, by which ranks agree."""
    turns, near = turns_between_leaders(layout), len(layout.here)
    leads, several = layout.me == layout.here[0], len(layout.nodes) > 1
    row, sent = 8 * N_INTEGERS, sum(len(turn.targets) for turn in turns)
    # A rank stores its words with the first of the node, and loads those of all, there or of all nodes.
    loaded = 0 if leads else 2 * row if several else near * row
    return Traffic(
        puts=sent + (not leads),
        bytes_put=2 * row * sent + row * (not leads),
        gets=int(not leads),
        bytes_got=loaded,
    )


def exchange_traffic(exchange: Exchange, itemsize: int) -> Traffic:
    """What one rank puts in one step of a channel, such as a halo exchange."""
    elements = sum(piece.box.volume for piece in exchange.sends)
    return Traffic(puts=len(by_peer(exchange.sends)), bytes_put=elements * itemsize)
