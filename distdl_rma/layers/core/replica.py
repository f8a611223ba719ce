"""Copies of a layer's weights on several ranks, kept equal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.machine import Machine
from distdl_rma.ops.autograd import first_derivative
from distdl_rma.ops.set_up_transfer import broadcast_from_first
from distdl_rma.ops.tensors import as_tensor, reduction_dtype
from distdl_rma.ops.weak_method import weakly_bound
from distdl_rma.segments.collectives.allreduce import Allreduce

Sink = Callable[[], "torch.Tensor | None"]


class Replica:
    """The parameters of one layer, held by several ranks.

    Until a :class:`GradientSync` takes over, the gradients are summed over the ranks in every backward,
    before it returns. Afterwards the layer only computes them, and puts them into the memory that the
    ``GradientSync`` offers: a linear layer computes them there, others copy them there.

    Parameters
    ----------
    machine
        The machine.
    holders
        Rank ids that hold copies, this one included; the first one's initial values count.
    name
        Name of the layer.
    ask
        Over which of the holders gradients are summed, this rank included; empty if over none. Of a method
        only a graph holds the object.
    """

    def __init__(
        self,
        machine: Machine,
        holders: Sequence[int],
        name: str,
        ask: Callable[[], Sequence[int]],
    ) -> None:
        self.holders, self.name = tuple(holders), name
        self.ask = weakly_bound(ask)
        self.taken_over = False
        self.sinks: dict[str, Sink] = {}
        self.adopted: dict[str, torch.Tensor] = {}
        self.machine = machine
        # The dtype of a layer may change, and so may what its user's callback says.
        self._sums: dict[tuple[tuple[int, ...], int, torch.dtype], Allreduce] = {}

    def equalise(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make the copies equal, at first; collective over the holders, blocking."""
        if len(self.holders) > 1:
            broadcast_from_first(self.machine, self.holders, parameters, self.name)

    def tie(self, *parameters: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters for use in a forward, tied together for the sum of their gradients."""
        used = [p for p in parameters if p is not None]
        if self.taken_over:
            self._check_adopted(used)
        alone = self.taken_over or len(self.summing()) == 1
        # What has no elements may be left out by the computation, and then by some of the copies only.
        learning = [p for p in used if p.requires_grad and p.numel()]
        if alone or not torch.is_grad_enabled() or not learning:
            return parameters
        tied = dict(zip(map(id, learning), _Tie.apply(self, *learning), strict=True))  # type: ignore[no-untyped-call]
        return tuple(tied.get(id(p), p) for p in parameters)

    def summing(self) -> tuple[int, ...]:
        """Ranks that gradients are summed over, this one included.

        Raises
        ------
        ConfigurationError
            If the user's callback names a rank without a copy, or twice, or leaves this rank out.
        """
        ranks = tuple(self.ask()()) or (self.machine.rank,)
        if ranks != self.holders:
            alien = set(ranks) - set(self.holders)
            if alien or len(set(ranks)) != len(ranks) or self.machine.rank not in ranks:
                error = ConfigurationError(
                    f"{self.name!r}: get_ranks_synch_weights() gave rank {self.machine.rank} {list(ranks)},"
                    f" the copies are on {list(self.holders)}: each rank once, the caller among them"
                )
                # The others were told nothing yet, and would wait for this one.
                self.machine.fail(error)
                raise error
        return ranks

    def _check_adopted(self, used: list[torch.Tensor]) -> None:
        known = {id(parameter) for parameter in self.adopted.values()}
        for parameter in used:
            # One without elements has nothing to sum.
            if parameter.requires_grad and parameter.numel() and id(parameter) not in known:
                raise ProtocolError(
                    f"{self.name!r}: a parameter was unfrozen or replaced after its GradientSync was made, or"
                    " is computed from others; make a new GradientSync"
                )

    def sink(self, name: str) -> torch.Tensor | None:
        """Memory in the segment to write a parameter's gradient to, or None if there is none now."""
        offer = self.sinks.get(name)
        return None if offer is None else offer()

    def fill(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient in the place that it is wanted: in the segment if a ``GradientSync`` offers it."""
        place = self.sink(name)
        return gradient if place is None else place.copy_(gradient)

    def sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum gradients over the ranks; blocking. Returns memory of its own."""
        count, dtype = sum(gradient.numel() for gradient in gradients), gradients[0].dtype
        ranks = self.summing()
        total = self._sums.get((ranks, count, dtype))
        if total is None:
            over = "" if ranks == self.holders else f" over ranks {list(ranks)}"
            name = f"{self.name} (gradients{over})"
            total = Allreduce(self.machine.segments, ranks, count, reduction_dtype(dtype), name=name)
            weakref.finalize(self, total.close)
            self._sums[ranks, count, dtype] = total
        flat = as_tensor(total.active, dtype)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=flat)
        total.start()
        parts = torch.split(as_tensor(total.wait(), dtype), [gradient.numel() for gradient in gradients])
        return [p.clone().view(g.shape) for p, g in zip(parts, gradients, strict=True)]


class _Tie(torch.autograd.Function):
    # Identity forward; backward sums over the ranks: a parameter used on all of them.
    @staticmethod
    def forward(ctx: Any, replica: Replica, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Whom the backward asks lives as long as the graph.
        ctx.replica, ctx.machine, ctx.ask = replica, replica.machine, replica.ask()
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.replica.sum(gradients)
