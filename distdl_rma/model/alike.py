"""What all ranks of a distributed model are to have alike: weights, inputs, where they go backward from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from distdl_rma.checks.arguments import sample
from distdl_rma.checks.consensus import gather_words
from distdl_rma.checks.gradient_origin import GradientCheck, first_apart
from distdl_rma.machine import Machine
from distdl_rma.model.calls import Calls
from distdl_rma.model.replicas import ReplicaSampler
from distdl_rma.split.calls.loss_origin import LOSS_ORIGIN
from distdl_rma.split.calls.site import Trail
from distdl_rma.split.entry import alike_on_all_ranks


class Alike:
    """Compares a little of it in every call of a model, and all where that differs; local to make.

    ``held`` is whether the model's weights are alike: else whoever sums their gradients looks after them.
    """

    def __init__(
        self, machine: Machine, model: Callable[[], nn.Module | None], name: str, held: bool
    ) -> None:
        self._machine, self._model, self._name, self._held = machine, model, name, held
        self._copies: dict[tuple[int, ...], ReplicaSampler] = {}
        self._seen: set[object] = set()
        # Of calls on some ranks, which may be fewer than those on others.
        self._numbers: Counter[tuple[int, ...]] = Counter()
        # Plain tensors that functions were passed in calls of some ranks.
        self._met: dict[tuple[int, ...], set[Any]] = {}

    def sign(self, calls: Calls, inputs: Sequence[torch.Tensor]) -> int:
        """A number for the call that begins with these plain inputs, alike if all is."""
        self._numbers[calls.ranks] += 1
        copies = self._copies_of(calls)
        held = 0 if copies is None else copies.word()
        begun = LOSS_ORIGIN.looked_at(self._machine, calls.ranks)
        gradients = GradientCheck.of(self._machine, calls.ranks).number
        return hash((held, begun, gradients, *[sample(x, self._numbers[calls.ranks]) for x in inputs]))

    def watch(self, calls: Calls, trail: Trail) -> None:
        """Compare plain tensors that functions are given in the call that has begun, at its end."""
        trail.watch(self._numbers[calls.ranks], self._met.setdefault(calls.ranks, set()))

    def difference(self, calls: Calls, inputs: Sequence[torch.Tensor]) -> str:
        """What is not alike, in words, the same on all ranks; empty if all is. Collective, blocking.

        ``MismatchError`` for inputs.
        """
        copies = self._copies_of(calls)
        found = "" if copies is None else copies.difference()
        if found := found or calls.backwards_differ() or self._gradients_differ(calls):
            return found
        self._compare(calls, inputs)
        return ""

    def compare_new_inputs(self, calls: Calls, inputs: Sequence[torch.Tensor]) -> None:
        """Compare all of plain inputs, once for a kind and ranks; blocks taken for whole would be wrong."""
        kind = calls.ranks, *((x.shape, x.dtype) for x in inputs)
        if inputs and kind not in self._seen:
            self._compare(calls, inputs)
            self._seen.add(kind)

    def forget(self) -> None:
        """Let go of the model's memory."""
        for copies in self._copies.values():
            copies.close()
        self._copies.clear()

    def _gradients_differ(self, calls: Calls) -> str:
        gradients = GradientCheck.of(self._machine, calls.ranks)
        title = f"calls of {self._name} (gradients)"
        said = gather_words(self._machine.segments, [*gradients.last], title, calls.ranks)
        # Also where they only are rounded otherwise.
        gradients.forget()
        if what := first_apart([*said.values()]):
            return (
                f"{self._name}: in a backward before this call the gradient of {what!r} was not alike on all"
                " ranks. It came from a loss of plain tensors, which all ranks have alike: from other data,"
                " or from to_local() of a tensor that is in no graph; use the split tensor itself there"
            )
        return ""

    def _compare(self, calls: Calls, inputs: Sequence[torch.Tensor]) -> None:
        alike_on_all_ranks(self._machine, calls.ranks, inputs, "an input of a distributed model")

    def _copies_of(self, calls: Calls) -> ReplicaSampler | None:
        found = self._copies.get(calls.ranks)
        if found is None and self._held:
            found = self._copies[calls.ranks] = ReplicaSampler(
                self._model, self._machine, calls.ranks, self._name
            )
        return found
