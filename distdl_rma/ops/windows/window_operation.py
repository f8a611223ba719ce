"""What pooling, padding and resizing share: outputs that are computed where they will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.box import LEADING
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import TableWindow, WindowSplit
from distdl_rma.geometry.partition import Partition
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.operation import GatherComputeScatter


class _Options(Protocol):
    def outputs(self, shape: tuple[int, ...]) -> Sequence[int]:
        """Spatial extents of the global output for a global input; ``ShapeError`` if there is none."""


T = TypeVar("T", bound=_Options)


class WindowOperation(GatherComputeScatter, Generic[T]):
    """Outputs that each read a part of an input (batch, channel, *spatial), by the options of its kind.

    They are balanced over P_y; where that is the partition of the input, the batch stays cut as it is.
    ``extents`` are those of the global input in space, ``box`` what this rank computes, of type ``dtype``.
    """

    inexact = True  # whether elements must be floating point numbers

    def __init__(
        self, site: CallSite, source: Decomposition, P_y: Partition, dtype: torch.dtype, options: T
    ) -> None:
        if self.inexact and not dtype.is_floating_point:
            raise UnsupportedError(f"the input is {dtype}; only floating point numbers are supported")
        output = Decomposition.balanced(P_y, (*source.shape[:LEADING], *options.outputs(source.shape)))
        if P_y == source.partition:
            output = output.with_splits({0: source.splits[0]})
        self.rank = rank = site.machine.rank
        super().__init__(site, rank in source.partition, rank in P_y, output)
        self.extents, self.box, self.dtype = source.shape[LEADING:], output.box(rank), dtype
        self._prepare(source, options)
        self._empty = self.box.empty

    def _prepare(self, source: Decomposition, options: T) -> None:
        """Set what this rank gathers, and what it computes with."""
        raise NotImplementedError

    def compute(self, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local outputs; those without elements come from no computation."""
        if not self._empty:
            return self._local(x)
        y = x.new_zeros(self.box.shape, dtype=self.dtype)
        return y + x.sum().to(y.dtype) if x.requires_grad else y

    def _local(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of this rank, at least one, from the inputs that they read."""
        raise NotImplementedError

    def read_by_tables(self, windows: Sequence[TableWindow]) -> Decomposition:
        """What each rank's outputs read of the input, by a table for each dimension."""
        reads = zip(self.output.splits[LEADING:], windows, self.extents, strict=True)
        return self.output.with_splits(dict(enumerate((WindowSplit(*read) for read in reads), LEADING)))


def extents_to_pool(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Spatial extents of a global input; ``ShapeError`` if there is nothing to pool."""
    if 0 in shape[LEADING:]:
        raise ShapeError(f"the global input {shape} has no elements to pool")
    return shape[LEADING:]
