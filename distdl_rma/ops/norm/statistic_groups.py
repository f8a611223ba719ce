"""Which elements of a tensor share a mean and a variance, and which ranks hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Split
from distdl_rma.geometry.partition import Partition

V = TypeVar("V")
# Dimension of the channels where they form groups.
_CHANNELS = 1
# Two numbers per group in every message, in float64 whatever the type of the data.
PAIR, _ITEMSIZE = 2, 8


@dataclass(frozen=True)
class NormAxes:
    """What a kind of normalisation reduces over, and where its parameters vary.

    ``reduced`` are the tensor dimensions that a mean is taken over, ``weighted`` those that the parameters
    have, in order. With ``groups`` of channels dimension 1 is reduced within a group only; 0 without.
    """

    reduced: tuple[int, ...]
    weighted: tuple[int, ...]
    groups: int = 0

    @property
    def in_run(self) -> NormAxes:
        """The same in the view of a run, where a dimension of groups stands before the channels."""
        if not self.groups:
            return self
        return NormAxes(tuple(d + 1 for d in self.reduced), (_CHANNELS, _CHANNELS + 1))

    @property
    def uniform(self) -> tuple[int, ...]:
        """Reduced dimensions along which the parameters do not vary."""
        return tuple(d for d in self.reduced if d not in self.weighted)

    def instances(self, ndim: int) -> tuple[int, ...]:
        """Dimensions along which nothing is shared: neither statistics nor parameters."""
        return tuple(d for d in range(ndim) if d not in self.reduced and d not in self.weighted)

    def width(self, channels: Split) -> int:
        """Channels of a group; 1 where there are no channels, and so no group has any."""
        return max(1, channels.extent // self.groups)

    def ranks_sharing(self, P_x: Partition, rank: int, channels: Split) -> tuple[int, ...]:
        """Ranks of P_x that hold elements of a rank's groups, itself included, in row-major order.

        How the channels are cut matters where they form groups, which may straddle ranks.
        """
        index = P_x.index_of(rank)
        ranges = [
            range(extent) if d in self.reduced else range(index[d], index[d] + 1)
            for d, extent in enumerate(P_x.shape)
        ]
        if self.groups:
            ranges[_CHANNELS] = _linked(channels, self.width(channels), index[_CHANNELS])
        return tuple(P_x.ranks_in(ranges))


def _linked(split: Split, width: int, part: int) -> range:
    # Parts from the first to the last whose groups go across the cuts between them.
    first, last = part, part + 1
    while first > 0 and split.interval(first)[0] % width:
        first -= 1
    while last < split.parts and split.interval(last)[0] % width:
        last += 1
    return range(first, last)


@dataclass(frozen=True)
class ChannelRun:
    """Part of a local tensor in which every group is a whole slice: groups of one width, or all of it.

    ``channels`` and ``groups`` are half-open: local channels, None for all of the tensor without groups of
    them; and groups, counted from the first of the sharing ranks.
    """

    channels: tuple[int, int] | None = None
    groups: tuple[int, int] = (0, 0)

    def of(self, tensor: Tensor, dim: int = _CHANNELS) -> Tensor:
        """View of the run, with a dimension of groups before that of the channels."""
        if self.channels is None:
            return tensor
        (start, stop), (first, last) = self.channels, self.groups
        part = tensor.narrow(dim, start, stop - start)
        groups = last - first, (stop - start) // (last - first)
        return part.view(*part.shape[:dim], *groups, *part.shape[dim + 1 :])

    def of_groups(self, values: V) -> V:
        """The run's part of values per group, a tensor or an array; a view."""
        first, last = self.groups
        part: Any = values
        return values if self.channels is None else part[:, first:last]


class StatisticGroups:
    """The groups of elements with one mean and variance that one rank has a part of.

    ``ranks`` share them: all with elements of the same groups, in row-major order of the grid, unless fewer
    are given. Values per group have the ``shape`` that broadcasts to the view of a run, and the local tensor,
    of shape ``local``, is its ``runs``. ``counts`` are the elements of each group on each of the ranks, as
    (rank, *groups), with extent 1 where they do not vary; ``total`` is their sum.
    """

    def __init__(
        self, axes: NormAxes, source: Decomposition, rank: int, ranks: Sequence[int] | None = None
    ) -> None:
        channels = source.splits[axes.weighted[0]]
        sharing = axes.ranks_sharing(source.partition, rank, channels) if ranks is None else ranks
        self.ranks = tuple(sharing)
        boxes, box = [source.box(r) for r in self.ranks], source.box(rank)
        self.local = box.shape
        self.shape = tuple(1 if d in axes.reduced else n for d, n in enumerate(box.shape))
        self.runs: tuple[ChannelRun, ...] = (ChannelRun(),)
        groups, width = range(1), 0
        if axes.groups:
            width = axes.width(channels)
            low, high = min(b.start[_CHANNELS] for b in boxes), max(b.bounds[_CHANNELS][1] for b in boxes)
            groups = range(low // width, -(-high // width))
            self.runs = _runs(box.bounds[_CHANNELS], width, groups.start)
            self.shape = (self.shape[0], len(groups), 1, *self.shape[2:])
        counts = [[_count(b, axes.reduced, width, group) for group in groups] for b in boxes]
        row = (1, len(groups), *(1,) * (len(self.shape) - 2)) if width else (1,) * len(self.shape)
        self.counts = torch.tensor(counts, dtype=torch.float64).view(len(boxes), *row)
        self.total = self.counts.sum(0)

    @property
    def nbytes(self) -> int:
        """Bytes of one message with the statistics of all of them."""
        return PAIR * prod(self.shape) * _ITEMSIZE


def _count(box: Box, reduced: Sequence[int], width: int, group: int) -> int:
    if width:
        start, stop = box.bounds[_CHANNELS]
        low = max(start, group * width)
        box = box.replace(_CHANNELS, low, max(low, min(stop, (group + 1) * width)))
    return prod(box.shape[d] for d in reduced)


def _runs(bounds: tuple[int, int], width: int, first: int) -> tuple[ChannelRun, ...]:
    # A part of a group in front, whole groups, a part of a group behind.
    start, stop = bounds
    whole = (-(-start // width) * width, stop // width * width)
    cuts = sorted({start, stop, *(cut for cut in whole if start < cut < stop)})
    return tuple(
        ChannelRun((a - start, b - start), (a // width - first, -(-b // width) - first))
        for a, b in pairwise(cuts)
    )
