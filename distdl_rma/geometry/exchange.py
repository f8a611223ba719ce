"""The one plan of data movement: ``y = 0; y[box] += x[box]``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.fingerprint import fingerprint

__all__ = ["Exchange", "Piece"]


@dataclass(frozen=True)
class Piece:
    """A box of global indices that travels between this rank and a peer."""

    peer: int
    box: Box


@dataclass(frozen=True)
class Exchange:
    """This rank's part of a movement from what ranks own to what ranks need.

    ``y = 0; y[box] += x[box]`` for every non-empty intersection of a box somebody owns with a box
    somebody needs: owners that overlap are summed, needs that overlap are copied, what nobody owns stays
    zero. The adjoint is the same movement read from right to left, ``exchange.T``.

    Parameters
    ----------
    rank
        Rank id of this process.
    source, target
        Who owns what, and who needs what.
    transposed
        Whether sends and receives are swapped: data flows from target to source.
    """

    rank: int
    source: Decomposition
    target: Decomposition
    transposed: bool = False

    @property
    def T(self) -> Exchange:  # noqa: N802
        """The adjoint movement: sends and receives swapped."""
        return Exchange(self.rank, self.source, self.target, not self.transposed)

    @property
    def own(self) -> Box:
        """Box of the tensor ``x`` that this rank puts in; its local shape."""
        return (self.target if self.transposed else self.source).box(self.rank)

    @property
    def need(self) -> Box:
        """Box of the tensor ``y`` that this rank gets out; its local shape."""
        return (self.source if self.transposed else self.target).box(self.rank)

    @cached_property
    def _forward(self) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        return self._pieces(self.source, self.target), self._pieces(self.target, self.source)

    def _pieces(self, mine: Decomposition, theirs: Decomposition) -> tuple[Piece, ...]:
        if self.rank not in mine.partition:
            return ()
        return tuple(Piece(*found) for found in theirs.meeting(mine.box(self.rank)))

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
        return tuple(p for p in self._forward[0] if p.peer == self.rank)

    @property
    def peers(self) -> tuple[int, ...]:
        """Rank ids that this rank exchanges anything with, sorted."""
        return tuple(sorted({piece.peer for piece in self.sends + self.receives}))

    @cached_property
    def fingerprint(self) -> int:
        """Number that is equal on all ranks of the same movement, and (almost surely) of no other."""
        ends = ((d.partition.ranks, d.partition.shape, d.splits, d.axes) for d in (self.source, self.target))
        return fingerprint(*ends, self.transposed)


def by_peer(pieces: tuple[Piece, ...]) -> list[tuple[int, tuple[Piece, ...]]]:
    """Pieces grouped by peer, each peer once."""
    return [(peer, tuple(group)) for peer, group in groupby(pieces, key=lambda piece: piece.peer)]
