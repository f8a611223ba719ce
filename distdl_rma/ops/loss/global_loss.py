"""Losses of split tensors: local sums by torch, one allreduce, the local gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import uncompiled
from distdl_rma.ops.core.tensors import no_autocast, trouble_with
from distdl_rma.ops.loss.loss_sums import LossSums

# Sums of 16-bit floats are taken in float32.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# How torch complains of a tensor that does not fit; all ranks hear of it.
MISFITS = (RuntimeError, ValueError, IndexError, TypeError)
TorchLoss = Callable[..., torch.Tensor]
# From what is wrong on this rank, and what it passes that has to be alike, to the error that all ranks raise.
Refuse = Callable[[str, str], Exception]


class LossArguments(NamedTuple):
    """What torch's function is called with besides its two tensors."""

    reduction: str
    options: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor | None]


class GlobalLoss:
    """A loss of torch over all elements of tensors that are split over ranks, evenly or not.

    Each rank has torch sum over its shard. One allreduce adds up these sums, what a mean divides by, and
    whether some rank cannot form them. The sum is linear in the ranks' sums, so nothing travels in the
    backward. This one has a term per element, of two tensors of one shape; shards need not form a grid.

    Local to make; a call is collective over P_x, and blocking. Once all ranks know that something does not
    fit, they call ``refuse``.
    """

    def __init__(self, P_x: Partition, function: TorchLoss, sums: LossSums, refuse: Refuse) -> None:
        self.P_x, self.function, self.sums, self.refuse = P_x, function, sums, refuse

    def __call__(self, input: torch.Tensor, target: torch.Tensor, given: LossArguments) -> torch.Tensor:
        """Global loss of local shards, the same on all ranks; for ``"none"`` of each local element."""
        problem = self._trouble(input, target, given)
        local, count, problem = self._local_sum(input, target, given, problem)
        alike = "" if problem else self._alike(input, target)
        value = 0.0 if problem or given.reduction == "none" else float(local.detach())
        batch = 0 if problem or not input.dim() else input.shape[0]
        totals = self.sums.of_all(value, count, batch, problem, alike)
        if totals is None:
            raise self.refuse(problem, alike)
        if given.reduction == "none":
            return local.to(result_dtype(input))
        value, scale, count = totals.terms, 1.0, totals.counted
        if given.reduction == "batchmean":
            count = self.sums.global_batch(totals.batches)
        if given.reduction != "sum":
            value, scale = _divided(value, count)
        loss: torch.Tensor = _GlobalValue.apply(  # type: ignore[no-untyped-call]
            local, value, scale, result_dtype(input), self.sums.name
        )
        return loss

    def _trouble(self, input: torch.Tensor, target: torch.Tensor, given: LossArguments) -> str:
        """What is wrong with local tensors themselves, or with each other; empty if nothing is."""
        problem = trouble_with(input) or trouble_with(target, "target")
        if problem:
            return problem
        if input.dim() != self.P_x.dim:
            return (
                f"input of shape {tuple(input.shape)} has {input.dim()} dimensions but P_x {self.P_x.shape}"
                f" has {self.P_x.dim}"
            )
        if not (input.is_floating_point() or input.is_complex()):
            return f"input is {input.dtype} but a loss needs floating point"
        for key, weight in given.weights.items():
            if weight is not None and autocast_dtype(weight) != autocast_dtype(input):
                return f"{key} is {weight.dtype} but input {input.dtype}"
        return self._misfit(input, target)

    def _misfit(self, input: torch.Tensor, target: torch.Tensor) -> str:
        """What keeps local tensors from being those of one loss."""
        if input.shape == target.shape and autocast_dtype(input) == autocast_dtype(target):
            return ""
        return (
            f"input has shape {tuple(input.shape)} and {input.dtype} but target {tuple(target.shape)} and"
            f" {target.dtype}"
        )

    def _local_sum(
        self, input: torch.Tensor, target: torch.Tensor, given: LossArguments, problem: str
    ) -> tuple[torch.Tensor, float, str]:
        """Local terms, what they count in a mean, and what is wrong with the tensors, if anything is."""
        if not problem:
            try:
                return self._terms(input, target, given), self._count(input, target, given), ""
            except MISFITS as error:
                problem = str(error) or repr(error)
        return torch.zeros(()), 0.0, problem

    def _terms(self, input: torch.Tensor, target: torch.Tensor, given: LossArguments) -> torch.Tensor:
        """Sum of the local terms by torch, or each of them for ``"none"``."""
        reduction = "none" if given.reduction == "none" else "sum"
        weights = {
            key: None if weight is None else wide(self._part(key, weight, input))
            for key, weight in given.weights.items()
        }
        with no_autocast():
            return self.function(wide(input), wide(target), reduction=reduction, **given.options, **weights)

    def _count(self, input: torch.Tensor, target: torch.Tensor, given: LossArguments) -> float:
        """What the local terms count in a mean."""
        return float(input.numel())

    def _alike(self, input: torch.Tensor, target: torch.Tensor) -> str:
        """What has to be alike on all ranks."""
        return f"{autocast_dtype(input)} and {autocast_dtype(target)}"

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight that is given for the global input, right-aligned."""
        shape, index = tuple(weight.shape), self.P_x.index or ()
        first = self.P_x.dim - len(shape)
        for d, extent in enumerate(shape):
            if extent == 1:
                continue
            here = input.shape[first + d]
            start, stop = Balanced(extent, self.P_x.shape[first + d]).interval(index[first + d])
            if stop - start != here:
                raise ShapeError(
                    f"{key} has global shape {shape}, of which {stop - start} belong here in dimension {d},"
                    f" but input has shape {tuple(input.shape)}: shards must be balanced"
                )
            weight = weight.narrow(d, start, here)
        return weight


class _GlobalValue(torch.autograd.Function):
    # The value is global, the gradient that of the local terms.
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, value: float, scale: float, dtype: torch.dtype, name: str
    ) -> torch.Tensor:
        ctx.dtype, ctx.scale, ctx.name = local.dtype, scale, name
        return local.new_tensor(value, dtype=dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # A factor that depends on the input would bring in terms of two ranks.
        if gradient.requires_grad:
            raise UnsupportedError(
                f"{ctx.name!r}: second derivatives of a nonlinear function of the loss are not supported;"
                " those of the loss itself are"
            )
        return gradient.to(ctx.dtype) * ctx.scale, None, None, None, None


def _divided(total: float, count: float) -> tuple[float, float]:
    # As torch: a mean over nothing is not a number.
    with np.errstate(all="ignore"):
        return float(np.float64(total) / count), float(np.float64(1.0) / count)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor in the dtype that its sums are taken in."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Dtype in which torch would take the loss of a tensor: losses are in float32 under autocast."""
    autocast = torch.is_autocast_enabled(tensor.device.type)
    return _WIDE.get(tensor.dtype, tensor.dtype) if autocast else tensor.dtype


def result_dtype(input: torch.Tensor) -> torch.dtype:
    """Dtype of the loss of a tensor."""
    dtype = autocast_dtype(input)
    return dtype.to_real() if dtype.is_complex else dtype
