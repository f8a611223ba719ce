"""Samples of which each rank reads its block.

From an item to blocks, for two ranks that cut the last dimension::

    item 7 (of crops=2)     sample 3, its second crop       draws: seed, epoch, item
    column 0: images        source[3]: (C, H, W)            cut as the grid says
    column 1: masks         source[3]:    (H, W)            cut likewise, without channels
    column 2: classes       source[3]: ()                   whole on every rank

    rank 0  ->  Block(image[..., :W/2], layout)   Block(mask[:, :W/2], layout)   Block(class, None)

Which sample, which crop and which box follows from integers that all ranks have. So ranks read without a word
to each other, and say whether it went well once a batch (``loader.py``). Shapes of files do not follow from
integers: the first sample decides, and each other one is compared with it when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from distdl_rma.errors import DataError, DistdlError, ShapeError, check_integers
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.jobs.data.draws import Crops
from distdl_rma.layers.sources.chunks import warn_of_chunks
from distdl_rma.layers.sources.opening import open_array
from distdl_rma.layers.sources.reading import label, read_box
from distdl_rma.segments.machine import Machine

if TYPE_CHECKING:
    from distdl_rma.layers.split.shard import Grid

# Files that stay open, of a list of files: a data set of thousands would be too many for the system, and
# random crops of a few volumes come back to the same ones.
_OPEN_FILES = 8
_DIMS = (1, 2, 3)
# Keys of draws begin with their purpose.
_DRAW = 2


class Block(NamedTuple):
    """This rank's block of one tensor of a batch; the layout is None for one that every rank has whole."""

    local: torch.Tensor
    layout: Decomposition | None


class Column:
    """One source for each sample: an array whose first dimension numbers them, or a list of sources.

    Files are opened at their first use, where a loader raises an error of one rank on all ranks; that of a
    constructor would be one rank's alone.
    """

    def __init__(self, given: Any) -> None:
        self._given, self._list = given, isinstance(given, (list, tuple))
        if self._list and all(isinstance(each, Number) for each in given):
            self._given, self._list = np.asarray(given), False
        self._opened = lru_cache(_OPEN_FILES)(open_array)

    def __len__(self) -> int:
        if self._list:
            return len(self._given)
        if not (shape := self._open(self._given).shape):
            raise ShapeError(
                f"{label(self._given)}: the first dimension numbers the samples, but it has none"
            )
        return int(shape[0])

    def source(self, sample: int) -> tuple[Any, tuple[slice, ...]]:
        """The source that has a sample, and where its dimensions for samples have it, at most one."""
        if self._list:
            return self._open(self._given[sample]), ()
        return self._open(self._given), (slice(sample, sample + 1),)

    def name(self, sample: int) -> str:
        """What messages call the source of a sample."""
        return label(self._given[sample] if self._list else self._given)

    def shape(self, sample: int) -> tuple[int, ...]:
        """Shape of a sample."""
        source, at = self.source(sample)
        return tuple(map(int, source.shape[len(at) :]))

    def read(self, sample: int, box: Box) -> torch.Tensor:
        """A box of a sample, in new memory."""
        source, at = self.source(sample)
        part = read_box(source, (*at, *(slice(*each) for each in box.bounds)))
        return part.squeeze(0) if at else part

    def _open(self, source: Any) -> Any:
        known = isinstance(source, (str, os.PathLike))
        return self._opened(os.fspath(source)) if known else open_array(source)


class _Form(NamedTuple):
    # What the samples of a column have in common: elements; dimensions before the spatial ones; whether it is
    # cut as the image is.
    dtype: torch.dtype
    leading: tuple[int, ...]
    cut: bool


class ShardDataset:
    """Samples that are split over ranks: each rank reads its block of a crop, and nothing else.

    The image is the first source, with dimensions (channels, D, H, W), of which the last one, two or three
    are spatial. Crops are those of the whole sample, ``sample[crop]``. They follow from ``seed``, the epoch
    and the number of the item, so that they are alike on all ranks of a sample, different for other samples,
    and the same on any number of ranks and replicas. :class:`ShardLoader` makes batches of them.

    Local to construct, but for the machine of COMM_WORLD, whose first use is collective. Files are opened at
    their first use, for instance by :class:`ShardLoader`, which raises errors of one rank on all ranks.

    Parameters
    ----------
    source
        The images. A path or an array (see :func:`open_array`): its first dimension numbers the samples. A
        list of paths or arrays: each is a sample.
    *labels
        Likewise, as many samples. A label whose last dimensions are the spatial ones of the image is cropped
        and cut as the image is; it may have channels, which are not cut. A label with fewer dimensions
        than that, such as a class number, is whole on every rank.
    grid
        Of a batch: ``"2x2"``, ``(2, 2)`` or ``{"D": 2, "H": 2}``, on the ranks of COMM_WORLD; or a partition
        of the ranks of this replica. Each block of a sample has elements.
    crop
        For each spatial dimension an extent, at a random place, or a slice, at the same place always. None:
        whole samples.
    crops
        Items for each sample. ``ShardDataset([volume], crop=(64, 64, 64), crops=1000)`` has 1,000 items.
    channels
        Whether the first dimension of an image is channels. Otherwise batches get one channel.
    seed
        Not negative, alike on all ranks.

    Raises
    ------
    ArgumentError
        If an argument has no known form.

    Examples
    --------
    >>> images, classes = torch.rand(10, 3, 8, 8), torch.arange(10)
    >>> samples = ShardDataset(images, classes, grid={"H": -1}, crop=(6, 6), seed=0)
    >>> image, labels = next(iter(ShardLoader(samples, batch=2)))
    >>> len(samples), image.shape, image.to_local().shape, labels
    (10, torch.Size([2, 3, 6, 6]), torch.Size([2, 3, 3, 6]), tensor([0, 1]))
    """

    def __init__(
        self,
        source: Any,
        *labels: Any,
        grid: Grid,
        crop: Sequence[int | slice] | None = None,
        crops: int = 1,
        channels: bool = True,
        seed: int = 0,
    ) -> None:
        check_integers("ShardDataset", 1, crops=crops)
        check_integers("ShardDataset", 0, seed=seed)
        self._columns = [Column(each) for each in (source, *labels)]
        self.grid: Any = grid
        self._crop, self._crops, self._channels, self.seed = crop, crops, bool(channels), seed
        self.machine = Machine.of(grid) if isinstance(grid, Partition) else Machine.on()

    def __len__(self) -> int:
        return len(self._columns[0]) * self._crops

    @cached_property
    def dims(self) -> int:
        """Number of dimensions of a batch of images."""
        return self._spatial + 2

    def facts(self, partition: Partition) -> dict[str, Any]:
        """What ranks compare, by name: of the arguments and of the first sample; JSON's types.

        Raises what is wrong with them on this rank, or does not fit the grid of a batch.
        """
        counts = [len(column) for column in self._columns]
        if len(set(counts)) > 1:
            raise ShapeError(
                "ShardDataset: the image and each label have the same number of samples, got"
                f" {', '.join(map(str, counts))}"
            )
        _, shapes = self._sample(0, 0)
        for at, shape in enumerate(shapes):
            self._layout(at, (1, *shape), partition)
        return {
            "samples": counts[0],
            "crop": repr(self._crop),
            "crops": self._crops,
            "seed": self.seed,
            "dtypes": [str(form.dtype) for form in self._forms],
            "shapes": [list(shape) for shape in shapes],
        }

    def warn_of_chunks(self, partition: Partition, stacklevel: int) -> None:
        """Warn, on one rank, if blocks of whole images cut chunks that are read whole; see :func:`shard`.

        Crops at random places cut chunks on any grid, so that there is no warning for them.
        """
        source, at = self._columns[0].source(0)
        grid = partition.shape[1 - len(at) :]
        if self._crop is None and self._channels and prod(grid) == partition.size:
            places = replace(partition, shape=grid)
            warn_of_chunks(source, Decomposition.balanced(places, source.shape), stacklevel + 1)

    def batch(self, epoch: int, items: Sequence[int], partition: Partition) -> list[Block]:
        """This rank's blocks of the image and the labels of some items, at least one; local, blocking.

        The shapes of the items are equal, and each rank knows all of them. Calls for one dataset do not
        overlap. ``DataError`` if reading fails, and ``ShapeError`` if shapes or dtypes differ between samples
        or do not fit the grid; both name the item.
        """
        samples = []
        for item in items:
            with self._reading(item):
                samples.append(self._sample(epoch, item))
            if samples[-1][1] != samples[0][1]:
                raise ShapeError(
                    f"samples {self._number(items[0])} and {self._number(item)} are in a batch, but have"
                    f" shapes {samples[0][1]} and {samples[-1][1]}: give a crop, or batches of one"
                )
        blocks = []
        for at, (form, shape) in enumerate(zip(self._forms, samples[0][1], strict=True)):
            layout = self._layout(at, (len(items), *shape), partition)
            (first, stop), *bounds = layout.own_box.bounds
            box, count = Box(tuple(bounds)), stop - first
            # The part of one sample is a batch as it is.
            local = torch.empty((0 if count == 1 else count, *box.shape), dtype=form.dtype)
            for row, item in enumerate(items[first:stop]):
                with self._reading(item):
                    part = self._part(at, item // self._crops, samples[first + row][0], box)
                if count == 1:
                    local = part.unsqueeze(0)
                else:
                    local[row] = part
            blocks.append(Block(local, layout if form.cut else None))
        return blocks

    @cached_property
    def _spatial(self) -> int:
        if not len(self._columns[0]):
            raise ShapeError("ShardDataset: there are no images; at least one sample is needed")
        shape = self._columns[0].shape(0)
        dims = len(shape) - self._channels
        if dims not in _DIMS:
            raise ShapeError(
                f"ShardDataset: an image has {'channels and ' if self._channels else ''}1 to 3 spatial"
                f" dimensions, got a sample of shape {shape}; a list has one source for each sample, an array"
                " has samples along its first dimension, and channels=False says that there are no channels"
            )
        return dims

    @cached_property
    def _boxes(self) -> Crops:
        return Crops(self._crop, self._spatial)

    @cached_property
    def _forms(self) -> list[_Form]:
        found = []
        for at, column in enumerate(self._columns):
            shape = column.shape(0)
            cut = at == 0 or len(shape) >= self._spatial
            # An empty box: the header says what the elements are, and how a library returns them.
            dtype = column.read(0, Box(((0, 0),) * len(shape))).dtype
            found.append(_Form(dtype, shape[: -self._spatial] if cut else shape, cut))
        return found

    def _sample(self, epoch: int, item: int) -> tuple[Box, list[tuple[int, ...]]]:
        # The crop that the item shows of its sample, and its shapes; those of the sources are checked. Every
        # rank does this for every sample of a batch, also those of which it reads nothing: it has to know the
        # shape of the batch.
        sample = item // self._crops
        shapes = [column.shape(sample) for column in self._columns]
        extents = shapes[0][-self._spatial :]
        for at, (shape, form) in enumerate(zip(shapes, self._forms, strict=True)):
            wanted = (*form.leading[-1:], *extents) if form.cut else form.leading
            if shape != wanted:
                name = f"{f'label {at}' if at else 'the image'}, {self._columns[at].name(sample)},"
                why = f": a label has the extents {extents}, with or without channels, or fewer dimensions"
                raise ShapeError(
                    f"{name} has shape {shape}, wanted {wanted} as in the first sample{why if at else ''}"
                )
        try:
            crop = self._boxes.draw(extents, _DRAW, self.seed, epoch, item)
        except ShapeError as error:
            raise ShapeError(f"{self._columns[0].name(sample)}: {error}") from error
        found = [
            (*form.leading, *crop.shape) if form.cut else shape
            for shape, form in zip(shapes, self._forms, strict=True)
        ]
        if not self._channels:
            found[0] = (1, *found[0])
        return crop, found

    def _layout(self, column: int, shape: Sequence[int], partition: Partition) -> Decomposition:
        # Of a column of a batch; the grid cuts no channels but those of the image.
        axes: list[int | None] = [None] * partition.dim
        if self._forms[column].cut:
            axes = [0, 1 if column == 0 else None, *range(len(shape) - self._spatial, len(shape))]
        parts = [partition.shape[axes.index(d)] if d in axes else 1 for d in range(len(shape))]
        for d, (extent, count) in enumerate(zip(shape, parts, strict=True)):
            # A smaller batch, the last one, may have no sample for some ranks.
            if d > 0 and count > extent:
                raise ShapeError(
                    f"ShardDataset: grid {partition.shape} cuts dimension {d} of batches of shape"
                    f" {tuple(shape)} into {count} blocks, of which {count - extent} would be empty"
                )
        return Decomposition(partition, tuple(map(Balanced, shape, parts)), tuple(axes))

    def _part(self, at: int, sample: int, crop: Box, box: Box) -> torch.Tensor:
        form, column = self._forms[at], self._columns[at]
        if not form.cut:
            part = column.read(sample, box)
        else:
            leading, place = box.bounds[: -self._spatial], Box(box.bounds[-self._spatial :])
            # Without a dimension for channels the image gets one, behind the reading.
            source = Box((*(leading if form.leading else ()), *place.shift(crop.start).bounds))
            part = column.read(sample, source).reshape(box.shape)
        if part.dtype != form.dtype:
            raise ShapeError(
                f"{column.name(sample)}: its elements are {part.dtype}, those of the first sample"
                f" {form.dtype}"
            )
        return part

    def _number(self, item: int) -> str:
        return f"{item}" if self._crops == 1 else f"{item // self._crops} (item {item})"

    @contextmanager
    def _reading(self, item: int) -> Iterator[None]:
        # Names the sample in errors, which keep their class: of ten thousand files it says which.
        try:
            yield
        except DistdlError as error:
            raise type(error)(f"sample {self._number(item)}: {error}") from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise DataError(f"sample {self._number(item)}: {text}") from error
