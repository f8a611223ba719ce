"""Which elements of a tensor share a mean and a variance, and which ranks hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Split

# Dimension of the channels where they form groups.
_CHANNELS = 1


@dataclass(frozen=True)
class NormAxes:
    """What a kind of normalisation reduces over, and where its parameters vary.

    Parameters
    ----------
    reduced
        Tensor dimensions that a mean is taken over.
    weighted
        Tensor dimensions that the parameters have, in order.
    groups
        Number of groups of channels: dimension 1 is then reduced within a group only. 0 without groups.
    """

    reduced: tuple[int, ...]
    weighted: tuple[int, ...]
    groups: int = 0

    @property
    def viewed(self) -> NormAxes:
        """The same in the view of a band, where a dimension of groups stands before the channels."""
        if not self.groups:
            return self
        return NormAxes(tuple(d + 1 for d in self.reduced), (_CHANNELS, _CHANNELS + 1))

    @property
    def local(self) -> tuple[int, ...]:
        """Reduced dimensions along which the parameters do not vary."""
        return tuple(d for d in self.reduced if d not in self.weighted)

    def alone(self, ndim: int) -> tuple[int, ...]:
        """Dimensions whose parts have neither cells nor parameters in common."""
        return tuple(d for d in range(ndim) if d not in self.reduced and d not in self.weighted)

    def width(self, channels: Split) -> int:
        """Channels of a group; 1 where there are no channels, and so no group has any."""
        return max(1, channels.extent // self.groups)

    def sharing(self, P_x: Partition, rank: int, channels: Split | None = None) -> tuple[int, ...]:
        """Ranks of P_x that hold elements of a rank's cells, itself included, in row-major order.

        Parameters
        ----------
        P_x
            Partition of the tensor, as many dimensions.
        rank
            Rank id of a member.
        channels
            How the channels are cut, where they form groups.
        """
        index = P_x.index_of(rank)
        ranges = [
            range(extent) if d in self.reduced else range(index[d], index[d] + 1)
            for d, extent in enumerate(P_x.shape)
        ]
        if channels is not None and self.groups:
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
    """Part of a local tensor in which every cell is a whole slice: groups of one width, or all of it.

    Parameters
    ----------
    channels
        From the first to behind the last local channel; None for all of the tensor, without groups.
    cells
        From the first to behind the last group, counted from the first of the sharing ranks.
    """

    channels: tuple[int, int] | None = None
    cells: tuple[int, int] = (0, 0)

    def of(self, tensor: torch.Tensor, dim: int = _CHANNELS) -> torch.Tensor:
        """View of the band, with a dimension of groups before that of the channels."""
        if self.channels is None:
            return tensor
        (start, stop), (first, last) = self.channels, self.cells
        part = tensor.narrow(dim, start, stop - start)
        groups = last - first, (stop - start) // (last - first)
        return part.view(*part.shape[:dim], *groups, *part.shape[dim + 1 :])

    def of_cells(self, values: torch.Tensor) -> torch.Tensor:
        """The band's part of values per cell; a view."""
        first, last = self.cells
        return values if self.channels is None else values.narrow(_CHANNELS, first, last - first)


class StatisticGroups:
    """The statistics cells of one rank's tensor: how many elements each has on which rank.

    Parameters
    ----------
    layout
        Which elements share a cell.
    P_x
        Partition of the tensor.
    source
        Who owns what of it.
    rank
        Rank id of this process, a member.
    ranks
        Those of the ranks with elements of the same cells that are to share them, in row-major order of the
        grid, this one included; all of them if None.

    Attributes
    ----------
    ranks
        Rank ids that share them, in row-major order of the grid, this one included.
    shape
        Shape of values per cell; they broadcast to the view of a band.
    bands
        Parts of the local tensor.
    counts
        Number of elements on each of the ranks in each cell, as (rank, *cells); 1 where it does not vary.
    total
        Number of elements of each cell.
    """

    def __init__(
        self,
        layout: NormAxes,
        P_x: Partition,
        source: Decomposition,
        rank: int,
        ranks: Sequence[int] | None = None,
    ) -> None:
        channels = source.splits[_CHANNELS] if layout.groups else None
        self.ranks = layout.sharing(P_x, rank, channels) if ranks is None else tuple(ranks)
        boxes, box = [source.box(r) for r in self.ranks], source.box(rank)
        self.shape = tuple(1 if d in layout.reduced else n for d, n in enumerate(box.shape))
        self.bands: tuple[ChannelRun, ...] = (ChannelRun(),)
        groups, width = range(1), 0
        if channels is not None:
            width = layout.width(channels)
            low, high = min(b.start[_CHANNELS] for b in boxes), max(b.bounds[_CHANNELS][1] for b in boxes)
            groups = range(low // width, -(-high // width))
            self.bands = _bands(box.bounds[_CHANNELS], width, groups.start)
            self.shape = (self.shape[0], len(groups), 1, *self.shape[2:])
        counts = [[_count(b, layout.reduced, width, group) for group in groups] for b in boxes]
        row = (1, len(groups), *(1,) * (len(self.shape) - 2)) if width else (1,) * len(self.shape)
        self.counts = torch.tensor(counts, dtype=torch.float64).view(len(boxes), *row)
        self.total = self.counts.sum(0)


def _count(box: Box, reduced: Sequence[int], width: int, group: int) -> int:
    if width:
        box = box & Box(
            (*box.bounds[:_CHANNELS], (group * width, (group + 1) * width), *box.bounds[_CHANNELS + 1 :])
        )
    return prod(box.shape[d] for d in reduced)


def _bands(bounds: tuple[int, int], width: int, first: int) -> tuple[ChannelRun, ...]:
    # A part of a group in front, whole groups, a part of a group behind.
    start, stop = bounds
    whole = (-(-start // width) * width, stop // width * width)
    cuts = sorted({start, stop, *(cut for cut in whole if start < cut < stop)})
    return tuple(
        ChannelRun((a - start, b - start), (a // width - first, -(-b // width) - first))
        for a, b in pairwise(cuts)
    )
