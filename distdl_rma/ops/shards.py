"""A rank's shard of a tensor that it has, or can read, as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.tensors import zero_volume_tensor


def shard(P_x: Partition, x: Any) -> torch.Tensor:
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
