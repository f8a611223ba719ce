"""Groups of elements that share a mean and a variance, and the ranks that hold these elements.

An input of 2 samples and 4 channels, on ranks that cut the rows in two. What one group is::

    batch_norm        a channel of all samples, all rows               4 groups, both ranks share all of them
    instance_norm     a channel of one sample                          8 groups, both ranks group_norm, 2
    two channels of one sample                       4 groups, both ranks layer_norm        the last
    dimensions of all that stands before    shared by ranks that cut these dimensions

A *row* is what this rank has of a group with one weight: of group norm, a channel of a sample. Sums are made
for rows, by torch, and added up to groups by numpy, since there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Split
from distdl_rma.geometry.partition import Partition

# There are few values per row: numpy computes on them in a third of the time of a torch call.
Array = NDArray[Any]
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
    def uniform(self) -> tuple[int, ...]:
        """Reduced dimensions along which the parameters do not vary."""
        return tuple(d for d in self.reduced if d not in self.weighted)

    @property
    def elementwise(self) -> bool:
        """Whether each element of a group has a weight of its own, as in layer norm."""
        return not self.groups and not self.uniform

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


class StatisticGroups:
    """The groups of elements with one mean and variance of which one rank has a part.

    ``ranks`` share the groups: by default all ranks with elements of them, in row-major order of the grid.
    The local tensor, of shape ``local``, consists of rows: of the elements of a group that have one weight,
    or, if the normalisation is ``elementwise``, of all elements of a group. Values per row have the shape
    ``rows``, values per group the ``shape``; both have the dimensions of the tensor. ``counts`` are the
    numbers of elements of each group on each of the ranks, as (rank, *groups), with extent 1 where they do
    not vary; ``total`` is their sum over the ranks.
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
        self.row_dims = axes.reduced if axes.elementwise else axes.uniform
        self.rows = tuple(1 if d in self.row_dims else n for d, n in enumerate(box.shape))
        # Group of each local channel; first local channel of each group with any, and index of these groups.
        self._group: Array | None = None
        self._starts: Array = np.empty(0)
        self._own: tuple[Any, ...] | None = None
        # Dimension of the channels, counted from the last one.
        self._axis = _CHANNELS - len(box.shape)
        groups, width = range(1), 0
        if axes.groups:
            width = axes.width(channels)
            low, high = min(b.start[_CHANNELS] for b in boxes), max(b.bounds[_CHANNELS][1] for b in boxes)
            groups = range(low // width, -(-high // width))
            self.shape = (self.shape[0], len(groups), *self.shape[_CHANNELS + 1 :])
            self._group = np.arange(*box.bounds[_CHANNELS]) // width - groups.start
            found, self._starts = np.unique(self._group, return_index=True)
            if len(found) != len(groups):
                own = slice(*found[[0, -1]] + (0, 1)) if len(found) else slice(0)
                self._own = (..., own, *(slice(None),) * (len(box.shape) - 2))
        counts = [[_count(b, axes.reduced, width, group) for group in groups] for b in boxes]
        row = (1, len(groups), *(1,) * (len(self.shape) - 2)) if width else (1,) * len(self.shape)
        self.counts = torch.tensor(counts, dtype=torch.float64).view(len(boxes), *row)
        self.total = self.counts.sum(0)

    @property
    def nbytes(self) -> int:
        """Bytes of one message with the statistics of all groups."""
        return PAIR * prod(self.shape) * _ITEMSIZE

    def sums(self, rows: Array, out: Array | None = None) -> Array:
        """Sums of values per row, (..., *rows), over the local rows of each group: (..., *shape).

        Zero for groups of which this rank has no channel, but a rank between two others may share.
        """
        if self._group is None:
            if out is None:
                return rows
            out[...] = rows
            return out
        if out is None:
            out = np.empty((*rows.shape[: -len(self.rows)], *self.shape))
        part = out
        if self._own is not None:
            out[...] = 0
            part = out[self._own]
        np.add.reduceat(rows, self._starts, self._axis, out=part)
        return out

    def spread(self, values: Array) -> Array:
        """Values per row, (..., *rows), from values per group."""
        return values if self._group is None else values.take(self._group, self._axis)


def _count(box: Box, reduced: Sequence[int], width: int, group: int) -> int:
    if width:
        start, stop = box.bounds[_CHANNELS]
        low = max(start, group * width)
        box = box.replace(_CHANNELS, low, max(low, min(stop, (group + 1) * width)))
    return prod(box.shape[d] for d in reduced)
