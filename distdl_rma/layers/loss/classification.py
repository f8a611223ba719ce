"""Losses with a global mean, over classes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.loss.base import DistributedLoss, wide
from distdl_rma.layers.loss.gather_classes import GatherClasses


class _ClassLoss(DistributedLoss):
    """Loss whose input has a dimension of classes: 1, or 0 if it is the only one."""

    _weights = ("weight",)
    ignore_index: int
    weight: torch.Tensor | None

    def __init__(
        self, P_x: Partition, reduction: str, name: str | None, legacy: dict[str, Any], **arguments: Any
    ) -> None:
        kind = type(self).__name__
        if not P_x.dim:
            raise PartitionError(f"{kind}: P_x has no dimension for the classes")
        self._dim = min(1, P_x.dim - 1)
        if P_x.shape[self._dim] > 1 and reduction == "none":
            raise UnsupportedError(f"{kind}: reduction='none' with classes split by P_x {P_x.shape}")
        super().__init__(P_x, reduction, name, legacy, **arguments)

    @cached_property
    def _gathers(self) -> tuple[GatherClasses, ...]:
        if self.P_x.shape[self._dim] == 1 or not self.P_x.active:
            return ()
        return tuple(
            GatherClasses(self.machine, self.P_x, self._dim, f"{self.name} ({what})")
            for what in ("input", "target")
        )

    def _local(
        self, input: torch.Tensor, target: torch.Tensor, problem: str
    ) -> tuple[torch.Tensor, float, str]:
        if not self._gathers:
            return super()._local(input, target, problem)
        # The others are on their way to gather: what is wrong is told there.
        gather_input, gather_target = self._gathers
        scores = gather_input(input if problem else wide(input), problem)
        truth = gather_target(wide(target))
        if self.machine.rank in gather_input.roots:
            return super()._local(scores, truth, "")
        # Nothing to add, and still part of the way back.
        return scores.sum() + (truth.sum() if truth.is_floating_point() else 0.0), 0.0, ""

    def _count(self, input: torch.Tensor, target: torch.Tensor) -> float:
        if target.is_floating_point():
            return float(input.numel() // max(1, input.shape[self._dim]))
        counted = target[target != self.ignore_index]
        if self.weight is None:
            return float(counted.numel())
        return float(self.weight[counted.long()].sum(dtype=torch.float64))

    def _facts(self, input: torch.Tensor, target: torch.Tensor) -> str:
        facts = super()._facts(input, target)
        if self._gathers or input.dim() != self.P_x.dim:
            return facts
        return f"{facts} for {input.shape[self._dim]} classes"

    def _check(self, input: torch.Tensor, target: torch.Tensor) -> None:
        if target.is_floating_point():
            super()._check(input, target)
            return
        self._check_input(input)
        expected = input.shape[: self._dim] + input.shape[self._dim + 1 :]
        if target.shape != expected:
            raise ShapeError(
                f"input has shape {tuple(input.shape)} but target {tuple(target.shape)};"
                f" class indices have shape {tuple(expected)}"
            )

    def _check_weight(self, kind: str, key: str, weight: Any) -> None:
        super()._check_weight(kind, key, weight)
        if weight is not None and weight.dim() != 1:
            raise ShapeError(f"{kind}: {key} has one number per class, got shape {tuple(weight.shape)}")

    def _check_options(self, kind: str) -> None:
        self._try(kind, torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return weight

    def _terms(self, input: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        # The backward of torch's kernel takes scores in one order of memory only.
        return super()._terms(input.contiguous(), target, reduction)


class DistributedCrossEntropyLoss(_ClassLoss):
    """Cross entropy of logits: ``torch.nn.CrossEntropyLoss`` of the global tensors.

    The local input is (batch, classes, ...), or (classes,), with as many dimensions as P_x. The local
    target is either class indices, of integers, (batch, ...) without the dimension of classes; or class
    probabilities, of the shape and dtype of the local input. Shards may have any size. Every rank of P_x
    gets the same value, that of the sequential loss, and in backward the gradient of its own elements.
    Ranks outside of P_x pass tensors without elements and get 0. Collective to construct over the machine;
    a call involves the ranks of P_x.

    Where P_x splits the classes, the ranks that differ in nothing else have the same class indices, which is
    checked. The first of them gathers the input, takes the loss, and has the gradient sent back. Shards
    must then form a grid.

    Parameters
    ----------
    P_x
        Partition of the input.
    weight
        As in torch: one number per class, of all classes, in the dtype of the input; the same on all
        ranks.
    ignore_index, label_smoothing
        As in torch.
    reduction
        ``"mean"`` or ``"sum"`` over all ranks, or ``"none"``: the local elements. A mean divides by the sum
        of the weights of all targets on all ranks that are not ignored, and is NaN if there are none.
    name
        For messages.

    Raises
    ------
    ShapeError
        If an argument is illegal. In a call, on every rank of P_x, if on one of them the shapes or dtypes
        of input, target and weight do not fit each other, or an index is no class; or if two ranks differ
        in dtype, in the number of classes, or in the kind of target; or ranks with parts of the same classes
        in their class indices.
    UnsupportedError
        If ``size_average`` or ``reduce`` is given, or ``reduction="none"`` with classes that P_x splits. In
        a backward, for second derivatives through split classes.

    Notes
    -----
    Requirement B11.
    """

    _function = staticmethod(F.cross_entropy)
    _options = ("ignore_index", "label_smoothing")

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        super().__init__(P_x, reduction, name, legacy, weight=weight, **options)


class DistributedNLLLoss(_ClassLoss):
    """Negative log likelihood of log-probabilities: ``torch.nn.NLLLoss`` of the global tensors.

    Shapes, arguments and errors are those of ``DistributedCrossEntropyLoss``, with class indices only.
    """

    _function = staticmethod(F.nll_loss)
    _options = ("ignore_index",)

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        name: str | None = None,
        **legacy: Any,
    ) -> None:
        super().__init__(P_x, reduction, name, legacy, weight=weight, ignore_index=ignore_index)
