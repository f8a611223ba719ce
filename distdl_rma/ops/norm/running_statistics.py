"""Running mean and variance, which all ranks that keep them update alike."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from math import prod

import numpy as np
import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.tensors import as_array, as_tensor
from distdl_rma.ops.norm.kept_values import KeptValues
from distdl_rma.ops.norm.statistic_groups import NormAxes
from distdl_rma.ops.norm.statistics import Statistics
from distdl_rma.segments.collectives.allreduce import Allreduce

NAMES = ("running_mean", "running_var")


class RunningStatistics:
    """Update of the running statistics by those of a batch; on all ranks that keep any, by ``store``.

    The statistics of the batch travel once more where not all of the keepers have computed them together.
    ``share`` is what part the groups of this rank are of all that normalise the same channels apart.
    """

    def __init__(
        self, site: CallSite, source: Decomposition, axes: NormAxes, store: Decomposition, share: float
    ) -> None:
        self._site, self._store, self._share = site, store, share
        self._instances = axes.instances(len(source.shape))
        self._number = max(1, prod(source.shape[d] for d in self._instances))
        self._empty = 0 in (n for d, n in enumerate(source.shape) if d not in axes.weighted)
        # Those that keep the same channels as this rank.
        self._keepers = store.holders(site.machine.rank)

    @cached_property
    def _sums(self) -> Allreduce:
        count = len(NAMES) * self._store.box(self._site.machine.rank).volume
        name = f"{self._site.name} (running statistics)"
        sums = Allreduce(self._site.machine.segments, self._keepers, count, np.float64, name=name)
        weakref.finalize(self, sums.close)
        return sums

    def _sums_for(self, statistics: Statistics | None) -> Allreduce | None:
        together = statistics is not None and set(statistics.groups.ranks) == set(self._keepers)
        return None if together or not self._keepers else self._sums

    def connect(self, statistics: Statistics | None) -> None:
        """Exchange addresses with the other keepers, if a batch travels; blocking."""
        sums = self._sums_for(statistics)
        if sums is not None:
            sums.connect()

    def update(
        self,
        running: Mapping[str, torch.Tensor],
        momentum: float,
        statistics: Statistics | None = None,
        kept: KeptValues | None = None,
        moments: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Mix a batch into ``running_mean`` and ``running_var`` with weight ``momentum``; blocking.

        The rest is known where there is a part of the batch: how it was computed, and its mean and variance.
        """
        batch: torch.Tensor | None = None
        if statistics is not None and kept is not None:
            mean, variance = moments
            unbiased = variance * (statistics.total / (statistics.total - 1).clamp(min=1))
            batch = torch.cat([kept.to_store(self._per_channel(values)) for values in (mean, unbiased)])
        sums = self._sums_for(statistics)
        if sums is not None:
            # One of those that share a group speaks for it.
            speaks = statistics is not None and statistics.groups.ranks[0] == self._site.machine.rank
            sums.active[:] = as_array(batch * self._share) if batch is not None and speaks else 0
            sums.start()
            batch = as_tensor(sums.wait())
        # A batch without elements changes nothing; a rank outside keeps nothing where channels are cut.
        if batch is None or self._empty:
            return
        for key, new in zip(NAMES, batch.tensor_split(len(NAMES)), strict=True):
            buffer = running[key]
            buffer.copy_(buffer.to(torch.float64).lerp(new, momentum))

    def _per_channel(self, values: torch.Tensor) -> torch.Tensor:
        # This rank's part of the mean over the instances.
        return (values.sum(self._instances) / self._number if self._instances else values).flatten()
