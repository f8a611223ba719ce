"""Losses with a global mean."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.autograd import first_derivative, tells_peers
from distdl_rma.machine import Machine
from distdl_rma.segments.allreduce import Allreduce

__all__ = ["DistributedMSELoss"]

_REDUCTIONS = ("mean", "sum")


class DistributedMSELoss(nn.Module):
    """Mean squared error over all elements of a tensor that is split over ranks, evenly or not.

    Every rank of P_x gets the same value, that of the sequential loss on the global tensors. The
    backward gives each rank the gradient of its own elements, so that the sum over ranks is the
    sequential gradient and no scaling by hand is needed. Ranks outside of P_x pass tensors without
    elements and get 0.

    Parameters
    ----------
    P_x
        Partition of input and target.
    reduction
        ``"mean"`` or ``"sum"``, over all elements of all ranks.
    name
        For messages.

    Raises
    ------
    ShapeError
        In a call, on every rank of P_x, if input and target differ in shape on one of them.

    Notes
    -----
    Requirement B11.
    """

    def __init__(self, P_x: Partition, reduction: str = "mean", *, name: str | None = None) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ShapeError(f"reduction is one of {_REDUCTIONS}, got {reduction!r}")
        self.P_x, self.reduction = P_x, reduction
        self.machine = Machine.of(P_x)
        self.name = name or self.machine.layer_name("DistributedMSELoss")
        self._sums: Allreduce | None = None
        if P_x.active:
            # Sum of squares, number of elements, and how many ranks cannot form them.
            self._sums = Allreduce(
                self.machine.segments, P_x.ranks, 3, np.float64, name=f"{self.name}, {reduction}"
            )
            weakref.finalize(self, self._sums.close)

    @tells_peers
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Global loss of the local shards ``input`` and ``target``; blocking."""
        if self._sums is None:
            return input.sum()
        fits = input.shape == target.shape and input.dtype == target.dtype
        difference = input - target if fits else input.new_zeros(0)
        local = torch.linalg.vector_norm(difference.detach(), dtype=torch.float64).square()
        self._sums.active[:] = (float(local), difference.numel(), not fits)
        self._sums.start()
        total, count, misfits = self._sums.wait().tolist()
        if misfits:
            mine = f"here {tuple(input.shape)} {input.dtype} and {tuple(target.shape)} {target.dtype}"
            raise ShapeError(f"{self.name!r}: input and target differ on {misfits:g} rank(s), {mine}")
        scale = 1.0 / count if self.reduction == "mean" and count else 1.0
        loss: torch.Tensor = _GlobalSquares.apply(difference, total * scale, 2.0 * scale)  # type: ignore[no-untyped-call]
        return loss


class _GlobalSquares(torch.autograd.Function):
    # The value is global, the gradient that of the local elements.
    @staticmethod
    def forward(ctx: Any, difference: torch.Tensor, value: float, factor: float) -> torch.Tensor:
        ctx.save_for_backward(difference)
        ctx.factor = factor
        return difference.new_tensor(value)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (difference,) = ctx.saved_tensors
        return difference * (gradient * ctx.factor), None, None
