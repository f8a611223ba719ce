"""Tensors cut into blocks that become tensors cut otherwise: repartition, all-gather, reduce-scatter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.core.staged import Moves, movement_between


class StagedMove(Operation):
    """Movements that follow one another, at least one; the result is memory of its own.

    ``dtype`` is that of the result, which may be shorter than the one that moves. ``flat`` is the local
    shape of the result where the movements see vectors; None where they see tensors.
    """

    def __init__(
        self,
        movements: Sequence[Moves],
        dtype: torch.dtype,
        output: Decomposition | None,
        flat: tuple[int, ...] | None = None,
    ) -> None:
        self._stages, self.dtype, self.output, self._flat = tuple(movements), dtype, output, flat

    def __call__(self, needs: GradientNeeds, x: torch.Tensor) -> torch.Tensor:
        """Local result of a local shard; blocking."""
        y = x if self._flat is None else x.reshape(-1)
        for movement in self._stages:
            # What has no elements may be of any type.
            y = movement(y.to(movement.dtype) if y.numel() else y, needs.input)
        y = y.to(self.dtype)
        return y if self._flat is None else y.reshape(self._flat)

    def movements(self) -> tuple[Moves, ...]:
        """The stages."""
        return self._stages


def redistribution(
    site: CallSite, source: Decomposition, target: Decomposition, dtype: torch.dtype
) -> StagedMove:
    """From any blocks to any others; what several ranks own is summed, what several need is copied."""
    return StagedMove([movement_between(site, source, target, dtype)], dtype, target)


def repartition(site: CallSite, source: Decomposition, P_y: Partition, dtype: torch.dtype) -> StagedMove:
    """To balanced blocks on another grid."""
    return redistribution(site, source, Decomposition.balanced(P_y, source.shape), dtype)


def all_gather(
    site: CallSite, source: Decomposition, axes: Collection[int], dtype: torch.dtype
) -> StagedMove:
    """To blocks that are whole along some dimensions; grid and tensor have the same ones."""
    kept = tuple(None if d in axes else d for d in range(source.partition.dim))
    splits = tuple(Balanced(s.extent, 1) if d in axes else s for d, s in enumerate(source.splits))
    return redistribution(site, source, Decomposition(source.partition, splits, kept), dtype)


def reduce_scatter(
    site: CallSite, source: Decomposition, axes: Collection[int], dtype: torch.dtype
) -> StagedMove:
    """Sum what is copied along some dimensions, and cut the sum along them; dimensions as above."""
    P = source.partition
    splits = tuple(Balanced(s.extent, P.shape[d]) if d in axes else s for d, s in enumerate(source.splits))
    return redistribution(site, source, Decomposition(P, splits, tuple(range(P.dim))), dtype)
