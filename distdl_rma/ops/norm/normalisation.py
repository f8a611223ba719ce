"""The operator of all normalisations: batch, instance, group, layer and RMS norm are cases of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds, anchor, idle
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import Operation
from distdl_rma.ops.core.tensors import no_autocast, sum_dtype
from distdl_rma.ops.norm.kept_values import KeptValues
from distdl_rma.ops.norm.normalise import Fill, Normalise, NormCall
from distdl_rma.ops.norm.running_statistics import NAMES, RunningStatistics
from distdl_rma.ops.norm.statistic_groups import NormAxes, StatisticGroups
from distdl_rma.ops.norm.statistics import Statistics

# Ranks that share statistics, per rank of the partition.
Sharing = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class NormOptions:
    """A kind of normalisation, and the mode of a call.

    ``eps`` is added to the variance, None for the resolution of the type. If not ``centred`` the mean stays.
    A call normalises ``by_batch``, by the statistics of its input, or else by running ones, and ``tracks``
    if it changes these. ``several`` says what its own statistics need more than one of; one will do if empty.
    """

    axes: NormAxes
    eps: float | None = 1e-5
    centred: bool = True
    by_batch: bool = True
    tracks: bool = False
    several: str = ""

    def check(self, source: Decomposition, dtype: torch.dtype, extents: tuple[int, ...]) -> None:
        """Refuse an input that does not fit parameters of some extents."""
        if not dtype.is_floating_point:
            raise ShapeError(f"an input of a floating-point type is needed, got {dtype}")
        found = tuple(source.shape[d] for d in self.axes.weighted)
        if found != extents:
            raise ShapeError(
                f"input of global shape {source.shape} has extents {found} in dimensions"
                f" {self.axes.weighted}, the layer takes {extents}"
            )


class Normalisation(Operation):
    """Normalisation of a split tensor; the output has the shape, type and decomposition of the input.

    Called with ``weight`` and ``bias``, where there are any, and with ``running_mean`` and ``running_var``
    where a call is not by the batch, or changes them in place; then with ``momentum`` too. Tensors are as
    this rank keeps them: what of them says ``store``, all of them on every rank or cut along the grid.

    ``parameters`` are name and type of those that there are. ``sharing`` narrows the ranks that share
    statistics. ``fill`` puts the gradient of a parameter that is used as it is kept where it is wanted.
    """

    def __init__(
        self,
        site: CallSite,
        source: Decomposition,
        dtype: torch.dtype,
        options: NormOptions,
        store: Decomposition,
        parameters: Mapping[str, torch.dtype],
        sharing: Sharing | None = None,
        fill: Fill | None = None,
    ) -> None:
        self.site, self.source, self.output, self.options = site, source, source, options
        options.check(source, dtype, store.shape)
        axes, rank = options.axes, site.machine.rank
        fewest, share = self._narrowed(sharing)
        if fewest == 1 and options.by_batch and options.several:
            raise ShapeError(f"more than 1 {options.several}, the global input is {source.shape}")
        self.eps = torch.finfo(sum_dtype(dtype)).eps if options.eps is None else options.eps
        self._parameters = parameters
        # For values per channel that come from running statistics.
        self._column = [-1 if d in axes.weighted else 1 for d in range(len(source.shape))]
        self.running = RunningStatistics(site, source, axes, store, share) if options.tracks else None
        self.statistics: Statistics | None = None
        if source.partition.active:
            groups = StatisticGroups(axes, source, rank, None if sharing is None else sharing[rank])
            self.statistics = Statistics(site, axes, groups, options.centred)
            self.kept = KeptValues(site, source, axes.weighted, store)
            self._fill = fill if self.kept.as_kept else None

    def _narrowed(self, sharing: Sharing | None) -> tuple[int, float]:
        # Elements of the smallest group that has any; and what part of all that normalise the same channels
        # apart this rank's groups are: one by their number.
        source, axes, rank = self.source, self.options.axes, self.site.machine.rank
        if axes.groups:
            return prod(source.shape) // axes.groups, 1.0
        fewest = prod(source.shape[d] for d in axes.reduced)
        if sharing is None:
            return fewest, 1.0
        counts = {
            ranks: int(StatisticGroups(axes, source, ranks[0], ranks).total.max())
            for ranks in set(sharing.values())
        }
        fewest = min((count for count in counts.values() if count), default=fewest)
        if rank not in sharing:
            return fewest, 1.0
        channels = source.splits[axes.weighted[0]]
        together = axes.ranks_sharing(source.partition, rank, channels)
        beside = {sharing[other] for other in together if counts[sharing[other]]}
        return fewest, 1 / len(beside) if sharing[rank] in beside else 0.0

    def connect(self) -> None:
        """Exchange addresses with all that this rank talks to; blocking."""
        options, wanted = self.options, dict(self._parameters)
        if not options.by_batch:
            wanted |= dict.fromkeys(NAMES, torch.float64)
        if self.statistics is not None:
            if options.by_batch:
                self.statistics.connect()
            self.kept.connect(wanted, options.tracks)
        if self.running is not None:
            self.running.connect(self.statistics)

    def __call__(self, needs: GradientNeeds, x: torch.Tensor, **weights: Any) -> torch.Tensor:
        """Normalise a local shard; ranks outside learn what it changes in the statistics that they keep."""
        statistics = self.statistics
        with no_autocast():
            if statistics is None:
                if self.running is not None:
                    self.running.update(weights, weights["momentum"])
                return idle(x, (weights.get("weight"), weights.get("bias")))
            kept, shifted, by_batch = self.kept, None, self.options.by_batch
            weight, bias = weights.get("weight"), weights.get("bias")
            if not kept.as_kept:
                weight = None if weight is None else kept.to_input("weight", weight)
                bias = None if bias is None else kept.to_input("bias", bias)
            if by_batch:
                mean, variance, shifted = statistics.of(x.detach().to(sum_dtype(x.dtype)))
                if self.running is not None:
                    self.running.update(weights, weights["momentum"], statistics, kept, (mean, variance))
            else:
                mean, variance = (
                    kept.to_input(key, weights[key].to(torch.float64)).view(self._column) for key in NAMES
                )
            depends = by_batch and needs.input
            call = NormCall(statistics, mean, variance, self.eps, depends, self._fill)
            y: torch.Tensor = Normalise.apply(x, weight, bias, anchor(needs.any), call, shifted)  # type: ignore[no-untyped-call]
            return y
