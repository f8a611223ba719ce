"""Losses of split tensors: local sums by torch, one allreduce of them, the local gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl_rma.checks.consensus import Consensus, gather_words
from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.autograd import GradientNeeds, OperatorFunction, recomputed_alike, tied, uncompiled
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.core.tensors import no_autocast, trouble_with
from distdl_rma.segments.collectives.allreduce import Allreduce

# How torch complains of a tensor that does not fit; all ranks hear of it.
MISFITS = (RuntimeError, ValueError, IndexError, TypeError)
# Sum of the terms, what they count in a mean, ranks that complain, sum and sum of squares of the codes; sum
# of the numbers of groups, and ranks in groups that have different ones.
_TOTALS = 7
# Bits of a code: squares of codes add up exactly in float64 on thousands of ranks.
_CODES = (1 << 20) - 1

Weights = Mapping[str, torch.Tensor | None]
# From what is wrong on this rank, and what it passes that has to be alike, to the error that all ranks raise.
Refuse = Callable[[str, str], Exception]


class LossOptions(NamedTuple):
    """A loss of torch: its function, what becomes of the terms, and what else it takes that is no tensor."""

    function: Callable[..., torch.Tensor]
    reduction: str
    arguments: Mapping[str, Any]


class Totals(NamedTuple):
    """Sums over all ranks: of their terms, of what these count, and of the numbers that groups have alike.

    Where some group has not: the number of each rank, by rank id.
    """

    terms: float
    counted: float
    numbers: float = 0.0
    told: Mapping[int, int] = {}


class LossSums:
    """One allreduce in float64 over the ranks of a partition, for a loss ``built_with`` some arguments.

    That ranks pass the same is told by a code of it: P ranks have the same one just if P times the sum of
    their squares is the square of their sum. Some ranks may have to have a number alike: they vote on it
    first. Local to make; in the first call ranks that differ in the arguments raise ``MismatchError``.
    """

    def __init__(self, site: CallSite, P_x: Partition, built_with: str, refuse: Refuse) -> None:
        self.P_x, self.name, self._refuse, self._segments = P_x, site.name, refuse, site.machine.segments
        title = f"{site.name}, {fingerprint(built_with):014x}"
        self._sums = Allreduce(self._segments, P_x.ranks, _TOTALS, np.float64, name=title)
        weakref.finalize(self, self._sums.close)
        self._title = f"{site.name} (numbers)"

    def of_all(
        self,
        terms: float,
        count: float,
        problem: str,
        alike: str,
        number: int = 0,
        among: Sequence[int] = (),
    ) -> Totals:
        """Totals of all ranks; blocking. All raise if one has a problem, or what must be alike is not.

        ``among`` are the ranks, this one included, that are to have the ``number`` alike; none on any rank
        where there is nothing of the kind.
        """
        differs = self._differs(number, bool(problem), among)
        code, first = fingerprint(alike) & _CODES, tuple(among[:1]) == (self._segments.rank,)
        row = self._sums.active
        row[:] = terms, count, bool(problem), code, code**2, number if first else 0, differs
        self._sums.start()
        total, counted, problems, codes, squares, numbers, different = self._sums.wait().tolist()
        if problems or int(squares) * self.P_x.size != int(codes) ** 2:
            raise self._refuse(problem, alike)
        told = gather_words(self._segments, number, self._title, self.P_x.ranks) if different else {}
        return Totals(total, counted, numbers, told)

    def _differs(self, number: int, has_problem: bool, among: Sequence[int]) -> bool:
        # Of ranks with a problem nobody knows the number, and all hear of it anyway.
        if len(among) < 2:
            return False
        consensus = Consensus.of(self._segments, among)
        return not consensus.alike(self._title, number, has_problem, 0) and not consensus.largest[1]


class GlobalLoss(Operation):
    """A loss of torch over all elements of two tensors that are split over ranks, evenly or not.

    Each rank has torch sum over its shards. One allreduce adds up these sums, what a mean divides by, and
    whether some rank cannot form them. The sum is linear in the ranks' sums, so nothing travels in the
    backward. This one has a term per element, of two tensors of one shape.

    ``source`` is the decomposition of the input, of which elements on several ranks count once; or the
    partition alone where nobody knows more of the shards, which need not form a grid then. ``target`` is that
    of the target. Weights are those of the global tensors. The value is on all ranks of the input.
    """

    def __init__(
        self, site: CallSite, source: Decomposition | Partition, options: LossOptions, sums: LossSums
    ) -> None:
        known = source if isinstance(source, Decomposition) else None
        self.P_x = source if isinstance(source, Partition) else source.partition
        self.source, self.target, self.options, self.sums = known, known, options, sums
        self.dims = self.P_x.dim if known is None else len(known.splits)
        self.output = known if options.reduction == "none" else Decomposition.replicated(self.P_x, ())
        rank = site.machine.rank
        self._counts = known is None or rank in each_once(known).partition
        self._bounds = None if known is None else known.box(rank).bounds
        # Ranks that are to have a number alike: the size of the batch, of those that share a block of it.
        self._numbered: tuple[int, ...] = ()
        if known is None and options.reduction == "batchmean" and self.dims and self.P_x.rank is not None:
            per_block = self.P_x.size // self.P_x.shape[0]
            first = self.P_x.rank - self.P_x.rank % per_block
            self._numbered = self.P_x.ranks[first : first + per_block]

    def __call__(
        self, needs: GradientNeeds, input: torch.Tensor, target: torch.Tensor, **weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Global loss of local shards, the same on all ranks; for ``"none"`` of each local element."""
        problem, reduction = self.trouble(input, target, weights), self.options.reduction
        local, count = torch.zeros(()), 0.0
        if problem:
            self._stand_in()
        else:
            whole = self._gathered(needs, _wide(input), _wide(target))
            try:
                local, count = self._local_sum(*whole, weights)
            except MISFITS as error:
                problem = str(error) or repr(error)
        alike = "" if problem else self._alike(input, target)
        value = 0.0 if problem or reduction == "none" else float(local.detach())
        number = 0 if problem else self._number(input, target)
        totals = self.sums.of_all(value, count, problem, alike, number, self._numbered)
        if reduction == "none":
            return local.to(result_dtype(input))
        value, scale, count = totals.terms, 1.0, self._divisor(totals)
        if reduction != "sum":
            value, scale = _divided(value, count)
        loss: torch.Tensor = _GlobalValue.apply(local, value, scale, result_dtype(input), self.sums.name)
        return loss

    def trouble(self, input: torch.Tensor, target: torch.Tensor, weights: Weights) -> str:
        """What is wrong with local tensors themselves, or with each other; empty if nothing is."""
        problem = trouble_with(input) or trouble_with(target, "target")
        if problem:
            return problem
        if input.dim() != self.dims:
            return (
                f"input of shape {tuple(input.shape)} has {input.dim()} dimensions but P_x {self.P_x.shape}"
                f" has {self.dims}"
            )
        if not (input.is_floating_point() or input.is_complex()):
            return f"input is {input.dtype} but a loss needs floating point"
        for key, weight in weights.items():
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

    def _gathered(
        self, needs: GradientNeeds, input: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank takes the loss of."""
        return input, target

    def _stand_in(self) -> None:
        """Send zeros in place of tensors that do not fit: others wait for them before they hear of it."""

    def _local_sum(
        self, input: torch.Tensor, target: torch.Tensor, weights: Weights
    ) -> tuple[torch.Tensor, float]:
        """Sum of the local terms, or each of them for ``"none"``; and what they count in a mean."""
        function, reduction, arguments = self.options
        if not self._counts and reduction != "none":
            # Nothing to add, and still part of the way back.
            return recomputed_alike(tied(torch.zeros(()), (input, target)).abs()), 0.0
        parts = {key: None if w is None else _wide(self._part(key, w, input)) for key, w in weights.items()}
        with no_autocast():
            how = "none" if reduction == "none" else "sum"
            terms = function(input, target, reduction=how, **arguments, **parts)
        return terms, self._count(input, target, weights)

    def _count(self, input: torch.Tensor, target: torch.Tensor, weights: Weights) -> float:
        """What the local terms count in a mean."""
        return float(input.numel())

    def _alike(self, input: torch.Tensor, target: torch.Tensor) -> str:
        """What has to be alike on all ranks."""
        return f"{autocast_dtype(input)} and {autocast_dtype(target)}"

    def _number(self, input: torch.Tensor, target: torch.Tensor) -> int:
        """What some ranks are to have alike: the size of the batch."""
        return input.shape[0] if input.dim() else 0

    def _divisor(self, totals: Totals) -> float:
        """What a mean divides by; raises on all ranks alike if what they told each other does not fit."""
        if self.options.reduction != "batchmean":
            return totals.counted
        if not self.dims:
            return 1.0
        if self.source is not None:
            return float(self.source.shape[0])
        per_block, ranks = self.P_x.size // self.P_x.shape[0], self.P_x.ranks
        for at, rank in enumerate(ranks if totals.told else ()):
            first = ranks[at - at % per_block]
            if totals.told[rank] != totals.told[first]:
                raise ShapeError(
                    f"{self.sums.name!r}: ranks {first} and {rank} share a batch block of P_x"
                    f" {self.P_x.shape} but have batch sizes {totals.told[first]} and {totals.told[rank]}"
                )
        # Those of the batch blocks, each once.
        return totals.numbers

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight that is given for the global input, right-aligned."""
        shape, index = tuple(weight.shape), self.P_x.index or ()
        first = self.dims - len(shape)
        for d, extent in enumerate(shape, first):
            if extent == 1:
                continue
            if self._bounds is None:
                start, stop = Balanced(extent, self.P_x.shape[d]).interval(index[d])
            else:
                start, stop = self._bounds[d]
            if stop - start != input.shape[d]:
                raise ShapeError(
                    f"{key} has global shape {shape}, of which {stop - start} belong here in dimension"
                    f" {d - first}, but input has shape {tuple(input.shape)}: shards must be balanced"
                )
            weight = weight.narrow(d - first, start, stop - start)
        return weight


def each_once(source: Decomposition) -> Decomposition:
    """A decomposition without its copies: those on the ranks that come first are left."""
    copied = {d: 0 for d, axis in enumerate(source.axes) if axis is None}
    return replace(source, partition=source.partition.slab(copied))


class _GlobalValue(OperatorFunction):
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


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Dtype in which torch would take the loss of a tensor: losses are in float32 under autocast."""
    return sum_dtype(tensor.dtype) if torch.is_autocast_enabled(tensor.device.type) else tensor.dtype


def result_dtype(input: torch.Tensor) -> torch.dtype:
    """Dtype of the loss of a tensor."""
    dtype = autocast_dtype(input)
    return dtype.to_real() if dtype.is_complex else dtype


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(sum_dtype(tensor.dtype))
