"""Distributed batch, instance and group normalisation."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn
from torch.nn.modules import batchnorm, instancenorm

from distdl_rma.errors import ArgumentError, PartitionError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.norm.base import DistributedNorm, NormArguments, check_dims, check_extents
from distdl_rma.layers.norm.running import DistributedRunningNorm
from distdl_rma.ops.norm.statistic_groups import NormAxes


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

    Notes
    -----
    Requirement B11. Document: ``docs/layers/normalization.md``.
    """

    _dims: tuple[int, ...] = ()
    several = "value per channel is needed in training"

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        check_dims(self, P_x, self._dims)
        if eps <= 0:
            raise ArgumentError(f"{type(self).__name__}: eps must be positive, got {eps}")
        axes = NormAxes(reduced=tuple(d for d in range(P_x.dim) if d != 1), weighted=(1,))
        given = NormArguments(eps, affine, bias, device, dtype)
        super().__init__(P_x, axes, num_features, given, momentum, track_running_stats, name, **callbacks)

    @property
    def by_batch(self) -> bool:
        """In training, and without running statistics."""
        return self.training or self.running_mean is None

    @property
    def tracks(self) -> bool:
        """In training."""
        return self.training and self.track_running_stats and self.running_mean is not None

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


class DistributedBatchNorm1d(DistributedBatchNorm, nn.BatchNorm1d):
    """Distributed ``torch.nn.BatchNorm1d``; tensors are (batch, channel) or (batch, channel, width)."""

    _dims = (2, 3)


class DistributedBatchNorm2d(DistributedBatchNorm, nn.BatchNorm2d):
    """Distributed ``torch.nn.BatchNorm2d``; tensors are (batch, channel, height, width)."""

    _dims = (4,)


class DistributedBatchNorm3d(DistributedBatchNorm, nn.BatchNorm3d):
    """Distributed ``torch.nn.BatchNorm3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = (5,)


class DistributedInstanceNorm(DistributedRunningNorm, instancenorm._InstanceNorm):
    """Instance normalisation of a tensor that is split over ranks along any of its dimensions.

    Mean and variance of a channel of an instance are those of the whole image, of more than one element.
    Local output: of the shape of the local input.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor: with or without a batch.
    num_features, eps, momentum, affine, track_running_stats, device, dtype, bias
        As in torch.
    placement, weights
        Where P_x cuts channels: ``"cut"`` with them, or ``"replicated"``; running statistics too.

    Notes
    -----
    Interface document, chapter 4; requirements A19, B11. Document: ``docs/layers/normalization.md``.
    """

    _dims: tuple[int, ...] = ()
    several = "spatial element is needed"

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        placement: str | None = None,
        weights: str | None = None,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        check_dims(self, P_x, self._dims)
        channels = P_x.dim - self._dims[0]
        axes = NormAxes(reduced=tuple(range(channels + 1, P_x.dim)), weighted=(channels,))
        given = NormArguments(eps, affine, bias, device, dtype, placement, weights)
        super().__init__(P_x, axes, num_features, given, momentum, track_running_stats, name, **callbacks)

    @property
    def by_batch(self) -> bool:
        """In training, and where no statistics are tracked."""
        return self.training or not self.track_running_stats

    @property
    def tracks(self) -> bool:
        """Wherever there are running statistics that are not used."""
        return self.by_batch and self.running_mean is not None

    def rate(self) -> float:
        """``momentum``; batches are not counted."""
        return self.momentum or 0.0


class DistributedInstanceNorm1d(DistributedInstanceNorm, nn.InstanceNorm1d):
    """Distributed ``torch.nn.InstanceNorm1d``; tensors are (batch, channel, width) or (channel, width)."""

    _dims = (2, 3)


class DistributedInstanceNorm2d(DistributedInstanceNorm, nn.InstanceNorm2d):
    """Distributed ``torch.nn.InstanceNorm2d``; tensors are (batch, channel, height, width), or unbatched."""

    _dims = (3, 4)


class DistributedInstanceNorm3d(DistributedInstanceNorm, nn.InstanceNorm3d):
    """Distributed ``torch.nn.InstanceNorm3d``; as (batch, channel, depth, height, width), or unbatched."""

    _dims = (4, 5)


class DistributedGroupNorm(DistributedNorm, nn.GroupNorm):
    """Group normalisation of a tensor that is split over ranks along any of its dimensions.

    Groups of channels may straddle ranks. Local input and output: (batch, channel, ...), of one shape.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    num_groups, num_channels, eps, affine, device, dtype, bias
        As in torch.

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
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
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
        super().__init__(P_x, axes, (num_channels,), given, name, **callbacks)
        self.num_groups, self.num_channels, self.affine = num_groups, num_channels, affine

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"{self.num_groups}, {super().extra_repr()}"
