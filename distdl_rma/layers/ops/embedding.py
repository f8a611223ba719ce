"""Embedding of split indices: every rank looks up its own indices in the whole table.

No vector moves, unless the output is wanted on other ranks. Gradients of the table are summed over the ranks
by those who sum all parameters' gradients.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.operation import GatherComputeScatter
from distdl_rma.layers.ops.core.staged import movement_or_none

INDICES = (torch.int64, torch.int32)


class Embedding(GatherComputeScatter):
    """Vectors of indices, in the blocks ``own`` that are cut as the indices, moved to ``output``."""

    def __init__(
        self,
        site: CallSite,
        own: Decomposition,
        output: Decomposition,
        dtype: torch.dtype,
        padding_idx: int | None,
    ) -> None:
        super().__init__(site, own.partition.active, own.partition.active, output)
        self.padding_idx = padding_idx
        if output is not own:
            self.scatter = movement_or_none(site, own, output, dtype, "vectors")

    def compute(self, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Vectors of this rank's indices."""
        return F.embedding(x, weights["weight"], self.padding_idx)
