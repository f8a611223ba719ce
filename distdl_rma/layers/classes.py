"""Tensors whose classes are split over ranks, gathered where a loss needs all of them."""

from __future__ import annotations

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.layers.agreement import Facts, Plans, common_dtype
from distdl_rma.layers.movement import Movement
from distdl_rma.machine import Machine

__all__ = ["WholeClasses"]


class _Stay:
    """Plan of a tensor without a dimension of classes."""

    def void(self) -> None:
        """Nothing moves."""


class WholeClasses:
    """Movement of a tensor to the ranks that come first in the dimension of classes, which they get whole.

    Collective over the ranks of P_x; blocking. Tensors of integers hold class indices, not classes, and
    stay where they are.

    Parameters
    ----------
    machine
        The machine.
    P_x
        Partition of the tensor.
    dim
        Dimension of the classes.
    name
        For messages.
    """

    def __init__(self, machine: Machine, P_x: Partition, dim: int, name: str) -> None:
        self._machine, self._P_x, self._dim, self._name = machine, P_x, dim, name
        self.roots = P_x.slab({dim: 0})
        self._plans: Plans[Movement | _Stay] = Plans(machine, P_x.ranks, name, self._plan)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Whole classes on the roots, a tensor without elements on the other ranks.

        Raises
        ------
        ShapeError
            On every rank, if the shards do not form a grid or differ in dtype.
        """
        plan, needs = self._plans.agree(x)
        return plan(x, needs.input) if isinstance(plan, Movement) else x

    def _plan(self, facts: dict[int, Facts]) -> Movement | _Stay:
        dtype = common_dtype(facts)
        if not dtype.is_floating_point:
            return _Stay()
        source = Decomposition.from_local_shapes(self._P_x, {r: fact.shape for r, fact in facts.items()})
        splits = list(source.splits)
        splits[self._dim] = Balanced(source.shape[self._dim], 1)
        target = Decomposition(self.roots, tuple(splits), source.axes)
        return Movement(self._machine, Exchange(self._machine.rank, source, target), dtype, self._name)
