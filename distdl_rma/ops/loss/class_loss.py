"""Losses over classes: which may be split over ranks, and are gathered then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.movement import CallSite, Movement
from distdl_rma.ops.loss.global_loss import GlobalLoss, LossArguments, Refuse, TorchLoss, wide
from distdl_rma.ops.loss.loss_sums import LossSums

# Takes a local shard and what is wrong with it to the first of the ranks that share the rest.
Gather = Callable[[torch.Tensor, str], torch.Tensor]


def class_dim(P_x: Partition) -> int:
    """Dimension of the classes: 1, or 0 if it is the only one."""
    return min(1, P_x.dim - 1)


def gather_classes(site: CallSite, source: Decomposition, dim: int, dtype: torch.dtype) -> Movement:
    """Movement to the ranks that come first in the dimension of classes, which get these whole."""
    splits = [Balanced(n, 1) if d == dim else source.splits[d] for d, n in enumerate(source.shape)]
    target = replace(source, partition=source.partition.slab({dim: 0}), splits=tuple(splits))
    return Movement(site.machine, Exchange(site.machine.rank, source, target), dtype, site.name)


class ClassLoss(GlobalLoss):
    """A loss whose input has a dimension of classes, and whose target has it, or indices of classes.

    Where classes are split, ``gathers`` move input and target to the ranks that come first in that dimension:
    these take the loss, the others send and wait.
    """

    def __init__(
        self,
        P_x: Partition,
        function: TorchLoss,
        sums: LossSums,
        refuse: Refuse,
        gathers: tuple[Gather, Gather] | None = None,
    ) -> None:
        super().__init__(P_x, function, sums, refuse)
        self.dim, self.gathers = class_dim(P_x), gathers
        self._takes_loss = P_x.active and P_x.slab({self.dim: 0}).active

    def _local_sum(
        self, input: torch.Tensor, target: torch.Tensor, given: LossArguments, problem: str
    ) -> tuple[torch.Tensor, float, str]:
        if self.gathers is None:
            return super()._local_sum(input, target, given, problem)
        # The others are on their way to gather: what is wrong is told there.
        gather_input, gather_target = self.gathers
        scores = gather_input(input if problem else wide(input), problem)
        truth = gather_target(wide(target), "")
        if self._takes_loss:
            return super()._local_sum(scores, truth, given, "")
        # Nothing to add, and still part of the way back.
        return scores.sum() + (truth.sum() if truth.is_floating_point() else 0.0), 0.0, ""

    def _terms(self, input: torch.Tensor, target: torch.Tensor, given: LossArguments) -> torch.Tensor:
        # The backward of torch's kernel takes scores in one order of memory only.
        return super()._terms(input.contiguous(), target, given)

    def _count(self, input: torch.Tensor, target: torch.Tensor, given: LossArguments) -> float:
        if target.is_floating_point():
            return float(input.numel() // max(1, input.shape[self.dim]))
        counted, weight = target[target != given.options["ignore_index"]], given.weights["weight"]
        if weight is None:
            return float(counted.numel())
        return float(weight[counted.long()].sum(dtype=torch.float64))

    def _alike(self, input: torch.Tensor, target: torch.Tensor) -> str:
        alike = super()._alike(input, target)
        return alike if self.gathers is not None else f"{alike} for {input.shape[self.dim]} classes"

    def _misfit(self, input: torch.Tensor, target: torch.Tensor) -> str:
        expected = input.shape[: self.dim] + input.shape[self.dim + 1 :]
        if target.is_floating_point():
            return super()._misfit(input, target)
        if target.shape == expected:
            return ""
        return (
            f"input has shape {tuple(input.shape)} but target {tuple(target.shape)}; class indices have shape"
            f" {tuple(expected)}"
        )

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return weight  # that of all classes, on every rank
