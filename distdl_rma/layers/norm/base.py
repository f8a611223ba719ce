"""What all normalisation layers share: parameters, their placement, and what the ranks must agree on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Unpack
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from distdl_rma.dtypes import sum_dtype
from distdl_rma.errors import ArgumentError, MismatchError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, ShapeAgreement, source_of
from distdl_rma.layers.core.arguments import PlacedOptions, chosen_placement, show_arguments_of
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.layers.core.placement import Placement, register
from distdl_rma.layers.norm.sharing import StatisticsAnswer, agreed_sharing, answer_of_user
from distdl_rma.ops.core.autograd import GradientNeeds, anchored
from distdl_rma.ops.core.operation import Agreement
from distdl_rma.ops.norm.normalisation import Normalisation, NormOptions
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups


class NormArguments(NamedTuple):
    """What all kinds of normalisation are told, by torch's names."""

    eps: float | None
    affine: bool
    bias: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class DistributedNorm(OperatorLayer[Normalisation]):
    """Normalisation of a tensor that is split over ranks along any of its dimensions.

    Base of the layers, which differ in what elements share a mean and a variance. The output has the shape,
    type and place of the input. Forward: local statistics, one message to the ranks that share them, scale.
    Backward: one message with two sums. Statistics travel and are merged in float64.

    ``extents`` is the global shape of the parameters. Where P_x cuts dimensions of them they are cut too,
    unless placed ``"replicated"``; otherwise every rank of the machine keeps copies of all of them.
    """

    # torch's classes, from which the layers inherit too, do not agree on what these are.
    weight: Any
    bias: Any
    eps: Any
    centred = True
    # Of what a group needs more than one, in words.
    several = ""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        twin = cls.__bases__[-1]
        if cls.__name__ == f"Distributed{twin.__name__}":
            show_arguments_of(cls, twin, PlacedOptions.__annotations__)

    def __init__(
        self,
        P_x: Partition,
        axes: NormAxes,
        extents: Sequence[int],
        given: NormArguments,
        *,
        placement: str | None = None,
        weights: str | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        placement = chosen_placement(type(self).__name__, placement, weights, ("cut", "replicated"))
        super().__init__(P_x, name=name, **callbacks)
        self.axes, self.eps, self.placement = axes, given.eps, placement
        kept = Placement.everywhere(self.machine, torch.Size(extents))
        # Grid dimensions that cut the parameters.
        cuts = tuple(d for d in axes.weighted if P_x.shape[d] > 1)
        if cuts and placement == "cut":
            splits = tuple(Balanced(n, P_x.shape[d]) for n, d in zip(extents, axes.weighted, strict=True))
            of_grid = tuple(axes.weighted.index(d) if d in cuts else None for d in range(P_x.dim))
            kept = Placement(Decomposition(P_x, splits, of_grid))
        self.store = kept.store
        wanted = {"weight": given.affine, "bias": given.affine and given.bias}
        values: dict[str, nn.Parameter | None] = dict.fromkeys(wanted)
        for key, make in (("weight", torch.ones), ("bias", torch.zeros)):
            if wanted[key]:
                values[key] = nn.Parameter(make(*extents, device=given.device, dtype=given.dtype))
        if given.affine:
            self.place(values, {key: kept for key in values if wanted[key]})
        else:
            register(self, values, {})

    def options(self) -> NormOptions:
        """What the next call computes."""
        return NormOptions(self.axes, self.eps, self.centred, several=self.several)

    def mode(self) -> tuple[Any, ...]:
        """What of a call depends on more than its input; to be alike on all ranks of the call."""
        return (None if self.eps is None else float(self.eps),)

    def about_mode(self, eps: float | None) -> str:
        """A mode in words, for messages."""
        return f"has eps {eps}"

    @cached_property
    def _operations(self) -> WeakValueDictionary[tuple[object, ...], Normalisation]:
        # By all that an operation depends on: what changes from call to call, as momentum may, makes none.
        return WeakValueDictionary()

    def plan(self, facts: dict[int, InputFacts]) -> Normalisation:
        """Normalisation of what all ranks said, in the mode that they have in common."""
        (first, expected), *others = ((rank, fact.call_arguments[0]) for rank, fact in facts.items())
        for rank, mode in others:
            if mode != expected:
                raise MismatchError(
                    f"rank {first} {self.about_mode(*expected)} but rank {rank} {self.about_mode(*mode)}:"
                    " train() or eval(), track_running_stats, momentum and eps must be alike on all ranks"
                )
        options = self.options()
        source, dtype = source_of(self.P_x, facts)
        options.check(source, dtype, self.store.shape)
        for rank, fact in facts.items():
            if fact.weights not in (None, dtype, sum_dtype(dtype)):
                raise ShapeError(f"input is {dtype} but on rank {rank} the parameters are {fact.weights}")
        answers = {rank: StatisticsAnswer(*fact.call_arguments[1]) for rank, fact in facts.items()}
        sharing = agreed_sharing(self.axes, source, answers)
        apart = sharing and tuple(sharing.items())
        key = source, dtype, options, apart, tuple(fact.weights for fact in facts.values())
        known = self._operations.get(key)
        if known is None:
            parameters = {name: getattr(self, name).dtype for name in self.placements or ()}
            fill = None if self.placed is None else self.placed.fill
            known = Normalisation(self.site, source, dtype, options, self.store, parameters, sharing, fill)
            self._operations[key] = known
        return known

    def enter(
        self,
        plans: ShapeAgreement[Normalisation],
        xs: Sequence[Tensor],
        weights: Collection[Tensor] = (),
        call_arguments: tuple[Any, ...] | None = None,
        problem: str = "",
    ) -> Agreement[Normalisation]:
        """As of every layer, with the mode, and with what the user of this rank says of statistics."""
        words = self.mode(), answer_of_user(vars(self), self.machine.rank)
        # Without parameters it is the type of running statistics that counts.
        mean = self._buffers.get("running_mean")
        told = weights if weights or mean is None else (mean,)
        return super().enter(plans, xs, told, words, problem)

    def leave(self, y: Tensor, x: Tensor, needs: GradientNeeds) -> Tensor:
        """Result in the graph if any rank's is; what has no elements keeps its shape."""
        return anchored(y, needs.any)

    @property
    def statistics_told(self) -> bool:
        """Wherever this rank takes part in calls."""
        return self.agreement is not None

    @property
    def _last(self) -> Normalisation | None:
        return None if self.agreement is None else self.agreement.last

    def get_ranks_synch_norm(self) -> list[int]:
        """Rank ids that share statistics with this one, itself included; empty if none is needed.

        Where groups of channels straddle ranks: those of the last call, and before it of a balanced input.
        A user who gives this callback decides it: any of these ranks that all name each other. It is asked
        in every call.
        """
        if not self.P_x.active:
            return []
        last, dim = self._last, self.axes.weighted[0]
        balanced = Balanced(self.store.shape[0], self.P_x.shape[dim])
        channels = balanced if last is None else last.source.splits[dim]
        ranks = self.axes.ranks_sharing(self.P_x, self.machine.rank, channels)
        return list(ranks) if len(ranks) > 1 else []

    def get_sizeof_norm(self) -> int:
        """Bytes of one message of statistics in the forward of the last input seen.

        Before that of the announced one, of layers that were built from global parameters; otherwise 0.
        """
        if not self.P_x.active:
            return 0
        if self._last is not None and self._last.statistics is not None:
            return self._last.statistics.groups.nbytes
        known = self.announced
        return 0 if known is None else StatisticGroups(self.axes, known.inputs[0], self.machine.rank).nbytes

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{', '.join(str(n) for n in self.store.shape)}, eps={self.eps},"
            f" affine={self.weight is not None}, bias={self.bias is not None}, P_x={self.P_x.shape}"
            + (f", placement={self.placement!r}" if self.placement != "cut" else "")
        )


def check_extents(layer: DistributedNorm, **extents: int) -> None:
    """Refuse a size below 0, by its name."""
    for name, extent in extents.items():
        if extent < 0:
            raise ArgumentError(f"{type(layer).__name__}: {name} must be at least 0, got {extent}")
