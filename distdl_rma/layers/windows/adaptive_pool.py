"""Pooling to a given output size."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_int
from typing import Any, ClassVar, Unpack

from torch import nn

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.arguments import each_dim
from distdl_rma.layers.windows.base import MaxLayer, WindowLayer, WindowOptions
from distdl_rma.ops.windows.adaptive_pool import AdaptiveAvgPooling, AdaptiveMaxPooling, AdaptiveOptions

Size = int | None | Sequence[int | None]


class _Adaptive(WindowLayer):
    output_size: Any
    _shown: ClassVar[tuple[str, ...]] = ("output_size",)

    def _sizes(self, output_size: Size) -> tuple[int | None, ...]:
        kind, wanted = type(self).__name__, "an integer or None"
        self.output_size = sizes = each_dim(kind, "output_size", output_size, self._dims, _size, wanted)
        return sizes


def _size(value: Any) -> int | None:
    size = None if value is None else as_int(value)
    if size is not None and size < 0:
        raise ValueError
    return size


class DistributedAdaptiveAvgPool(_Adaptive):
    """Average pooling to a given global size, of a tensor that is split over ranks.

    Every rank sums what its own data contributes to each output; these sums travel, not the data, and the
    owners of the outputs add them: a global pool sends one number per channel and rank. Partitions, shapes
    and errors are those of :class:`DistributedAvgPool`.

    Parameters
    ----------
    output_size
        As in torch: the global output; None for a dimension keeps its extent.
    """

    operation = AdaptiveAvgPooling

    def __init__(self, P_x: Partition, output_size: Size, **options: Unpack[WindowOptions]) -> None:
        super().__init__(P_x, **options)
        self.options = AdaptiveOptions(self._sizes(output_size))


class DistributedAdaptiveMaxPool(_Adaptive, MaxLayer):
    """Max pooling to a given global size, of a tensor that is split over ranks.

    Every rank fetches what its outputs read. Arguments are those of :class:`DistributedAdaptiveAvgPool`, and
    ``return_indices`` of :class:`DistributedMaxPool`.
    """

    operation = AdaptiveMaxPooling
    _shown = (*_Adaptive._shown, "return_indices")

    def __init__(
        self,
        P_x: Partition,
        output_size: Size,
        return_indices: bool = False,
        **options: Unpack[WindowOptions],
    ) -> None:
        super().__init__(P_x, **options)
        self.return_indices = bool(return_indices)
        self.options = AdaptiveOptions(self._sizes(output_size), self.return_indices)


class DistributedAdaptiveAvgPool1d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool1d, dims=1):
    """Distributed ``torch.nn.AdaptiveAvgPool1d``; tensors are (batch, channel, width)."""


class DistributedAdaptiveAvgPool2d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool2d, dims=2):
    """Distributed ``torch.nn.AdaptiveAvgPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAdaptiveAvgPool3d(DistributedAdaptiveAvgPool, nn.AdaptiveAvgPool3d, dims=3):
    """Distributed ``torch.nn.AdaptiveAvgPool3d``; tensors are (batch, channel, depth, height, width)."""


class DistributedAdaptiveMaxPool1d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool1d, dims=1):
    """Distributed ``torch.nn.AdaptiveMaxPool1d``; tensors are (batch, channel, width)."""


class DistributedAdaptiveMaxPool2d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool2d, dims=2):
    """Distributed ``torch.nn.AdaptiveMaxPool2d``; tensors are (batch, channel, height, width)."""


class DistributedAdaptiveMaxPool3d(DistributedAdaptiveMaxPool, nn.AdaptiveMaxPool3d, dims=3):
    """Distributed ``torch.nn.AdaptiveMaxPool3d``; tensors are (batch, channel, depth, height, width)."""
