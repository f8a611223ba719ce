"""Seconds of messages and sums by LogGP, on ranks that share memory on a node and wires between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scaling.plans import Cluster, Communication, Movement, Round, Staged, Sum, Told, Vote
from distdl_rma.geometry.exchange import by_peer
from distdl_rma.segments.collectives.allreduce import all_push_is_better
from distdl_rma.segments.collectives.between_nodes import number_of_pieces
from distdl_rma.segments.collectives.equality_check import turns_between_leaders


@dataclass(frozen=True)
class Wire:
    """Constants of LogGP in seconds: overheads of a notified put at both ends, latency, and time per byte.

    ``mpi`` is a message of MPI within a collective, from its start to the end of its wait.
    """

    o_send: float
    o_receive: float
    L: float
    G: float
    mpi: float

    @property
    def o(self) -> float:
        """Both overheads."""
        return self.o_send + self.o_receive


@dataclass(frozen=True)
class Span:
    """What a communication takes of a rank: seconds ``busy``, and until it is there, if nothing hides it."""

    busy: float = 0.0
    travels: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds where the rank waits for it at once."""
        return self.busy + self.travels

    def behind(self, compute: float) -> float:
        """Seconds that it adds to a computation that runs while it travels."""
        return self.busy + max(0.0, self.travels - compute)

    def slowed(self, crowd: float) -> Span:
        """The same where so many ranks share a core."""
        return Span(crowd * self.busy, self.travels)


@dataclass(frozen=True)
class Network:
    """A cluster with the wires that its ranks have: to ranks of their node, and to other nodes.

    The ranks of a node share its wire. On a node bytes are copied by the ranks themselves, so that nothing
    hides them; between nodes they travel while ranks compute.
    """

    cluster: Cluster
    near: Wire
    far: Wire

    def span(self, what: Communication, me: int) -> Span:
        """What a communication takes of one rank."""
        if isinstance(what, Movement):
            return self._movement(what, me)
        if isinstance(what, Round):
            return self._round(what.nbytes)
        if isinstance(what, Vote):
            return self._vote(me)
        if isinstance(what, Told | Staged):
            spans = [self._movement(each, me) for each in what.movements(self.cluster, me)]
            return Span(sum(span.busy for span in spans), sum(span.travels for span in spans))
        if all_push_is_better(self.cluster.size, what.count * what.itemsize, what.one_round):
            return self._round(what.count * what.itemsize)
        return self._sum(what, me)

    def _node(self, rank: int) -> int:
        return rank // self.cluster.per_node

    def _vote(self, me: int) -> Span:
        # A board of the node, and turns between nodes.
        turns = turns_between_leaders(self.cluster.layout(me))
        messages = sum(len(turn.targets) for turn in turns)
        return Span(self.near.o + messages * self.far.o, 2 * self.near.L + len(turns) * self.far.L)

    def _movement(self, what: Movement, me: int) -> Span:
        sends, receives = (
            [(peer, what.itemsize * sum(piece.box.volume for piece in each)) for peer, each in by_peer(half)]
            for half in (what.exchange.sends, what.exchange.receives)
        )
        far = [nbytes for peer, nbytes in sends if self._node(peer) != self._node(me)]
        busy = sum(self._wire(peer, me).o_send for peer, _ in sends)
        busy += sum(self._wire(peer, me).o_receive for peer, _ in receives)
        busy += self.near.G * (sum(nbytes for _, nbytes in sends) - sum(far))
        # All ranks of a node send over its wire what this one does.
        sharing = len(self.cluster.nodes[self._node(me)])
        return Span(busy, self._latency(sends, me) + self.far.G * sharing * sum(far))

    def _latency(self, sends: Sequence[tuple[int, int]], me: int) -> float:
        return max((self._wire(peer, me).L for peer, _ in sends), default=0.0)

    def _wire(self, peer: int, me: int) -> Wire:
        return self.near if self._node(peer) == self._node(me) else self.far

    def _round(self, nbytes: int) -> Span:
        here = min(self.cluster.per_node, self.cluster.size)
        near, far = here - 1, self.cluster.size - here
        busy = near * (self.near.o + nbytes * self.near.G) + far * self.far.o
        latency = self.far.L if far else self.near.L if near else 0.0
        return Span(busy, latency + here * far * nbytes * self.far.G)

    def _sum(self, what: Sum, me: int) -> Span:
        cluster = self.cluster
        layout, nodes = cluster.layout(me), len(cluster.nodes)
        share = layout.share(what.count)
        nbytes, others = (share.stop - share.start) * what.itemsize, len(layout.here) - 1
        # Shares of all ranks of the node are loaded, and the sum is stored to them; two notifications.
        busy = 2 * others * nbytes * self.near.G + (2 * self.near.o if others else 0.0)
        travels = 2 * self.near.L if others else 0.0
        if nodes > 1:
            # A reduce-scatter and an all-gather by halves, of all shares of the node at once.
            rounds = (nodes - 1).bit_length()
            pieces = number_of_pieces(what.count * what.itemsize // layout.shares, nodes)
            moved = what.count * what.itemsize * (nodes - 1) / nodes
            wire = 2 * (pieces * rounds * self.far.mpi + moved * self.far.G)
            # While one piece is on the wire, the rank loads or stores another.
            travels += wire - min(wire, busy) * (pieces - 1) / pieces
        return Span(busy, travels)
