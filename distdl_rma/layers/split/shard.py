"""Make a split tensor from a tensor that every rank has, or from a source of which each reads its block.

A tensor or a numpy array is in the memory of every rank: each takes its box, without a message. A file is
opened by each rank alone, and may fail on one of them, so its ranks meet (``together``) before any of them
returns: otherwise one rank would raise, and the others would wait for it in the next function.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distdl_rma.errors import ArgumentError, PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.tensors import problem_with, zero_volume_tensor
from distdl_rma.layers.sources.chunks import warn_of_chunks
from distdl_rma.layers.sources.opening import open_array
from distdl_rma.layers.sources.reading import label, read_box
from distdl_rma.layers.split.entry import grid_for
from distdl_rma.layers.split.layout import balanced
from distdl_rma.layers.split.tensor import SplitTensor, refuse_tangents
from distdl_rma.segments.consensus import together
from distdl_rma.segments.machine import Machine

# What users pass for a partition.
Grid = Partition | str | Mapping[str, int] | Sequence[int]


def shard(grid: Grid, x: Any) -> SplitTensor:
    """Split tensor of a whole tensor, array or file: every rank reads its balanced block into new memory.

    Local for a tensor or numpy array. For other sources it is collective over the grid, and blocks until all
    ranks have read their blocks, so that an error of one rank is raised on all.

    Parameters
    ----------
    grid
        A partition with as many dimensions as the tensor; or the numbers of blocks, on the ranks of the
        machine of COMM_WORLD: ``"2x2"`` or ``(2, 2)`` for the last dimensions, or ``{"H": 2, "W": 2}`` by
        the letters N, C, D, H and W. One number may be -1, for the ranks that the others leave, as in
        ``{"H": -1}``; :func:`distribute` says more. Blocks may be empty.
    x
        The tensor, equal on all ranks; or a source, of which each rank reads its block only: a path for
        :func:`open_array`, such as ``"scan.zarr"`` or ``"run.h5::name"``, what this returns, or any object
        with ``shape`` that is sliced like an array.

    Returns
    -------
    SplitTensor
        Outside of any graph; it requires a gradient if ``x`` does.

    Raises
    ------
    ArgumentError
        If ``x`` has no shape (a list, for instance) or is split already, or ``grid`` is none of these.
    PartitionError
        If the numbers of dimensions or of ranks differ.
    DataError
        If a file cannot be read on some rank; on all ranks of the grid.
    ShapeError
        If the sources of two ranks differ in shape or dtype, or torch does not have their elements.

    Warns
    -----
    UserWarning
        If chunks that are read whole make the ranks fetch more than 1.5 times the bytes of their blocks. It
        names the grid that fetches least.

    Examples
    --------
    >>> x = shard({"H": -1}, torch.arange(12.0).reshape(1, 1, 6, 2))
    >>> x.shape, x.to_local().shape
    (torch.Size([1, 1, 6, 2]), torch.Size([1, 1, 3, 2]))
    >>> x.mean().item()  # of the whole, on all ranks
    5.5
    """
    if not hasattr(x, "shape") and not isinstance(x, (str, os.PathLike)):
        raise ArgumentError(
            f"shard: takes a grid, then a tensor or an array, got {type(x).__name__!r} for that"
        )
    if isinstance(x, SplitTensor):
        raise ArgumentError(
            "shard: takes a whole tensor, got a SplitTensor; its redistribute() cuts it otherwise"
        )
    if isinstance(grid, Partition) and not grid.active:
        raise PartitionError(f"shard: rank {grid.me} is not in {grid}")
    if not isinstance(x, (torch.Tensor, np.ndarray)):
        x, partition, local = _read_block(grid, x)
        warn_of_chunks(x, Decomposition.balanced(partition, x.shape), stacklevel=2)
        return SplitTensor(local, balanced(partition, tuple(x.shape)))
    partition = grid_for(grid, None if isinstance(grid, Partition) else Machine.on(), len(x.shape))
    refuse_tangents(shard, [x])
    local = balanced_block(partition, x)
    if problem := problem_with(local, "the tensor"):
        raise ShapeError(f"shard: {problem}")
    if isinstance(x, torch.Tensor) and x.requires_grad:
        local.requires_grad_()
    return SplitTensor(local, balanced(partition, tuple(x.shape)))


def _read_block(grid: Grid, x: Any) -> tuple[Any, Partition, torch.Tensor]:
    # The opened source, the grid and this rank's block; raises on all ranks if one of them fails.
    place = Machine.of(grid) if isinstance(grid, Partition) else Machine.on()
    ranks = grid.ranks if isinstance(grid, Partition) else place.ranks
    advice = f"all ranks pass the same source and grid; this rank passes {label(x)}"
    with together(place, ranks, "shard", differs=ShapeError, advice=advice) as facts:
        source = open_array(x)
        try:
            partition = grid_for(grid, place, len(source.shape))
        except (ArgumentError, PartitionError) as error:
            raise type(error)(f"{label(x)} has shape {tuple(source.shape)}: {error}") from error
        local = balanced_block(partition, source)
        facts["source"] = f"{tuple(map(int, source.shape))} of {local.dtype}"
        facts["grid"] = str(partition.shape)
    return source, partition, local


def balanced_block(P_x: Partition, x: Any) -> torch.Tensor:
    """This rank's balanced shard of a tensor or source, of the same dtype, in new memory; local.

    ``x`` is the tensor, or a source of :func:`distdl_rma.layers.sources.reading.read_box`, of which only the
    shard is read. The shard is outside of any graph. Ranks outside of P_x get a shard without elements, of
    shape (b, 0) where ``x`` has b rows. ``PartitionError`` if P_x and the tensor have different numbers of
    dimensions.
    """
    blocks = Decomposition.balanced(P_x, x.shape)
    outside = not P_x.active
    own = tuple(slice(0, 0) for _ in x.shape) if outside else blocks.slices()
    if isinstance(x, torch.Tensor):
        part = x.detach()[own].clone(memory_format=torch.contiguous_format)
    else:
        part = read_box(x, own)
    return zero_volume_tensor(x.shape[0], part.dtype) if outside else part
