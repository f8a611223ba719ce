"""Losses over classes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, ShapeAgreement, common_dtype, source_of
from distdl_rma.layers.core.callbacks import LayerOptions
from distdl_rma.layers.loss.base import DistributedLoss
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.loss.class_loss import ClassLoss, class_dim
from distdl_rma.ops.loss.global_loss import GlobalLoss


class _ClassLoss(DistributedLoss):
    # A loss whose input has a dimension of classes.
    _operation = ClassLoss
    _weights = ("weight",)
    weight: torch.Tensor | None

    def __init__(
        self, P_x: Partition, reduction: str, arguments: Mapping[str, Any], **options: Unpack[LayerOptions]
    ) -> None:
        kind = type(self).__name__
        if not P_x.dim:
            raise PartitionError(f"{kind}: P_x has no dimension for the classes")
        if reduction == "none" and P_x.shape[class_dim(P_x.dim)] > 1:
            raise UnsupportedError(f"{kind}: reduction='none' with classes split by P_x {P_x.shape}")
        super().__init__(P_x, reduction, arguments, **options)
        self._cuts_classes = P_x.shape[class_dim(P_x.dim)] > 1

    @cached_property
    def agreement(self) -> ShapeAgreement[ClassLoss] | None:
        """What the ranks tell each other of their tensors where classes are split."""
        return ShapeAgreement(self, self.P_x.ranks, inputs=2) if self._cuts_classes else None

    def agree(self, input: torch.Tensor, target: torch.Tensor) -> tuple[GlobalLoss, GradientNeeds]:
        """The operation for local shards, and what any rank needs."""
        if self.agreement is None:
            return super().agree(input, target)
        problem = self.operation.trouble(input, target, self.loss_weights)
        self.agreement.begin(InputFacts.about((input, target), None, (), (False, False), problem))
        operation, needs = self.agreement.settle()
        # An argument may have been changed since this was planned.
        operation.options = self.options
        return operation, needs

    def plan(self, facts: dict[int, InputFacts]) -> ClassLoss:
        """The operation that gathers the classes."""
        try:
            source, dtype = source_of(self.P_x, facts)
        except ShapeError as error:
            raise ShapeError(f"input: {error}") from None
        try:
            target = common_dtype({rank: fact.of(1) for rank, fact in facts.items()})
        except ShapeError as error:
            raise ShapeError(f"target: {error}") from None
        return ClassLoss(self.site, source, self.options, self._sums, (dtype, target))

    def _check_weight(self, kind: str, key: str, weight: Any) -> None:
        super()._check_weight(kind, key, weight)
        if weight is not None and weight.dim() != 1:
            raise ShapeError(f"{kind}: {key} has one number per class, got shape {tuple(weight.shape)}")

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)


class DistributedCrossEntropyLoss(_ClassLoss, nn.CrossEntropyLoss):
    """Cross entropy of logits: ``torch.nn.CrossEntropyLoss`` of the global tensors.

    The local input is (batch, classes, ...), or (classes,). The local target is either class indices, of
    integers, (batch, ...) without the dimension of classes; or class probabilities, of the shape and dtype
    of the local input. Values and gradients are as those of :class:`DistributedL1Loss`. A mean divides by
    the sum of the weights of all targets on all ranks that are not ignored, and is NaN if there are none.

    Where P_x splits the classes, the ranks that differ in nothing else have the same class indices, which is
    checked. The first of them gathers the input, takes the loss, and has the gradient sent back. Shards must
    then form a grid.

    Parameters
    ----------
    weight
        As in torch: one number per class, of all classes, in the dtype of the input; the same on all ranks.
    ignore_index, label_smoothing
        As in torch.

    Raises
    ------
    ShapeError
        In a call, on every rank of P_x in the same words, if on one of them the shapes or dtypes of input,
        target and weight do not fit each other, or an index is no class; or if two ranks differ in dtype,
        in the number of classes, or in the kind of target; or ranks with parts of the same classes in their
        class indices.
    UnsupportedError
        If ``reduction="none"`` is given with classes that P_x splits. In a backward, for second derivatives
        through split classes.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/losses.md``.
    """

    _function = staticmethod(F.cross_entropy)

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **options: Unpack[LayerOptions],
    ) -> None:
        arguments = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        super().__init__(P_x, reduction, arguments, **options)


class DistributedNLLLoss(_ClassLoss, nn.NLLLoss):
    """Negative log likelihood of log-probabilities: ``torch.nn.NLLLoss`` of the global tensors.

    As :class:`DistributedCrossEntropyLoss`, with class indices only.
    """

    _function = staticmethod(F.nll_loss)

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(P_x, reduction, {"weight": weight, "ignore_index": ignore_index}, **options)
