"""What a distributed operation is: worked out once for inputs of one kind, then called on local shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.ops.core.autograd import GradientNeeds, idle
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.staged import Moves
from distdl_rma.ops.core.tensors import no_autocast


class Operation:
    """An operator for inputs of known decompositions: what moves, what is computed, and what comes out.

    Made on all its ranks alike, errors included; local to make. It owns the segment memory of its
    movements, so two places of a program have operations of their own. ``output`` says who has what of the
    result; it follows from the inputs, on every rank alike, and is None only where the inputs are
    subtensors that are no blocks of one tensor.
    """

    output: Decomposition | None

    def __call__(self, needs: GradientNeeds, *inputs: Any, **weights: Any) -> torch.Tensor:
        """Local result from local shards, differentiable; blocking.

        Ranks outside of the input pass a tensor without elements, those outside of the output get one.
        """
        raise NotImplementedError

    def movements(self) -> Sequence[Moves | None]:
        """All that moves; None where this rank has no part of it."""
        return ()

    def connect(self) -> None:
        """Exchange addresses with the neighbours, which otherwise the first call does; blocking."""
        for movement in self.movements():
            if movement is not None:
                movement.connect()

    def void(self) -> None:
        """Give up what some ranks may have started before all agreed; nothing, unless it starts early."""


P_co = TypeVar("P_co", bound=Operation, covariant=True)


class Agreement(Protocol[P_co]):
    """What the ranks of a call agree on: known at once of split tensors, told on the way of plain ones."""

    @property
    def guess(self) -> P_co | None:
        """Operation that fits as far as this rank can see, to start on before the others are heard."""

    def settle(self) -> tuple[P_co, GradientNeeds]:
        """The operation that holds, and what any rank needs the gradient of; blocking."""


class Agreed(NamedTuple, Generic[P_co]):
    """An agreement that needs no message."""

    guess: P_co
    needs: GradientNeeds

    def settle(self) -> tuple[P_co, GradientNeeds]:
        """Both, at once."""
        return self.guess, self.needs


class GatherComputeScatter(Operation):
    """An operation of the form ``y = finish(scatter(compute(gather(x))))``.

    Subclasses set ``gather`` and ``scatter`` where anything moves, and say what a rank computes. ``reads``
    and ``works`` say whether this rank has a part of the input, and whether it computes.
    """

    output: Decomposition
    gather: Moves | None = None
    scatter: Moves | None = None

    def __init__(self, site: CallSite, reads: bool, works: bool, output: Decomposition) -> None:
        self.site, self.reads, self.works, self.output = site, reads, works, output
        # Whether something is left to do with what this rank gets.
        self._finishes = output.partition.active and type(self).finish is not GatherComputeScatter.finish

    def compute(self, x: torch.Tensor, **weights: Any) -> torch.Tensor:
        """Local output from what was gathered; called on the ranks that compute only."""
        raise NotImplementedError

    def finish(self, y: torch.Tensor, **weights: Any) -> torch.Tensor:
        """Local output from what was scattered to this rank; called on the ranks of the output only."""
        return y

    def carry_out(
        self, needs: GradientNeeds, x: torch.Tensor, weights: Mapping[str, torch.Tensor | None]
    ) -> torch.Tensor:
        """``compute``, for a subclass whose computation moves data itself, and so has to know what for."""
        machine, name = self.site
        if machine.trace.recording is None:
            return self.compute(x, **weights)
        with machine.trace.span("local", name):
            return self.compute(x, **weights)

    def movements(self) -> tuple[Moves | None, ...]:
        """Both."""
        return self.gather, self.scatter

    def __call__(self, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local result from a local shard."""
        # Outside of the input nothing goes in, but its backward may be waited for by others.
        y = x if self.reads else x.flatten()[:0]
        if self.gather is not None:
            y = self.gather(y, needs.input)
        if self.works and not torch.is_autocast_enabled("cpu"):
            y = self.carry_out(needs, y, weights)
        elif self.works:
            with no_autocast():
                y = self.carry_out(needs, y, weights)
        else:
            y = idle(y, weights.values())
        if self.scatter is not None:
            y = self.scatter(y if self.works else y.new_empty(0) + y.sum(), needs.any)
        return self.finish(y, **weights) if self._finishes else y
