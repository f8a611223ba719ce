"""Layers that are an operator with parameters: enter, operator, leave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, TypeVar, Unpack

import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import ShapeAgreement
from distdl_rma.layers.core.arguments import Callbacks
from distdl_rma.layers.core.input_facts import InputFacts
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.ops.core.autograd import GradientNeeds, anchored, deliver, tells_peers
from distdl_rma.ops.core.operation import Agreement, Operation
from distdl_rma.ops.core.tensors import autocast

O = TypeVar("O", bound=Operation)  # noqa: E741
_needs_gradient = attrgetter("requires_grad")


class OperatorLayer(DistributedLayer, Generic[O]):
    """A layer whose ranks agree on what plain tensors are parts of, and then call an operation on them.

    Subclasses say which operation serves which inputs (``plan``). Agreement on shapes, parameters, ranks
    with and without work, and the backward of all of them are here. P_y is P_x if None; where a call passes
    several inputs, P_x is the sequence of their partitions, and ``self.P_x`` the first one. ``others`` are
    partitions of other ranks that take part in a call.
    """

    _casts = False  # whether torch's autocast computes this kind of layer in a shorter type
    _call_arguments: tuple[Any, ...] = ()  # what else is said of a call with nothing but an input
    # What else is wrong with the inputs of this rank of P_x, for all to refuse; empty if nothing is. Inputs
    # that are no tensors are none of its business.
    trouble: Callable[..., str] | None = None

    def __init__(
        self,
        P_x: Partition | Sequence[Partition],
        P_y: Partition | None = None,
        *others: Partition,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        P_xs = (P_x,) if isinstance(P_x, Partition) else tuple(P_x)
        P_y = P_xs[0] if P_y is None else P_y
        super().__init__(*P_xs, P_y, *others, name=name, **callbacks)
        self.P_xs, self.P_x, self.P_y = P_xs, P_xs[0], P_y
        self._idle, self._has_output = tuple(not P.active for P in P_xs), P_y.active

    def plan(self, facts: dict[int, InputFacts]) -> O:
        """Operation for what all ranks said of their inputs; alike on all ranks, errors included."""
        raise NotImplementedError

    @property
    def input_partitions(self) -> tuple[Partition, ...]:
        """Those of its inputs."""
        return self.P_xs

    def output_layout(self) -> Decomposition | None:
        """That of the operation of the last call."""
        return None if self.agreement is None or self.agreement.last is None else self.agreement.last.output

    @cached_property
    def agreement(self) -> ShapeAgreement[O] | None:
        """Operations by what the ranks passed; None on ranks without a part in a call."""
        ranks = self.agreeing()
        if self.machine.rank not in ranks:
            return None
        return ShapeAgreement(self, ranks, len(self.P_xs), tells=self.placements is not None)

    @tells_peers
    def connect(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> None:
        """Plan for an input before it is there, and exchange addresses with the neighbours, once.

        Otherwise the first forward and the first backward do it, as they do in any case for the sum of
        gradients, and for what a layer moves while it computes. Collective over the ranks of the layer,
        and in training over those that keep its weights, blocking. Calls with other inputs remain possible.

        ``shape`` is the global one of the input, or that of each subtensor where these may have any; it may
        be left out of a layer that was built from global parameters, else ``ProtocolError``. ``dtype`` is
        that of the parameters if None. Interface document, section 3.2; requirement A8.
        """
        self.connect_for([self.expected(self.P_x, shape, dtype)])

    def connect_for(self, xs: Sequence[torch.Tensor]) -> None:
        """Plan for inputs that look like these, and exchange addresses; blocking."""
        if self.placed is not None:
            self.placed.connect()
        outcome = self.outcome()
        if outcome is not None:
            outcome.connect()
        if self.agreement is not None:
            # No call: nobody outside is told what becomes of it.
            with torch.no_grad():
                operation, _ = self.enter(self.agreement, xs, list(self.parameters())).settle()
            operation.connect()

    def enter(
        self,
        plans: ShapeAgreement[O],
        xs: Sequence[torch.Tensor],
        weights: Collection[torch.Tensor] = (),
        call_arguments: tuple[Any, ...] | None = None,
        problem: str = "",
    ) -> Agreement[O]:
        """Begin to agree with the other ranks on what ``xs`` are parts of; does not wait for them."""
        # The others take part in a backward if any weight needs a gradient.
        told = max(weights, key=_needs_gradient, default=None)
        if self.trouble is not None and not problem and not self._idle[0]:
            problem = self.trouble(*xs)
        words = self._call_arguments if call_arguments is None else call_arguments
        plans.begin(InputFacts.about(xs, told, words, self._idle, problem))
        return plans

    def run(
        self, agreement: Agreement[O], xs: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, GradientNeeds]:
        """Call the operation that the ranks agree on; local result, and what any rank needs."""
        operation, needs = agreement.settle()
        return operation(needs, *xs, **weights), needs

    def leave(self, y: torch.Tensor, x: torch.Tensor, needs: GradientNeeds) -> torch.Tensor:
        """Result for the first input ``x`` as the caller gets it.

        Without elements outside of P_y, and in a graph if any rank's is.
        """
        if not self._has_output:
            y = deliver(y, False, x.shape[0] if x.dim() else None)
        return y if y.requires_grad else anchored(y, needs.any)

    @tells_peers
    def forward(self, input: torch.Tensor) -> Any:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        return self.apply_to(input)

    def apply_to(
        self, *xs: torch.Tensor, call_arguments: tuple[Any, ...] | None = None, problem: str = ""
    ) -> torch.Tensor:
        """Apply the layer, called with some words that the plan depends on, unless there is a problem."""
        weights = {} if self.placed is None else self.placed.use()
        if self.agreement is None:
            return self.idle_output(xs[0], (*xs[1:], *weights.values()))
        if self._casts:
            first = len(xs)
            cast = autocast(*xs, *weights.values())
            xs, weights = cast[:first], dict(zip(weights, cast[first:], strict=True))  # type: ignore[assignment,arg-type]
        agreement = self.enter(self.agreement, xs, weights.values(), call_arguments, problem)
        y, needs = self.run(agreement, xs, weights)
        return self.leave(y, xs[0], needs)
