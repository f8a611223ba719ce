"""Layers that consist of an operation with parameters: enter, operation, leave.

A call of such a layer, on ranks of its partitions and on ranks outside that hold its weights::

    apply_to    parameters.use      weights come from where they are kept; ranks outside stop behind this,
      |                             and receive the outcome: ``idle_output``
      +- enter  InputFacts.about    what this rank passes; sends an id, and does not wait
      +- run    settle, operation   the plan of all ranks, then data; an operation may start before ``settle``
      +- leave                      no elements outside of P_y; in a graph if that of any rank is

Subclasses replace one of the three, never the order: facts of all ranks before data of any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, Unpack

import torch
from torch.autograd import profiler

from distdl_rma.errors import PartitionError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import (
    GradientNeeds,
    anchored,
    deliver,
    misfit,
    reports_failures,
    uncompiled,
)
from distdl_rma.layers.ops.core.operation import Agreement, Operation
from distdl_rma.layers.ops.core.tensors import AUTOCASTS
from distdl_rma.layers.partitioned.core.agreement import ShapeAgreement
from distdl_rma.layers.partitioned.core.arguments import function_of
from distdl_rma.layers.partitioned.core.callbacks import CALLBACKS, Callbacks
from distdl_rma.layers.partitioned.core.input_facts import InputFacts
from distdl_rma.layers.partitioned.core.layer import DistributedLayer, nbytes_of
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.autocast import castable, dtype_for
from distdl_rma.layers.split.calls.signatures import mapped
from distdl_rma.layers.split.tensor import SplitTensor, checked_block
from distdl_rma.layers.staging import backward_in_this_thread

O = TypeVar("O", bound=Operation)  # noqa: E741


class OperatorLayer(DistributedLayer, Generic[O]):
    """A layer whose ranks agree on the global tensors of their shards, and then call an operation on them.

    Subclasses choose the operation for the inputs (``plan``). P_y is P_x if None. For a layer of several
    inputs P_x is the sequence of their partitions, and ``self.P_x`` the first one. ``others`` are partitions
    of further ranks that take part in a call.

    On each rank, all calls of a layer go through ``apply_to``, wrong ones included (``refuse``): the ranks
    count calls, and one that left out a call would meet the others in the next one, with old data.
    """

    _call_arguments: tuple[Any, ...] = ()  # other facts of a call that passes only an input
    preserve_batch = True  # whether an output without elements has the batch size, as shape (b, 0)
    # Error in the inputs of a rank of P_x, which all ranks then raise; empty for inputs that are no tensors.
    input_problem: Callable[..., str] | None = None

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
        """Operation for the facts of all ranks; equal on all ranks, errors included.

        Runs outside of inference mode, because training may use the tensors that an operation keeps. It is
        kept and used again, so it depends on shapes, types and arguments, never on values.
        """
        raise NotImplementedError

    @uncompiled
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call ``forward``, and remember the sizes of the local shards.

        ``ConfigurationError``, and failure of the machine, if a user's callback returns a wrong value.
        """
        given = (*inputs, *named.values()) if named else inputs
        for x in given:
            if isinstance(x, SplitTensor):
                return self._call_on_blocks(inputs, named)
        before = self.nbytes_in(given)
        # Looked for in every call, since the user may set a callback at any time: one look at the dict of
        # attributes, as the layers of most programs have no callback.
        stated = not CALLBACKS.isdisjoint(vars(self))
        if stated:
            self._check_callbacks(get_sizeof_input_tensor=before, get_sizeof_tensor=before)
        try:
            if profiler._is_profiler_enabled:
                with profiler.record_function(self.label):
                    y = super().__call__(*inputs, **named)
            else:
                y = super().__call__(*inputs, **named)
        except TypeError:
            # A call with the wrong number of arguments never reaches the forward, where others wait.
            problem = misfit(type(self).forward, self, inputs, named)
            if problem:
                self.refuse(problem)
            raise
        behind = nbytes_of(y)
        # torch's __setattr__ takes longer than the rest of this function.
        self.__dict__["shard_nbytes"] = before, behind
        if stated:
            self._check_callbacks(get_sizeof_output_tensor=behind)
        return y

    def _call_on_blocks(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        # Split tensors in, split tensors out. A split tensor has what a layer needs, a block on a grid, and
        # more: its layout. The layer is called on the blocks as if these were plain shards, and agrees on
        # shapes as always, so that no layer has a second path. Plain tensors among the inputs are blocks.
        given, blocks = (*inputs, *named.values()), []
        for at, x in enumerate(given):
            if not isinstance(x, SplitTensor):
                blocks.append(x)
                continue
            wanted, grid = self.partition_of(at, x.dim()), lay.on_grid(x.decomposition).partition
            if grid != wanted:
                raise PartitionError(
                    f"{self.label!r}: input {at} is split over {grid}, the layer takes {wanted}: build the"
                    " layer on the partition of the model, or move the tensor by redistribute() or"
                    " Repartition"
                )
            with torch._C.DisableTorchFunctionSubclass():
                blocks.append(checked_block(x))
        count = len(inputs)
        result = self(*blocks[:count], **dict(zip(named, blocks[count:], strict=True)))
        found = None if self._last is None else self._last.output
        if found is None:
            raise UnsupportedError(
                f"{self.label!r}: its results are not blocks of one tensor; call it with plain tensors,"
                " x.to_local()"
            )
        layout, rank = lay.normal(found), found.partition.me
        # A rank without a part of the output gets a tensor without elements, of any shape.
        return mapped(lambda y: SplitTensor(y.reshape(layout.box(rank).shape), layout), result)

    def nbytes_in(self, inputs: tuple[Any, ...]) -> int:
        """Bytes of the input among the arguments of a call."""
        return nbytes_of(inputs[:1])

    def partition_of(self, at: int, _dims: int) -> Partition:
        """Partition of the input with this number, which has so many dimensions, in a call.

        Numbers of inputs that are passed by name go on behind those of the others. The last partition holds
        for all further inputs.
        """
        return self.P_xs[min(at, len(self.P_xs) - 1)]

    @property
    def _last(self) -> O | None:
        # Operation of the last call; None before the first one, and on ranks outside of calls.
        return None if self.agreement is None else self.agreement.last

    @cached_property
    def agreement(self) -> ShapeAgreement[O] | None:
        """Agreement on the facts and the operation of a call; None on ranks outside of calls.

        Made at the first use, and anew in a copy of the layer, which is another layer for the ranks.
        """
        ranks = self.agreeing()
        if self.machine.rank not in ranks:
            return None
        return ShapeAgreement(self, ranks, has_outcome=self.placements is not None)

    @reports_failures
    def connect(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> None:
        """Plan for an input before the first call, and exchange addresses with the neighbours, once.

        Without it the first forward and the first backward do so. They always do so for the sum of gradients,
        and for movements within an operation. Collective over the ranks of the layer, and while gradients are
        recorded over those that hold its weights; blocking. Calls with other inputs remain possible.

        ``shape`` is the global shape of the input, or, for layers of subtensors, the shape of each subtensor.
        Without it a layer that was not built from global parameters raises ``ProtocolError``. ``dtype`` is
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
            # Without gradients, ranks outside get no outcome: this is not a call.
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
        """Start the agreement on the inputs ``xs``; does not wait for the other ranks."""
        # The facts have one weight, in place of all: the ranks take part in a backward if any weight needs a
        # gradient, so it is one that does, if there is one; and all have one type, or all ranks refuse.
        weight = None
        for each in weights:
            weight = each if weight is None else weight
            if each.dtype is not weight.dtype and not problem:
                problem = f"the parameters are of different types, {weight.dtype} and {each.dtype}"
            if each.device != weight.device and not problem:
                problem = f"the parameters are on different devices, {weight.device} and {each.device}"
            if each.requires_grad and not weight.requires_grad:
                weight = each
        if self.input_problem is not None and not problem and not self._idle[0]:
            problem = self.input_problem(*xs)
        words = self._call_arguments if call_arguments is None else call_arguments
        trainable = None if self.placed is None else self.placed.trainable
        facts = InputFacts.about(xs, weight, words, self._idle, problem, trainable)
        if facts.device:
            backward_in_this_thread()
        plans.begin(facts)
        return plans

    def run(
        self, agreement: Agreement[O], xs: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, GradientNeeds]:
        """Call the operation that the ranks agree on; local result, and gradients that any rank needs.

        An operation that can start on a guess takes the agreement itself, and settles it in its schedule.
        """
        operation, needs = agreement.settle()
        return operation(needs, *xs, **weights), needs

    @reports_failures
    def refuse(self, problem: str) -> None:
        """As in the base; the other ranks get the problem with the facts about this rank's inputs."""
        self.apply_to(torch.empty(0), problem=problem)
        super().refuse(problem)

    def leave(self, y: torch.Tensor, x: torch.Tensor, needs: GradientNeeds) -> torch.Tensor:
        """Result as returned to the caller, for the first input ``x``.

        It has no elements outside of P_y, and is in a graph if that of any rank is.
        """
        if not self._has_output:
            y = deliver(y, False, x.shape[0] if self.preserve_batch and x.dim() else None)
        return y if y.requires_grad else anchored(y, needs.any)

    @reports_failures
    def forward(self, input: torch.Tensor) -> Any:
        """Apply the layer to ``input``, the local shard on P_x or a tensor without elements elsewhere."""
        return self.apply_to(input)

    def apply_to(
        self, *xs: torch.Tensor, call_arguments: tuple[Any, ...] | None = None, problem: str = ""
    ) -> torch.Tensor:
        """Apply the layer; ``call_arguments`` are facts for the plan, and all ranks raise a ``problem``."""
        weights = {} if self.placed is None else self.placed.use()
        if self.agreement is None:
            return self.idle_output(xs[0], (*xs[1:], *weights.values()))
        if AUTOCASTS():
            # Before the facts, so that the ranks compare the types that travel.
            xs, weights = self._converted(xs, weights)
        agreement = self.enter(self.agreement, xs, weights.values(), call_arguments, problem)
        y, needs = self.run(agreement, xs, weights)
        return self.leave(y, xs[0], needs)

    def _converted(
        self, xs: tuple[torch.Tensor, ...], weights: dict[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        # Operations are not functions of torch: converted as autocast does for that of torch's layer. All
        # ranks refuse values that are no tensors, or have no memory, later.
        given: list[Any] = [*xs, *weights.values()]
        some = [x for x in given if isinstance(x, torch.Tensor) and not x.is_meta and castable(x)]
        dtype = dtype_for(function_of(type(self)), some, some[0].device.type) if some else None
        if dtype is None:
            return xs, weights
        cast = [x.to(dtype) if any(x is each for each in some) else x for x in given]
        return tuple(cast[: len(xs)]), dict(zip(weights, cast[len(xs) :], strict=True))
