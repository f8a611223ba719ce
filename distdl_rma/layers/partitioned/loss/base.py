"""The base of all losses: shards become split tensors, of which torch's function is the loss.

Two ranks with shards of 6 and of 4 elements, under ``reduction="mean"``::

    enter    the ranks agree on their shapes       a tensor of 10 elements, cut as 6 + 4
    loss     rule of torch's function              terms 1.5 and 1.0, one allreduce, 2.5 / 10 on both ranks
    leave    the block of the result               a number with the gradient of this rank's terms

The rules of ``layers/split/functions/losses.py`` compute every cut, reduction and weight, so that a loss of
plain shards is that of split tensors, bit by bit. A layer adds what plain shards lack: an agreement on their
shapes, one error for what is wrong on one rank, and ranks that have no shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from distdl_rma.errors import ArgumentError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import Partition, alike
from distdl_rma.layers.checks.arguments import summary_of
from distdl_rma.layers.ops.core.autograd import GradientNeeds, reports_failures
from distdl_rma.layers.ops.core.operation import Agreement, Operation
from distdl_rma.layers.ops.core.tensors import problem_with
from distdl_rma.layers.ops.losses import LEGACY
from distdl_rma.layers.partitioned.core.arguments import LayerOptions, by_name, own_options, torchs_layer
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, common_dtype, source_of
from distdl_rma.layers.partitioned.core.operator_layer import OperatorLayer
from distdl_rma.layers.partitioned.core.refusals import attributed
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.torch_errors import raise_as_torch
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, composed

# Arguments that are tensors, which become buffers.
_WEIGHTS = "weight", "pos_weight"
# Errors of torch for tensors that do not fit; all ranks then raise.
_MISFITS = (RuntimeError, ValueError, IndexError, TypeError)


class Parts(Operation):
    """Layouts of input and target, which the ranks' shards are blocks of, and of the last result."""

    def __init__(self, *layouts: Decomposition) -> None:
        self.layouts, self.output = layouts, None


class DistributedLoss(OperatorLayer[Parts]):
    """Loss over all elements of tensors that are split over ranks, evenly or not; base of all losses.

    To add a loss, add a class to ``elementwise`` that inherits from this class and torch's, and whose
    ``_function`` is torch's function, which has a rule for split tensors: its arguments have the names of the
    attributes of torch's class. ``_reductions`` are the allowed ones. Losses over classes are in
    ``classification``.

    A rank that raised within the loss would leave the others in its sum. So what torch would find wrong with
    the values of this rank is looked for before the ranks agree (``_value_problem``), and what it would find
    wrong with types and shapes where all ranks know these (``plan``). Then all ranks raise together.

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
        super().__init__([P_x, P_x], **own)
        self.take_over(like)
        # Arguments may change later, and are compared in each call.
        self._changeable = self._shown
        for key in like._buffers:
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
    def _weights(self) -> dict[str, torch.Tensor]:
        return {key: weight for key, weight in self._buffers.items() if weight is not None}

    @cached_property
    def _settings(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        # Arguments of torch's function without weights; and as texts what must be equal on all ranks, which
        # would else add up terms of different losses. Computed once, and again after an assignment
        # (``__setattr__``): a summary of weights takes longer than the loss of a small tensor.
        codes = {key: f"values of code {fingerprint(summary_of(w)):x}" for key, w in self._weights.items()}
        given = {key: getattr(self, key) for key in self._shown}
        return given, tuple(f"{key}={value!r}" for key, value in (given | codes).items())

    @property
    def _given(self) -> dict[str, Any]:
        # Weights are read in each call: ``to()`` replaces buffers.
        return {**self._settings[0], **self._weights} if self._buffers else self._settings[0]

    def arguments_text(self) -> str:
        """As in the base, with codes of the weights."""
        return f"{super().arguments_text()} {self._settings[1]}"

    def extra_repr(self) -> str:
        """As in the base, with the shapes of weights."""
        shapes = {key: tuple(weight.shape) for key, weight in self._weights.items()}
        words = {**self._settings[0], **shapes, "P_x": self.P_x.shape}
        return ", ".join(f"{key}={value}" for key, value in words.items())

    @reports_failures
    def forward(  # type: ignore[override]
        self, input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
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
            the layer, those of two ranks differ in dtype, or the shards form no grid.
        """
        return self.apply_to(input, target, call_arguments=self._settings[1])

    def connect_for(self, xs: Sequence[torch.Tensor]) -> None:
        """Do nothing: a loss has no halo, and its sum connects in the first call."""

    def input_problem(self, input: Any, target: Any) -> str:
        """Error in the local tensors; empty also for those that the agreement refuses."""
        if problem_with(input) or problem_with(target):
            return ""
        shape = tuple(input.shape)
        if len(shape) != self.P_x.dim:
            return (
                f"input of shape {shape} has {len(shape)} dimensions but P_x {self.P_x.shape} has"
                f" {self.P_x.dim}"
            )
        if not (input.is_floating_point() or input.is_complex()):
            return f"input is {input.dtype} but a loss needs floating point"
        # Torch would broadcast a target of another shape, with a warning on this rank alone.
        wanted = self._target_shape(input, target)
        if tuple(target.shape) != wanted:
            return f"input has shape {shape} but target {tuple(target.shape)}, wanted {wanted}"
        return self._value_problem(input, target)

    def _target_shape(self, input: torch.Tensor, target: torch.Tensor) -> tuple[int, ...]:
        return tuple(input.shape)

    def _value_problem(self, input: torch.Tensor, target: torch.Tensor) -> str:
        # What torch's kernel would refuse on this rank alone.
        return ""

    def plan(self, facts: dict[int, InputFacts]) -> Parts:
        """Layouts of the tensors that the shards form; raises torch's error for such tensors."""
        settings = {rank: ", ".join(fact.call_arguments) for rank, fact in facts.items()}
        alike(settings, "rank {} passes {} but rank {} {}")
        with attributed("input"):
            source, dtype = source_of(self.P_x, facts)
        with attributed("target"):
            of_target = common_dtype({rank: fact.of(1) for rank, fact in facts.items()})
        parts = Parts(*self._layouts(lay.normal(source), of_target))
        stand_ins = [
            SplitTensor(torch.zeros((), dtype=each).expand(layout.box(self.machine.rank).shape), layout)
            for layout, each in zip(parts.layouts, (dtype, of_target), strict=True)
        ]
        try:
            raise_as_torch(type(self)._function, tuple(stand_ins), self._given)
        except _MISFITS as error:
            raise ShapeError(str(error) or repr(error)) from None
        return parts

    def _layouts(self, scores: Decomposition, _target: torch.dtype) -> tuple[Decomposition, Decomposition]:
        # Of input and target.
        return scores, scores

    def run(
        self, agreement: Agreement[Parts], xs: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, GradientNeeds]:
        """The loss of the split tensors; this rank's block of it."""
        parts, needs = agreement.settle()
        return self._loss_of(parts, *xs), needs

    def _loss_of(self, parts: Parts, *xs: torch.Tensor) -> torch.Tensor:
        split = [SplitTensor(x, layout) for x, layout in zip(xs, parts.layouts, strict=True)]
        y: SplitTensor = composed(type(self)._function, *split, **self._given)
        parts.output = y._layout
        return checked_block(y)

    def idle_output(self, x: torch.Tensor, others: Iterable[torch.Tensor] = ()) -> torch.Tensor:
        """0 in the graphs of both tensors, so that any rank can call ``backward``; local."""
        problem = next(filter(None, (problem_with(each) for each in (x, *others))), "")
        if not problem and x.numel():
            shape = tuple(x.shape)
            problem = f"it is not in P_x but passes a tensor of shape {shape}; pass one without elements"
        if problem:
            raise ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        nothing = super().idle_output(x, others)
        if self.reduction == "none":
            return nothing
        return nothing.sum().real if nothing.is_complex() else nothing.sum()
