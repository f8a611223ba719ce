"""Ranks of a collective by node, and the elements that each works on; without MPI.

Ranks 0 to 4 on two nodes, of which the smaller one has two ranks. So a vector is cut into two shares, and
rank 2 holds none::

    node 0      node 1
    0           3          share 0, the first half: summed on each node by 0 and by 3, then between 0 and 3
    1           4          share 1, the second half: by 1 and by 4, then between 1 and 4
    2                      writes its vector, and reads the result

Each pair talks over the network at once. With one leader per node instead, a single core would sum the whole
vector; with more shares than the smallest node has ranks, some rank would have two partners elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Groups, grouped, leaders, share_holders
from distdl_rma.segments.memory.array_bytes import as_count


@dataclass(frozen=True)
class NodeLayout:
    """The ranks of a collective by node, seen from one of them.

    A vector is cut into as many balanced shares as the smallest node has ranks. On every node the *holders*
    work on one share each; holders of the same share communicate between nodes. ``machine_nodes`` are all
    ranks of the machine by node; the ranks of a node load and store each other's memory.
    """

    ranks: tuple[int, ...]
    machine_nodes: Groups
    me: int

    @classmethod
    def checked(cls, ranks: Sequence[int], machine_nodes: Groups, me: int, who: str) -> NodeLayout:
        """Layout of the ranks that a caller gave; messages name the caller by ``who``.

        ``PartitionError`` if a rank is listed twice or is not of the machine, or this rank is not among them.
        """
        chosen, known = tuple(ranks), {rank for node in machine_nodes for rank in node}
        if me not in chosen or len(set(chosen)) != len(chosen) or not known.issuperset(chosen):
            raise PartitionError(
                f"{who!r}: ranks must be unique, of the machine {tuple(sorted(known))}, and hold this rank"
                f" {me}, got {chosen}"
            )
        return cls(chosen, machine_nodes, me)

    @cached_property
    def nodes(self) -> Groups:
        """The ranks of each node, both in the order of ``ranks``."""
        where = {rank: number for number, node in enumerate(self.machine_nodes) for rank in node}
        return grouped(self.ranks, where.__getitem__)

    @cached_property
    def my_node(self) -> int:
        """Index of this rank's node in ``nodes``."""
        return next(number for number, node in enumerate(self.nodes) if self.me in node)

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Ranks on this rank's node, itself included."""
        return self.nodes[self.my_node]

    @cached_property
    def others_here(self) -> tuple[int, ...]:
        """The other ranks on this rank's node."""
        return tuple(rank for rank in self.here if rank != self.me)

    def leaders(self, root: int) -> tuple[int, ...]:
        """One rank of each node: the root on its node, the first one elsewhere."""
        return leaders(self.nodes, root)

    @cached_property
    def _holders(self) -> Groups:
        return share_holders(self.nodes)

    @property
    def shares(self) -> int:
        """Number of shares that a vector is cut into."""
        return len(self.holders)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Ranks of this node that work on a share each, in the order of the shares."""
        return self._holders[self.my_node]

    @cached_property
    def my_share(self) -> int | None:
        """Index of the share that this rank works on; None if it holds none."""
        return self.holders.index(self.me) if self.me in self.holders else None

    @property
    def same_share(self) -> tuple[int, ...]:
        """Ranks of all nodes that work on this rank's share, itself included; none if it holds none."""
        return () if self.my_share is None else tuple(node[self.my_share] for node in self._holders)

    def share(self, count: int) -> slice:
        """Elements of a vector of ``count`` elements that this rank works on."""
        if self.my_share is None:
            return slice(0, 0)
        return slice(*Balanced(count, self.shares).interval(self.my_share))


def check_count(count: object, who: str) -> int:
    """Return a number of elements; ``ShapeError``, which names ``who`` asked, if it is invalid."""
    return as_count(count, f"{who!r}: a number of elements is an integer", ShapeError)
