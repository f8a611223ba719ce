"""Embedding of split indices: every rank looks up its own indices in the whole table.

No vector moves, unless the output is wanted on other ranks. Gradients of the table are summed over the ranks
by those who sum all parameters' gradients. ``scale_grad_by_freq`` divides by how often an index occurs in the
whole batch: an allreduce of counts in each forward, as long as the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.staged import movement_or_none
from distdl_rma.segments.collectives.allreduce import Allreduce

INDICES = (torch.int64, torch.int32)


class IndexFrequencies:
    """Number of times that each index occurs in the global input; ``scale_grad_by_freq`` divides by it."""

    def __init__(self, site: CallSite, P_x: Partition, num_embeddings: int) -> None:
        name = f"{site.name} (frequencies)"
        self._sum = Allreduce(site.machine.segments, P_x.ranks, num_embeddings, np.float64, name=name)

    def scale(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``y``, the vectors of the indices ``x``; its backward divides by the frequencies. Blocking."""
        found = np.bincount(x.detach().flatten().numpy(), minlength=self._sum.count)
        total = torch.from_numpy(self._sum(found).copy())
        scaled: torch.Tensor = _Scale.apply(y, total[x.to(torch.int64)].unsqueeze(-1))
        return scaled


class _Scale(OperatorFunction):
    # Identity; its backward divides by the frequency of each vector's index.
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return y.view_as(y)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (counts,) = ctx.saved_tensors
        return gradient / counts.to(gradient.dtype), None


class Embedding(GatherComputeScatter):
    """Embedding in the decomposition of its indices, or in balanced blocks on ``P_y`` if one is given.

    ``dtype`` is the type of the indices. ``frequencies`` divides gradients; it is None if gradients are not
    divided, and on ranks without indices.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        dtype: torch.dtype,
        embedding_dim: int,
        padding_idx: int | None,
        weight_dtype: torch.dtype,
        P_y: Partition | None = None,
        frequencies: IndexFrequencies | None = None,
    ) -> None:
        if dtype not in INDICES:
            raise ShapeError(f"indices are {dtype}, wanted one of {INDICES}")
        self.padding_idx, self.frequencies = padding_idx, frequencies
        P_x = source.partition
        P_own = P_x.create_cartesian_topology_partition((*P_x.shape, 1))
        vectors = Balanced(embedding_dim, 1)
        own = Decomposition(P_own, (*source.splits, vectors), (*source.axes, len(source.splits)))
        output = own if P_y is None else Decomposition.balanced(P_y, own.shape)
        super().__init__(site, P_x.active, P_x.active, output)
        if P_y is not None:
            self.scatter = movement_or_none(site, own, output, weight_dtype, "vectors")

    def compute(self, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Vectors of this rank's indices."""
        y = F.embedding(x, weights["weight"], self.padding_idx)
        return y if self.frequencies is None else self.frequencies.scale(y, x)
