"""Normalisation with running statistics, equal on all ranks that keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.placement import cut
from distdl_rma.layers.norm.base import DistributedNorm, NormArguments, as_number, as_value, check_extents
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.operation import Agreement
from distdl_rma.ops.norm.normalisation import Normalisation, NormOptions
from distdl_rma.ops.norm.running_statistics import NAMES
from distdl_rma.ops.norm.statistic_groups import NormAxes

_BY_BATCH, _TRACKS = 1, 2


class DistributedRunningNorm(DistributedNorm):
    """Normalisation per channel that may keep running statistics, in torch's buffers.

    These are where the parameters are, or would be; whole on ranks outside of P_x too. In training they
    travel once more where not all of their keepers have computed them together; in evaluation not at all.
    """

    def __init__(
        self,
        P_x: Partition,
        axes: NormAxes,
        num_features: int,
        arguments: NormArguments,
        momentum: float | None,
        track_running_stats: bool,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        check_extents(self, num_features=num_features)
        super().__init__(P_x, axes, (num_features,), arguments, name, **callbacks)
        self.num_features, self.momentum, self.affine = num_features, momentum, arguments.affine
        self.track_running_stats = track_running_stats
        self.running_mean: torch.Tensor | None
        self.running_var: torch.Tensor | None
        self.num_batches_tracked: torch.Tensor | None
        if not track_running_stats:
            for key in (*NAMES, "num_batches_tracked"):
                self.register_buffer(key, None)
            return
        device, dtype = arguments.device, arguments.dtype
        for key, make in zip(NAMES, (torch.zeros, torch.ones), strict=True):
            self.register_buffer(key, cut(self.store, make(num_features, device=device, dtype=dtype)))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))
        if any(axis is not None for axis in self.store.axes):
            self.buffer_layouts.update(dict.fromkeys(NAMES, self.store))

    def agreeing(self) -> tuple[int, ...]:
        """All ranks of the machine where statistics are tracked: they all keep some."""
        ranks = super().agreeing()
        if self.running_mean is None:
            return ranks
        return (*ranks, *(rank for rank in self.machine.ranks if rank not in self.P_x))

    def reset_running_stats(self) -> None:
        """Start the running statistics anew; local, to be called on all ranks."""
        for key, start in (*zip(NAMES, (0, 1), strict=True), ("num_batches_tracked", 0)):
            buffer = self._buffers[key]
            if buffer is not None:
                buffer.fill_(start)

    @property
    def by_batch(self) -> bool:
        """Whether a call normalises by the statistics of its input."""
        raise NotImplementedError

    @property
    def tracks(self) -> bool:
        """Whether a call changes the running statistics."""
        raise NotImplementedError

    def rate(self) -> float:
        """Weight of this batch in the running statistics."""
        raise NotImplementedError

    def options(self) -> NormOptions:
        """As of every norm, with what is done about running statistics."""
        return replace(super().options(), by_batch=self.by_batch, tracks=self.tracks)

    def mode(self) -> tuple[int, ...]:
        """By what a call normalises, and how it changes the running statistics; as of the base."""
        tracks = self.tracks
        kind = _BY_BATCH * self.by_batch + _TRACKS * tracks
        return as_number(self.eps), kind, as_number(self.momentum) if tracks else 0

    def about_mode(self, mode: tuple[int, ...]) -> str:
        """A mode in words, for messages."""
        eps, kind, momentum = mode
        by = f"normalises by the statistics of {'the batch' if kind & _BY_BATCH else 'earlier batches'}"
        by += f" with eps {as_value(eps)}"
        tracked = f"tracks them with momentum {as_value(momentum)}" if kind & _TRACKS else "tracks none"
        return f"{by} and {tracked}"

    def run(
        self,
        agreement: Agreement[Normalisation],
        xs: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, GradientNeeds]:
        """Call the operation, with the running statistics that it uses or changes."""
        operation, needs = agreement.settle()
        mode, named = operation.options, dict[str, Any](weights)
        if mode.tracks or not mode.by_batch:
            named |= {key: self._buffers[key] for key in NAMES}
        if mode.tracks:
            named["momentum"] = self.rate()
        return operation(needs, *xs, **named), needs

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{super().extra_repr()}, momentum={self.momentum},"
            f" track_running_stats={self.track_running_stats}"
        )
