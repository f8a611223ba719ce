"""Sources whose boxes are prepared as they are read, for models that others have trained.

What a program does to a volume before its model sees it is exact on a box if each element depends on itself
alone, and on numbers of the whole that were found before::

    file       (z, y, x), or channels first        files of single channels are stacked
      read     a box, with all channels            as float32
      steps    box -> box, elementwise             by numbers of the whole, where a step has some
    source     (channels, z, y, x)

Numbers of the whole are sums over boxes in float64. Each process reads a part of the boxes, and all add up
the same sums in the same order, so that they have equal numbers on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, NamedTuple, Self

import torch

from distdl_rma.jobs.out_of_core.processes import Processes
from distdl_rma.jobs.out_of_core.results import of_disk
from distdl_rma.layers.sources.reading import label, read_box

Slices = tuple[slice, ...]
Step = Callable[[torch.Tensor], torch.Tensor]
# Elements of a box by which numbers of the whole are found.
_BOX_COUNT = 1 << 22


@dataclass(frozen=True)
class Prepared:
    """A source ``(channels, *spatial)`` of float32 that applies steps to what it reads; local.

    ``facts`` say in words what the steps do: a prediction goes on with an earlier one if they are the same.
    """

    source: Any
    spatial: int
    steps: tuple[Step, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of channels and spatial dimensions."""
        shape = tuple(map(int, self.source.shape))
        return shape if len(shape) > self.spatial else (1, *shape)

    @property
    def path(self) -> str:
        """What messages call the source."""
        return label(self.source)

    def __getattr__(self, name: str) -> Any:
        # What the file says of its axes and chunks.
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def __getitem__(self, box: Slices) -> torch.Tensor:
        """A box, prepared."""
        extents = [each.stop - each.start for each in box]
        if 0 in extents:
            return torch.empty(extents)
        inner = (slice(None), *box[1:])[len(self.shape) - len(self.source.shape) :]
        values = read_box(self.source, inner).float().view(self.shape[0], *extents[1:])
        for step in self.steps:
            values = step(values)
        return values[box[0]]

    def then(self, step: Step) -> Self:
        """The source with a further step."""
        return replace(self, steps=(*self.steps, step))


class Totals(NamedTuple):
    """Numbers of all chosen elements, in float64: one of each channel, or the same for all of them."""

    smallest: torch.Tensor
    largest: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor


def totals(source: Prepared, processes: Processes, *, nonzero: bool, by_channel: bool) -> Totals:
    """Numbers of a source, or of its elements that are not 0; collective over the processes, blocking.

    Reads the source twice: the deviation is that from the mean, as where all is in memory.
    """
    zeros = torch.zeros(source.shape[0], dtype=torch.float64)
    count, added, _, smallest, largest = _summed(source, processes, nonzero, by_channel, zeros)
    mean = added / count
    _, _, squares, *_ = _summed(source, processes, nonzero, by_channel, mean)
    return Totals(smallest, largest, mean, (squares / count).sqrt())


def _summed(
    source: Prepared, processes: Processes, nonzero: bool, by_channel: bool, center: torch.Tensor
) -> torch.Tensor:
    # Over all boxes, in their order: rows as of _sums.
    boxes = [*_boxes(source.shape)]

    def mine() -> dict[int, torch.Tensor]:
        with of_disk(source.path):
            return {
                n: _sums(source[box], nonzero, center) for n, box in enumerate(boxes) if processes.plays(n)
            }

    parts = {n: part for each in processes.gathered(mine) for n, part in each.items()}
    whole = torch.stack([parts[n] for n in range(len(boxes))], dim=-1)
    if not by_channel:
        whole = whole.flatten(1)[:, None].expand(-1, len(center), -1)
    return torch.cat([whole[:3].sum(-1), whole[3:4].amin(-1), whole[4:].amax(-1)])


def _sums(values: torch.Tensor, nonzero: bool, center: torch.Tensor) -> torch.Tensor:
    # Of each channel: count, sum and sum of squares of what is left beside the center, smallest, largest.
    x = values.flatten(1).double()
    chosen = x != 0 if nonzero else torch.ones_like(x, dtype=torch.bool)
    beside = torch.where(chosen, x - center[:, None], 0)
    smallest, largest = (torch.where(chosen, x, each) for each in (inf, -inf))
    rows = chosen.sum(1), beside.sum(1), beside.square().sum(1), smallest.amin(1), largest.amax(1)
    return torch.stack([row.double() for row in rows])


def _boxes(shape: Sequence[int]) -> Iterator[Slices]:
    # Along the longest dimension in space.
    dim = max(range(1, len(shape)), key=lambda d: shape[d])
    rows = max(1, _BOX_COUNT * shape[dim] // max(1, prod(shape)))
    for start in range(0, shape[dim], rows):
        box = [slice(0, n) for n in shape]
        box[dim] = slice(start, min(start + rows, shape[dim]))
        yield tuple(box)


def along_channels(values: Any, like: torch.Tensor) -> torch.Tensor:
    """Numbers of channels, or one of all, to be broadcast over a box (channels, *spatial)."""
    return torch.as_tensor(values, dtype=like.dtype).view(-1, *[1] * (like.dim() - 1))


def scaled(totals: Totals, low: float, high: float, x: torch.Tensor) -> torch.Tensor:
    """A box whose smallest element of the whole becomes ``low``, and the largest ``high``."""
    smallest, largest = (along_channels(each, x) for each in (totals.smallest, totals.largest))
    span = largest - smallest
    # What is constant has no range.
    return torch.where(span == 0, x * low, (x - smallest) / span * (high - low) + low)


def normalised(mean: Any, std: Any, nonzero: bool, x: torch.Tensor) -> torch.Tensor:
    """A box less a mean, by a deviation; elements that are 0 stay so, if ``nonzero``."""
    divisor = along_channels(std, x)
    y = (x - along_channels(mean, x)) / torch.where(divisor == 0, 1, divisor)
    return torch.where(x != 0, y, x) if nonzero else y
