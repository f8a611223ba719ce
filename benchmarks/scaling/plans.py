"""What one rank of many sends in a step of a network, from the plans that the library would make there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple, cast

from benchmarks.scaling.layers import Layer
from benchmarks.traffic import Traffic, allreduce_traffic, exchange_traffic, vote_traffic
from distdl_rma import Partition, distribute
from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.gathering import FlatStages, steps
from distdl_rma.layers.ops.norm import statistics
from distdl_rma.layers.ops.norm.statistic_groups import PAIR
from distdl_rma.layers.partitioned.core import refusals
from distdl_rma.layers.sync.bucket import GradientSlot, bucketed
from distdl_rma.segments.collectives.node_layout import NodeLayout

FLOAT, DOUBLE = 4, 8
BUCKET_NBYTES: int = inspect.signature(distribute).parameters["bucket_nbytes"].default


@dataclass(frozen=True)
class Cluster:
    """Ranks on a grid (batch, channel, *space), row-major, so many of them in a row on each node."""

    grid: tuple[int, ...]
    per_node: int

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.grid)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node."""
        return tuple(self.ranks[at : at + self.per_node] for at in range(0, self.size, self.per_node))

    @property
    def middle(self) -> int:
        """A rank with as many neighbours as there are."""
        partition = Partition(self.ranks, self.grid, 0)
        return partition.rank_at(tuple(n // 2 for n in self.grid))

    def partition(self, me: int) -> Partition:
        """The grid as a rank sees it."""
        return Partition(self.ranks, self.grid, me)

    def layout(self, me: int) -> NodeLayout:
        """The ranks by node as a rank sees it."""
        return NodeLayout(self.ranks, self.nodes, me)


@dataclass(frozen=True)
class Movement:
    """Pieces that go to peers, and as many come back; of elements of ``itemsize`` bytes."""

    exchange: Exchange
    itemsize: int = FLOAT

    def traffic(self, _cluster: Cluster, _me: int) -> Traffic:
        """What this rank puts."""
        return exchange_traffic(self.exchange, self.itemsize)


@dataclass(frozen=True)
class Round:
    """A vector of everyone to everyone."""

    nbytes: int

    def traffic(self, cluster: Cluster, _me: int) -> Traffic:
        """What each rank puts."""
        others = cluster.size - 1
        return Traffic(puts=others, bytes_put=others * self.nbytes)


@dataclass(frozen=True)
class Sum:
    """An allreduce over all ranks."""

    count: int
    itemsize: int
    one_round: bool = False

    def traffic(self, cluster: Cluster, me: int) -> Traffic:
        """What a rank stores, loads, and hands to MPI between nodes."""
        return allreduce_traffic(cluster.layout(me), self.count, self.itemsize, one_round=self.one_round)


@dataclass(frozen=True)
class Vote:
    """Whether all ranks say the same: that they begin a call of the model, and which way they went."""

    def traffic(self, cluster: Cluster, me: int) -> Traffic:
        """What a rank says, and tells other nodes."""
        return vote_traffic(cluster.layout(me))


@dataclass(frozen=True)
class Staged:
    """A movement between decompositions, in stages over nodes where it takes these."""

    source: Decomposition
    target: Decomposition
    itemsize: int = FLOAT

    def movements(self, cluster: Cluster, me: int) -> list[Movement]:
        """What follows one another."""
        ends = self.source, self.target
        found = steps(*ends, lambda rank: rank // cluster.per_node, me) or [ends]
        stages = (step.stages if isinstance(step, FlatStages) else [step] for step in found)
        return [Movement(Exchange(me, *stage), self.itemsize) for stage in chain.from_iterable(stages)]

    def traffic(self, cluster: Cluster, me: int) -> Traffic:
        """What a rank puts, and passes on."""
        each = [movement.traffic(cluster, me) for movement in self.movements(cluster, me)]
        return Traffic(puts=sum(t.puts for t in each), bytes_put=sum(t.bytes_put for t in each))

    @property
    def back(self) -> Staged:
        """The adjoint."""
        return Staged(self.target, self.source, self.itemsize)


@dataclass(frozen=True)
class Told:
    """So many bytes of the first rank to all others."""

    nbytes: int

    def movements(self, cluster: Cluster, me: int) -> list[Movement]:
        """What follows one another until all have them."""
        ranks = cluster.ranks
        if cluster.size == 1:
            return []
        source, target = (
            Decomposition.replicated(Partition(some, (len(some),), me), (self.nbytes,))
            for some in (ranks[:1], ranks[1:])
        )
        return Staged(source, target, 1).movements(cluster, me)

    def traffic(self, cluster: Cluster, me: int) -> Traffic:
        """What a rank puts, and passes on."""
        each = [movement.traffic(cluster, me) for movement in self.movements(cluster, me)]
        return Traffic(puts=sum(t.puts for t in each), bytes_put=sum(t.bytes_put for t in each))


Communication = Movement | Round | Sum | Vote | Told | Staged


class Planned(NamedTuple):
    """What a layer communicates in a step: in its forward, and in its backward."""

    layer: Layer
    forward: tuple[Communication, ...]
    backward: tuple[Communication, ...]


def planned(layer: Layer, cluster: Cluster, me: int) -> Planned:
    """The plans of one rank for a layer whose input and output are cut in balanced blocks."""
    if layer.kind == "BatchNorm":
        return Planned(layer, *_norm(layer.inputs[1], cluster))
    if layer.stencil is None:
        return Planned(layer, (), ())
    exchange = _windows(layer, cluster.partition(me), me)
    if not (exchange.sends or exchange.receives):
        return Planned(layer, (), ())
    back = () if layer.first else (Movement(exchange.T),)
    return Planned(layer, (Movement(exchange),), back)


def _windows(layer: Layer, P_x: Partition, me: int) -> Exchange:
    # What outputs read of the inputs; of a transposed layer, what inputs add to the outputs.
    assert layer.stencil is not None
    x, y = (Decomposition.balanced(P_x, shape) for shape in (layer.inputs, layer.outputs))
    few, many = (x, y) if layer.kind == "ConvTranspose" else (y, x)
    read = layer.stencil.with_halo(few.splits[LEADING:], many.shape[LEADING:])
    # In channels and in the batch every rank has all that it needs.
    reads = many.with_splits(dict(enumerate(read, LEADING)))
    return Exchange(me, reads, y) if layer.kind == "ConvTranspose" else Exchange(me, x, reads)


def _norm(channels: int, cluster: Cluster) -> tuple[tuple[Communication, ...], tuple[Communication, ...]]:
    if cluster.size == 1:
        return (), ()
    nbytes = PAIR * channels * DOUBLE
    quick = cluster.size <= statistics._ROUND_RANKS and cluster.size * nbytes <= statistics._ROUND_NBYTES
    backward = (Sum(PAIR * channels, DOUBLE, one_round=quick),)
    if quick:
        return (Round(nbytes),), backward
    return (Sum(channels, DOUBLE), Sum(channels, DOUBLE)), backward


def gradients(layers: list[Layer]) -> list[tuple[list[Layer], Sum]]:
    """The allreduces of gradients in the order in which backward reaches them, with the layers of each."""
    slots = [[_Slot(layer, count) for count in layer.parameters] for layer in layers if layer.parameters]
    made = bucketed(cast(list[list[GradientSlot]], slots), BUCKET_NBYTES)
    return [_bucket(cast(list[_Slot], bucket)) for bucket in made]


@dataclass(frozen=True)
class _Slot:
    # What a bucket looks at.
    layer: Layer
    count: int
    kind: Any = None

    @property
    def nbytes(self) -> int:
        return FLOAT * self.count


def _bucket(slots: list[_Slot]) -> tuple[list[Layer], Sum]:
    # A flag per parameter comes with them.
    return [slot.layer for slot in slots], Sum(sum(slot.count for slot in slots) + len(slots), FLOAT)


def loss() -> Sum:
    """The sum of the loss over the ranks."""
    return Sum(1, FLOAT)


def outcome() -> Told:
    """What ranks that only keep copies of weights hear of a call."""
    return Told(refusals._OUTCOME_NBYTES)


def step_traffic(layers: list[Layer], cluster: Cluster, me: int) -> Traffic:
    """All that one rank moves in a step."""
    total = Traffic()
    # The begin and the end of the call.
    votes = (Vote(), Vote()) if cluster.size > 1 else ()
    for each in (*communications(layers, cluster, me), *votes):
        traffic = each.traffic(cluster, me)
        for name in ("puts", "bytes_put", "gets", "bytes_got", "collectives", "bytes_collective"):
            setattr(total, name, getattr(total, name) + getattr(traffic, name))
    total.across = len(cluster.nodes)
    return total


def communications(layers: list[Layer], cluster: Cluster, me: int) -> Iterator[Communication]:
    """Everything that a rank communicates in a step, but for the begin and the end of its call."""
    for layer in layers:
        plan = planned(layer, cluster, me)
        yield from (*plan.forward, *plan.backward)
    if cluster.size > 1:
        yield loss()
        yield from (total for _, total in gradients(layers))
