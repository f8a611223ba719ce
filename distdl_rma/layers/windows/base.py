"""Layers without parameters whose outputs read a part of the input: pooling, padding, up-sampling."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import torch

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.layers.core.callbacks import LayerOptions
from distdl_rma.layers.core.operator_layer import OperatorLayer
from distdl_rma.ops.windows.pool import MaxWindows
from distdl_rma.ops.windows.window_operation import WindowOperation


class WindowOptions(LayerOptions, total=False):
    """What these layers take by name: the partition of the output too, which is P_x if None."""

    P_y: Partition | None


class WindowLayer(OperatorLayer[WindowOperation[Any]]):
    """Layer on (batch, channel, *spatial) that is an operation with options, and has no parameters.

    A class for ``dims`` spatial dimensions says so where it names its bases, the last of which is its twin in
    torch; one that does not is for 1 to 3 of them.
    """

    operation: ClassVar[type[WindowOperation[Any]]]
    options: Any  # what the operation is built with
    _dims: int = 0
    _shown: ClassVar[tuple[str, ...]] = ()  # arguments to be printed

    def __init_subclass__(cls, dims: int | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls._dims = cls._dims if dims is None else dims

    def __init__(self, P_x: Partition, P_y: Partition | None = None, **options: Unpack[LayerOptions]) -> None:
        kind, dims = type(self).__name__, self._dims or P_x.dim - LEADING
        if dims not in (1, 2, 3):
            raise PartitionError(f"{kind}: P_x has {P_x.dim} dimensions {P_x.shape}, tensors have 3, 4 or 5")
        for label, partition in (("P_x", P_x), ("P_y", P_x if P_y is None else P_y)):
            if partition.dim != LEADING + dims:
                raise PartitionError(
                    f"{kind}: {label} has {partition.dim} dimensions {partition.shape}, the tensor has"
                    f" {LEADING + dims}"
                )
        super().__init__(P_x, P_y, **options)
        self._dims = dims

    def plan(self, facts: dict[int, InputFacts]) -> WindowOperation[Any]:
        """The operation, for the global input that the ranks form."""
        source, dtype = source_of(self.P_x, facts)
        return type(self).operation(self.site, source, self.P_y, dtype, self.options)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        shown = [f"{key}={getattr(self, key)!r}" for key in self._shown]
        return ", ".join([*shown, f"P_x={self.P_x.shape}", f"P_y={self.P_y.shape}"])


class MaxLayer(WindowLayer):
    """Layer that can also say where the largest elements are, in the flattened global plane."""

    return_indices: bool

    def forward(self, input: torch.Tensor) -> Any:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        y = super().forward(input)
        if not self.return_indices:
            return y
        operation = None if self.agreement is None else self.agreement.last
        index = operation.take_indices() if isinstance(operation, MaxWindows) else None
        return y, torch.zeros(y.shape, dtype=torch.int64) if index is None else index
