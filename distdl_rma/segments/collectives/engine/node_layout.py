"""Who sends what to whom in a collective, as numbers: no MPI, no memory, any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index as as_int

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.exchange import Exchange, by_peer
from distdl_rma.geometry.split import Balanced, Listed

# Up to this many bytes at each receiver, everyone's vector to everyone beats a share each in two rounds.
_ONE_ROUND_BYTES = 8 << 10
# With more ranks than this, one message to each is no longer the fastest way for anything.
_ONE_ROUND_RANKS = 32


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of a vector, and the rank that they belong to or come from."""

    peer: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Traffic:
    """What one rank moves in one step: messages and bytes.

    ``puts`` and ``gets`` are copies to and from peers; ``collectives`` are calls of MPI's collectives
    ``across`` so many nodes, with the bytes that this rank hands to them.
    """

    puts: int = 0
    bytes_put: int = 0
    gets: int = 0
    bytes_got: int = 0
    collectives: int = 0
    bytes_collective: int = 0
    across: int = 1

    @property
    def messages(self) -> int:
        """Messages of this rank, if MPI's collectives take as few as they can: a logarithm of the nodes."""
        return self.puts + self.gets + self.collectives * (self.across - 1).bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank moves; of those handed to MPI's collectives, each once."""
        return self.bytes_put + self.bytes_got + self.bytes_collective


@dataclass(frozen=True)
class NodeLayout:
    """The ranks of a collective by node, seen from one of them.

    Parameters
    ----------
    ranks
        Rank ids in the order of the collective.
    machine_nodes
        All ranks of the machine by node: those that load and store each other's memory.
    me
        This rank.
    """

    ranks: tuple[int, ...]
    machine_nodes: tuple[tuple[int, ...], ...]
    me: int

    @classmethod
    def checked(
        cls, ranks: Sequence[int], machine_nodes: tuple[tuple[int, ...], ...], me: int, who: str
    ) -> NodeLayout:
        """Layout of ranks given by a caller.

        Raises
        ------
        PartitionError
            If a rank is listed twice or is not of the machine, or this rank is not among them.
        """
        chosen, known = tuple(ranks), {rank for node in machine_nodes for rank in node}
        if me not in chosen or len(set(chosen)) != len(chosen) or not known.issuperset(chosen):
            raise PartitionError(
                f"{who!r}: ranks must be unique, of the machine {tuple(sorted(known))}, and hold this rank"
                f" {me}, got {chosen}"
            )
        return cls(chosen, machine_nodes, me)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, both in the order of ``ranks``."""
        where = {rank: number for number, node in enumerate(self.machine_nodes) for rank in node}
        nodes: dict[int, list[int]] = {}
        for rank in self.ranks:
            nodes.setdefault(where[rank], []).append(rank)
        return tuple(map(tuple, nodes.values()))

    @cached_property
    def my_node(self) -> int:
        """Which of ``nodes`` this rank is on."""
        return next(number for number, node in enumerate(self.nodes) if self.me in node)

    @property
    def here(self) -> tuple[int, ...]:
        """Ranks on this rank's node, itself included."""
        return self.nodes[self.my_node]

    @cached_property
    def lanes(self) -> int:
        """Shares that a vector is cut into: as many as the smallest node has ranks."""
        return min(map(len, self.nodes))

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks on this node that reduce a share each."""
        return self.here[: self.lanes]

    @cached_property
    def lane(self) -> int | None:
        """Which share this rank reduces; None if none."""
        at = self.here.index(self.me)
        return at if at < self.lanes else None

    @property
    def lane_ranks(self) -> tuple[int, ...]:
        """Ranks of all nodes that reduce the same share as this one."""
        return () if self.lane is None else tuple(node[self.lane] for node in self.nodes)

    def share(self, count: int) -> tuple[int, int]:
        """Elements of a vector that this rank reduces."""
        return (0, 0) if self.lane is None else Balanced(count, self.lanes).interval(self.lane)

    def allreduce_stores(self, count: int) -> tuple[Span, ...]:
        """Whom on the node this rank stores its share of the result to."""
        start, stop = self.share(count)
        return tuple(Span(rank, start, stop) for rank in self.here if rank != self.me and start < stop)

    def scatter_pieces(self, lengths: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
        """For each node: what of its ranks' results this rank reduces, and whose it is.

        Parameters
        ----------
        lengths
            Elements of each rank's result, in the order of ``ranks``.
        """
        split, at = Listed(tuple(lengths)), {rank: i for i, rank in enumerate(self.ranks)}
        pieces = []
        for node in self.nodes:
            wanted = [Span(rank, *split.interval(at[rank])) for rank in node]
            start, stop = self.share(sum(span.size for span in wanted))
            pieces.append(tuple(_between(wanted, start, stop)))
        return tuple(pieces)

    def checked_root(self, root: int | None, who: str) -> int:
        """Root given by a caller, the first rank if None.

        Raises
        ------
        PartitionError
            If it is none of ``ranks``.
        """
        if root is None:
            return self.ranks[0]
        if root not in self.ranks:
            raise PartitionError(f"{who!r}: the root is one of the ranks {self.ranks}, got {root!r}")
        return root

    def leaders(self, root: int) -> tuple[int, ...]:
        """One rank of each node: the root on its node, the first one elsewhere."""
        return tuple(root if root in node else node[0] for node in self.nodes)


def _between(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    # Of spans laid one behind the other, those (or parts of them) at positions [start, stop).
    at = 0
    for span in spans:
        low, high = max(start - at, 0), min(stop - at, span.size)
        if low < high:
            yield Span(span.peer, span.start + low, span.start + high)
        at += span.size


def rooted_lengths(layout: NodeLayout, count: int, root: int) -> tuple[int, ...]:
    """Elements of each rank's result where the root alone has one."""
    return tuple(count if rank == root else 0 for rank in layout.ranks)


def only_node(counts: Sequence[int]) -> int | None:
    """Which of the nodes gets elements, if it is one alone."""
    getting = [node for node, count in enumerate(counts) if count]
    return getting[0] if len(getting) == 1 else None


def one_round_is_better(size: int, nbytes: int, asked: bool) -> bool:
    """Whether everyone's vector goes to everyone: for small ones, or for latency if asked for."""
    small = asked or nbytes * (size - 1) <= _ONE_ROUND_BYTES
    return size == 1 or (small and size <= _ONE_ROUND_RANKS)


def allreduce_traffic(
    layout: NodeLayout, count: int, itemsize: int, wide_itemsize: int | None = None, one_round: bool = False
) -> Traffic:
    """What one rank moves in one step of an allreduce of ``count`` elements."""
    nbytes, size, number = count * itemsize, len(layout.ranks), len(layout.nodes)
    if one_round_is_better(size, nbytes, one_round):
        return Traffic(puts=size - 1, bytes_put=(size - 1) * nbytes)
    start, stop = layout.share(count)
    share, stores = stop - start, layout.allreduce_stores(count)
    loads = (len(layout.here) - 1) * bool(share)
    across = number > 1 and share > 0
    first, last = Balanced(share, number).interval(layout.my_node)
    return Traffic(
        puts=len(stores),
        bytes_put=itemsize * sum(span.size for span in stores),
        gets=loads,
        bytes_got=loads * share * itemsize,
        collectives=2 * across,
        bytes_collective=across * (share * (wide_itemsize or itemsize) + (last - first) * itemsize),
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
        bytes_collective=nbytes * across,
        across=len(layout.nodes) if across else 1,
    )


def reduce_traffic(
    layout: NodeLayout, root: int, count: int, itemsize: int, wide_itemsize: int | None = None
) -> Traffic:
    """What one rank moves in one step of a reduction of ``count`` elements to a root."""
    pieces = layout.scatter_pieces(rooted_lengths(layout, count, root))
    share = sum(span.size for spans in pieces for span in spans)
    stored = [span.size for span in pieces[layout.my_node] if span.peer != layout.me]
    loads = (len(layout.here) - 1) * bool(share)
    across = len(layout.nodes) > 1 and share > 0
    return Traffic(
        puts=len(stored),
        bytes_put=itemsize * sum(stored),
        gets=loads,
        bytes_got=loads * share * itemsize,
        collectives=int(across),
        bytes_collective=across * share * (wide_itemsize or itemsize),
        across=len(layout.nodes) if across else 1,
    )


def exchange_traffic(exchange: Exchange, itemsize: int) -> Traffic:
    """What one rank puts in one step of a channel, such as a halo exchange."""
    messages = by_peer(exchange.sends)
    elements = sum(piece.box.volume for piece in exchange.sends)
    return Traffic(puts=len(messages), bytes_put=elements * itemsize)


def check_count(count: object, who: str) -> int:
    """Return a number of elements, or raise ``ShapeError`` if it is none; names ``who`` asked."""
    try:
        number = as_int(count)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(count, bool) or number < 0:
        raise ShapeError(f"{who!r}: a number of elements is an integer of at least 0, got {count!r}")
    return number


def check_lengths(count: int | Sequence[int], size: int, who: str) -> tuple[int, ...]:
    """Return a number of elements for each rank, given one for all or one for each.

    Raises
    ------
    ShapeError
        If one is no number of elements, or there is not one for every rank; names ``who`` asked.
    """
    if not isinstance(count, Sequence):
        return (check_count(count, who),) * size
    if len(count) != size:
        raise ShapeError(f"{who!r}: {size} ranks need {size} numbers of elements, got {tuple(count)}")
    return tuple(check_count(number, who) for number in count)
