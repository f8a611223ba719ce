"""Losses over classes: which may be split over ranks, and are gathered then."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import torch

from distdl_rma.dtypes import as_words, sum_dtype
from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.movement import CallSite, Movement
from distdl_rma.ops.loss.global_loss import (
    GlobalLoss,
    LossOptions,
    LossSums,
    Totals,
    Weights,
    each_once,
)


def class_dim(dims: int) -> int:
    """Dimension of the classes: 1, or 0 if it is the only one."""
    return min(1, dims - 1)


def whole_classes(source: Decomposition, dim: int) -> Decomposition:
    """Blocks with whole classes, on the ranks that come first in the dimension of classes."""
    splits = (*source.splits[:dim], Balanced(source.shape[dim], 1), *source.splits[dim + 1 :])
    return replace(source, partition=source.partition.slab({source.axes.index(dim): 0}), splits=splits)


def index_blocks(source: Decomposition, dim: int) -> Decomposition:
    """Blocks of class indices that belong to those of an input: alike on ranks that split the classes."""
    axes = [
        None if axis == dim else axis - (axis > dim) if axis is not None else None for axis in source.axes
    ]
    return replace(source, splits=source.splits[:dim] + source.splits[dim + 1 :], axes=tuple(axes))


class ClassLoss(GlobalLoss):
    """A loss whose input has a dimension of classes, and whose target has it, or indices of classes.

    Where a known ``source`` splits the classes, input and probabilities are moved to the ranks that come
    first in that dimension: these take the loss, the others send and wait. Then ``dtypes`` are those of
    input and target, and those that have the same elements vote on a code of their class indices.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition | Partition,
        options: LossOptions,
        sums: LossSums,
        dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        super().__init__(site, source, options, sums)
        self.dim = class_dim(self.dims)
        self._gathers: tuple[Movement, ...] = ()
        if self.source is None or dtypes is None:
            return
        (machine, name), floating = site, dtypes[1].is_floating_point
        if not floating:
            self.target = index_blocks(self.source, self.dim)
        if self.source.splits[self.dim].parts == 1:
            return
        if options.reduction == "none":
            raise UnsupportedError(f"reduction='none' with classes split by P_x {self.P_x.shape}")
        blocks = each_once(self.source)
        exchange = Exchange(machine.rank, blocks, whole_classes(blocks, self.dim))
        self._sends, self._counts = self._counts, machine.rank in exchange.target.partition
        self._gathers = tuple(
            Movement(machine, exchange, sum_dtype(dtype), f"{name} ({what})")
            for what, dtype in zip(("input", "target"), dtypes[: 1 + floating], strict=False)
        )
        if self.target is not None and not floating:
            self._numbered = self.target.holders(machine.rank)

    def movements(self) -> tuple[Movement, ...]:
        """What gathers the input, and probabilities."""
        return self._gathers

    def _gathered(
        self, needs: GradientNeeds, input: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._gathers[0](self._sent(input), needs.input) if self._gathers else input
        truth = self._gathers[1](self._sent(target), needs.others[0]) if len(self._gathers) > 1 else target
        # The backward of torch's kernel takes scores in one order of memory only.
        return scores.contiguous(), truth

    def _stand_in(self) -> None:
        for gather in self._gathers:
            gather(self._sent(torch.zeros([stop - start for start, stop in self._bounds or ()])))

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        # Of copies nothing goes in.
        return x if self._sends else x.flatten()[:0]

    def _count(self, input: torch.Tensor, target: torch.Tensor, weights: Weights) -> float:
        if target.is_floating_point():
            return float(input.numel() // max(1, input.shape[self.dim]))
        counted, weight = target[target != self.options.arguments["ignore_index"]], weights["weight"]
        if weight is None:
            return float(counted.numel())
        return float(weight[counted.long()].sum(dtype=torch.float64))

    def _alike(self, input: torch.Tensor, target: torch.Tensor) -> str:
        alike = super()._alike(input, target)
        return alike if self._gathers else f"{alike} for {input.shape[self.dim]} classes"

    def _number(self, input: torch.Tensor, target: torch.Tensor) -> int:
        # Tells class indices apart; nothing of probabilities, which are not meant to be alike.
        return 0 if target.is_floating_point() or not self._gathers else crc32(as_words(target).tobytes())

    def _divisor(self, totals: Totals) -> float:
        if self._numbered and self.target is not None:
            for rank, code in totals.told.items():
                first = self.target.holders(rank)[0]
                if code != totals.told[first]:
                    raise ShapeError(
                        f"{self.sums.name!r}: ranks {first} and {rank} have different classes of the same"
                        " elements, and must have the same class indices, but they differ"
                    )
        return super()._divisor(totals)

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
