"""The base of all losses: their arguments, local sums by torch, and one allreduce of these sums."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import numpy as np
import torch

from distdl_rma.errors import ArgumentError, DistdlError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.checks.arguments import summary_of
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, anchored, reports_failures, tied, uncompiled
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.tensors import no_autocast, problem_with
from distdl_rma.layers.partitioned.core.arguments import LayerOptions, torchs_layer
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.partitioned.core.refusals import gather_refusal
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.consensus import WORDS, are_equal, gather_words, halves, words_of

_LEGACY = ("size_average", "reduce")
# Errors of torch for tensors that do not fit; all ranks then raise.
_MISFITS = (RuntimeError, ValueError, IndexError, TypeError)
# Elements of the allreduce: the terms, their count in a mean, ranks with a problem, the numbers of groups,
# ranks whose terms need a gradient; the words of facts that must be equal; for each half of a number a sum
# that is 0 if it is equal in each group.
_OWN = 5
_TOTALS = _OWN + WORDS + 2


class Totals(NamedTuple):
    """Sums over all ranks: of their terms, of the terms' count, and of one number per group.

    ``numbers_by_rank`` is by rank id, and empty unless numbers differ within a group. ``needed`` is whether
    the terms of any rank need a gradient.
    """

    terms: float
    counted: float
    numbers: float = 0.0
    numbers_by_rank: Mapping[int, int] = {}
    needed: bool = False


class LossSums:
    """One allreduce in float64 over the ranks of a partition, for a loss with these arguments.

    The same allreduce compares facts that must be equal, by ``summed_codes``. Within a group, ranks multiply
    their number by factors whose sum is 0. ``refuse`` makes the error that all ranks raise, from the problem
    and the facts of this rank. Local to construct; the first call raises ``MismatchError`` if the texts of
    ``arguments`` differ between ranks.
    """

    def __init__(
        self, site: CallSite, P_x: Partition, arguments: str, refuse: Callable[[str, str], Exception]
    ) -> None:
        self.P_x, self.name, self._refuse, self._segments = P_x, site.name, refuse, site.machine.segments
        title = f"{site.name}, {fingerprint(arguments):014x}"
        self._sums = Allreduce(self._segments, P_x.ranks, _TOTALS, np.float64, name=title)
        weakref.finalize(self, self._sums.close)

    def allreduce(
        self,
        terms: float,
        count: float,
        problem: str,
        alike: str,
        number: int = 0,
        among: Sequence[int] = (),
        needed: bool = False,
    ) -> Totals:
        """Totals of all ranks; blocking. All ranks raise if one has a problem, or their ``alike`` differ.

        ``among`` is the group of ranks, this one included, that must have the same ``number``. It is empty on
        all ranks if the loss has no groups. ``needed`` is whether the terms need a gradient.
        """
        at = among.index(self._segments.rank) if among else 0
        factor = _factors(tuple(among))[at] if len(among) > 1 else 0
        row = self._sums.active
        row[:_OWN] = terms, count, bool(problem), 0 if at else number, needed
        row[_OWN:-2] = words_of(alike)
        row[-2:] = [half * factor for half in halves(number)] if factor else 0
        self._sums.start()
        total, counted, problems, numbers, needing, *others = self._sums.wait().tolist()
        if problems or not are_equal(others[:WORDS], self.P_x.size):
            raise self._refuse(problem, alike)
        if not any(others[WORDS:]):
            return Totals(total, counted, numbers, needed=needing > 0)
        by_rank = gather_words(self._segments, number, f"{self.name} (numbers)", self.P_x.ranks)
        return Totals(total, counted, numbers, by_rank, needing > 0)


@cache
def _factors(ranks: tuple[int, ...]) -> list[int]:
    # A factor for each rank; their sum is 0. Sums of different numbers times these are almost never 0.
    others = [halves(fingerprint((rank,)))[0] | 1 for rank in ranks[1:]]
    return [-sum(others), *others]


# How the values of a loss become one: ``"none"`` keeps them.
How = Literal["mean", "sum", "none"]


class DistributedLoss(DistributedLayer):
    """Loss over all elements of tensors that are split over ranks, evenly or not; base of all losses.

    To add a loss, add a class to ``elementwise`` that inherits from this class and torch's. Its ``_function``
    is torch's function, and its constructor passes that function's arguments on by name. ``_weights`` names
    the arguments that are tensors, ``_reductions`` the allowed reductions. Losses over classes are in
    ``classification``.

    Each rank calls torch's function on its shards, which, unlike split tensors, need not form a grid. One
    allreduce adds the local sums, the divisor of a mean, and the number of ranks with a problem. The loss is
    linear in the local sums, so that the backward moves no data.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    >>> loss = DistributedL1Loss(P_x)
    >>> x, target = torch.rand(2, 1, 3, 8, 8)  # whole, equal on all ranks
    >>> loss(shard(P_x, x), shard(P_x, target)).shape  # one number, that of one process
    torch.Size([])
    """

    _function: ClassVar[Callable[..., torch.Tensor]]
    _weights: ClassVar[tuple[str, ...]] = ()
    _reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none")
    # Why two ranks of a group may not differ in their ``_number``.
    _unlike: ClassVar[str] = "share a batch block of P_x {P_x} but have batch sizes {sizes}"
    reduction: str

    def __init__(
        self, P_x: Partition, reduction: str, arguments: Mapping[str, Any], **options: Unpack[LayerOptions]
    ) -> None:
        kind, given = type(self).__name__, dict[str, Any](options)
        for key in _LEGACY:
            if given.pop(key, None) is not None:
                raise UnsupportedError(
                    f"{kind}: {key} is not supported; say reduction='mean', 'sum' or 'none'"
                )
        super().__init__(P_x, **given)
        self.P_x, self.reduction = P_x, reduction
        self._arguments = tuple(key for key in arguments if key not in self._weights)
        for key, value in arguments.items():
            if key in self._arguments:
                setattr(self, key, value)
            else:
                self._check_weight(kind, key, value)
                self.register_buffer(key, value)
        torchs_layer(type(self), reduction=reduction, **self.arguments, sample=self._sample())

    def __setattr__(self, name: str, value: Any) -> None:
        """As in the base; arguments may change later, and are compared in each call."""
        if name == "reduction":
            self._check_reduction(value)
        super().__setattr__(name, value)
        vars(self).pop("_stated", None)

    def _check_reduction(self, reduction: str) -> None:
        if reduction not in self._reductions:
            wanted = f"reduction is one of {self._reductions}"
            raise ArgumentError(f"{type(self).__name__}: {wanted}, got {reduction!r}")

    def _check_weight(self, kind: str, key: str, weight: Any) -> None:
        if weight is None:
            return
        if not isinstance(weight, torch.Tensor):
            raise ArgumentError(f"{kind}: {key} is a tensor, got {weight!r}")
        if weight.requires_grad:
            raise UnsupportedError(f"{kind}: {key} requires a gradient, which a loss does not give it")
        if weight.dim() > self.P_x.dim:
            raise ShapeError(
                f"{kind}: {key} of shape {tuple(weight.shape)} has more dimensions than P_x {self.P_x.shape}"
            )

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Valid tensors for torch's function.
        x = torch.full((1,), 0.5)
        return x, x

    @property
    def arguments(self) -> dict[str, Any]:
        """Current arguments of torch's function, besides tensors and reduction."""
        return {key: getattr(self, key) for key in self._arguments}

    def output_layout(self, _inputs: Sequence[Any]) -> Decomposition | None:
        """A replicated number; None for ``reduction="none"``."""
        return None if self.reduction == "none" else Decomposition.replicated(self.P_x, ())

    def extra_repr(self) -> str:
        """As in the base, with the shapes of weights."""
        weights = {key: getattr(self, key) for key in self._weights}
        shapes = {key: tuple(weight.shape) for key, weight in weights.items() if weight is not None}
        words = {"reduction": self.reduction, **self.arguments, **shapes, "P_x": self.P_x.shape}
        return ", ".join(f"{key}={value}" for key, value in words.items())

    @reports_failures
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Global loss of the local shards ``input`` and ``target``, which are empty outside of P_x; blocking.

        Returns
        -------
        torch.Tensor
            A number, the same on all ranks of P_x and 0 elsewhere; for ``"none"`` the loss of each local
            element.

        Raises
        ------
        ShapeError
            On every rank of P_x with the same text, if the tensors of one of them do not fit each other or
            the layer, or those of two ranks differ in dtype.
        """
        if not self.P_x.active:
            return self._idle(input, target)
        problem, reduction = self._input_problem(input, target), self.reduction
        self._agree(input, target, problem)
        terms, count, alike, number = torch.zeros(()), 0.0, "", 0
        if not problem:
            terms, count, problem = self._terms_or_problem(input, target)
        if not problem:
            alike, number = f"{self._alike(input, target)}{self._stated}", self._number(input, target)
        value = 0.0 if reduction == "none" else float(terms.detach())
        group, needed = self._group(self.machine.rank), terms.requires_grad
        totals = self._sums.allreduce(value, count, problem, alike, number, group, needed)
        for rank, its in totals.numbers_by_rank.items():
            first = self._group(rank)[0]
            if its != totals.numbers_by_rank[first]:
                sizes = f"{totals.numbers_by_rank[first]} and {its}"
                unlike = self._unlike.format(P_x=self.P_x.shape, sizes=sizes)
                raise ShapeError(f"{self.name!r}: ranks {first} and {rank} {unlike}")
        if reduction == "none":
            return anchored(terms.to(result_dtype(input)), totals.needed)
        value, scale = totals.terms, 1.0
        if reduction != "sum":
            count = totals.counted if reduction == "mean" else totals.numbers if self.P_x.dim else 1.0
            # As in torch, a mean over no elements is NaN.
            with np.errstate(all="ignore"):
                value, scale = float(np.float64(value) / count), float(np.float64(1.0) / count)
        loss: torch.Tensor = _GlobalValue.apply(terms, value, scale, result_dtype(input), self.name)
        # A backward may start here, as on the other ranks.
        return anchored(loss, totals.needed)

    @cached_property
    def _stated(self) -> str:
        # Ranks with other arguments or weights would add up terms of different losses.
        weights = {key: w for key in self._weights if (w := getattr(self, key)) is not None}
        words = {"reduction": self.reduction, **self.arguments}
        words |= {key: f"values of code {fingerprint(summary_of(w)):x}" for key, w in weights.items()}
        return "".join(f", {key}={value!r}" for key, value in words.items())

    @reports_failures
    def refuse(self, problem: str) -> None:
        """As in the base; the other ranks get the problem with the sums."""
        if self.P_x.active:
            nothing = torch.empty(0)
            self._agree(nothing, nothing, problem)
            self._sums.allreduce(0.0, 0.0, problem, "")
        super().refuse(problem)

    @cached_property
    def _sums(self) -> LossSums:
        refuse = partial(gather_refusal, self.machine, self.P_x.ranks, self.name)
        return LossSums(self.site, self.P_x, f"{self.extra_repr()}{self._stated}", refuse)

    def _input_problem(self, input: torch.Tensor, target: torch.Tensor) -> str:
        # Error text if the local tensors are invalid, or do not fit together; empty otherwise.
        problem = problem_with(input) or problem_with(target, "target")
        if problem:
            return problem
        if input.dim() != self.P_x.dim:
            return (
                f"input of shape {tuple(input.shape)} has {input.dim()} dimensions but P_x {self.P_x.shape}"
                f" has {self.P_x.dim}"
            )
        if not (input.is_floating_point() or input.is_complex()):
            return f"input is {input.dtype} but a loss needs floating point"
        for key in self._weights:
            weight = getattr(self, key)
            if weight is not None and autocast_dtype(weight) != autocast_dtype(input):
                return f"{key} is {weight.dtype} but input {input.dtype}"
        return self._misfit(input, target)

    def _misfit(self, input: torch.Tensor, target: torch.Tensor) -> str:
        # Error text if input and target do not fit together; empty otherwise.
        same = input.dtype == target.dtype or autocast_dtype(input) == autocast_dtype(target)
        if same and input.shape == target.shape:
            return ""
        return (
            f"input has shape {tuple(input.shape)} and {input.dtype} but target {tuple(target.shape)} and"
            f" {target.dtype}"
        )

    def _terms_or_problem(self, input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float, str]:
        # The local terms, their count in a mean, and an error text if they cannot be computed.
        try:
            with no_autocast():
                return self._terms(_wide(input), _wide(target)), self._count(input, target), ""
        except ShapeError as error:
            problem = str(error)
        except DistdlError:
            raise
        except _MISFITS as error:
            problem = str(error) or repr(error)
        return torch.zeros(()), 0.0, problem

    def _agree(self, _input: torch.Tensor, _target: torch.Tensor, _problem: str) -> None:
        """Agree on shapes, for terms of several ranks' data."""

    def _terms(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sum of the local terms, or each of them for ``"none"``."""
        weights = {key: getattr(self, key) for key in self._weights}
        parts = {k: None if w is None else _wide(self._part(k, w, input)) for k, w in weights.items()}
        how = "none" if self.reduction == "none" else "sum"
        return type(self)._function(input, target, reduction=how, **self.arguments, **parts)

    def _count(self, input: torch.Tensor, target: torch.Tensor) -> float:
        """Contribution of the local terms to the divisor of a mean."""
        return float(input.numel())

    def _alike(self, input: torch.Tensor, target: torch.Tensor) -> str:
        """Facts that must be equal on all ranks."""
        return f"{autocast_dtype(input)} and {autocast_dtype(target)}"

    def _group(self, rank: int) -> tuple[int, ...]:
        """Ranks that must have the same ``_number``: here those of one batch block, with its batch size."""
        if self.reduction != "batchmean" or not self.P_x.dim:
            return ()
        return self.P_x.slab({0: self.P_x.index_of(rank)[0]}).ranks

    def _number(self, input: torch.Tensor, target: torch.Tensor) -> int:
        return input.shape[0] if input.dim() else 0

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        # This rank's part of a weight, which is right-aligned with the global input.
        shape, index = tuple(weight.shape), self.P_x.index or ()
        first = self.P_x.dim - len(shape)
        for d, extent in enumerate(shape, first):
            if extent == 1:
                continue
            start, stop = Balanced(extent, self.P_x.shape[d]).interval(index[d])
            if stop - start != input.shape[d]:
                raise ShapeError(
                    f"{key} has global shape {shape}, of which {stop - start} belong here in dimension"
                    f" {d - first}, but input has shape {tuple(input.shape)}: shards must be balanced"
                )
            weight = weight.narrow(d - first, start, stop - start)
        return weight

    def _idle(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        problem = problem_with(input) or problem_with(target, "target")
        if problem:
            raise ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        if input.numel():
            raise ShapeError(
                f"{self.name!r}: rank {self.machine.rank} is not in P_x but passes a tensor of shape"
                f" {tuple(input.shape)}; pass one without elements"
            )
        result = input.clone() if self.reduction == "none" else input.sum()
        # A backward must reach the graph of the target on this rank too.
        result = tied(result, [target] if target.requires_grad else [])
        return (result.real if result.is_complex() else result).to(result_dtype(input))


class _GlobalValue(OperatorFunction):
    # The value is that of the global loss, the gradient is that of the local terms.
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, value: float, scale: float, dtype: torch.dtype, name: str
    ) -> torch.Tensor:
        ctx.dtype, ctx.scale, ctx.name = local.dtype, scale, name
        return local.new_tensor(value, dtype=dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # A factor that depends on the input has second derivatives across ranks.
        if gradient.requires_grad:
            raise UnsupportedError(
                f"{ctx.name!r}: second derivatives of a nonlinear function of the loss are not supported;"
                " those of the loss itself are"
            )
        return gradient.to(ctx.dtype) * ctx.scale, None, None, None, None


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Dtype in which torch computes the loss of a tensor: float32 under autocast."""
    return sum_dtype(tensor.dtype) if torch.is_autocast_enabled(tensor.device.type) else tensor.dtype


def result_dtype(input: torch.Tensor) -> torch.dtype:
    """Dtype of the loss of a tensor."""
    dtype = autocast_dtype(input)
    return dtype.to_real() if dtype.is_complex else dtype


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(sum_dtype(tensor.dtype))
