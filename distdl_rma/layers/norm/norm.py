"""Distributed batch, instance, group, layer and RMS normalisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

from distdl_rma.errors import ArgumentError, PartitionError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.arguments import PlacedOptions
from distdl_rma.layers.core.placement import cut
from distdl_rma.layers.norm.base import DistributedNorm, NormArguments, check_extents
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.operation import Agreement
from distdl_rma.ops.norm.normalisation import RUNNING, Normalisation, NormOptions
from distdl_rma.ops.norm.statistic_groups import NormAxes


class DistributedRunningNorm(DistributedNorm, batchnorm._NormBase):
    """Normalisation per channel that may keep running statistics, in torch's buffers, equal on all keepers.

    These are where the parameters are, or would be; whole on ranks outside of P_x too. In training they
    travel once more where not all of their keepers have computed them together; in evaluation not at all.
    """

    _dims: ClassVar[tuple[int, ...]]
    # What affine and track_running_stats are unless they are given, and whether eps has to be positive.
    _usual: ClassVar[bool]
    _needs_eps: ClassVar[bool] = False

    def __init_subclass__(cls, dims: tuple[int, ...] = (), **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._dims = dims or getattr(cls, "_dims", ())

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool | None = None,
        track_running_stats: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        **options: Unpack[PlacedOptions],
    ) -> None:
        kind = type(self).__name__
        affine, tracked = (self._usual if it is None else it for it in (affine, track_running_stats))
        if P_x.dim not in self._dims:
            wanted = " or ".join(str(n) for n in self._dims)
            raise PartitionError(f"{kind}: P_x has {P_x.dim} dimensions {P_x.shape}, the tensor has {wanted}")
        if self._needs_eps and eps <= 0:
            raise ArgumentError(f"{kind}: eps must be positive, got {eps}")
        check_extents(self, num_features=num_features)
        arguments = NormArguments(eps, affine, bias, device, dtype)
        super().__init__(P_x, self.axes_of(P_x.dim), (num_features,), arguments, **options)
        self.num_features, self.momentum, self.affine = num_features, momentum, affine
        self.track_running_stats = tracked
        if not tracked:
            for key in (*RUNNING, "num_batches_tracked"):
                self.register_buffer(key, None)
            return
        for key, make in zip(RUNNING, (torch.zeros, torch.ones), strict=True):
            self.register_buffer(key, cut(self.store, make(num_features, device=device, dtype=dtype)))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))
        if any(axis is not None for axis in self.store.axes):
            self.buffer_layouts.update(dict.fromkeys(RUNNING, self.store))

    def axes_of(self, dims: int) -> NormAxes:
        """What is reduced, of a tensor of so many dimensions."""
        raise NotImplementedError

    def agreeing(self) -> tuple[int, ...]:
        """All ranks of the machine where statistics are tracked: they all keep some."""
        ranks = super().agreeing()
        idle = () if self.running_mean is None else self.machine.ranks
        return (*ranks, *(rank for rank in idle if rank not in self.P_x))

    def reset_running_stats(self) -> None:
        """Start the running statistics anew; local, to be called on all ranks."""
        for key, start in (*zip(RUNNING, (0, 1), strict=True), ("num_batches_tracked", 0)):
            buffer = self._buffers[key]
            if buffer is not None:
                buffer.fill_(start)

    def statistics_mode(self) -> tuple[bool, bool]:
        """Whether a call normalises by the statistics of its input, and whether it changes running ones."""
        raise NotImplementedError

    def rate(self) -> float:
        """Weight of this batch in the running statistics."""
        raise NotImplementedError

    def options(self) -> NormOptions:
        """As of every norm, with what is done about running statistics."""
        by_batch, tracks = self.statistics_mode()
        return replace(super().options(), by_batch=by_batch, tracks=tracks)

    def mode(self) -> tuple[Any, ...]:
        """By what a call normalises, and how it changes the running statistics; as of the base."""
        by_batch, tracks = self.statistics_mode()
        momentum = self.momentum if tracks else None
        eps, momentum = (None if value is None else float(value) for value in (self.eps, momentum))
        return eps, by_batch, tracks, momentum

    def about_mode(
        self, eps: float | None, by_batch: bool = True, tracks: bool = False, momentum: float | None = None
    ) -> str:
        """A mode in words, for messages."""
        by = f"normalises by the statistics of {'the batch' if by_batch else 'earlier batches'}"
        tracked = f"tracks them with momentum {momentum}" if tracks else "tracks none"
        return f"{by} with eps {eps} and {tracked}"

    def run(
        self, agreement: Agreement[Normalisation], xs: Sequence[Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, GradientNeeds]:
        """Call the operation, with the running statistics that it uses or changes."""
        operation, needs = agreement.settle()
        mode, named = operation.options, dict[str, Any](weights)
        if mode.tracks or not mode.by_batch:
            named |= {key: self._buffers[key] for key in RUNNING}
        if mode.tracks:
            named["momentum"] = self.rate()
        return operation(needs, *xs, **named), needs

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        settings = f"momentum={self.momentum}, track_running_stats={self.track_running_stats}"
        return f"{super().extra_repr()}, {settings}"


class DistributedBatchNorm(DistributedRunningNorm, batchnorm._BatchNorm):
    """Batch normalisation of a tensor that is split over ranks along any of its dimensions.

    Mean and variance of a channel are those of the whole batch and all of space, on however many ranks: more
    than one value per channel is needed in training. Local output: of the shape of the local input.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    num_features, eps, momentum, affine, track_running_stats, device, dtype, bias
        As in torch. ``eps`` must be positive.
    placement, weights
        Where P_x cuts dimensions of the parameters: ``"cut"`` with them, or ``"replicated"`` on all ranks of
        the machine; running statistics too.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/normalization.md``.
    """

    several = "value per channel is needed in training"
    _usual = _needs_eps = True

    def axes_of(self, dims: int) -> NormAxes:
        """All but channels."""
        return NormAxes(reduced=tuple(d for d in range(dims) if d != 1), weighted=(1,))

    def statistics_mode(self) -> tuple[bool, bool]:
        """By the input in training, and without running statistics; these change in training."""
        running = self.running_mean is not None
        return self.training or not running, self.training and self.track_running_stats and running

    def rate(self) -> float:
        """``momentum``, or one by the number of batches if that is None; counts the batch."""
        if self.num_batches_tracked is None:
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum

    @property
    def qconfig(self) -> None:
        """Refuse what asks for it: quantisation, and ``nn.SyncBatchNorm.convert_sync_batchnorm``.

        That would put a layer in the place of this one which normalises each shard by itself.
        """
        raise UnsupportedError(
            f"{self.label!r} shares its statistics over all ranks already, and is not to be converted to"
            " another kind of batch norm"
        )


class DistributedBatchNorm1d(DistributedBatchNorm, nn.BatchNorm1d, dims=(2, 3)):
    """Distributed ``torch.nn.BatchNorm1d``; tensors are (batch, channel) or (batch, channel, width)."""


class DistributedBatchNorm2d(DistributedBatchNorm, nn.BatchNorm2d, dims=(4,)):
    """Distributed ``torch.nn.BatchNorm2d``; tensors are (batch, channel, height, width)."""


class DistributedBatchNorm3d(DistributedBatchNorm, nn.BatchNorm3d, dims=(5,)):
    """Distributed ``torch.nn.BatchNorm3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedInstanceNorm(DistributedRunningNorm, instancenorm._InstanceNorm):
    """Instance normalisation: as :class:`DistributedBatchNorm`, of each instance by itself.

    Mean and variance of a channel of an instance are those of the whole image, of more than one element.
    Tensors come with or without a batch.

    Notes
    -----
    Interface document, chapter 4; requirements A19, B11. Document: ``docs/layers/normalization.md``.
    """

    several = "spatial element is needed"
    _usual = False

    def axes_of(self, dims: int) -> NormAxes:
        """Space, behind the channels."""
        channels = dims - self._dims[0]
        return NormAxes(reduced=tuple(range(channels + 1, dims)), weighted=(channels,))

    def statistics_mode(self) -> tuple[bool, bool]:
        """By the input in training, and where none are tracked; running ones change where they are unused."""
        by_batch = self.training or not self.track_running_stats
        return by_batch, by_batch and self.running_mean is not None

    def rate(self) -> float:
        """``momentum``; batches are not counted."""
        return self.momentum or 0.0


class DistributedInstanceNorm1d(DistributedInstanceNorm, nn.InstanceNorm1d, dims=(2, 3)):
    """Distributed ``torch.nn.InstanceNorm1d``; tensors are (batch, channel, width) or (channel, width)."""


class DistributedInstanceNorm2d(DistributedInstanceNorm, nn.InstanceNorm2d, dims=(3, 4)):
    """Distributed ``torch.nn.InstanceNorm2d``; tensors are (batch, channel, height, width), or unbatched."""


class DistributedInstanceNorm3d(DistributedInstanceNorm, nn.InstanceNorm3d, dims=(4, 5)):
    """Distributed ``torch.nn.InstanceNorm3d``; as (batch, channel, depth, height, width), or unbatched."""


class DistributedGroupNorm(DistributedNorm, nn.GroupNorm):
    """Group normalisation of a tensor that is split over ranks along any of its dimensions.

    Groups of channels may straddle ranks. Local input and output: (batch, channel, ...), of one shape.
    Arguments are as of :class:`DistributedBatchNorm`, or else as in torch.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/normalization.md``.
    """

    several = "value per group is needed"

    def __init__(
        self,
        P_x: Partition,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        **options: Unpack[PlacedOptions],
    ) -> None:
        kind = type(self).__name__
        if P_x.dim < 2:
            raise PartitionError(f"{kind}: P_x {P_x.shape} has 1 dimension, the tensor has at least 2")
        check_extents(self, num_channels=num_channels)
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(
                f"{kind}: num_channels {num_channels} must be divisible by num_groups {num_groups}"
            )
        axes = NormAxes(reduced=tuple(range(1, P_x.dim)), weighted=(1,), groups=num_groups)
        given = NormArguments(eps, affine, bias, device, dtype)
        super().__init__(P_x, axes, (num_channels,), given, **options)
        self.num_groups, self.num_channels, self.affine = num_groups, num_channels, affine

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"{self.num_groups}, {super().extra_repr()}"


class DistributedTrailingNorm(DistributedNorm):
    """Normalisation over the last dimensions of a tensor, ``normalized_shape``."""

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        arguments: NormArguments,
        **options: Unpack[PlacedOptions],
    ) -> None:
        kind = type(self).__name__
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape:
            raise ArgumentError(f"{kind}: normalized_shape needs at least one dimension")
        check_extents(self, normalized_shape=min(shape))
        if P_x.dim < len(shape):
            raise PartitionError(
                f"{kind}: P_x has {P_x.dim} dimensions {P_x.shape}, normalized_shape {shape} has {len(shape)}"
            )
        trailing = tuple(range(P_x.dim - len(shape), P_x.dim))
        super().__init__(P_x, NormAxes(trailing, trailing), shape, arguments, **options)
        self.normalized_shape, self.elementwise_affine = shape, arguments.affine


class DistributedLayerNorm(DistributedTrailingNorm, nn.LayerNorm):
    """Layer normalisation of a tensor that is split over ranks along any of its dimensions.

    Local output: of the shape of the local input. Ranks among which P_x splits normalised dimensions share
    the statistics of every instance. Arguments are as of :class:`DistributedBatchNorm`, or else as in torch;
    ``normalized_shape`` is global.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/normalization.md``.
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[PlacedOptions],
    ) -> None:
        given = NormArguments(eps, elementwise_affine, bias, device, dtype)
        super().__init__(P_x, normalized_shape, given, **options)


class DistributedRMSNorm(DistributedTrailingNorm, nn.RMSNorm):
    """Root mean square normalisation: as :class:`DistributedLayerNorm`, without mean and bias.

    Notes
    -----
    Requirement B11. Document: ``docs/layers/normalization.md``.
    """

    centred = False

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[PlacedOptions],
    ) -> None:
        given = NormArguments(eps, elementwise_affine, False, device, dtype)
        super().__init__(P_x, normalized_shape, given, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; ``x`` is the local shard, or a tensor without elements outside of P_x."""
        y: Tensor = super().forward(x)
        return y
