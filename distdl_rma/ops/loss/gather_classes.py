"""Tensors whose classes are split over ranks, gathered where a loss needs all of them."""

from __future__ import annotations

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.split import Balanced
from distdl_rma.ops.autograd import GradientNeeds
from distdl_rma.ops.movement import CallSite, Movement
from distdl_rma.ops.operation import Operation


class GatherClasses(Operation):
    """A tensor to the ranks that come first in the dimension of classes, which get these whole."""

    def __init__(self, site: CallSite, source: Decomposition, dim: int, dtype: torch.dtype) -> None:
        splits = list(source.splits)
        splits[dim] = Balanced(source.shape[dim], 1)
        self.output = Decomposition(source.partition.slab({dim: 0}), tuple(splits), source.axes)
        exchange = Exchange(site.machine.rank, source, self.output)
        self._movement = Movement(site.machine, exchange, dtype, site.name)

    def __call__(self, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Whole classes on the first ranks, a tensor without elements on the others."""
        return self._movement(x, needs.input)

    def connect(self) -> None:
        """Exchange addresses with the neighbours; blocking."""
        self._movement.connect()


class StayHere(Operation):
    """Class indices are the same on all ranks that split the classes, and stay where they are."""

    def __call__(self, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """The tensor as it is."""
        return x

    def connect(self) -> None:
        """Nothing moves."""
