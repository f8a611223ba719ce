"""What all normalisation layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple, Unpack
from weakref import WeakValueDictionary

import torch
from torch import nn

from distdl_rma.errors import MismatchError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import DistributedLayer, source_of
from distdl_rma.layers.core.placement import Placement
from distdl_rma.layers.core.plan_cache import InputFacts, PlanCache
from distdl_rma.layers.norm.sharing import groups_of, said
from distdl_rma.ops.autograd import anchor, anchored, tells_peers
from distdl_rma.ops.idle_ranks import idle
from distdl_rma.ops.movement import Movement, movement_or_none
from distdl_rma.ops.norm.normalise import NormCall, normalise, widened
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.ops.norm.statistics import Shifted, Statistics, message_nbytes
from distdl_rma.ops.tensors import no_autocast, sum_dtype

_PATTERNS = ("cut", "replicated")


class Moments(NamedTuple):
    """Mean and variance to normalise by, and what the input became if they are its own."""

    mean: torch.Tensor
    variance: torch.Tensor
    shifted: Shifted | None = None
    of_input: bool = True


class NormPlan:
    """What a call needs to know for one set of local shapes.

    Parameters
    ----------
    layer
        The layer.
    source
        Who owns what of the input.
    groups
        Ranks that share statistics, per rank of P_x, where users say it; None where nobody does.

    Attributes
    ----------
    shape
        Global shape of the input.
    fewest
        Elements of the smallest cell that has any.
    statistics
        Of this rank's cells; None outside of P_x.
    portion
        Weight of this rank's cells among those of the same elements: one by their number.
    moves
        Whether parameters travel, since the input is not cut where they are.
    """

    def __init__(
        self,
        layer: DistributedNorm,
        source: Decomposition,
        groups: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.shape, self.channels = source.shape, source.splits[layer.layout.weighted[0]]
        self.fewest = prod(source.shape[d] for d in layer.layout.reduced)
        self.statistics: Statistics | None = None
        self.portion = 1.0
        self.moves = False
        self._fetch: dict[str, Movement | None] = {}
        self._home: Movement | None = None
        # This rank's part of parameters that are whole; None where they are cut as the input is.
        self.part: tuple[slice, ...] | None = None
        P_x, layout, rank = layer.P_x, layer.layout, layer.machine.rank
        self._weighted = layout.weighted
        if groups is not None:
            self._divide(layer, source, groups)
        if not P_x.active:
            return
        cells = StatisticGroups(layout, P_x, source, rank, None if groups is None else groups[rank])
        self.statistics = Statistics(layer.machine, layout, cells, layer.centred, layer.name)
        splits = tuple(source.splits[d] for d in layout.weighted)
        mine = source.box(rank).bounds
        if layer.whole:
            self.part = tuple(slice(*mine[d]) for d in layout.weighted)
        self.moves = bool(layer.cuts) and splits != layer.store.splits
        if not self.moves:
            return
        line = P_x.slab({d: i for d, i in enumerate(P_x.index_of(rank)) if d not in layer.cuts})
        kept = Decomposition(line, layer.store.splits, layer.store.axes)
        used = Decomposition(line, splits, layer.store.axes)
        for key, parameter in layer.named_parameters(recurse=False) if not layer.whole else ():
            self._fetch[key] = movement_or_none(layer.site, kept, used, parameter.dtype, key)
        for key in layer.buffer_layouts:
            self._fetch[key] = movement_or_none(layer.site, kept, used, torch.float64, key)
        self._home = (
            movement_or_none(layer.site, used, kept, torch.float64, "batch statistics")
            if layer.buffer_layouts
            else None
        )

    def _divide(
        self, layer: DistributedNorm, source: Decomposition, groups: Mapping[int, tuple[int, ...]]
    ) -> None:
        # Each group has a cell of its own where the plan has one; those without elements have nothing to say.
        counts = {
            group: int(StatisticGroups(layer.layout, layer.P_x, source, group[0], group).total.max())
            for group in set(groups.values())
        }
        self.fewest = min((count for count in counts.values() if count), default=self.fewest)
        rank = layer.machine.rank
        if rank in groups and not layer.layout.groups:
            sharing = layer.layout.sharing(layer.P_x, rank)
            beside = {groups[other] for other in sharing if counts[groups[other]]}
            self.portion = 1 / len(beside) if groups[rank] in beside else 0.0

    def void(self) -> None:
        """Nothing was started before all ranks agreed."""

    def connect(self) -> None:
        """Exchange addresses with all that this rank talks to; blocking."""
        if self.statistics is not None:
            self.statistics.connect()
        for movement in (*self._fetch.values(), self._home):
            if movement is not None:
                movement.connect()

    def fetch(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Parameter, or buffer in float64, cut as the input is; blocking."""
        movement = self._fetch.get(key)
        return values if movement is None else movement(values, values.requires_grad)

    def used(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Parameter, cut as the input is; blocking where it travels."""
        return self.fetch(key, values) if self.part is None else values[self.part]

    def bring_home(self, values: torch.Tensor) -> torch.Tensor:
        """Values per channel from where the input is cut to where the buffers are; blocking.

        Where buffers are whole, zeros beside this rank's part.
        """
        if self.part is not None:
            whole = values.new_zeros([self.shape[d] for d in self._weighted])
            whole[self.part] = values
            return whole
        return values if self._home is None else self._home(values)


class DistributedNorm(DistributedLayer):
    """Normalisation of a tensor that is split over ranks along any of its dimensions.

    Base of the layers, which differ in what elements share a mean and a variance. Local input: the shard of
    this rank, of any size that forms a grid with the others'. Local output: of the same shape, dtype and
    place. Ranks outside of P_x pass and receive tensors without elements. Collective to construct over the
    machine; a call involves the ranks of P_x. Statistics travel between those that share them.

    Forward: local statistics, one message to the ranks that share them, scale. Backward: one message with
    two sums. Statistics travel and are merged in float64.

    Where P_x cuts dimensions of the parameters, these are cut too, unless they are to be replicated;
    otherwise every rank of the machine keeps copies of all of them.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    layout
        What the statistics reduce over, and where the parameters vary.
    extents
        Global shape of the parameters.
    eps
        Added to the variance; None for the resolution of the type.
    affine, bias
        Whether there is a weight, and a bias beside it.
    device, dtype
        Of the parameters.
    name
        For messages.
    weights
        ``"cut"`` or ``"replicated"``: what is done with parameters where P_x cuts their dimensions.
    """

    centred = True

    def __init__(
        self,
        P_x: Partition,
        layout: NormAxes,
        extents: Sequence[int],
        eps: float | None,
        affine: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        name: str | None,
        *,
        weights: str = "cut",
        **callbacks: Unpack[Callbacks],
    ) -> None:
        if weights not in _PATTERNS:
            raise ShapeError(f"{type(self).__name__}: weights is one of {_PATTERNS}, got {weights!r}")
        super().__init__(P_x, name=name, **callbacks)
        self.P_x, self.layout, self.eps = P_x, layout, eps
        # Grid dimensions that cut the parameters.
        self.cuts = tuple(d for d in layout.weighted if P_x.shape[d] > 1)
        axes = tuple(layout.weighted.index(d) if d in self.cuts else None for d in range(P_x.dim))
        splits = tuple(Balanced(n, P_x.shape[d]) for n, d in zip(extents, layout.weighted, strict=True))
        everywhere = Placement.everywhere(self.machine, torch.Size(extents))
        self.store = Decomposition(P_x, splits, axes) if self.cuts else everywhere.store
        values: dict[str, nn.Parameter | None] = {"weight": None, "bias": None}
        if affine:
            values["weight"] = nn.Parameter(torch.ones(*extents, device=device, dtype=dtype))
        if affine and bias:
            values["bias"] = nn.Parameter(torch.zeros(*extents, device=device, dtype=dtype))
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        # Whether parameters are whole where the input is cut.
        self.whole = bool(self.cuts) and weights == "replicated"
        self.kept = everywhere if self.whole else Placement(self.store)
        self.place(values, {key: self.kept for key, value in values.items() if value is not None})
        self._agreeing = self.agreeing()

    @cached_property
    def _plans(self) -> PlanCache[NormPlan] | None:
        if self.machine.rank not in self._agreeing:
            return None
        return PlanCache(self.machine, self._agreeing, self.name, self._plan, self.built_with, self.outcome)

    def agreeing(self) -> tuple[int, ...]:
        """Ranks that take part in a call: those of P_x, and others that keep what a call changes."""
        return self.P_x.ranks

    def _plan(self, facts: dict[int, InputFacts]) -> NormPlan:
        self._check_modes(facts)
        source, dtype = source_of(self.P_x, facts)
        if not dtype.is_floating_point:
            raise ShapeError(f"an input of a floating-point type is needed, got {dtype}")
        for rank, fact in facts.items():
            if fact.weights not in (None, dtype, sum_dtype(dtype)):
                raise ShapeError(f"input is {dtype} but on rank {rank} the parameters are {fact.weights}")
        extents = tuple(source.shape[d] for d in self.layout.weighted)
        if extents != self.store.shape:
            raise ShapeError(
                f"input of global shape {source.shape} has extents {extents} in dimensions"
                f" {self.layout.weighted}, the layer takes {self.store.shape}"
            )
        groups = groups_of(self.P_x, self.layout, source, facts)
        # What moves does not depend on the mode: a plan serves all of them.
        said = len(self._said())
        key = tuple(
            (fact.shape, fact.dtype, fact.weights, fact.call_arguments[-said:]) for fact in facts.values()
        )
        plan = self._known.get(key)
        if plan is None:
            plan = self._known[key] = NormPlan(self, source, groups)
        self.check(plan)
        return plan

    @cached_property
    def _known(self) -> WeakValueDictionary[tuple[object, ...], NormPlan]:
        return WeakValueDictionary()

    def _check_modes(self, facts: dict[int, InputFacts]) -> None:
        said = len(self._said())
        (first, expected), *others = ((rank, fact.call_arguments[:-said]) for rank, fact in facts.items())
        for rank, mode in others:
            if mode != expected:
                raise MismatchError(
                    f"rank {first} {self.about_mode(expected)} but rank {rank} {self.about_mode(mode)}:"
                    " train() or eval(), track_running_stats and momentum must be alike on all ranks"
                )

    def get_ranks_synch_norm(self) -> list[int]:
        """Rank ids that share statistics with this one, itself included; empty if none is needed.

        Where groups of channels straddle ranks: those of the last call, and before it of a balanced input.
        A user who gives this callback decides it: any of these ranks that all name each other. It is asked
        in every call.
        """
        if not self.P_x.active:
            return []
        last = self._plans.last if self._plans is not None else None
        channels = self.store.splits[0] if last is None else last.channels
        ranks = self.layout.sharing(self.P_x, self.machine.rank, channels)
        return list(ranks) if len(ranks) > 1 else []

    def get_sizeof_norm(self) -> int:
        """Bytes of one message of statistics in the forward of the last input seen.

        Before that of the announced one, of layers that were built from global parameters; otherwise 0.
        """
        if self._last_statistics is not None:
            return self._last_statistics.nbytes
        if self.announced is None or not self.P_x.active:
            return 0
        return message_nbytes(
            StatisticGroups(self.layout, self.P_x, self.announced.inputs[0], self.machine.rank)
        )

    @property
    def _last_statistics(self) -> Statistics | None:
        plan = self._plans.last if self._plans is not None else None
        return None if plan is None else plan.statistics

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{', '.join(str(n) for n in self.store.shape)}, eps={self.eps},"
            f" affine={self.weight is not None}, bias={self.bias is not None}, P_x={self.P_x.shape}"
            + (", weights='replicated'" if self.whole else "")
        )

    @tells_peers
    def connect(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> None:
        """Plan for an input before it is there, as of :class:`ComposedLayer`."""
        x = self.expected(self.P_x, shape, dtype)
        self.connect_parameters()
        if self._plans is not None:
            with torch.no_grad():
                plan, _ = self._plans.agree(x, self._typed(), self._call_arguments(), not self.P_x.active)
            plan.connect()

    @tells_peers
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; ``input`` is the local shard, or a tensor without elements on ranks outside of P_x."""
        weights = {} if self.placed is None else self.placed.use()
        if self._plans is None:
            return self.stand_aside(input, weights.values())
        plan, needs = self._plans.agree(input, self._typed(), self._call_arguments(), not self.P_x.active)
        with no_autocast():
            if plan.statistics is None:
                self.stand_by(plan)
                return anchored(idle(input, weights.values()), needs.any)
            used = {key: plan.used(key, values) for key, values in weights.items()}
            moments = self.moments(plan, plan.statistics, input)
            depends = moments.of_input and needs.input
            eps = torch.finfo(sum_dtype(input.dtype)).eps if self.eps is None else self.eps
            # The memory that a GradientSync offers is for gradients of what this rank keeps.
            elsewhere = plan.moves or plan.part is not None
            place = _as_it_is if elsewhere or self.placed is None else self.placed.fill
            job = NormCall(self.machine, plan.statistics, moments.mean, moments.variance, eps, depends, place)
            return normalise(
                input, used.get("weight"), used.get("bias"), anchor(needs.any), job, moments.shifted
            )

    def _typed(self) -> torch.Tensor | None:
        # A tensor of the type of the parameters.
        return next((t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()), None)

    @property
    def statistics_told(self) -> bool:
        """Wherever this rank takes part in calls."""
        return self._plans is not None

    def _said(self) -> tuple[int, ...]:
        # What the user of this rank says of the statistics of this call.
        return said(vars(self), self.machine.rank)

    def _call_arguments(self) -> tuple[int, ...]:
        return (*self.mode(), *self._said())

    def mode(self) -> tuple[int, ...]:
        """What of a call depends on more than its input, in numbers; to be alike on all ranks of the call."""
        return ()

    def about_mode(self, mode: tuple[int, ...]) -> str:
        """A mode in words, for messages."""
        return ""

    def check(self, plan: NormPlan) -> None:
        """Refuse an input that the kind of layer has no statistics of; alike on all ranks of a call."""

    def moments(self, plan: NormPlan, statistics: Statistics, x: torch.Tensor) -> Moments:
        """Mean and variance to normalise ``x`` by; blocking."""
        return Moments(*statistics.of(widened(x.detach())))

    def stand_by(self, plan: NormPlan) -> None:
        """Take part in a call without a part of the input."""


def _as_it_is(_key: str, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def check_extents(layer: DistributedNorm, **extents: int) -> None:
    """Refuse a size below 0, by its name."""
    for name, extent in extents.items():
        if extent < 0:
            raise ShapeError(f"{type(layer).__name__}: {name} must be at least 0, got {extent}")
