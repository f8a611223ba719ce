"""Layers that move data and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Unpack

import torch

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.layers.core.plan_cache import InputFacts, PlanCache
from distdl_rma.ops.autograd import tells_peers
from distdl_rma.ops.idle_ranks import deliver
from distdl_rma.ops.movement import Movement


class MovementPlan:
    """A plan of a moving layer: movements that follow one another, and what becomes of their result.

    Parameters
    ----------
    movements
        The movements, at least one.
    dtype
        Type of the result.
    flat
        Local shape of the result where the movements see vectors; None where they see tensors.
    finish
        What is made of the result of the movements; nothing if None.
    """

    def __init__(
        self,
        movements: Sequence[Movement],
        dtype: torch.dtype,
        flat: tuple[int, ...] | None = None,
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._movements, self._dtype, self._flat, self._finish = movements, dtype, flat, finish

    def void(self) -> None:
        """Nothing was started before all ranks agreed."""

    def __call__(self, x: torch.Tensor, needs_grad: bool) -> torch.Tensor:
        """Local result, in memory of its own; blocking."""
        y = x if self._flat is None else x.reshape(-1)
        for movement in self._movements:
            # What has no elements may be of any type.
            y = movement(y.to(movement.dtype) if y.numel() else y, needs_grad)
        y = y.to(self._dtype)
        if self._flat is not None:
            y = y.reshape(self._flat)
        return y if self._finish is None else self._finish(y)


class MovementLayer(DistributedLayer):
    """A layer that moves data from P_x to P_y.

    Subclasses say how (``plan``). Everything else is here: agreement on shapes, ranks in one, both or
    none of the partitions, results without elements.

    Parameters
    ----------
    P_x, P_y
        Input and output partition.
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).
    name
        For messages.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        super().__init__(P_x, P_y, name=name, **callbacks)
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, preserve_batch

    def plan(self, facts: dict[int, InputFacts]) -> MovementPlan:
        """Plan for what all ranks said of their inputs; alike on all ranks, errors included."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The partitions, and what else the layer was built with."""
        return f"P_x={self.P_x.shape}, P_y={self.P_y.shape}"

    def built_with(self) -> str:
        """As of every layer, with the ranks, which are not the same for all grids of one shape."""
        return f"{self.P_x.ranks} to {self.P_y.ranks}, {super().built_with()}"

    @cached_property
    def _plans(self) -> PlanCache[MovementPlan]:
        return PlanCache(self.machine, self.members, self.name, self.plan, self.built_with)

    @tells_peers
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Move ``input``, the local part on P_x or a tensor without elements elsewhere; blocking."""
        if self.machine.rank not in self.members:
            y = self.stand_aside(input)
            return y if self.preserve_batch or not input.numel() else y.flatten()
        move, needs = self._plans.agree(input, idle=not self.P_x.active)
        batch = input.shape[0] if self.preserve_batch and input.dim() else None
        return deliver(move(input, needs.input), self.P_y.active, batch)
