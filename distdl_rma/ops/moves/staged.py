"""A move in stages: movements that follow one another, each from the result of the one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import Movement
from distdl_rma.ops.core.operation import Operation


class StagedMove(Operation):
    """Movements that follow one another, at least one; the result is memory of its own.

    ``dtype`` is that of the result, which may be shorter than the one that moves. ``flat`` is the local
    shape of the result where the movements see vectors; None where they see tensors.
    """

    def __init__(
        self,
        movements: Sequence[Movement],
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

    def movements(self) -> tuple[Movement, ...]:
        """The stages."""
        return self._stages
