"""What a prediction will do: slabs, passes, memory and disk; chosen for a limit of memory, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, ConfigurationError, ShapeError
from distdl_rma.out_of_core.estimate import Post, crop_extent, dependence_of, needs_of
from distdl_rma.split.entry import grid_for

_LEADING = 2
# Slabs at most: each is a thread, and each function is called once for each of them.
_MOST_SLABS = 512
# Of the limit, what may be planned: the rest is for what is not counted, such as the allocator's gaps.
_USABLE = 0.85
# Beside tensors: of the file and of each slab, whose thread has objects of each layer.
_OF_FILES_NBYTES, _OF_SLAB_NBYTES = 16 << 20, 3 << 19
# In whole passes, blocks of so many ranks are in memory at least: written, used and read ahead.
_RANKS_IN_MEMORY = 3


@dataclass(frozen=True)
class Form:
    """The dimensions of a source: whether it has a batch and channels before its ``spatial`` ones."""

    spatial: int
    has_batch: bool
    has_channels: bool

    @classmethod
    def of(cls, model: nn.Module, shape: Sequence[int]) -> Form:
        """The form of a source of this shape; ``ShapeError`` if it fits no input of the model."""
        spatial, dims = _spatial_dims(model), len(shape)
        if spatial is None:
            spatial = dims - _LEADING
        if not (1 <= spatial <= 3 and spatial <= dims <= spatial + _LEADING):
            raise ShapeError(
                f"predict: the source has shape {tuple(shape)}; a model of {spatial} spatial dimensions takes"
                " (*spatial), (channels, *spatial) or (batch, channels, *spatial)"
            )
        return cls(spatial, dims == spatial + _LEADING, dims > spatial)

    def sample(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of one input of the model, (1, channels, *spatial)."""
        space = tuple(map(int, shape[len(shape) - self.spatial :]))
        return 1, int(shape[self.has_batch]) if self.has_channels else 1, *space

    def box(self, box: Sequence[slice], sample: int) -> tuple[slice, ...]:
        """Where a box of a sample lies in the source."""
        leading = (slice(sample, sample + 1), box[1])
        return *leading[0 if self.has_batch else 1 if self.has_channels else 2 :], *box[_LEADING:]


def _spatial_dims(model: nn.Module) -> int | None:
    # Of the model's convolutions, if they agree.
    found = {
        int(kind.__name__[-2])
        for part in model.modules()
        for kind in type(part).__mro__
        if kind.__module__ == "torch.nn.modules.conv" and kind.__name__[-2].isdigit()
    }
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class Plan:
    """What :func:`predict` does; ``str(plan)`` says it in words. All sizes are in bytes.

    Attributes
    ----------
    source, result
        Shapes of the source and of the result, for all samples.
    dtype
        Elements of the result.
    samples, grid
        Number of samples, and of blocks of a sample in each dimension, the batch and channels included.
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
    """

    source: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype
    samples: int
    grid: tuple[int, ...]
    passes: int
    waits: tuple[str, ...]
    memory: int
    nbytes: int
    whole_nbytes: int
    disk_nbytes: int
    #: Bytes of blocks that stay in memory while their rank waits.
    resident_nbytes: int
    form: Form

    @property
    def slabs(self) -> int:
        """Number of blocks of a sample."""
        return prod(self.grid)

    def __str__(self) -> str:
        letters = "NC" + "DHW"[3 - self.form.spatial :]
        cut = " x ".join(f"{n} along {d}" for d, n in zip(letters, self.grid, strict=True) if n > 1) or "1"
        within = f"{_text(self.nbytes)} of {_text(self.memory)}"
        passes = f"{self.passes}: slabs end one after the other"
        if self.waits:
            count = len(self.waits)
            passes = f"{self.passes}: {count} functions need all slabs, in {_listed(self.waits)}"
        lines = {
            "source": f"{self.source}, {self.samples} sample{'s' if self.samples > 1 else ''}",
            "result": f"{self.result} of {str(self.dtype).removeprefix('torch.')}",
            "slabs": cut,
            "memory": f"{within}; the whole at once: {_text(self.whole_nbytes)}",
            "passes": passes,
            "disk": _text(self.disk_nbytes) if self.disk_nbytes else "none",
        }
        return "\n".join(f"{name:10}{text}" for name, text in lines.items())


def planned(
    model: nn.Module,
    post: Post,
    shape: Sequence[int],
    dtype: torch.dtype,
    memory: int,
    grid: Any,
    folder: Path,
) -> Plan:
    """Choose the slabs for a limit of memory, and refuse what cannot be done; runs the model on a crop.

    Raises
    ------
    ShapeError
        If the source does not fit the model.
    ConfigurationError
        If the memory, or the space in ``folder``, is too small: names the least.
    UnsupportedError
        If a function of the model cannot be split.
    """
    form = Form.of(model, shape)
    sample = form.sample(shape)
    blocks = None if grid is None else _blocks(grid, len(sample))
    dim = max(range(_LEADING, len(sample)), key=lambda d: sample[d])
    if blocks is not None and prod(blocks) > 1:
        dim = max(range(_LEADING, len(sample)), key=lambda d: blocks[d])
    whole = needs_of(model, post, sample, dtype)
    if tuple(whole.shape[:1]) != (1,):
        raise ShapeError(
            f"predict: the result of a sample has shape {tuple(whole.shape)}, and its first dimension is the"
            " batch, of 1: let the model and post= keep it"
        )
    found = dependence_of(model, post, sample, dtype, dim)
    fixed, each = _bytes_of_rows(model, post, sample, dtype, dim)
    across, voxels = prod(sample) / sample[dim], prod(sample)
    held, messages = found.held * voxels, found.messages * across

    def need(blocks: Sequence[int]) -> tuple[float, float]:
        # Of the forward of a block with its messages; and of waiting ranks, at least.
        rows = prod(-(-n // b) for n, b in zip(sample, blocks, strict=True)) / across
        wide = across / max(1, prod(blocks) / blocks[dim])
        rows = min(sample[dim], rows + (found.lag if blocks[dim] > 1 else 0) * wide / across)
        forward = fixed + each * rows + _OF_FILES_NBYTES + _OF_SLAB_NBYTES * prod(blocks)
        forward += messages if prod(blocks) > 1 else 0
        waiting = min(held, _RANKS_IN_MEMORY * held / prod(blocks)) if prod(blocks) > 1 else 0
        return forward, waiting

    usable = _USABLE * memory
    most = min(sample[dim], _MOST_SLABS)
    choices = (
        [blocks]
        if blocks is not None
        else [tuple(n if d == dim else 1 for d in range(len(sample))) for n in range(1, most + 1)]
    )
    chosen = next((each for each in choices if sum(need(each)) <= usable), None)
    if chosen is None:
        least = min(map(sum, map(need, choices)))
        slabs = "this grid" if grid is not None else f"the smallest of up to {most} slabs"
        raise ConfigurationError(
            f"predict: memory={_text(memory)} is too small: {slabs} of {sample} needs"
            f" {_text(least / _USABLE)}; give as much{', or more blocks' if grid is not None else ''}"
        )
    forward, waiting = need(chosen)
    several = prod(chosen) > 1
    resident = min(held, usable - forward) if several else 0.0
    disk = max(0.0, held - resident) if several else 0.0
    if disk and (free := shutil.disk_usage(folder).free) < disk:
        raise ConfigurationError(
            f"predict: {len(found.waits)} functions of the model need all slabs, which wait on disk"
            f" meanwhile: {_text(disk)} in {folder}, where {_text(free)} are free; choose another folder by"
            " scratch="
        )
    samples = int(shape[0]) if form.has_batch else 1
    result = (samples, *whole.shape[1:]) if form.has_batch else whole.shape[1:]
    waits = found.waits if several else ()
    return Plan(
        tuple(map(int, shape)), result, whole.dtype, samples, chosen, 1 + len(waits), waits, memory,
        int(forward + max(waiting, resident)), whole.nbytes, int(disk),
        max(0, int(resident - _RANKS_IN_MEMORY * held / prod(chosen))) if disk else int(held) + 1, form,
    )  # fmt: skip


def _bytes_of_rows(
    model: nn.Module, post: Post, sample: Sequence[int], dtype: torch.dtype, dim: int
) -> tuple[float, float]:
    # The need of a slab is a constant and so much for each row.
    few = crop_extent(sample[dim], 64)
    more = crop_extent(sample[dim], 2 * few)
    first = needs_of(model, post, _with(sample, dim, few), dtype).nbytes
    if more == few:
        return 0.0, first / few
    second = needs_of(model, post, _with(sample, dim, more), dtype).nbytes
    each = (second - first) / (more - few)
    return max(0.0, first - each * few), each


def _with(shape: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    return tuple(extent if d == dim else n for d, n in enumerate(shape))


def _blocks(grid: Any, dims: int) -> tuple[int, ...]:
    # The numbers of blocks of a user's grid.
    numbers: Sequence[Any] = ()
    if isinstance(grid, str):
        numbers = [int(part) if part.strip().isdecimal() else 0 for part in grid.lower().split("x")]
    elif isinstance(grid, Mapping):
        numbers = list(grid.values())
    elif isinstance(grid, Sequence):
        numbers = list(grid)
    if not numbers or not all(type(n) is int and n > 0 for n in numbers):
        raise ArgumentError(
            f"predict: a grid has the numbers of blocks, such as {{'H': 8}}, (4, 4) or '4x4', got {grid!r}"
        )
    shape = grid_for(grid, None, dims, tuple(range(prod(numbers)))).shape
    if shape[0] > 1 or shape[1] > 1:
        raise ArgumentError(f"predict: a grid cuts spatial dimensions, got {grid!r}")
    return shape


def _listed(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    return ", ".join(different[:4]) + (f" and {len(different) - 4} others" if len(different) > 4 else "")


def _text(nbytes: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{int(nbytes)} bytes"
