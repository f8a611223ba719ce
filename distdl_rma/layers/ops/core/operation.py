"""Distributed operations: planned once for inputs of known decompositions, then called on local shards.

Most are of one form, ``GatherComputeScatter``::

    x --- gather ---> what this rank's part needs --- compute ---> partial outputs --- scatter ---> y
          movement                                   torch                           movement, which sums

    pool            halo of the block                the pool                        -
    linear          features of the columns          product with a block of W       sums over the columns
    embedding       -                                the lookup                      to the ranks of P_y

Either movement is None on ranks where nothing moves. Ranks that only give data do not compute; ranks that
compute may have no part of the input or of the output. All of them make the same calls, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.autograd import GradientNeeds, idle
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.staged import Moves
from distdl_rma.layers.ops.core.tensors import AUTOCASTS, no_autocast


class Operation:
    """An operator for inputs of known decompositions: its movements, its computation and its output.

    All its ranks make it, or all raise the same error; local to make. It owns the segment memory of its
    movements, so each place of a program has its own operation. ``output`` is the decomposition of the
    result, equal on every rank; it is None only if the inputs are subtensors that are no blocks of a tensor.

    Construction is where things are refused: it sees decompositions, types and options, which are equal on
    all ranks, so that all raise before any data move. A call checks nothing.
    """

    output: Decomposition | None

    def __call__(self, needs: GradientNeeds, *inputs: Any, **weights: Any) -> torch.Tensor:
        """Local result from local shards, differentiable; blocking.

        Ranks outside of the input or output partition pass, or get, a tensor without elements.
        """
        raise NotImplementedError

    def movements(self) -> Sequence[Moves | None]:
        """Movements of the operation; None where this rank takes no part in one."""
        return ()

    def connect(self) -> None:
        """Exchange addresses with the neighbours, before the first call does; blocking."""
        for movement in self.movements():
            if movement is not None:
                movement.connect()

    def void(self) -> None:
        """Give up movements that some ranks may have started before all ranks agreed on the operation."""


P_co = TypeVar("P_co", bound=Operation, covariant=True)


class Agreement(Protocol[P_co]):
    """Agreement of the ranks on a call: known at once for split tensors, exchanged for plain tensors.

    An operation that overlaps begins on the ``guess``, while the facts of the others are on their way, and
    calls ``settle`` when there is nothing left to do without them.
    """

    @property
    def guess(self) -> P_co | None:
        """Operation that this rank expects, to start before the other ranks' messages arrive, or None."""

    def settle(self) -> tuple[P_co, GradientNeeds]:
        """The agreed operation, and the tensors whose gradient any rank needs; blocking."""


class GatherComputeScatter(Operation):
    """An operation of the form ``y = finish(scatter(compute(gather(x))))``.

    Subclasses set ``gather`` and ``scatter`` where data moves, and implement ``compute``. ``reads`` says
    whether this rank has a part of the input, ``works`` whether it computes.
    """

    output: Decomposition
    gather: Moves | None = None
    scatter: Moves | None = None

    def __init__(self, site: CallSite, reads: bool, works: bool, output: Decomposition) -> None:
        self.site, self.reads, self.works, self.output = site, reads, works, output
        self._finishes = output.partition.active and type(self).finish is not GatherComputeScatter.finish

    def compute(self, x: torch.Tensor, **weights: Any) -> torch.Tensor:
        """Partial output from the gathered input; called only on ranks that compute."""
        raise NotImplementedError

    def finish(self, y: torch.Tensor, **weights: Any) -> torch.Tensor:
        """Local output from the scattered result; called only on ranks of the output partition."""
        return y

    def carry_out(
        self, needs: GradientNeeds, x: torch.Tensor, weights: Mapping[str, torch.Tensor | None]
    ) -> torch.Tensor:
        """Call ``compute``; a subclass whose computation moves data overrides this, and uses ``needs``."""
        machine, name = self.site
        if machine.trace.recording is None:
            return self.compute(x, **weights)
        with machine.trace.span("local", name):
            return self.compute(x, **weights)

    def movements(self) -> tuple[Moves | None, ...]:
        """``gather`` and ``scatter``."""
        return self.gather, self.scatter

    def __call__(self, needs: GradientNeeds, x: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        """Local result from a local shard; blocking."""
        # A rank outside of the input partition has no input, but peers may wait for its backward.
        y = x if self.reads else x.flatten()[:0]
        if self.gather is not None:
            y = self.gather(y, needs.input)
        if self.works and not AUTOCASTS():
            y = self.carry_out(needs, y, weights)
        elif self.works:
            with no_autocast():
                y = self.carry_out(needs, y, weights)
        else:
            y = idle(y, weights.values())
        if self.scatter is not None:
            y = self.scatter(y if self.works else y.new_empty(0) + y.sum(), needs.any)
        return self.finish(y, **weights) if self._finishes else y
