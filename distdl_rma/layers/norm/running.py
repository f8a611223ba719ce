"""Normalisation with running statistics, equal on all ranks that keep them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Unpack

import numpy as np
import torch

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.placement import cut
from distdl_rma.layers.norm.base import DistributedNorm, Moments, NormPlan
from distdl_rma.ops.autograd import tells_peers
from distdl_rma.ops.norm.normalise import widened
from distdl_rma.ops.norm.statistic_groups import NormAxes
from distdl_rma.ops.norm.statistics import Statistics
from distdl_rma.ops.tensors import as_array, as_tensor
from distdl_rma.segments.collectives.allreduce import Allreduce

_PAIR = ("running_mean", "running_var")


class DistributedRunningNorm(DistributedNorm):
    """Normalisation per channel that may keep running statistics.

    The buffers are torch's. Where parameters are cut, so are they; otherwise they are whole, and the same on
    every rank of the machine, those outside of P_x included. In training the statistics of
    the batch travel once more where not all of these ranks have computed them together. In evaluation
    nothing travels but shapes.

    Parameters
    ----------
    P_x, layout, eps, affine, bias, device, dtype, name, weights
        As in the base.
    num_features, momentum, track_running_stats
        As in torch.
    """

    def __init__(
        self,
        P_x: Partition,
        layout: NormAxes,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        bias: bool,
        name: str | None,
        *,
        weights: str = "cut",
        **callbacks: Unpack[Callbacks],
    ) -> None:
        self.num_features, self.momentum = num_features, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        extents = (num_features,)
        super().__init__(
            P_x, layout, extents, eps, affine, bias, device, dtype, name, weights=weights, **callbacks
        )
        self.running_mean: torch.Tensor | None
        self.running_var: torch.Tensor | None
        self.num_batches_tracked: torch.Tensor | None
        if not track_running_stats:
            for key in (*_PAIR, "num_batches_tracked"):
                self.register_buffer(key, None)
            return
        kept = self.kept.store
        for key, make in zip(_PAIR, (torch.zeros, torch.ones), strict=True):
            self.register_buffer(key, cut(kept, make(num_features, device=device, dtype=dtype)))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))
        if self.cuts and not self.whole:
            self.buffer_layouts.update(dict.fromkeys(_PAIR, self.store))

    @cached_property
    def _keepers(self) -> tuple[int, ...]:
        # Those that keep the same channels as this rank.
        index = self.P_x.index
        if not self.buffer_layouts:
            return self.machine.ranks
        if index is None:
            return (self.machine.rank,)
        return self.P_x.slab({d: index[d] for d in self.cuts}).ranks

    @cached_property
    def _sums(self) -> Allreduce:
        # Where not all of them have computed the statistics of a batch together, they add them up.
        count = len(_PAIR) * self.kept.store.box(self.machine.rank).volume
        name = f"{self.name} (running statistics)"
        sums = Allreduce(self.machine.segments, self._keepers, count, np.float64, name=name)
        weakref.finalize(self, sums.close)
        return sums

    def _sums_for(self, plan: NormPlan) -> Allreduce | None:
        if self.running_mean is None:
            return None
        if plan.statistics is not None and set(plan.statistics.cells.ranks) == set(self._keepers):
            return None
        return self._sums

    def agreeing(self) -> tuple[int, ...]:
        """All ranks of the machine where statistics are tracked: they all keep some."""
        ranks = super().agreeing()
        if not self.track_running_stats:
            return ranks
        return (*ranks, *(rank for rank in self.machine.ranks if rank not in self.P_x))

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{super().extra_repr()}, momentum={self.momentum},"
            f" track_running_stats={self.track_running_stats}"
        )

    @tells_peers
    def connect(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> None:
        """Plan for an input before it is there, as of :class:`DistributedNorm`."""
        super().connect(shape, dtype)
        plan = None if self._plans is None else self._plans.last
        sums = None if plan is None else self._sums_for(plan)
        if sums is not None:
            sums.connect()

    def reset_running_stats(self) -> None:
        """Start the running statistics anew; local, to be called on all ranks."""
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    @property
    def by_batch(self) -> bool:
        """Whether a call normalises by the statistics of its input."""
        raise NotImplementedError

    @property
    def tracks(self) -> bool:
        """Whether a call changes the running statistics."""
        raise NotImplementedError

    def mode(self) -> tuple[int, ...]:
        """By what a call normalises, and how it changes the running statistics; as of the base."""
        bits = -1 if self.momentum is None else int(np.float64(self.momentum).view(np.int64))
        return int(self.by_batch), int(self.tracks), bits if self.tracks else 0

    def about_mode(self, mode: tuple[int, ...]) -> str:
        """A mode in words, for messages."""
        by_batch, tracks, bits = mode
        by = f"normalises by the statistics of {'the batch' if by_batch else 'earlier batches'}"
        momentum = "None" if bits == -1 else np.int64(bits).view(np.float64)
        return f"{by} and tracks them with momentum {momentum}" if tracks else f"{by} and tracks none"

    def rate(self) -> float:
        """Weight of this batch in the running statistics."""
        raise NotImplementedError

    def moments(self, plan: NormPlan, statistics: Statistics, x: torch.Tensor) -> Moments:
        """Those of the batch, which may change the running ones, or the running ones."""
        if not self.by_batch:
            mean, variance = (
                plan.used(key, getattr(self, key).to(torch.float64)).view(self._column(x)) for key in _PAIR
            )
            return Moments(mean, variance, of_input=False)
        mean, variance, shifted = statistics.of(widened(x.detach()))
        if self.tracks:
            total = statistics.total
            unbiased = variance * (total / (total - 1).clamp(min=1))
            self._track(plan, [self._per_channel(values, plan.shape) for values in (mean, unbiased)])
        return Moments(mean, variance, shifted)

    def stand_by(self, plan: NormPlan) -> None:
        """Learn the statistics of a batch of which this rank has no part."""
        if self.by_batch and self.tracks:
            self._track(plan, None)

    def _column(self, x: torch.Tensor) -> list[int]:
        (channels,) = self.layout.weighted
        return [-1 if d == channels else 1 for d in range(x.dim())]

    def _per_channel(self, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        # This rank's part of the mean over the instances.
        instances = self.layout.alone(len(shape))
        count = 1
        for d in instances:
            count *= shape[d]
        return (values.sum(instances) / max(1, count) if instances else values).flatten()

    def _track(self, plan: NormPlan, values: list[torch.Tensor] | None) -> None:
        rate, sums = self.rate(), self._sums_for(plan)
        home = None if values is None else torch.cat([plan.bring_home(v) for v in values])
        if sums is not None:
            # One of those that share a cell speaks for it.
            speaks = plan.statistics is not None and plan.statistics.cells.ranks[0] == self.machine.rank
            sums.active[:] = as_array(home * plan.portion) if home is not None and speaks else 0
            sums.start()
            home = as_tensor(sums.wait())
        counted = [n for d, n in enumerate(plan.shape) if d not in self.layout.weighted]
        if home is None or 0 in counted:
            # An empty batch says nothing, nor does any where nothing is kept.
            return
        for key, new in zip(_PAIR, home.tensor_split(len(_PAIR)), strict=True):
            buffer = getattr(self, key)
            buffer.copy_(buffer.to(torch.float64).lerp(new, rate))
