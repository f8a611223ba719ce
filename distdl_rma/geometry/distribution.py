"""Distributions: how many instances each tensor dimension has, and their positions in the machine.

``Distribution(2, 1, 3, strides=(2, 1, 4))`` on a machine of nine ranks, M = (0, ..., 8): two parts of the
batch and three of the height, in a box of 2 x 1 x 4 ranks::

    M                0        1        2        3      4        5        6        7      8
    (n, c, height)   (0,0,0)  (0,0,1)  (0,0,2)  idle   (1,0,0)  (1,0,1)  (1,0,2)  idle   idle

Strides let a layer leave places free, so that the parts of another layer with four places lie on the same
ranks: fewer elements move between the two. Layers take partitions; ``on`` makes one of a distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Protocol

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.box import LEADING, Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition, integers

# Numbers of the inequalities in the interface document: of an input, of an output, of a normalisation.
INPUT, OUTPUT, NORM = ("3.1", "3.2", "3.3"), ("3.4", "3.5", "3.6"), ("4.1", "4.2", "4.3")
_MOST_SPACE = 3
_NOBODY = -1


class Ranked(Protocol):
    """Ordered list of ranks: a machine or a partition."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank ids, in order."""


@dataclass(frozen=True, init=False, repr=False)
class Distribution:
    """Number of instances over which each tensor dimension is distributed, and their strides in the list M.

    ``Distribution(2, 1, 3, 1)`` splits the batch into two parts and the height into three. A distribution is
    a value and belongs to no machine: functions that take both check that it fits.

    Let p count the places in space, row-major. The process at (n, c, p) is the one at position ``n * stride_n
    + c * stride_c + p`` of the list M. In the box that ``strides`` spans, ``stride_c`` is P~ and ``stride_n``
    is C~ x P~. If the instances do not fit into the box, the shards are packed instead, as the inequalities
    permit, so that each rank has at most one shard.

    Parameters
    ----------
    n, c, spatial
        Number of instances of batch, channels and one to three spatial dimensions; 1 is not distributed.
    strides
        Extents of the box of ranks in which the instances lie: (N~, C~, P~), or one number per dimension,
        whose spatial ones multiply to P~. Tight if None.

    Raises
    ------
    PartitionError
        If a count is not an integer of at least 1, or there are too few or too many counts. Methods that take
        a machine or a partition raise it if the distribution does not fit.

    Notes
    -----
    Interface document, chapters 1, 3 and 4; requirements A2 to A6.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)
    >>> rows = Distribution(1, 1, 2, 1)
    >>> rows.active_ranks(machine), rows.coords_of(1, machine)
    ((0, 1), (0, 0, 1, 0))
    >>> [box.shape for box in rows.shards((1, 3, 5, 4), machine).values()]
    [(1, 3, 3, 4), (1, 3, 2, 4)]
    >>> machine.distribute(rows)  # the same as a partition
    Partition(ranks=(0, 1), shape=(1, 1, 2, 1), me=0)
    """

    shape: tuple[int, ...]  # instances of all dimensions
    strides: tuple[int, int, int]  # (N~, C~, P~)

    def __init__(self, n: int, c: int, *spatial: int, strides: Sequence[int] | None = None) -> None:
        shape = _counts("instances", (n, c, *spatial))
        if not 1 <= len(spatial) <= _MOST_SPACE:
            raise PartitionError(
                f"Distribution: needs batch, channels and 1 to {_MOST_SPACE} spatial dimensions, got {shape}"
            )
        box = shape if strides is None else _counts("strides", strides)
        if len(box) not in (LEADING + 1, len(shape)):
            raise PartitionError(
                f"Distribution: strides are (N~, C~, P~), or {len(shape)} numbers for instances {shape}, got"
                f" {box}"
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "strides", (*box[:LEADING], prod(box[LEADING:])))

    def __repr__(self) -> str:
        box = "" if self.strides == self._tight else f", strides={self.strides}"
        return f"Distribution({', '.join(map(str, self.shape))}{box})"

    @property
    def dim(self) -> int:
        """Number of dimensions of the tensor."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of shards."""
        return prod(self.shape)

    @property
    def _tight(self) -> tuple[int, int, int]:
        n, c, *space = self.shape
        return n, c, prod(space)

    @cached_property
    def _steps(self) -> tuple[int, int]:
        # Distance in M between two neighbours in batch, and between two in channels.
        (n, c, places), (box_n, box_c, box_p) = self._tight, self.strides
        return (c * places, places) if n > box_n else (box_c * box_p, box_p if c <= box_c else places)

    @cached_property
    def _places(self) -> dict[tuple[int, ...], int]:
        # Position in M of each shard by its coordinates, in row-major order of the shards.
        (n, c, places), (step_n, step_c) = self._tight, self._steps
        positions = (i * step_n + j * step_c + p for i in range(n) for j in range(c) for p in range(places))
        return dict(zip(product(*map(range, self.shape)), positions, strict=True))

    def check(self, size: int, equations: Sequence[str] = INPUT, who: str = "Distribution") -> None:
        """Check the inequalities for a machine of ``size`` ranks; local, with the same result on all ranks.

        ``PartitionError`` for the first that does not hold, with its values and its number in the interface
        document. ``equations`` are these numbers, from the inequality of space to that of all dimensions.
        """
        for count, equation in enumerate(equations, 1):
            instances, box = self.shape[LEADING + 1 - count :], self.strides[-count:]
            if prod(instances) > prod(box):
                raise PartitionError(f"{who}: ({equation}): {_product(instances)} > {_product(box)}")
        if prod(self.strides) > size:
            raise PartitionError(f"{who}: ({equations[-1]}): {_product(self.strides)} > |M| = {size}")

    def _checked(self, machine: Ranked) -> tuple[int, ...]:
        self.check(len(machine.ranks))
        return machine.ranks

    def rank_of(self, coords: Sequence[int], machine: Ranked) -> int:
        """Rank id of the process at ``(n, c, *spatial)``; ``PartitionError`` if there is no such place."""
        place = integers(coords, f"{self}: coordinates")
        if place not in self._places:
            raise PartitionError(f"{self}: there are no coordinates {place}")
        return self._checked(machine)[self._places[place]]

    def coords_of(self, rank: int, machine: Ranked) -> tuple[int, ...] | None:
        """Coordinates ``(n, c, *spatial)`` of a rank id of the machine; None if the rank is idle."""
        ranks = self._checked(machine)
        if rank not in ranks:
            raise PartitionError(f"rank {rank} is not in M = {ranks}")
        return {at: coords for coords, at in self._places.items()}.get(ranks.index(rank))

    def active_ranks(self, machine: Ranked) -> tuple[int, ...]:
        """Rank ids that hold a shard, in row-major order of the shards."""
        ranks = self._checked(machine)
        return tuple(ranks[at] for at in self._places.values())

    def shards(self, shape: Sequence[int], machine: Ranked) -> dict[int, Box]:
        """Box of a global tensor that each rank of the machine holds; an empty box on idle ranks."""
        blocks = Decomposition.balanced(Partition(self.active_ranks(machine), self.shape, _NOBODY), shape)
        return {rank: blocks.box(rank) for rank in machine.ranks}

    def on(self, partition: Partition) -> Partition:
        """Grid of shards on ranks of a partition of M; local."""
        return Partition(self.active_ranks(partition), self.shape, partition.me, partition.home)


def _counts(what: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    counts = integers(numbers, f"Distribution: {what}")
    if min(counts, default=1) < 1:
        raise PartitionError(f"Distribution: {what} must be at least 1, got {counts}")
    return counts


def _product(factors: Sequence[int]) -> str:
    text = " x ".join(map(str, factors))
    return text if len(factors) == 1 else f"{text} = {prod(factors)}"
