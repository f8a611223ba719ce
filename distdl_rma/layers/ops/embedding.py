"""Embedding of split indices: every rank looks up its own indices in the whole table.

No vector moves, unless the output is wanted on other ranks. Gradients of the table are summed over the ranks
by those who sum all parameters' gradients.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.staged import movement_or_none

INDICES = (torch.int64, torch.int32)


class Embedding(GatherComputeScatter):
    """Embedding in the decomposition of its indices, or in balanced blocks on ``P_y`` if one is given.

    ``dtype`` is the type of the indices.
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
    ) -> None:
        if dtype not in INDICES:
            raise ShapeError(f"indices are {dtype}, wanted one of {INDICES}")
        self.padding_idx = padding_idx
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
        return F.embedding(x, weights["weight"], self.padding_idx)
