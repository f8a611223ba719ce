"""Layers that fetch, compute and hand over: all that their forwards have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Unpack

import torch

from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.layers.core.plan_cache import InputFacts, PlanCache
from distdl_rma.ops.autograd import GradientNeeds, anchored, tells_peers
from distdl_rma.ops.idle_ranks import deliver, idle
from distdl_rma.ops.movement import Movement
from distdl_rma.ops.tensors import autocast, no_autocast, trouble_with


class CallPlan:
    """A plan of the form ``y = scatter(compute(gather(x)))``.

    Parameters
    ----------
    gather, scatter
        Movements before and after the local computation; None where there is nothing to move on any rank.
    collect
        In the place of ``gather``, where the computation goes on while it travels: ``carry_out`` does it.
    facts
        Whatever the local computation wants to know about this plan.
    """

    def __init__(
        self, gather: Movement | None, scatter: Movement | None, collect: Movement | None = None, **facts: Any
    ) -> None:
        self.gather, self.scatter, self.collect = gather, scatter, collect
        self.facts = facts

    def void(self) -> None:
        """Nothing was started before all ranks agreed."""

    def connect(self) -> None:
        """Exchange addresses with the neighbours; blocking."""
        for movement in (self.gather, self.collect, self.scatter):
            if movement is not None:
                movement.connect()


class ExchangingLayer(DistributedLayer):
    """A layer that fetches what its outputs read, computes, and hands the results to their owners.

    Subclasses say how a call moves data (``plan``), what each rank computes (``compute``), and what is left
    to do with its output (``finish``). Everything else is here: agreement on shapes, parameters, ranks with
    and without work, the backward of all of them.

    Parameters
    ----------
    P_x, P_y
        Partitions of input and output.
    P_w
        Partition of the ranks that compute; P_x if None.
    name, callbacks
        As of :class:`DistributedLayer`.
    """

    _casts = False  # whether torch's autocast computes this kind of layer in a shorter type
    _call_arguments: tuple[int, ...] = ()  # the numbers of a call with nothing but an input

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        works = P_x if P_w is None else P_w
        super().__init__(P_x, P_y, works, name=name, **callbacks)
        self.P_x, self.P_y = P_x, P_y
        self._works = works.active

    def plan(self, facts: dict[int, InputFacts]) -> CallPlan:
        """Plan for what all ranks said of their inputs; alike on all ranks, errors included."""
        raise NotImplementedError

    def compute(self, flow: CallPlan, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local output from local input; called on the ranks that compute only."""
        raise NotImplementedError

    def finish(self, flow: CallPlan, y: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local output from what was scattered to this rank; called on the ranks of P_y only."""
        return y

    def carry_out(
        self, flow: CallPlan, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor
    ) -> torch.Tensor:
        """``compute``, for a subclass whose computation moves data itself, and so has to know what for."""
        with self.machine.trace.span("local", self.name):
            return self.compute(flow, x, **weights)

    @tells_peers
    def connect(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> None:
        """Plan for an input before it is there, and exchange addresses with the neighbours, once.

        Otherwise the first forward and the first backward do it, as they do in any case for the sum of
        gradients, and for what a layer moves while it computes. Collective over the ranks of the layer,
        and in training over those that keep its weights, blocking. Calls with other inputs remain possible.

        Parameters
        ----------
        shape
            Global shape of the input; may be left out of a layer that was built from global parameters.
        dtype
            Its type; that of the parameters if None.

        Raises
        ------
        ProtocolError
            If the shape is not known.
        ShapeError, PartitionError
            If it does not fit the layer.

        Notes
        -----
        Interface document, section 3.2; requirement A8.
        """
        x = self.expected(self.P_x, shape, dtype)
        self.connect_parameters()
        if self.machine.rank in self.members:
            # No call: nobody outside is told what becomes of it.
            with torch.no_grad():
                flow, _ = self._agree(x, list(self.parameters()), self._call_arguments)
            flow.connect()

    @cached_property
    def _plans(self) -> PlanCache[CallPlan]:
        return PlanCache(self.machine, self.members, self.name, self.plan, self.built_with, self.outcome)

    def _agree(
        self,
        x: torch.Tensor,
        weights: Collection[torch.Tensor],
        call_arguments: tuple[int, ...],
        problem: str = "",
    ) -> tuple[CallPlan, GradientNeeds]:
        # The others take part in a backward if any weight needs a gradient.
        told = sorted(weights, key=lambda weight: not weight.requires_grad)
        if not problem and self.P_x.active and not trouble_with(x):
            problem = self.trouble(x)
        return self._plans.agree(x, next(iter(told), None), call_arguments, not self.P_x.active, problem)

    def trouble(self, x: torch.Tensor) -> str:
        """What is wrong with the elements of this rank's shard, for all to refuse; empty if nothing is."""
        return ""

    @tells_peers
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        return self.apply_to(input)

    def apply_to(
        self, x: torch.Tensor, call_arguments: tuple[int, ...] = (), problem: str = ""
    ) -> torch.Tensor:
        """Apply the layer, called with some numbers that the plan depends on, unless there is a problem."""
        weights = {} if self.placed is None else self.placed.use()
        if self.machine.rank not in self.members:
            return self.stand_aside(x, weights.values())
        if self._casts:
            (x, *cast) = autocast(x, *weights.values())  # type: ignore[assignment]
            weights = dict(zip(weights, cast, strict=True))  # type: ignore[arg-type]
        flow, needs = self._agree(x, weights.values(), call_arguments, problem)
        # Outside of P_x nothing goes in, but its backward may be waited for by others.
        y = x if self.P_x.active else x.flatten()[:0]
        if flow.gather is not None:
            y = flow.gather(y, needs.input)
        if self._works:
            with no_autocast():
                y = self.carry_out(flow, needs, y, **weights)
        else:
            y = idle(y, weights.values())
        if flow.scatter is not None:
            y = flow.scatter(y if self._works else y.new_empty(0) + y.sum(), needs.any)
        if self.P_y.active:
            y = self.finish(flow, y, **weights)
        batch = x.shape[0] if x.dim() else None
        y = deliver(y, self.P_y.active, batch)
        return anchored(y, needs.any)
