"""Tensors whose classes are split over ranks, gathered where a loss needs all of them."""

from __future__ import annotations

from zlib import crc32

import torch

from distdl_rma.errors import ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.layers.core.plan_cache import InputFacts, PlanCache, common_dtype
from distdl_rma.machine import Machine
from distdl_rma.ops.movement import Movement
from distdl_rma.ops.tensors import as_words, trouble_with


class _StayHere:
    """Plan of a tensor without a dimension of classes."""

    def void(self) -> None:
        """Nothing moves."""


class GatherClasses:
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
        self._plans: PlanCache[Movement | _StayHere] = PlanCache(machine, P_x.ranks, name, self._plan)

    def __call__(self, x: torch.Tensor, problem: str = "") -> torch.Tensor:
        """Whole classes on the roots, a tensor without elements on the other ranks.

        Parameters
        ----------
        x
            Local shard.
        problem
            What is wrong with it on this rank; empty if nothing is.

        Raises
        ------
        ShapeError
            On every rank, if something is wrong on one of them, the shards do not form a grid or differ in
            dtype, or class indices differ where they must not.
        """
        plan, needs = self._plans.agree(x, call_arguments=_digest(x), problem=problem)
        return plan(x, needs.input) if isinstance(plan, Movement) else x

    def _plan(self, facts: dict[int, InputFacts]) -> Movement | _StayHere:
        dtype = common_dtype(facts)
        if not dtype.is_floating_point:
            self._check_alike(facts)
            return _StayHere()
        source = Decomposition.from_local_shapes(self._P_x, {r: fact.shape for r, fact in facts.items()})
        splits = list(source.splits)
        splits[self._dim] = Balanced(source.shape[self._dim], 1)
        target = Decomposition(self.roots, tuple(splits), source.axes)
        return Movement(self._machine, Exchange(self._machine.rank, source, target), dtype, self._name)

    def _check_alike(self, facts: dict[int, InputFacts]) -> None:
        for rank, fact in facts.items():
            index = self._P_x.index_of(rank)
            first = self._P_x.slab({d: i for d, i in enumerate(index) if d != self._dim}).ranks[0]
            if (fact.shape, fact.call_arguments) != (facts[first].shape, facts[first].call_arguments):
                raise ShapeError(
                    f"ranks {first} and {rank} have different classes of the same elements, and must have the"
                    " same class indices, but they differ"
                )


def _digest(x: torch.Tensor) -> tuple[int, ...]:
    # Tells class indices apart; nothing of scores, which are not meant to be alike.
    if trouble_with(x) or x.is_floating_point():
        return ()
    return (crc32(as_words(x).tobytes()),)
