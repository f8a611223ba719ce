"""What a prediction will do: slabs, passes, memory and disk; chosen for a limit of memory, or refused.

Slabs are blocks along the longest dimension in space, or of the user's grid. A result ends before the input
that it needs, by the *lag*: the rows that the windows of all layers together read beyond it. So 100 rows of
input with a lag of 10 are cut as if there were 110. The first slab has fewer rows of the result, by the lag,
and the last one fewer of the input::

    input     |----- 27 -----|------ 28 ------|----- 27 -----|-- 18 --|
    result    |-- 17 --|------ 28 ------|----- 27 -----|----- 28 -----|
               0        17               45             72           100

A cut lies at a multiple of the *unit*, the rows of the input that one row of the coarsest layer stands for:
after four strides of 2 that is 16. Elsewhere a coarse row would belong to two slabs.

What a slab needs, compared with the limit (see ``_Costs.running``)::

    rows of a slab  x  bytes per row while it runs          measured on a crop, scaled to the whole
    + tensors that are not cut, messages for it and the next slab, weights in the order of the kernels
    + what a thread, a machine and the kept plans of functions take

The first number of slabs that fits into 0.85 of the limit is taken: the estimate is no bound. Where slabs
wait for each other, what all of them hold meanwhile comes on top, on the disk as far as it does not fit; if
not even the smallest slabs fit, the plan is refused with the least memory that would do.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from distdl_rma.errors import ArgumentError, ConfigurationError, ShapeError
from distdl_rma.geometry.intervals import Balanced, Listed, Split
from distdl_rma.jobs.out_of_core.estimate import Dependence, Needs, are_independent, dependence_of, needs_of
from distdl_rma.jobs.out_of_core.inference import Forward
from distdl_rma.layers.sources.chunks import chunks_of, fetched_of
from distdl_rma.layers.sources.reading import read_box
from distdl_rma.layers.split.entry import blocks_of
from distdl_rma.trace import size_text

_LEADING = 2
# Slabs at most: each is a thread, and each function is called once for each of them.
_MOST_SLABS = 512
# Of the limit, what may be planned: the rest is for what is not counted, such as the allocator's gaps.
_USABLE = 0.85
# Beside tensors: of the file; of each slab, a thread with a machine, which knows all slabs; and of each
# function that it calls, whose plan a slab keeps until it ends.
_OF_FILES_NBYTES, _OF_SLAB_NBYTES, _OF_PAIR_NBYTES, _OF_CALL_NBYTES = 8 << 20, 320 << 10, 3 << 9, 6 << 10
# In whole passes, slabs that wait in memory if that suffices: one is written, and one is read ahead.
_SLABS_IN_MEMORY = 2
# Size of tensors whose memory the allocator keeps, at least and at most.
_LEAST_KEPT, _MOST_KEPT = 1 << 19, 1 << 22
# Memory of results that is kept for the next ones, at most.
_MOST_IDLE_NBYTES = 1 << 28
# By how much slabs may be longer if they end where chunks of the source end.
_LONGER = 1.25
# Chunks of a result for each slab.
_PARTS = 4
# A sliding window, as its users set it.
_ROI, _OVERLAP = 96, 0.25


@dataclass(frozen=True)
class Form:
    """The dimensions of a source: whether it has a batch and channels before its ``spatial`` ones.

    A volume (60, 80, 70) for a model with three spatial dimensions is one sample with one channel: the box
    ``[0:1, 0:1, 5:9, :, :]`` of the model's input is ``[5:9, :, :]`` of the source.

    ``together`` samples, 1 or all of the source, are one input of the model.
    """

    spatial: int
    has_batch: bool
    has_channels: bool
    together: int = 1

    @classmethod
    def of(cls, model: nn.Module, shape: Sequence[int]) -> Form:
        """The form of a source of this shape; ``ShapeError`` if it fits no input of the model."""
        dims = len(shape)
        found = {len(m.kernel_size) for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)}
        # Of the model's convolutions, if they agree.
        spatial = found.pop() if len(found) == 1 else dims - _LEADING
        if not (1 <= spatial <= 3 and spatial <= dims <= spatial + _LEADING):
            raise ShapeError(
                f"predict: the source has shape {tuple(shape)}; a model of {spatial} spatial dimensions takes"
                " (*spatial), (channels, *spatial) or (batch, channels, *spatial)"
            )
        return cls(spatial, dims == spatial + _LEADING, dims > spatial)

    def sample(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one input of the model, (samples, channels, *spatial)."""
        space = tuple(map(int, shape[len(shape) - self.spatial :]))
        return self.together, int(shape[self.has_batch]) if self.has_channels else 1, *space

    def box(self, box: Sequence[slice], number: int) -> tuple[slice, ...]:
        """Where a box of an input lies in the source."""
        leading = slice(number, number + self.together), box[1]
        return *leading[0 if self.has_batch else 1 if self.has_channels else 2 :], *box[_LEADING:]


@dataclass(frozen=True)
class Plan:
    """What :func:`predict` does; ``str(plan)`` says it in words. All sizes are in bytes.

    Attributes
    ----------
    source, result
        Shapes of the source and of the result, for all samples.
    dtype
        Elements of the result.
    samples, splits
        Number of samples, and their blocks in each dimension, the batch and channels included. Samples that
        depend on each other are one input of the model; ``samples`` is 1 then.
    passes
        Times that a block is taken up: 1, and once more for each function that waits for all blocks.
    waits
        Paths of the modules with these functions.
    memory, nbytes
        The limit, and the planned need within it, beside what the process has already.
    whole_nbytes
        What the model would need for a sample at once.
    disk_nbytes
        Largest use of the scratch folder.
    reads
        Bytes of the source that a process alone fetches for each byte of it, where chunks are fetched as a
        whole. Slabs end where chunks end if that makes them hardly longer.
    ahead_nbytes
        Of the source, what is in memory beside the slab that is computed: the box of the next one, and rows
        of chunks that a slab cuts. 0 where the memory does not suffice, and of a source in memory.
    tile, tile_voxels, tile_reads
        For comparison, a sliding window with 96 elements in each spatial dimension, or the whole extent if
        that is less, and an overlap of 0.25: its shape, how many elements all tiles have for each one of a
        sample, and the bytes of the source that reading them fetches for each byte of it.

    Examples
    --------
    >>> np.save("scan.npy", np.ones((400, 100), np.float32))
    >>> plan = plan_prediction(nn.Conv2d(1, 2, 3), "scan.npy", grid={"H": 4})
    >>> plan.slabs, plan.passes, plan.result, plan.disk_nbytes
    (4, 1, (2, 398, 98), 0)
    """

    source: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype
    samples: int
    splits: tuple[Split, ...]
    passes: int
    waits: tuple[str, ...]
    memory: int
    nbytes: int
    whole_nbytes: int
    disk_nbytes: int
    reads: float
    ahead_nbytes: int
    tile: tuple[int, ...]
    tile_voxels: float
    tile_reads: float
    #: Extents of the chunks of a new result, at most: each is a small part of a slab.
    chunks: tuple[int, ...]
    #: Of the dimension of the source that is cut, multiples of rows at which fetches end.
    fetched_rows: int
    #: Bytes of ranks that wait, and of messages, that stay in memory; and of memory that is kept for results.
    resident_nbytes: int
    idle_nbytes: int
    form: Form

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks of a sample in each dimension."""
        return tuple(split.parts for split in self.splits)

    @property
    def slabs(self) -> int:
        """Number of blocks of a sample."""
        return prod(self.grid)

    @property
    def freed_above(self) -> int:
        """Size above which memory goes back to the system: what is kept is a small part of the limit.

        Where slabs wait, that of all of them goes and comes.
        """
        return _LEAST_KEPT if self.waits else max(_LEAST_KEPT, min(_MOST_KEPT, self.memory >> 7))

    def __str__(self) -> str:
        letters = "NC" + "DHW"[3 - self.form.spatial :]
        cut = " x ".join(f"{n} along {d}" for d, n in zip(letters, self.grid, strict=True) if n > 1) or "1"
        within = f"{size_text(self.nbytes)} of {size_text(self.memory)}"
        passes = f"{self.passes}: slabs end one after the other"
        if self.waits:
            count = len(self.waits)
            passes = f"{self.passes}: {count} functions need all slabs, in {_listed(self.waits)}"
        samples, at_once = max(self.samples, self.form.together), " at once" * (self.form.together > 1)
        lines = {
            "source": f"{self.source}, {samples} sample{'s' if samples > 1 else ''}{at_once}",
            "result": f"{self.result} of {str(self.dtype).removeprefix('torch.')}",
            "slabs": cut,
            "memory": f"{within}; the whole at once: {size_text(self.whole_nbytes)}",
            "passes": passes,
            "disk": size_text(self.disk_nbytes) if self.disk_nbytes else "none",
            "reads": f"{self.reads:.2f} x the source{', a slab ahead' * (self.ahead_nbytes > 0)}",
            "tiles": f"of {' x '.join(map(str, self.tile))}, overlap {_OVERLAP}, would be"
            f" {self.tile_voxels:.1f} x the voxels, and read {self.tile_reads:.1f} x the source",
        }
        return "\n".join(f"{name:10}{text}" for name, text in lines.items())


def planned(forward: Forward, source: Any, memory: int, grid: Any, folder: Path, returns: bool) -> Plan:
    """Choose the slabs for a limit of memory, and refuse what cannot be done; runs the model on a crop.

    The order matters: the model runs on one sample first. If samples of a batch turn out to depend on each
    other, as in a norm over the batch, they are one input, and all is measured again for it.

    ``returns`` says whether the result is in memory.

    Raises
    ------
    ShapeError
        If the source does not fit the model.
    ConfigurationError
        If the memory, or the space in ``folder``, is too small: names the least.
    UnsupportedError
        If a function of the model cannot be split.
    """
    shape = tuple(map(int, source.shape))
    form = Form.of(forward.model, shape)
    sample = form.sample(shape)
    blocks = None if grid is None else _blocks(grid, len(sample))
    longest = blocks if blocks is not None and prod(blocks) > 1 else sample
    dim = max(range(_LEADING, len(sample)), key=lambda d: longest[d])
    costs = _Costs.of(forward, sample, dim, memory, source)
    samples = int(shape[0]) if form.has_batch else 1
    together = replace(form, together=samples)
    if samples > 1 and not are_independent(forward, costs.found, together.sample(shape), memory):
        form, sample = together, together.sample(shape)
        costs = _Costs.of(forward, sample, dim, memory, source)
    whole = costs.whole
    result = (samples, *whole.shape[1:]) if form.has_batch else whole.shape[1:]
    kept = prod(result) * whole.dtype.itemsize if returns else 0
    usable = _USABLE * memory - kept
    choices = costs.choices if blocks is None else [blocks]

    def needs(each: Sequence[int], keeps: bool, ahead: bool) -> float:
        return costs.running(each) + costs.ahead(each) + costs.source_nbytes(each, samples, keeps, ahead)

    kinds = (True, True), (False, True), (False, False)
    how = ((each, *kind) for kind in kinds for each in choices)
    chosen, keeps, ahead = next((each for each in how if needs(*each) <= usable), (None, False, False))
    if chosen is None:
        # Less waits in memory then.
        chosen = min(choices, key=costs.running)
        most = usable + costs.ahead(chosen)
        keeps, ahead = next((kind for kind in kinds if needs(chosen, *kind) <= most), kinds[-1])
    running = costs.running(chosen) + costs.source_nbytes(chosen, samples, keeps, ahead)
    if running > usable:
        slabs = "this grid" if blocks is not None else f"the smallest of up to {len(choices)} slabs"
        raise ConfigurationError(
            f"predict: memory={size_text(memory)} is too small:"
            f" {slabs} of {sample} needs {size_text((running + kept) / _USABLE)}"
            f"{f', of which the result has {size_text(kept)}' if kept else ''}; give as much"
            f"{', or more blocks' if blocks is not None else ''}"
        )
    several = prod(chosen) > 1
    waits = costs.found.waits if several else ()
    resident = min(costs.waiting(chosen), usable - running) if waits else 0.0
    disk = costs.waiting(chosen) - resident if waits else 0.0
    if disk and (free := shutil.disk_usage(folder).free) < disk:
        raise ConfigurationError(
            f"predict: {len(waits)} functions of the model need all slabs, which wait on disk"
            f" meanwhile: {size_text(disk)} in {folder}, where {size_text(free)} are free; choose another"
            " folder by scratch="
        )
    splits: list[Split] = list(map(Balanced, sample, chosen))
    splits[dim] = costs.rows(chosen[dim])
    idle = min(_MOST_IDLE_NBYTES, usable - running) if several and not waits else 0.0
    chunks = ((1,) if form.has_batch else ()) + _chunks(whole.shape[1:], splits)
    tiles = [_tiles(n) for n in sample[_LEADING:]]
    rows = [list(map(each.interval, range(each.parts))) for each in splits[_LEADING:]]
    unit = costs.chunk if keeps and prod(chosen) == chosen[dim] and costs.cuts_chunks(chosen) else 1
    ends = [0, *(min(-(-stop // unit) * unit, sample[dim]) for _, stop in rows[dim - _LEADING])]
    rows[dim - _LEADING] = [*pairwise(ends)]
    batch = [(n, n + form.together) for n in range(0, samples, form.together)]
    leading = [*[batch] * form.has_batch, *[[(0, sample[1])]] * form.has_channels]
    return Plan(
        shape, result, whole.dtype, samples // form.together, tuple(splits), 1 + len(waits), waits, memory,
        int(kept + running + resident + idle), whole.nbytes, int(disk),
        fetched_of(source, [*leading, *rows]), costs.source_nbytes(chosen, samples, keeps, ahead),
        tuple(each[0][1] for each in tiles),
        prod(sum(b - a for a, b in each) / n for each, n in zip(tiles, sample[_LEADING:], strict=True)),
        fetched_of(source, [*leading, *tiles]), chunks, unit,
        int(costs.messages + resident), int(idle), form,
    )  # fmt: skip


class _Costs(NamedTuple):
    """Bytes that slabs of a sample need, by the needs of the whole and the dependence found on a crop.

    The whole is known without its data (fake tensors), but only as one block. How a block depends on its
    neighbours is known from a crop. A number of the crop is scaled by the ratio of both as one block,
    ``whole.nbytes / found.alone``, which knows what each layer makes of an extent; or, for bytes that only
    grow with the elements of the input, by these.
    """

    sample: tuple[int, ...]
    dim: int  # that is cut
    whole: Needs
    found: Dependence
    chunk: int  # of the source, in the cut dimension
    itemsize: int  # of the source, 0 if that is in memory

    @classmethod
    def of(cls, forward: Forward, sample: tuple[int, ...], dim: int, memory: int, source: Any) -> Self:
        """Measured; ``ShapeError`` if the result lacks the batch."""
        whole = needs_of(forward, sample)
        if tuple(whole.shape[:1]) != sample[:1]:
            raise ShapeError(
                f"predict: the result of {sample[0]} sample{'s' if sample[0] > 1 else ''} has shape"
                f" {tuple(whole.shape)}, and its first dimension is the batch, of {sample[0]}: let the model"
                " and post= keep it"
            )
        chunk = (chunks_of(source) or (1,) * len(sample))[dim - len(sample)]
        # Of unequal ones the first stands for all.
        chunk = chunk[0] if isinstance(chunk, (tuple, list)) else int(chunk)
        kind = read_box(source, [slice(0, 0)] * len(source.shape)).dtype
        in_memory = isinstance(source, (torch.Tensor, np.ndarray)) and not isinstance(source, np.memmap)
        found = dependence_of(forward, sample, dim, memory)
        return cls(sample, dim, whole, found, chunk, 0 if in_memory else kind.itemsize)

    @property
    def choices(self) -> list[tuple[int, ...]]:
        """Numbers of blocks along the cut dimension, from 1 on; first those that cut no chunk."""
        extent = self.sample[self.dim]
        unit = self.whole.unit(self.dim, extent)
        most = min(-(-(extent + self.found.lag) // unit), _MOST_SLABS)

        grids = [
            tuple(n if d == self.dim else 1 for d in range(len(self.sample))) for n in range(1, most + 1)
        ]
        return sorted(grids, key=self.cuts_chunks)

    @property
    def _larger(self) -> float:
        # Elements of the sample for each one of the crop.
        return prod(self.sample) / prod(self.found.crop)

    @property
    def messages(self) -> float:
        """Messages of a slab, while those for it are there."""
        return 2 * self.found.messages * self._larger * self.found.crop[self.dim] / self.sample[self.dim]

    def rows(self, parts: int) -> Listed:
        """Blocks of the cut dimension: as many results each, which end ``lag`` rows before the inputs.

        Blocks end at multiples of the unit; those of the last slabs are shorter, or empty. The picture at the
        head of this file is that of 4 parts. They end where chunks of the source end as well, if the longest
        is hardly longer then.
        """
        extent = self.sample[self.dim]
        unit = self.whole.unit(self.dim, extent)

        def cut(unit: int) -> Listed:
            units = -(-(extent + self.found.lag) // unit) if parts > 1 else 1
            ends = [min(extent, unit * (units * part // parts)) for part in range(parts)]
            return Listed(tuple(b - a for a, b in pairwise([*ends, extent])))

        blocks, aligned = cut(unit), cut(lcm(unit, self.chunk))
        return aligned if max(aligned.lengths) <= _LONGER * max(blocks.lengths) else blocks

    def cuts_chunks(self, blocks: Sequence[int]) -> bool:
        """Whether blocks end within chunks of the source."""
        ends = accumulate(self.rows(blocks[self.dim]).lengths)
        return any(end % self.chunk for end in ends if end < self.sample[self.dim])

    def source_nbytes(self, blocks: Sequence[int], samples: int, keeps: bool, ahead: bool) -> int:
        """Of a source that is not in memory: the box of another slab, and what is fetched of cut chunks."""
        count = prod(blocks)
        rows = self._rows(blocks) if ahead and (count > 1 or samples > self.sample[0]) else 0
        if keeps and count == blocks[self.dim] and self.cuts_chunks(blocks):
            # Those that were fetched before, and those that are being fetched.
            rows += 2 * (max(self.rows(count).lengths) + self.chunk)
        return int(rows * prod(self.sample) / self.sample[self.dim]) * self.itemsize

    def _rows(self, blocks: Sequence[int]) -> float:
        # Of a slab, that would be whole in the other dimensions.
        across = [-(-n // b) / n for n, b in zip(self.sample, blocks, strict=True)]
        return prod(across) * blocks[self.dim] * max(self.rows(blocks[self.dim]).lengths)

    def waiting(self, blocks: Sequence[int]) -> float:
        """Of ranks that wait, with messages."""
        by_ranks = (self.found.held + self.found.copies * prod(blocks)) * self.whole.nbytes / self.found.alone
        return by_ranks + self.found.moved * self._larger

    def ahead(self, blocks: Sequence[int]) -> float:
        """Of ranks that wait in memory, so that the disk is used while others compute."""
        count = prod(blocks)
        return (
            min(1, _SLABS_IN_MEMORY / count) * self.waiting(blocks) if self.found.waits and count > 1 else 0
        )

    def running(self, blocks: Sequence[int]) -> float:
        """Of the slab that runs, and of messages for the next one."""
        (sample, dim, whole, found, *_), count = self, prod(blocks)
        kept = _OF_CALL_NBYTES * whole.calls * (count if found.waits else 1)
        others = _OF_FILES_NBYTES + (_OF_SLAB_NBYTES + _OF_PAIR_NBYTES * count) * count + kept + whole.weights
        if count == 1:
            return whole.nbytes + others
        rows = self._rows(blocks)
        if found.waits:
            rows = max(rows, sample[dim] / found.parts)
        each = found.row * whole.nbytes / found.alone * found.crop[dim] / sample[dim]
        return each * rows + found.whole * self._larger + self.messages + others


def _blocks(grid: Any, dims: int) -> tuple[int, ...]:
    # The numbers of blocks of a user's grid; none is left open, by -1, for a number of ranks.
    shape = blocks_of(grid, dims, 0)
    if shape is None or min(shape) < 1:
        raise ArgumentError(
            f"predict: a grid has the numbers of blocks, such as {{'H': 8}}, (4, 4) or '4x4', got {grid!r}"
        )
    if shape[0] > 1 or shape[1] > 1:
        raise ArgumentError(f"predict: a grid cuts spatial dimensions, got {grid!r}")
    return shape


def _tiles(extent: int) -> list[tuple[int, int]]:
    # Where a sliding window lies along a dimension: the last one is moved inside.
    roi = min(_ROI, extent)
    starts = [*range(0, extent - roi, max(1, int(roi * (1 - _OVERLAP)))), extent - roi]
    return [(start, start + roi) for start in starts]


def _chunks(result: Sequence[int], splits: Sequence[Split]) -> tuple[int, ...]:
    # The whole extent where nothing is cut, elsewhere a part of a slab.
    found = [*result]
    for d in range(-min(len(found), len(splits) - _LEADING), 0):
        if splits[d].parts > 1:
            found[d] = -(-found[d] // (splits[d].parts * _PARTS))
    return tuple(found)


def _listed(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    return ", ".join(different[:4]) + (f" and {len(different) - 4} others" if len(different) > 4 else "")
