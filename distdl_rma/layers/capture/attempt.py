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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

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
from distdl_rma.layers.capture.recording import COMPUTED, INPUT, Recorder, ones_of, used_by
from distdl_rma.layers.capture.regions import CompilerError, Regions
from distdl_rma.layers.checks.gradient_origin import SHOWN, nodes_behind
from distdl_rma.layers.ops.core.tensors import no_autocast
from distdl_rma.layers.split.tensor import SplitTensor, checked_block

# Of the recorded call: no program has this one, so that a seed which it sets is another.
_SEED = 0x6A09E667F3BCC908


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
        known = {*map(id, state.learnt.values())}
        learnt = {
            id(p): _stand_in(p, weights.get(id(p), p))
            for p in chain.from_iterable(map(dict.values, tables))
            if p is not None and (weights or (graph and id(p) in known))
        }
        blocks = [x.view_as(x) if graph and x.requires_grad else x for x in tensors]
        # In the order in which a replay returns gradients.
        ends = [learnt[id(p)] for p in state.learnt.values()] if graph else []
        self.ends = [*ends, *(x for x in blocks if graph and x.requires_grad)]
        # Tables of parameters, and what they are in the call.
        self._tables = [(each, {key: learnt.get(id(p), p) for key, p in each.items()}) for each in tables]
        args, kwargs = given.rebuilt(blocks)
        with self._replaced():
            found = function(*args, **kwargs)
        leaves, form = tree_flatten(found)
        self._form = None if isinstance(found, torch.Tensor) else form
        # What the model returned, and of tensors among it, the blocks.
        self._leaves = leaves
        tensors_of = [x for x in leaves if isinstance(x, torch.Tensor)]
        self.results = [checked_block(x) if isinstance(x, SplitTensor) else x for x in tensors_of]
        self.differentiable = [x.requires_grad for x in self.results]
        self.plain = [x for x in leaves if not isinstance(x, torch.Tensor)]
        # The first of the results that are one object, and which of these each result is.
        first = {id(x): n for n, x in reversed([*enumerate(tensors_of)])}
        self.chosen = sorted(first.values())
        self._which = [self.chosen.index(first[id(x)]) for x in tensors_of]

    def returned(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returned, with other tensors in the place of its ``chosen`` results."""
        given = [x for x in self._leaves if isinstance(x, torch.Tensor)]
        made = [split_like(given[n], x) for n, x in zip(self.chosen, tensors, strict=True)]
        others = iter([made[n] for n in self._which])
        leaves = [next(others) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return restored(leaves, self._form)

    def forget(self) -> None:
        """Keep the form of what the model returned only, and no tensor of the call."""
        none = torch.empty(0)
        self._leaves = [split_like(x, none) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        self.ends, self.results, self._tables = [], [], []

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        before = [each.copy() for each, _ in self._tables]
        try:
            for each, new in self._tables:
                each.update(new)
            yield
        finally:
            for (each, _), old in zip(self._tables, before, strict=True):
                each.update(old)

    def gradients(
        self, chosen: Sequence[int], given: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of ``ends`` for those of the ``chosen`` results; blocking, collective."""
        roots = [self.results[n] for n, x in zip(chosen, given, strict=True) if x is not None]
        values, engine = [x for x in given if x is not None], torch.autograd.Variable._execution_engine
        # keep_graph is True, create_graph False, allow_unreachable True, accumulate_grad False.
        how = True, False, tuple(self.ends), True, False
        # A checkpoint calls modules again.
        with self._replaced():
            found: Any = engine.run_backward(tuple(roots), tuple(values), *how)
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
    """The program of a kind of calls, the recorded call, and strides of the gradients of its outputs.

    They are None for an output that gets no gradient.
    """

    program: Program
    attempt: Attempt
    strides: list[tuple[int, ...] | None]

    @property
    def chosen(self) -> list[int]:
        """Which results the outputs are: the first of those that are one object."""
        return self.attempt.chosen

    @property
    def differentiable(self) -> list[bool]:
        """Of each output."""
        return [self.attempt.differentiable[n] for n in self.chosen]


def record(
    function: Callable[..., Any],
    given: Given,
    state: State,
    strides: Sequence[tuple[int, ...] | None],
    agreed: Callable[[str], str],
    nbytes: int,
    told: Callable[[int], object] | None = None,
) -> Captured:
    """Record a call on other numbers, forward and backward; blocking, collective.

    Buffers and random numbers are as before afterwards. ``agreed`` returns the first rank's problem to all of
    them, and ``NotCapturedError`` says it. ``strides`` are those of gradients, if they are known. A piece of
    the backward ends when it has ``nbytes`` of gradients. With ``told`` the steps are compiled, and it is
    called with the number of regions that are; ``CompilerError`` on all ranks if one of them cannot.
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
    recorder, before = Recorder(others, state.tensors, weights, told is not None), _Before(state, others)
    gradients, found, ones = list[Any](), list[Any](), list[torch.Tensor | None]()
    with unchanged(state.fixed.values()):
        torch.manual_seed(_SEED)
        try:
            with recorder:
                attempt = Attempt(function, given, state, others, weights)
        except Exception as error:
            what = f"on other numbers than yours, on which it is recorded, it raises {type(error).__name__}"
            error.add_note("compile: raised while a call was recorded on other numbers than the program's")
            raise OtherNumbersError(recorder.problem or f"{what}: {error}") from error
        finally:
            changed = before.restored()
            if torch.initial_seed() != _SEED:
                changed = changed or "it sets the seed of random numbers"
        chosen = attempt.chosen
        outputs = [recorder.slot(attempt.results[n]) for n in chosen]
        length = len(recorder.steps)
        own = {n for n, *_ in outputs if recorder.kinds[n] not in {COMPUTED, INPUT}}
        # But a buffer that it has changed.
        if own - used_by(step for step in recorder.steps if step.results is None):
            changed = changed or "it returns a tensor of its own, and none that it computed"
        able = [n for n in chosen if attempt.differentiable[n]]
        memory = [recorder.memory(recorder.slot(attempt.results[n]).number) for n in able]
        if len({*memory}) < len(memory):
            changed = changed or "two results of it show the same memory; return a clone() of one"
        # A rank alone would wait for the others in the backward.
        refuse(agreed(recorder.problem or attempt.problem or changed))
        if able:
            results = [attempt.results[n].detach() for n in able]
            ones = [*map(torch.ones_like, results)]
            if strides:
                both = zip(results, strides, strict=True)
                ones = [None if each is None else ones_of(x, each) for x, each in both]
            gradients = [recorder.results(x) for x in ones if x is not None]
            with recorder, no_autocast():
                derivatives = attempt.gradients(able, ones)
            found = [None if x is None else recorder.slot(x) for x in derivatives]
            refuse(agreed(recorder.problem))
    attempt.forget()
    make = partial(Program, recorder, length, outputs, gradients, found, nbytes)
    program = make() if told is None else _compiled(make, Regions(recorder, told), agreed)
    return Captured(program, attempt, [None if x is None else x.stride() for x in ones])


def _compiled(make: Callable[[Regions], Program], regions: Regions, agreed: Callable[[str], str]) -> Program:
    found, problem = list[Program](), ""
    try:
        found.append(make(regions))
    except CompilerError as error:
        problem = str(error)
    if problem := agreed(problem):
        raise CompilerError(problem)
    return found[0]


def recorded_strides(x: torch.Tensor, compiles: bool) -> tuple[int, ...]:
    """Strides in which a gradient is recorded: for a compiler, dense ones if its elements share memory."""
    return x.contiguous().stride() if compiles and 0 in x.stride() else x.stride()


def laid_out(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor with such strides; without, where these put elements in one place."""
    if x.stride() == strides:
        return x
    shared = any(not each and n > 1 for n, each in zip(x.shape, strides, strict=True))
    return x.contiguous() if shared else torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


def _with_numbers(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    # A tensor of the same form; integers, as of classes, must stay in their range.
    found, some = ones_of(x, x.stride(), x.storage_offset()), x.detach()
    found.copy_(change(some) if x.is_floating_point() or x.is_complex() else some)
    return found.requires_grad_(x.requires_grad)


class _Before:
    """What a call changes beside results and buffers, and a replay would not."""

    def __init__(self, state: State, inputs: Sequence[torch.Tensor]) -> None:
        self._state, self._inputs = state, inputs
        self._versions = [x._version for x in inputs]
        # Generators of numpy hold another one.
        self._generators = [getattr(each, "bit_generator", each) for each in state.generators]
        self._numbers = [each.__getstate__() for each in self._generators]

    def restored(self) -> str:
        """Restore it; the reason why the call is not captured if something had changed."""
        drawn = [each.__getstate__() for each in self._generators]
        for each, numbers in zip(self._generators, self._numbers, strict=True):
            each.__setstate__(numbers)
        try:
            changed = self._state.restore()
        except Exception as error:  # noqa: BLE001 - all ranks refuse the call
            return f"it changes what cannot be put back: {type(error).__name__}: {error}"
        if changed:
            return f"it changes {changed!r}, which is no buffer and no parameter"
        if self._versions != [x._version for x in self._inputs]:
            return "it changes an input in place"
        return "" if str(drawn) == str(self._numbers) else "it draws random numbers of Python or numpy"


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
