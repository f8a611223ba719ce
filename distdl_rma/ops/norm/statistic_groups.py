"""Groups of elements that share a mean and a variance, and the ranks that hold these elements."""

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
# Dimension of the channels if they form groups.
_CHANNELS = 1
# Values per group in every message, and bytes of each, float64 for all types of data.
PAIR, _ITEMSIZE = 2, 8


@dataclass(frozen=True)
class NormAxes:
    """Dimensions that a kind of normalisation reduces, and dimensions of its parameters.

    ``reduced`` are the tensor dimensions over which a mean is taken. ``weighted`` are the dimensions along
    which the parameters vary, in order. ``groups`` is the number of groups of channels: dimension 1 is then
    reduced only within a group. It is 0 without groups.
    """

    reduced: tuple[int, ...]
    weighted: tuple[int, ...]
    groups: int = 0

    @property
    def in_run(self) -> NormAxes:
        """The same for the view of a run, which has a dimension of groups before the channels."""
        if not self.groups:
            return self
        return NormAxes(tuple(d + 1 for d in self.reduced), (_CHANNELS, _CHANNELS + 1))

    @property
    def uniform(self) -> tuple[int, ...]:
        """Reduced dimensions along which the parameters do not vary."""
        return tuple(d for d in self.reduced if d not in self.weighted)

    def instances(self, ndim: int) -> tuple[int, ...]:
        """Dimensions that share neither statistics nor parameters, for example samples in instance norm."""
        return tuple(d for d in range(ndim) if d not in self.reduced and d not in self.weighted)

    def width(self, channels: Split) -> int:
        """Number of channels of a group; 1 if there are no channels."""
        return max(1, channels.extent // self.groups)

    def ranks_sharing(self, P_x: Partition, rank: int, channels: Split) -> tuple[int, ...]:
        """Ranks of P_x that hold elements of a rank's groups, itself included, in row-major order.

        ``channels`` is the cut of the channels: a group of channels may be on several ranks.
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
    # Parts around a part such that a group crosses each cut between them.
    first, last = part, part + 1
    while first > 0 and split.interval(first)[0] % width:
        first -= 1
    while last < split.parts and split.interval(last)[0] % width:
        last += 1
    return range(first, last)


@dataclass(frozen=True)
class ChannelRun:
    """Part of a local tensor in which all groups have the same number of local channels.

    ``channels`` and ``groups`` are half-open intervals: of local channels, None for the whole tensor without
    groups of channels; and of groups, counted from the first group of the sharing ranks.
    """

    channels: tuple[int, int] | None = None
    groups: tuple[int, int] = (0, 0)

    def of(self, tensor: Tensor, dim: int = _CHANNELS) -> Tensor:
        """View of the run, with a dimension of groups before the channels."""
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
    """The groups of elements with one mean and variance of which one rank has a part.

    ``ranks`` share the groups: by default all ranks with elements of them, in row-major order of the grid.
    Values per group have the ``shape``, which broadcasts to the view of a run. The local tensor, of shape
    ``local``, consists of the ``runs``. ``counts`` are the numbers of elements of each group on each of the
    ranks, as (rank, *groups), with extent 1 where they do not vary; ``total`` is their sum over the ranks.
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
        """Bytes of one message with the statistics of all groups."""
        return PAIR * prod(self.shape) * _ITEMSIZE


def _count(box: Box, reduced: Sequence[int], width: int, group: int) -> int:
    if width:
        start, stop = box.bounds[_CHANNELS]
        low = max(start, group * width)
        box = box.replace(_CHANNELS, low, max(low, min(stop, (group + 1) * width)))
    return prod(box.shape[d] for d in reduced)


def _runs(bounds: tuple[int, int], width: int, first: int) -> tuple[ChannelRun, ...]:
    # Part of a group, whole groups, part of a group.
    start, stop = bounds
    whole = (-(-start // width) * width, stop // width * width)
    cuts = sorted({start, stop, *(cut for cut in whole if start < cut < stop)})
    return tuple(
        ChannelRun((a - start, b - start), (a // width - first, -(-b // width) - first))
        for a, b in pairwise(cuts)
    )
