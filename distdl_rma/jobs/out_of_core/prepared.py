"""Sources whose boxes are prepared as they are read, for models that others have trained.

What a program does to a volume before its model sees it is exact on a box if each element depends on itself
alone, and on numbers of the whole that were found before::

    file       (z, y, x), or channels first        files of single channels are stacked
      read     a box, with all channels            as float32
      steps    box -> box, elementwise             by numbers of the whole, where a step has some
    source     (channels, z, y, x), or a part of it: ``Place``

A ``Bundle`` and a ``TrainedFolder`` have a model, what follows it, and such a source.

Numbers of the whole are sums over boxes in float64. Each process reads a part of the boxes, and all add up
the same sums in the same order, so that they have equal numbers on any number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.jobs.out_of_core.plan import Form
from distdl_rma.jobs.out_of_core.processes import Processes
from distdl_rma.jobs.out_of_core.results import Place, of_disk
from distdl_rma.layers.sources.opening import open_array
from distdl_rma.layers.sources.reading import Slices, label, read_box
from distdl_rma.layers.sources.remote import needed

T = TypeVar("T")
Step = Callable[[torch.Tensor], torch.Tensor]
# Elements of a box by which numbers of the whole are found.
_BOX_COUNT = 1 << 22


@dataclass(frozen=True)
class Prepared:
    """A source ``(channels, *spatial)`` of float32 that applies steps to what it reads; local.

    It is that of the file, or the part of it that ``place`` says. ``facts`` say in words what the steps do: a
    prediction goes on with an earlier one if they are the same.
    """

    source: Any
    spatial: int
    steps: tuple[Step, ...] = ()
    facts: tuple[str, ...] = ()
    place: Place | None = None

    @classmethod
    def of(cls, file: str | os.PathLike[str], model: nn.Module, facts: tuple[str, ...]) -> Self:
        """A file with one volume for a model; ``ShapeError`` if it has more."""
        array = open_array(file)
        form = Form.of(model, array.shape)
        if form.has_batch:
            raise ShapeError(f"predict: {file} of {tuple(array.shape)} has a batch; give one volume")
        if form.has_channels and label(array).lower().endswith(".nii"):
            raise UnsupportedError(
                f"predict: {file} of {tuple(array.shape)} has its channels last, which its model wants first;"
                " write them so, into a .zarr or .h5 file"
            )
        return cls(array, form.spatial, facts=facts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of channels and spatial dimensions."""
        shape = tuple(map(int, self.source.shape))
        shape = shape if len(shape) > self.spatial else (1, *shape)
        return shape if self.place is None else (shape[0], *self.place.extents)

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
        if self.place is None:
            return self._read(box[1:])[box[0]]
        there, here = self.place.of(box[1:])
        values = torch.zeros(self.shape[0], *extents[1:])
        if all(each.start < each.stop for each in there):
            values[:, *here] = self._read(there)
        return values[box[0]]

    def _read(self, space: Slices) -> torch.Tensor:
        # All channels of a box in space of the file, after all steps.
        inner = (slice(None), *space)[1 + self.spatial - len(self.source.shape) :]
        extents = [each.stop - each.start for each in space]
        values = read_box(self.source, inner).float().view(self.shape[0], *extents)
        for step in self.steps:
            values = step(values)
        return values

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

    Squares are summed beside the mean of a box, and what its distance from the mean of all adds: as exact as
    where all is in memory.
    """
    parts = torch.stack(of_boxes(source, processes, lambda box: _moments(source[box], nonzero)), dim=-1)
    if not by_channel:
        parts = parts.flatten(1)[:, None].expand(-1, source.shape[0], -1)
    count, means, squares, smallest, largest = parts
    mean = (count * means).sum(-1) / count.sum(-1)
    squares = (squares + count * (means - mean[:, None]).square()).sum(-1)
    return Totals(smallest.amin(-1), largest.amax(-1), mean, (squares / count.sum(-1)).sqrt())


def of_boxes(source: Prepared, processes: Processes, call: Callable[[Slices], T]) -> list[T]:
    """What ``call`` returns for each box of a source, in their order; collective, blocking.

    Boxes are cut along the longest dimension in space. Each process calls for a part of them.
    """
    boxes = [*_boxes(source.shape)]

    def mine() -> dict[int, T]:
        with of_disk(source.path):
            return {n: call(box) for n, box in enumerate(boxes) if processes.plays(n)}

    parts = {n: part for each in processes.gathered(mine) for n, part in each.items()}
    return [parts[n] for n in range(len(boxes))]


def _moments(values: torch.Tensor, nonzero: bool) -> torch.Tensor:
    # Of each channel: count, mean, sum of the squares of what is left beside it, smallest, largest.
    x = values.flatten(1).double()
    chosen = x != 0 if nonzero else torch.ones_like(x, dtype=torch.bool)
    count = chosen.sum(1).double()
    mean = torch.where(chosen, x, 0).sum(1) / count.clamp(1)
    squares = torch.where(chosen, x - mean[:, None], 0).square().sum(1)
    smallest, largest = (torch.where(chosen, x, each) for each in (inf, -inf))
    return torch.stack([count, mean, squares, smallest.amin(1), largest.amax(1)])


def longest(shape: Sequence[int]) -> int:
    """The longest dimension in space, along which boxes are cut."""
    return max(range(1, len(shape)), key=lambda d: shape[d])


def _boxes(shape: Sequence[int]) -> Iterator[Slices]:
    dim = longest(shape)
    rows = max(1, _BOX_COUNT * shape[dim] // max(1, prod(shape)))
    for start in range(0, shape[dim], rows):
        box = [slice(0, n) for n in shape]
        box[dim] = slice(start, min(start + rows, shape[dim]))
        yield tuple(box)


def space_of(source: Prepared) -> tuple[Any, str | None]:
    """Spacing and orientation, as far as the file says them."""
    spacing, codes = getattr(source, "spacing", None), None
    if Path(source.path).suffix.lower() == ".nii":
        image = needed("nibabel").load(source.path)
        spacing = image.header.get_zooms()[: source.spatial]
        codes = "".join(needed("nibabel").aff2axcodes(image.affine))
    return spacing, codes


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
