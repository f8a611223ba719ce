"""Make a split tensor from a tensor that every rank has or can read."""

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

# What users pass for a partition.
Grid = Partition | str | Mapping[str, int] | Sequence[int]


def shard(grid: Grid, x: Any) -> SplitTensor:
    """Split tensor of a whole tensor: every rank copies its balanced block into new memory; local.

    Parameters
    ----------
    grid
        A partition with as many dimensions as the tensor; or the numbers of blocks, on the ranks of the
        machine of COMM_WORLD: ``"2x2"`` or ``(2, 2)`` for the last dimensions, or ``{"H": 2, "W": 2}``.
    x
        The tensor, equal on all ranks; or an object that is sliced like one: a numpy array, a memory-mapped
        file, an HDF5 dataset. Only the block of such an object is read.

    Returns
    -------
    SplitTensor
        Outside of any graph; it requires a gradient if ``x`` does.

    Raises
    ------
    ArgumentError
        If ``x`` has no shape (a list, for instance), or ``grid`` is none of these.
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
    """This rank's balanced shard of a global tensor, of the same dtype, copied into new memory; local.

    ``x`` is the tensor, or an object that is sliced like one: a numpy array, a memory-mapped file, an HDF5
    dataset; only the shard of such an object is read. The shard is outside of any graph. Ranks outside of P_x
    get a shard without elements, of shape (b, 0) where ``x`` has b rows. ``PartitionError`` if P_x and the
    tensor have different numbers of dimensions.
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
