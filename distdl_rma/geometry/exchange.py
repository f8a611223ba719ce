"""The one plan of data movement: ``y = 0; y[box] += x[box]``.

A halo of one row, as rank 1 of three plans it; each rank owns four rows::

    rows      0 1 2 3 | 4 5 6 7 | 8 9 ...
    owns      rank 0  | rank 1  | rank 2
    needs           3 | 4 5 6 7 | 8            rank 1

    receives  [3:4] from 0, [8:9] from 2       its needed box & boxes that others own
    sends     [4:5] to 0, [7:8] to 2           its own box & boxes that others need
    local     [4:8]                            its own box & its needed box

The adjoint swaps owned and needed: gradients of rows 3 and 8 travel back, and are added where they came from.
A broadcast has a source on one rank and a target of copies, and a sum-reduction is its adjoint; scatter,
gather and redistribution are two decompositions of one tensor. Layers have no other code for movements. Each
rank plans its own part from the two decompositions, without a message, and both ends of a piece find the same
box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import combinations, pairwise
from operator import attrgetter

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import by_key

# More boxes than this are only compared in one dimension at a time. If that leaves overlap possible, the
# boxes count as overlapping: then elements are summed, which is always right.
_COMPARED = 64


@dataclass(frozen=True)
class Piece:
    """A box of global indices that travels between this rank and a peer.

    Examples
    --------
    >>> Piece(peer=1, box=Box.of_shape((2, 3))).box.volume
    6
    """

    peer: int  # rank id
    box: Box  # in this rank's tensor: in x if the elements are sent or stay, else in y
    there: Box | None = None  # in the other tensor, if an image of x puts the elements elsewhere

    @property
    def target(self) -> Box:
        """Box in ``y`` of a piece that stays on this rank."""
        return self.box if self.there is None else self.there


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a movement of data from the boxes that ranks own to the boxes that ranks need.

    ``y = 0; y[box] += x[box]`` for every non-empty intersection of an owned box with a needed box. Elements
    with several owners are summed, elements that several ranks need are copied, and elements without an owner
    are zero. ``exchange.T`` is the adjoint: the same movement from target to source.

    A periodic ``x`` has several images: with ``images``, shifts of one number per dimension, the movement is
    ``y[box] += x[box - shift]`` for every shift.

    Examples
    --------
    >>> ranks = Partition(ranks=(0, 1), shape=(2,), me=0)
    >>> blocks = Decomposition.balanced(ranks, (4,))
    >>> gather = Exchange(0, blocks, Decomposition.replicated(ranks, (4,)))
    >>> gather.receives
    (Piece(peer=1, box=Box(bounds=((2, 4),)), there=None),)
    >>> gather.T.sends  # the adjoint sums
    (Piece(peer=1, box=Box(bounds=((2, 4),)), there=None),)
    """

    rank: int  # rank id of this process
    source: Decomposition  # who owns what
    target: Decomposition  # who needs what
    transposed: bool = False  # whether data flows from target to source
    images: tuple[tuple[int, ...], ...] = ()

    @property
    def T(self) -> Exchange:  # noqa: N802
        """The adjoint movement: sends and receives swapped."""
        return Exchange(self.rank, self.source, self.target, not self.transposed, self.images)

    @cached_property
    def own(self) -> Box:
        """Box of the global tensor ``x`` that this rank puts in: its local input."""
        return (self.target if self.transposed else self.source).box(self.rank)

    @cached_property
    def need(self) -> Box:
        """Box of the global tensor ``y`` that this rank gets: its local output."""
        return self.need_of(self.rank)

    def need_of(self, peer: int) -> Box:
        """Box of ``y`` that another rank gets."""
        return (self.source if self.transposed else self.target).box(peer)

    @cached_property
    def _forward(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        back = tuple(tuple(-step for step in shift) for shift in self.images)
        sent = self._pieces(self.source, self.target, self.images)
        return sent, self._pieces(self.target, self.source, back)

    def _pieces(
        self, mine: Decomposition, theirs: Decomposition, shifts: Sequence[tuple[int, ...]]
    ) -> tuple[Piece, ...]:
        # Pieces of this rank's box in one decomposition that meet boxes of the other one, sorted by peer.
        if self.rank not in mine.partition:
            return ()
        box = mine.box(self.rank)
        if not shifts:
            return tuple(Piece(*found) for found in theirs.meeting(box))
        pieces = tuple(
            Piece(peer, there.shift([-step for step in shift]), there)
            for shift in shifts
            for peer, there in theirs.meeting(box.shift(shift))
        )
        return tuple(piece for _, group in by_peer(pieces) for piece in group)

    @cached_property
    def sends(self) -> tuple[Piece, ...]:
        """Pieces of ``x`` for other ranks, in the order of the partition."""
        return tuple(p for p in self._forward[self.transposed] if p.peer != self.rank)

    @cached_property
    def receives(self) -> tuple[Piece, ...]:
        """Pieces of ``y`` from other ranks, in the order of the partition."""
        return tuple(p for p in self._forward[not self.transposed] if p.peer != self.rank)

    @cached_property
    def local(self) -> tuple[Piece, ...]:
        """Pieces that stay on this rank."""
        return tuple(p for p in self._forward[self.transposed] if p.peer == self.rank)

    @cached_property
    def before_local(self) -> int:
        """Number of pieces from ranks that come before this one in the order of the partition.

        Sums that begin with these, then add the own piece, have the same order of terms on all ranks.
        """
        peers = [piece.peer for piece in self._forward[not self.transposed]]
        return peers.index(self.rank) if self.rank in peers else len(peers)

    @cached_property
    def _filled(self) -> list[Box]:
        # Boxes of y that get elements.
        return [piece.target for piece in self.local] + [piece.box for piece in self.receives]

    @cached_property
    def disjoint(self) -> bool:
        """Whether each element of this rank's ``y`` gets at most one element of ``x``: no sums."""
        if len(self._filled) > _COMPARED:
            return any(
                all(before[1] <= after[0] for before, after in pairwise(sorted(intervals)))
                for intervals in zip(*(box.bounds for box in self._filled), strict=True)
            )
        return all((a & b).empty for a, b in combinations(self._filled, 2))

    @cached_property
    def complete(self) -> bool:
        """Whether every element of this rank's ``y`` certainly gets exactly one element of ``x``."""
        return self.disjoint and sum(box.volume for box in self._filled) == self.need.volume

    @cached_property
    def idle(self) -> bool:
        """Whether this rank keeps all its elements in place and communicates with no other rank."""
        stays = len(self.local) == 1 and self.local[0].target == self.local[0].box == self.own
        return not self.peers and self.own == self.need and (self.own.empty or stays)

    @property
    def peers(self) -> tuple[int, ...]:
        """Rank ids that this rank sends to or receives from, sorted."""
        return tuple(sorted({piece.peer for piece in self.sends + self.receives}))

    @cached_property
    def fingerprint(self) -> int:
        """Number that is equal on all ranks of the same movement, and (almost surely) differs for others."""
        ends = ((d.partition.ranks, d.partition.shape, d.splits, d.axes) for d in (self.source, self.target))
        return fingerprint(*ends, self.transposed, *([self.images] if self.images else []))


def by_peer(pieces: tuple[Piece, ...]) -> list[tuple[int, tuple[Piece, ...]]]:
    """Pieces grouped by peer, each peer once."""
    return [(peer, tuple(group)) for peer, group in by_key(pieces, attrgetter("peer")).items()]


def fingerprint(*facts: object) -> int:
    """Number of 56 bits, equal on all ranks if ``repr(facts)`` is equal, else (almost surely) different.

    Python's ``hash`` would not do: that of text differs between processes. Seven bytes, so that the number is
    positive in a word of 64 bits, as messages and flags have.
    """
    return int.from_bytes(blake2b(repr(facts).encode(), digest_size=7).digest(), "little")
