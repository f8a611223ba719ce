"""Large vectors in pieces: while one travels between nodes, the next is made and the one before handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from distdl_rma.geometry.intervals import Balanced
from distdl_rma.segments.collectives.engine.node_layout import RankSlice, clipped

# Takes the piece of a number, without waiting; returns what is left to wait for.
Stage = Callable[[int], Iterable[None]]

# A piece has so many bytes at least, and so many for each node: of less, latency outweighs what overlaps.
_LEAST_NBYTES, _LEAST_OF_NODE = 8 << 20, 64 << 10
_MOST_PIECES = 4


def number_of_pieces(nbytes: int, nodes: int) -> int:
    """How many pieces a vector of so many bytes goes in between so many nodes; on one node it is one."""
    if nodes == 1:
        return 1
    return min(_MOST_PIECES, max(1, nbytes // max(_LEAST_NBYTES, _LEAST_OF_NODE * nodes)))


def slices(count: int, number: int) -> list[slice]:
    """The pieces of so many elements, balanced; of few elements some are empty."""
    split = Balanced(count, number)
    return [slice(*split.interval(piece)) for piece in range(number)]


def pieces_of_all(parts: Sequence[Sequence[RankSlice]], number: int) -> list[list[tuple[RankSlice, ...]]]:
    """For each piece what it has of the parts of every node, each of which is cut into so many pieces."""
    cuts = [slices(sum(part.size for part in of_node), number) for of_node in parts]
    return [
        [
            tuple(clipped(of_node, cut[piece].start, cut[piece].stop))
            for of_node, cut in zip(parts, cuts, strict=True)
        ]
        for piece in range(number)
    ]


def in_pieces(number: int, stages: Sequence[Stage]) -> Iterator[None]:
    """Take pieces through stages, each in its turn; yields as long as it has to wait.

    What a stage leaves to wait for is waited for before the next stage of the same piece: meanwhile the stage
    before begins on the next piece, and the stage behind goes on with the last one. Everything is called in
    an order that follows from the two numbers alone, so that ranks which call MPI's collectives on one
    communicator call them alike. Of one stage two pieces are under way at most.
    """
    under_way: dict[int, Iterable[None]] = {}
    for turn in range(number + len(stages)):
        for at in range(len(stages) + 1):
            piece = turn - at
            if 0 <= piece < number:
                yield from under_way.pop(piece, ())
                if at < len(stages):
                    under_way[piece] = stages[at](piece)
