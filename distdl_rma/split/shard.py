"""Cut a tensor that every rank has, or can read, into a split one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distdl_rma.errors import ArgumentError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.machine import Machine
from distdl_rma.ops.core.tensors import zero_volume_tensor
from distdl_rma.split.entry import grid_for
from distdl_rma.split.tensor import SplitTensor, refuse_tangents

# What a user gives for a partition.
Grid = Partition | str | Mapping[str, int] | Sequence[int]


def shard(grid: Grid, x: Any) -> SplitTensor:
    """The split tensor of a whole one: every rank keeps its balanced block, in memory of its own; local.

    Parameters
    ----------
    grid
        A partition with as many dimensions as the tensor; or for the ranks of the machine of COMM_WORLD the
        numbers of blocks, as ``"2x2"`` or ``(2, 2)`` for the last dimensions or ``{"H": 2, "W": 2}``.
    x
        The tensor, alike on all ranks, or what is sliced as one: a numpy array, a memory-mapped file, a
        dataset of HDF5. Of these only the block is read.

    Returns
    -------
    SplitTensor
        Outside of any graph; it requires a gradient if ``x`` does.

    Raises
    ------
    ArgumentError
        If ``x`` has no shape, as a list has none, or what is passed for a grid is none.
    PartitionError
        If the numbers of dimensions or of ranks differ.
    """
    if not hasattr(x, "shape"):
        raise ArgumentError(
            f"shard: takes a grid, then a tensor or an array, got {type(x).__name__!r} for that"
        )
    machine = None if isinstance(grid, Partition) else Machine.on()
    partition = grid_for(grid, machine, len(x.shape))
    refuse_tangents(shard, [x])
    local = block_of(partition, x)
    if isinstance(x, torch.Tensor) and x.requires_grad:
        local.requires_grad_()
    return SplitTensor.from_local(local, partition, tuple(x.shape))


def block_of(P_x: Partition, x: Any) -> torch.Tensor:
    """This rank's balanced shard of a global tensor, of the same dtype and in memory of its own; local.

    ``x`` is the tensor, or what is sliced as one: a numpy array, a memory-mapped file, a dataset of HDF5; of
    these only the shard is read. The shard is outside of any graph; ranks outside of P_x get one without
    elements, of shape (b, 0) where ``x`` has b rows. ``PartitionError`` if P_x has another number of
    dimensions than the tensor.
    """
    blocks = Decomposition.balanced(P_x, x.shape)
    outside = not P_x.active
    own = tuple(slice(0, 0) for _ in x.shape) if outside else blocks.slices()
    if isinstance(x, torch.Tensor):
        part = x.detach()[own].clone(memory_format=torch.contiguous_format)
    else:
        values = np.asarray(x[own])
        part = torch.from_numpy(np.array(values, values.dtype.newbyteorder("="), order="C"))
    return zero_volume_tensor(x.shape[0], part.dtype) if outside else part
