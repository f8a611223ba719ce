"""The base of all losses: local sums by torch, and one allreduce of these sums and of what must be equal.

Two ranks with shards of any shape, under ``reduction="mean"``::

    rank 0    terms 1.5 of 6 elements  ─┐                        loss 2.5 / 10, gradients of own terms / 10
    rank 1    terms 1.0 of 4 elements  ─┴─  allreduce: 2.5, 10   loss 2.5 / 10, gradients of own terms / 10

Unlike other layers, a loss does not agree on shapes first. It needs no grid, so that nothing follows from the
shapes of other ranks, and a message before the sum would double the time of a small loss. What must be equal
on all ranks travels as numbers beside the sum. Layers of ``classification`` agree if classes are cut.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, NoReturn

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
from distdl_rma.layers.ops.core.tensors import no_autocast, problem_with
from distdl_rma.layers.ops.losses import LEGACY, divisor_of
from distdl_rma.layers.partitioned.core.arguments import LayerOptions, by_name, own_options, torchs_layer
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.partitioned.core.refusals import gather_refusal
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.consensus import WORDS, are_equal, gather_words, halves, words_of

# Arguments that are tensors, which become buffers.
_WEIGHTS = "weight", "pos_weight"
# Errors of torch for tensors that do not fit; all ranks then raise.
_MISFITS = (RuntimeError, ValueError, IndexError, TypeError)
# Elements of the allreduce: see ``DistributedLoss._totals``.
_OWN = 4
_TOTALS = _OWN + WORDS + 2


class _Settings(NamedTuple):
    # What follows from a layer's arguments, until one of them changes.
    function: Callable[..., torch.Tensor]  # torch's, with its arguments
    stated: str  # must be equal on all ranks, which would else add up terms of different losses
    counts: bool  # whether this rank's divisor counts: on the first rank of its group, and without groups
    factor: int  # factors of a group add up to 0


class DistributedLoss(DistributedLayer):
    """Loss over all elements of tensors that are split over ranks, evenly or not; base of all losses.

    To add a loss, add a class to ``elementwise`` that inherits from this class and torch's, and whose
    ``_function`` is torch's function: its arguments have the names of the attributes of torch's class.
    ``_reductions`` are the allowed ones. Losses over classes are in ``classification``.

    Each rank calls torch's function on its shards, which, unlike split tensors, need not form a grid. One
    allreduce adds the local sums, the divisor of a mean, and the number of ranks with a problem. The loss is
    linear in the local sums, so that the backward moves no data.

    A rank that raised before the allreduce would leave the others in it. So every rank of P_x takes part in
    it exactly once in each call: whatever is wrong with this rank's tensors becomes a *problem*, a text that
    is empty if there is none, and all ranks raise together afterwards. The ranks compare facts in the same
    allreduce, so that a comparison costs no message of its own.

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
    _reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none")
    _by_name = (*LayerOptions.__annotations__,)
    # Why two ranks of a group may not differ in their ``_number``.
    _unlike: ClassVar[str] = "share a batch block of P_x {P_x} but have batch sizes {sizes}"
    reduction: str

    def __init__(self, P_x: Partition, *arguments: Any, **options: Any) -> None:
        kind, own = type(self).__name__, own_options(options)
        for key in LEGACY:
            if options.pop(key, None) is not None:
                raise UnsupportedError(
                    f"{kind}: {key} is not supported; say reduction='mean', 'sum' or 'none'"
                )
        given = by_name(type(self), *arguments, **options)
        weights = {key: given.pop(key, None) for key in _WEIGHTS}
        self._check_reduction(given.get("reduction", "mean"))
        for key, weight in weights.items():
            if weight is not None:
                self._check_weight(f"{kind}: {key}", weight, P_x)
        like = torchs_layer(type(self), **given, sample=self._sample())
        super().__init__(P_x, **own)
        self.P_x = P_x
        self.take_over(like)
        # Arguments may change later, and are compared in each call.
        self._changeable = self._shown
        self._weighted = tuple(like._buffers)
        for key in self._weighted:
            self.register_buffer(key, weights[key])

    def __setattr__(self, name: str, value: Any) -> None:
        """As in the base; checks a reduction that is assigned later.

        Arguments of torch's losses may be assigned, as some programs do from epoch to epoch. All ranks must
        assign alike, which each call compares.
        """
        if name == "reduction":
            self._check_reduction(value)
        super().__setattr__(name, value)
        vars(self).pop("_settings", None)

    def _check_reduction(self, reduction: str) -> None:
        if reduction not in self._reductions:
            wanted = f"reduction is one of {self._reductions}"
            raise ArgumentError(f"{type(self).__name__}: {wanted}, got {reduction!r}")

    def _check_weight(self, what: str, weight: Any, P_x: Partition) -> None:
        # Torch checks a weight against the input of a call; what cannot fit any input is refused here.
        if not isinstance(weight, torch.Tensor):
            raise ArgumentError(f"{what} is a tensor, got {weight!r}")
        if weight.requires_grad:
            raise UnsupportedError(f"{what} requires a gradient, which a loss does not give it")
        if weight.dim() > P_x.dim:
            raise ShapeError(
                f"{what} of shape {tuple(weight.shape)} has more dimensions than P_x {P_x.shape}"
            )

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Valid tensors for torch's function.
        x = torch.full((1,), 0.5)
        return x, x

    @property
    def arguments(self) -> dict[str, Any]:
        """Current arguments of torch's function, besides tensors and reduction."""
        return {key: getattr(self, key) for key in self._shown if key != "reduction"}

    @property
    def _weights(self) -> dict[str, torch.Tensor]:
        return {key: weight for key in self._weighted if (weight := getattr(self, key)) is not None}

    @cached_property
    def _settings(self) -> _Settings:
        # Computed once, and again after an assignment (``__setattr__``): a summary of weights takes longer
        # than the loss of a small tensor.
        how, group = "none" if self.reduction == "none" else "sum", self._group(self.machine.rank)
        codes = {key: f"values of code {fingerprint(summary_of(w)):x}" for key, w in self._weights.items()}
        words = {"reduction": self.reduction, **self.arguments, **codes}
        at = group.index(self.machine.rank) if group else 0
        return _Settings(
            partial(type(self)._function, reduction=how, **self.arguments),
            "".join(f", {key}={value!r}" for key, value in words.items()),
            at == 0,
            _factors(group)[at] if len(group) > 1 else 0,
        )

    def output_layout(self, _inputs: Sequence[Any]) -> Decomposition | None:
        """A replicated number; None for ``reduction="none"``.

        Losses of local elements have no layout: shards of a loss need not form a grid.
        """
        return None if self.reduction == "none" else Decomposition.replicated(self.P_x, ())

    def extra_repr(self) -> str:
        """As in the base, with the shapes of weights."""
        shapes = {key: tuple(weight.shape) for key, weight in self._weights.items()}
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
        # With a problem too, as the other ranks wait in the same places.
        self._agree(input, target, problem)
        terms, divisor, value, alike, number = torch.zeros(()), 0.0, 0.0, "", 0
        if not problem:
            try:
                with no_autocast():
                    terms, divisor = self._sums_of(_wide(input), _wide(target))
                alike = f"{self._alike(input, target)}{self._settings.stated}"
                number = self._number(input, target)
                value = 0.0 if reduction == "none" else float(terms.detach())
            except ShapeError as error:
                problem = str(error)
            except DistdlError:
                # Such as a failure of the machine in a gathering, which the other ranks notice as well.
                raise
            except _MISFITS as error:
                problem = str(error) or repr(error)
        value, divisor, needed = self._totals(problem, value, divisor, terms.requires_grad, alike, number)
        if reduction == "none":
            return anchored(terms.to(result_dtype(input)), needed)
        scale = 1.0
        if reduction != "sum":
            # Without elements these are infinity, and a mean that is not a number, as in torch.
            scale = 1.0 / divisor if divisor else math.inf
            value = value / divisor if divisor else value * math.inf
        loss: torch.Tensor = _GlobalValue.apply(terms, value, scale, result_dtype(input), self.name)
        # A backward may start here, as on the other ranks.
        return anchored(loss, needed)

    @reports_failures
    def refuse(self, problem: str) -> None:
        """As in the base; the other ranks get the problem with the sums."""
        if self.P_x.active:
            nothing = torch.empty(0)
            self._agree(nothing, nothing, problem)
            self._totals(problem)
        super().refuse(problem)

    @cached_property
    def _sums(self) -> Allreduce:
        title = f"{self.name}, {fingerprint(f'{self.extra_repr()}{self._settings.stated}'):014x}"
        sums = Allreduce(self.machine.segments, self.P_x.ranks, _TOTALS, np.float64, name=title)
        weakref.finalize(self, sums.close)
        return sums

    def _totals(
        self,
        problem: str,
        terms: float = 0.0,
        divisor: float = 0.0,
        needed: bool = False,
        alike: str = "",
        number: int = 0,
    ) -> tuple[float, float, bool]:
        """Sums of terms and divisors over the ranks, and whether any rank needs a gradient; blocking.

        One row of float64 is summed, 10 numbers from each rank::

            | terms | divisor | problems | needing a gradient | 4 words of alike | 2 halves of number |

        Facts that are ``alike`` on all ranks have words from which ``are_equal`` finds whether they are.
        The ``number`` needs to be equal only in each group, ``_group``. Ranks multiply theirs by factors that
        add up to 0 in each group. So the sum over all ranks is 0 if numbers are equal, and (almost surely)
        not 0 if they differ in a group. Words and halves are integers, which float64 adds exactly.

        All ranks raise the same error if one has a problem, or if ranks differ.
        """
        now, row = self._settings, self._sums.active
        row[:_OWN] = terms, divisor if now.counts else 0, bool(problem), needed
        row[_OWN:-2] = words_of(alike)
        row[-2:] = [half * now.factor for half in halves(number)] if now.factor else 0
        self._sums.start()
        total, divisors, problems, needing, *others = self._sums.wait().tolist()
        if problems or not are_equal(others[:WORDS], self.P_x.size):
            raise gather_refusal(self.machine, self.P_x.ranks, self.name, problem, alike)
        # Last, since a rank with a problem has no number.
        if any(others[WORDS:]):
            self._refuse_number(number)
        return total, divisors, needing > 0

    def _refuse_number(self, number: int) -> NoReturn:
        # Some rank has another number than the first one of its group.
        numbers = gather_words(self.machine.segments, number, f"{self.name} (numbers)", self.P_x.ranks)
        pairs = ((self._group(rank)[0], rank) for rank in numbers)
        first, rank = next((first, rank) for first, rank in pairs if numbers[rank] != numbers[first])
        sizes = f"{numbers[first]} and {numbers[rank]}"
        unlike = self._unlike.format(P_x=self.P_x.shape, sizes=sizes)
        raise ShapeError(f"{self.name!r}: ranks {first} and {rank} {unlike}")

    def _input_problem(self, input: torch.Tensor, target: torch.Tensor) -> str:
        # Error text if the local tensors are invalid, or do not fit together; empty otherwise. Torch would
        # take some of these: it broadcasts a target of another shape, with a warning on this rank alone, and
        # promotes types, so that ranks would return losses of different types.
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
        for key, weight in self._weights.items():
            if autocast_dtype(weight) != autocast_dtype(input):
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

    def _agree(self, _input: torch.Tensor, _target: torch.Tensor, _problem: str) -> None:
        """Agree on shapes, for terms of several ranks' data."""

    def _sums_of(self, input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Sum of the local terms, or each of them for ``"none"``, and their part of the divisor of a mean."""
        parts = {key: _wide(self._part(key, w, input)) for key, w in self._weights.items()}
        return self._settings.function(input, target, **parts), divisor_of(self.reduction, input.shape)

    def _alike(self, input: torch.Tensor, target: torch.Tensor) -> str:
        """Facts that must be equal on all ranks."""
        return f"{autocast_dtype(input)} and {autocast_dtype(target)}"

    def _group(self, rank: int) -> tuple[int, ...]:
        """Ranks that must have the same ``_number``: here those of one batch block, with its batch size.

        They have parts of the same rows, and only the first one counts these. Without groups all ranks count.
        """
        if self.reduction != "batchmean" or not self.P_x.dim:
            return ()
        return self.P_x.slab({0: self.P_x.index_of(rank)[0]}).ranks

    def _number(self, input: torch.Tensor, target: torch.Tensor) -> int:
        # Of 40 bits at most, ``halves``.
        return input.shape[0] if input.dim() else 0

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        # This rank's part of a weight, which is right-aligned with the global input. A loss does not know
        # where its shard begins, except if shards are balanced: then the extent of the weight tells.
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
        # Outside of P_x: 0, in the graphs of both tensors, so that any rank can call ``backward``. Nobody
        # waits for this rank here, so it raises alone.
        problem = problem_with(input) or problem_with(target, "target")
        if not problem and input.numel():
            shape = tuple(input.shape)
            problem = f"it is not in P_x but passes a tensor of shape {shape}; pass one without elements"
        if problem:
            self.refuse(problem)
        result = input.clone() if self.reduction == "none" else input.sum()
        # A backward must reach the graph of the target on this rank too.
        result = tied(result, [target] if target.requires_grad else [])
        return (result.real if result.is_complex() else result).to(result_dtype(input))


def _factors(ranks: Sequence[int]) -> list[int]:
    # A factor for each rank of a group. Their sum is 0, and they depend on the ranks, so that differences in
    # two groups do not cancel: 3 and 4 rows in one group, 4 and 3 in another.
    others = [halves(fingerprint((rank,)))[0] | 1 for rank in ranks[1:]]
    return [-sum(others), *others]


class _GlobalValue(OperatorFunction):
    # The value is that of the global loss, the gradient is that of the local terms. So no rank counts a term
    # of another one, and the gradient of the global loss in this rank's shard is complete without a message.
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
    """Dtype in which torch computes the loss of a tensor: float32 under autocast.

    Torch casts inside of its functions. A layer sums outside of them, and so has to know the type.
    """
    return sum_dtype(tensor.dtype) if torch.is_autocast_enabled(tensor.device.type) else tensor.dtype


def result_dtype(input: torch.Tensor) -> torch.dtype:
    """Dtype of the loss of a tensor."""
    dtype = autocast_dtype(input)
    return dtype.to_real() if dtype.is_complex else dtype


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(sum_dtype(tensor.dtype))
