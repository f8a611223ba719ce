"""A call of a model whose graph ends at stand-ins, and the program that a recording of such a call gives.

A replay has no graph inside; torch sees one node in place of the model. So a call that is recorded, or that a
replay is compared with, is put behind the same node. Its own graph ends at views of parameters and inputs::

    parameter ---- InGraph ---- result          what torch, GradientSync and optimizers see
    parameter - view | ... rules, kernels ... | result        of the real call: it is run up to the view

The recorded call gets other numbers than the user's, in inputs and parameters: a constant that was computed
of these, without a kernel that the recording saw, then makes the replay of the user's call differ, which is
compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.capture.kinds import NotCapturedError, State, is_plain
from distdl_rma.layers.capture.program import Program
from distdl_rma.layers.capture.recording import COMPUTED, INPUT, Recorder
from distdl_rma.layers.checks.gradient_origin import SHOWN, nodes_behind
from distdl_rma.layers.split.calls.signatures import mapped
from distdl_rma.layers.split.tensor import SplitTensor, checked_block

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NONE: dict[int, torch.Tensor] = {}


class _Output(NamedTuple):
    """In place of a tensor that a model returns; without a layout it is a plain one."""

    layout: Decomposition | None
    strides: tuple[int, ...] | None


class Attempt:
    """A call of a model's forward on the given blocks and plain tensors; its graph ends at ``ends``."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        others: Mapping[int, torch.Tensor] = _NONE,
    ) -> None:
        graph = torch.is_grad_enabled()
        learnt = {
            id(p): _stand_in(p, others.get(id(p), p))
            for p in model.parameters()
            if others or (graph and p.requires_grad)
        }
        blocks = [x.view_as(x) if graph and x.requires_grad else x for x in tensors]
        self.ends = [x for x in (*learnt.values(), *blocks) if graph and x.requires_grad]
        self._model, self._learnt, self._forward = model, learnt, forward
        self._arguments = rebuilt(arguments, iter(blocks))
        # Blocks and plain tensors that the model returned, and what it returned, without them.
        self.results: list[torch.Tensor] = []
        self.returned: Any = None

    def run(self) -> None:
        """Run the forward; blocking, collective."""
        tables = [module._parameters for module in self._model.modules()]
        before = [dict(each) for each in tables]
        try:
            for each in tables:
                each.update({key: self._learnt[id(p)] for key, p in each.items() if id(p) in self._learnt})  # type: ignore[misc]
            args, kwargs = self._arguments
            found = self._forward(*args, **kwargs)
        finally:
            for each, old in zip(tables, before, strict=True):
                each.update(old)
        self.returned = mapped(self._taken, found)

    def _taken(self, x: torch.Tensor) -> _Output:
        if not isinstance(x, SplitTensor):
            self.results.append(x)
            return _Output(None, None)
        self.results.append(checked_block(x))
        return _Output(x._layout, x._strides)

    @property
    def differentiable(self) -> list[bool]:
        """Which results are in the graph."""
        return [x.requires_grad for x in self.results]

    def gradients(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of ``ends`` for those of the differentiable results; blocking, collective."""
        roots = tuple(x for x in self.results if x.requires_grad)
        engine = torch.autograd.Variable._execution_engine
        # keep_graph is True, create_graph False, allow_unreachable True, accumulate_grad False.
        found: Any = engine.run_backward(roots, tuple(given), True, False, tuple(self.ends), True, False)
        return [*found]

    @property
    def problem(self) -> str:
        """Why its graph cannot be put behind one node; empty if it can."""
        if not _returns_plain(self.returned):
            return "it returns what is neither a tensor nor a plain value"
        for x, output in zip(self.results, _outputs(self.returned), strict=True):
            if x.requires_grad and output.layout is None:
                return "it returns a plain tensor that requires a gradient"
        ends = {x.grad_fn for x in self.ends}
        for node in nodes_behind([x.grad_fn for x in self.results], ends.__contains__):
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf.numel():
                return "it learns a tensor that is no parameter of its modules, or is held elsewhere too"
            if SHOWN in node.metadata:
                return "it takes a block by to_local()"
        return ""


def _stand_in(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    # A view in the graph; it and its leaf have the attributes that rules read.
    found = values.view_as(values)
    for each in (values, found):
        vars(each).update(vars(parameter))
    return found


def rebuilt(arguments: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Arguments with other blocks, and other plain tensors."""

    def change(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, SplitTensor):
            return next(tensors)
        found = SplitTensor(next(tensors), x._layout)
        found._strides = x._strides
        return found

    return mapped(change, arguments)


def filled(returned: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """What a model returned, with tensors again."""
    if isinstance(returned, _Output):
        x = next(tensors)
        if returned.layout is not None:
            x = SplitTensor(x, returned.layout)
            x._strides = returned.strides
        return x
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return type(returned)(*(filled(each, tensors) for each in returned))
    if isinstance(returned, (list, tuple)):
        return type(returned)(filled(each, tensors) for each in returned)
    return {k: filled(each, tensors) for k, each in returned.items()} if type(returned) is dict else returned


def _outputs(returned: Any) -> Iterator[_Output]:
    if isinstance(returned, _Output):
        yield returned
    elif isinstance(returned, (list, tuple, dict)):
        for each in returned.values() if isinstance(returned, dict) else returned:
            yield from _outputs(each)


def _returns_plain(returned: Any) -> bool:
    if isinstance(returned, (list, tuple)) and not isinstance(returned, _Output):
        return all(map(_returns_plain, returned))
    if type(returned) is dict:
        return all(map(_returns_plain, returned.values()))
    return isinstance(returned, _Output) or is_plain(returned)


class Captured(NamedTuple):
    """The program of a kind of calls, and what belongs to its results."""

    program: Program
    returned: Any
    differentiable: list[bool]
    # Of the gradients of differentiable results.
    strides: list[tuple[int, ...]]


def capture(
    model: nn.Module,
    forward: Callable[..., Any],
    arguments: Arguments,
    tensors: Sequence[torch.Tensor],
    state: State,
    agreed: Callable[[str], str],
) -> Captured:
    """Record a call on other numbers, forward and backward; blocking, collective.

    Buffers and random numbers are as before afterwards. ``agreed`` returns the first rank's problem to all of
    them, and ``NotCapturedError`` says it.
    """
    others = [*map(_other_numbers, tensors)]
    weights = {id(p): _other_numbers(p) for p in model.parameters()}
    attempt = Attempt(model, forward, arguments, others, weights)
    recorder = Recorder(others, state.tensors, weights)
    versions = [x._version for x in others]
    drawn = random.getstate(), np.random.get_state()  # noqa: NPY002 - that of the user
    before = state.copy()
    with unchanged(state.fixed.values()):
        try:
            with recorder:
                attempt.run()
        finally:
            changed = state.restore(before)
        problem = recorder.problem or attempt.problem
        if changed:
            problem = problem or f"it changes {changed!r}, which is no buffer and no parameter"
        if versions != [x._version for x in others]:
            problem = problem or "it changes an input in place"
        now = random.getstate(), np.random.get_state()  # noqa: NPY002
        if repr(drawn) != repr(now):
            problem = problem or "it draws random numbers of Python or numpy"
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])  # noqa: NPY002
        outputs, length = [recorder.slot(x) for x in attempt.results], len(recorder.steps)
        if any(recorder.kinds[slot.number] not in {COMPUTED, INPUT} for slot in outputs):
            problem = problem or "it returns a tensor of its own, and none that it computed"
        gradients, found, ones = list[Any](), list[Any](), list[torch.Tensor]()
        # A rank alone would wait for the others in the backward.
        problem = agreed(problem)
        if not problem and any(attempt.differentiable):
            ones = [torch.ones_like(x) for x in attempt.results if x.requires_grad]
            gradients = [recorder.results(x) for x in ones]
            with recorder:
                derivatives = attempt.gradients(ones)
            found = [None if x is None else recorder.slot(x) for x in derivatives]
            problem = agreed(recorder.problem)
    if problem:
        raise NotCapturedError(problem)
    program = Program(recorder, length, outputs, gradients, found)
    return Captured(program, attempt.returned, attempt.differentiable, [x.stride() for x in ones])


def _other_numbers(x: torch.Tensor) -> torch.Tensor:
    # A tensor of the same form; integers, as of classes, must stay in their range.
    try:
        size = x.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        if x.storage_offset():
            found = torch.empty(size, dtype=x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        else:
            found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        some = x.detach()
        found.copy_(some * 0.75 + 0.125 if x.is_floating_point() or x.is_complex() else some)
    except RuntimeError as error:
        raise NotCapturedError(f"an argument has elements in the same place: {error}") from None
    return found.requires_grad_(x.requires_grad)


@contextmanager
def unchanged(state: Collection[torch.Tensor]) -> Iterator[None]:
    """Context behind which tensors and torch's random numbers are as before."""
    numbers = torch.get_rng_state()
    values = [x.clone() for x in state]
    try:
        yield
    finally:
        torch.set_rng_state(numbers)
        for x, before in zip(state, values, strict=True):
            # Not a change that torch's versions count: a graph of an earlier call may have saved it.
            x.data.copy_(before)
