"""Distributed normalisation over the last dimensions: layer norm, and by the root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.norm.base import DistributedNorm, check_extents
from distdl_rma.ops.norm.statistic_groups import NormAxes


class DistributedLayerNorm(DistributedNorm):
    """Layer normalisation of a tensor that is split over ranks along any of its dimensions.

    Local input and output: the shard of this rank. Where P_x splits normalised dimensions, so are the
    parameters, and the ranks that share them share the statistics of every instance. Collective to construct
    over the machine; a call involves the ranks of P_x.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    normalized_shape, eps, elementwise_affine, bias, device, dtype
        As in torch; ``normalized_shape`` is global.
    name
        For messages.

    Raises
    ------
    PartitionError
        If P_x has fewer dimensions than ``normalized_shape``.
    ShapeError
        If ``normalized_shape`` is empty; in a call, on all its ranks, if the input does not fit.

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
        self.normalized_shape, layout = _trailing(self, P_x, normalized_shape)
        self.elementwise_affine = elementwise_affine
        super().__init__(
            P_x,
            layout,
            self.normalized_shape,
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
            name,
            **callbacks,
        )


class DistributedRMSNorm(DistributedNorm):
    """Root mean square normalisation of a tensor that is split over ranks along any of its dimensions.

    As ``DistributedLayerNorm``, without mean and bias.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor.
    normalized_shape, eps, elementwise_affine, device, dtype
        As in torch; ``normalized_shape`` is global.
    name
        For messages.

    Raises
    ------
    PartitionError
        If P_x has fewer dimensions than ``normalized_shape``.
    ShapeError
        If ``normalized_shape`` is empty; in a call, on all its ranks, if the input does not fit.

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
        self.normalized_shape, layout = _trailing(self, P_x, normalized_shape)
        self.elementwise_affine = elementwise_affine
        super().__init__(
            P_x,
            layout,
            self.normalized_shape,
            eps,
            elementwise_affine,
            False,
            device,
            dtype,
            name,
            **callbacks,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise, by torch's name of the local shard."""
        return super().forward(x)


def _trailing(
    layer: DistributedNorm, P_x: Partition, normalized_shape: int | Sequence[int]
) -> tuple[tuple[int, ...], NormAxes]:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape:
        raise ShapeError(f"{type(layer).__name__}: normalized_shape needs at least one dimension")
    check_extents(layer, normalized_shape=min(shape))
    if P_x.dim < len(shape):
        raise PartitionError(
            f"{type(layer).__name__}: P_x has {P_x.dim} dimensions {P_x.shape}, normalized_shape {shape} has"
            f" {len(shape)}"
        )
    trailing = tuple(range(P_x.dim - len(shape), P_x.dim))
    return shape, NormAxes(reduced=trailing, weighted=trailing)
