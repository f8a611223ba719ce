"""Distributed normalisation over the last dimensions: layer norm, and by the root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, PartitionError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.norm.base import DistributedNorm, NormArguments, check_extents
from distdl_rma.ops.norm.statistic_groups import NormAxes


class DistributedTrailingNorm(DistributedNorm):
    """Normalisation over the last dimensions of a tensor, ``normalized_shape``."""

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        arguments: NormArguments,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
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
        super().__init__(P_x, NormAxes(trailing, trailing), shape, arguments, name, **callbacks)
        self.normalized_shape, self.elementwise_affine = shape, arguments.affine


class DistributedLayerNorm(DistributedTrailingNorm, nn.LayerNorm):
    """Layer normalisation of a tensor that is split over ranks along any of its dimensions.

    Local output: of the shape of the local input. Where P_x splits normalised dimensions, so are the
    parameters, and the ranks that share them share the statistics of every instance.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    normalized_shape, eps, elementwise_affine, bias, device, dtype
        As in torch; ``normalized_shape`` is global.

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
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        given = NormArguments(eps, elementwise_affine, bias, device, dtype)
        super().__init__(P_x, normalized_shape, given, name, **callbacks)


class DistributedRMSNorm(DistributedTrailingNorm, nn.RMSNorm):
    """Root mean square normalisation: as :class:`DistributedLayerNorm`, without mean and bias.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    normalized_shape, eps, elementwise_affine, device, dtype
        As in torch; ``normalized_shape`` is global.

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
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        given = NormArguments(eps, elementwise_affine, False, device, dtype)
        super().__init__(P_x, normalized_shape, given, name, **callbacks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise; ``x`` is the local shard, or a tensor without elements outside of P_x."""
        y: torch.Tensor = super().forward(x)
        return y
