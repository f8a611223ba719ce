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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from distdl_rma.layers.capture.kinds import (
    Given,
    OtherNumbersError,
    State,
    is_plain,
    refuse,
    restored,
    split_like,
)
from distdl_rma.layers.capture.program import Program
from distdl_rma.layers.capture.recording import COMPUTED, INPUT, Recorder
from distdl_rma.layers.checks.gradient_origin import SHOWN, nodes_behind
from distdl_rma.layers.ops.core.tensors import no_autocast
from distdl_rma.layers.split.tensor import SplitTensor, checked_block


class Attempt:
    """A call of a step; its graph ends at ``ends``. ``weights`` replace parameters, by ``id``."""

    def __init__(
        self,
        function: Callable[..., Any],
        given: Given,
        state: State,
        tensors: Sequence[torch.Tensor],
        weights: Mapping[int, torch.Tensor],
    ) -> None:
        graph = torch.is_grad_enabled()
        tables: list[dict[str, Any]] = [module._parameters for module in state.modules]
        before, known = [each.copy() for each in tables], {*map(id, state.learnt.values())}
        learnt = {
            id(p): _stand_in(p, weights.get(id(p), p))
            for p in chain.from_iterable(map(dict.values, tables))
            if p is not None and (weights or (graph and id(p) in known))
        }
        blocks = [x.view_as(x) if graph and x.requires_grad else x for x in tensors]
        # In the order in which a replay returns gradients.
        ends = [learnt[id(p)] for p in state.learnt.values()] if graph else []
        self.ends = [*ends, *(x for x in blocks if graph and x.requires_grad)]
        try:
            for each in tables:
                each.update({key: learnt.get(id(p), p) for key, p in each.items()})
            args, kwargs = given.rebuilt(blocks)
            found = function(*args, **kwargs)
        finally:
            for each, old in zip(tables, before, strict=True):
                each.update(old)
        leaves, form = tree_flatten(found)
        self._form = None if isinstance(found, torch.Tensor) else form
        # What the model returned, and of tensors among it, the blocks.
        self._leaves = leaves
        tensors_of = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.results = [checked_block(x) if isinstance(x, SplitTensor) else x for x in tensors_of]
        self.differentiable = [x.requires_grad for x in self.results]

    def returned(self, tensors: Iterable[torch.Tensor]) -> Any:
        """What the model returned, with other blocks and plain tensors."""
        others = iter(tensors)
        leaves = [split_like(x, next(others)) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return restored(leaves, self._form)

    def forget(self) -> None:
        """Keep the form of what the model returned only, and no tensor of the call."""
        none = torch.empty(0)
        self._leaves = [split_like(x, none) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        self.ends, self.results = [], []

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
        for x in self._leaves:
            if not (isinstance(x, torch.Tensor) or is_plain(x)):
                return f"it returns a {type(x).__name__}"
            if isinstance(x, torch.Tensor) and not isinstance(x, SplitTensor) and x.requires_grad:
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


class Captured(NamedTuple):
    """The program of a kind of calls, what its results belong to, and the layout of their gradients."""

    program: Program
    returned: Callable[[Iterable[torch.Tensor]], Any]
    differentiable: list[bool]
    strides: list[tuple[int, ...]]


def record(
    function: Callable[..., Any],
    given: Given,
    state: State,
    strides: Sequence[tuple[int, ...]],
    agreed: Callable[[str], str],
    nbytes: int,
) -> Captured:
    """Record a call on other numbers, forward and backward; blocking, collective.

    Buffers and random numbers are as before afterwards. ``agreed`` returns the first rank's problem to all of
    them, and ``NotCapturedError`` says it. ``strides`` are those of gradients, if they are known. A piece of
    the backward ends when it has ``nbytes`` of gradients.
    """
    others, weights, problem = list[torch.Tensor](), dict[int, torch.Tensor](), ""
    try:
        # In the range of the inputs: a function may take no others.
        others = [
            _with_numbers(x, lambda y: y * 0.75 + y.flip([*range(y.dim())]) * 0.25) for x in given.tensors
        ]
        parameters = chain.from_iterable(module._parameters.values() for module in state.modules)
        weights = {id(p): _with_numbers(p, lambda y: y * 0.75 + 0.125) for p in parameters if p is not None}
    except RuntimeError as error:
        problem = f"a tensor has elements in the same place: {error}"
    refuse(agreed(problem))
    recorder, before = Recorder(others, state.tensors, weights), _Before(state, others)
    gradients, found, ones = list[Any](), list[Any](), list[torch.Tensor]()
    with unchanged(state.fixed.values()):
        try:
            with recorder:
                attempt = Attempt(function, given, state, others, weights)
        except Exception as error:
            what = f"on other numbers than yours, on which it is recorded, it raises {type(error).__name__}"
            error.add_note("compile: raised while a call was recorded on other numbers than the program's")
            raise OtherNumbersError(f"{what}: {error}") from error
        finally:
            changed = before.restored()
        outputs, length = [recorder.slot(x) for x in attempt.results], len(recorder.steps)
        if any(recorder.kinds[slot.number] not in {COMPUTED, INPUT} for slot in outputs):
            changed = changed or "it returns a tensor of its own, and none that it computed"
        # A rank alone would wait for the others in the backward.
        refuse(agreed(recorder.problem or attempt.problem or changed))
        if any(attempt.differentiable):
            ends = [x for x in attempt.results if x.requires_grad]
            ones = [*map(torch.ones_like, ends)]
            if strides:
                ones = [_of_strides(x, each).fill_(1) for x, each in zip(ends, strides, strict=True)]
            gradients = [recorder.results(x) for x in ones]
            with recorder, no_autocast():
                derivatives = attempt.gradients(ones)
            found = [None if x is None else recorder.slot(x) for x in derivatives]
            refuse(agreed(recorder.problem))
    program = Program(recorder, length, outputs, gradients, found, nbytes)
    attempt.forget()
    return Captured(program, attempt.returned, attempt.differentiable, [x.stride() for x in ones])


def _of_strides(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype)


def _with_numbers(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    # A tensor of the same form; integers, as of classes, must stay in their range.
    found = _of_strides(x, x.stride())
    if x.storage_offset():
        size = x.storage_offset() + found.untyped_storage().nbytes() // x.element_size()
        found = torch.empty(size, dtype=x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
    some = x.detach()
    found.copy_(change(some) if x.is_floating_point() or x.is_complex() else some)
    return found.requires_grad_(x.requires_grad)


class _Before:
    """What a call changes beside results and buffers, and a replay would not."""

    def __init__(self, state: State, inputs: Sequence[torch.Tensor]) -> None:
        self._state, self._inputs, self._held = state, inputs, state.copy()
        self._versions = [x._version for x in inputs]
        self._numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - that of the user

    def restored(self) -> str:
        """Restore it; the reason why the call is not captured if something had changed."""
        drawn = repr((random.getstate(), np.random.get_state()))  # noqa: NPY002
        random.setstate(self._numbers[0])
        np.random.set_state(self._numbers[1])  # noqa: NPY002
        if changed := self._state.restore(self._held):
            return f"it changes {changed!r}, which is no buffer and no parameter"
        if self._versions != [x._version for x in self._inputs]:
            return "it changes an input in place"
        return "" if drawn == repr(self._numbers) else "it draws random numbers of Python or numpy"


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
