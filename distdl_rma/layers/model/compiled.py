"""``model.compile()`` of a distributed model: calls of a known kind are replayed without their rules.

What happens to a call, by its kind (``capture/kinds.py``)::

    new          recorded on other numbers, forward and backward; ranks agree that all can replay it
      |          then, in the same call, and until a backward has been compared:
    compared     replayed and run by the split model, on the user's numbers: results, buffers and
      |          gradients must be equal, bit by bit. The user gets those of the split model
    known        replayed
    refused      run by the split model (``fallback=True``), or an error on all ranks

Where it happens: torch calls ``model._compiled_call_impl`` in place of a module that is compiled, hooks
included. A known kind is replayed there; any other call goes the way of the split model, and takes part in
its comparisons of ranks, but with ``_met`` in place of the forward.

Agreement. All ranks must do the same with a call, since all of it exchanges data:

- replays: the comparison with which every call begins (``Calls.begin``), of the number of the kind in place
  of the facts of a call. It ends before the first operation: a rank that does otherwise is an error on all;
- the rest, which is rare: words, exchanged before each step (``_agree``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from distdl_rma.errors import DistdlError, MismatchError, UnsupportedError
from distdl_rma.layers.capture.attempt import Attempt, Captured, capture, unchanged
from distdl_rma.layers.capture.kinds import Given, NotCapturedError, State
from distdl_rma.layers.capture.program import InGraph, Kept
from distdl_rma.layers.checks.gradient_origin import note_reached_split
from distdl_rma.layers.checks.model_calls import CallTrace
from distdl_rma.layers.checks.user_frames import warn_user
from distdl_rma.layers.dtypes import is_readable
from distdl_rma.layers.ops.core.autograd import compiles, tracer
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.calls.site import CALL_TRACES
from distdl_rma.layers.split.calls.table import OBSERVERS
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.machine import Machine

_MOST = 8
_has_any_global_hook: Any = torch_module._has_any_global_hook
_hooks_of_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks
_ADVICE = "compile(fallback=True) runs such calls by the split model, and without compile() all are"


@dataclass
class _Kind:
    """A kind of calls. ``captured`` is None if it is refused.

    ``strides`` are set if the gradients of a backward had other ones than those of the recording, and the
    next call records ``again``, once.
    """

    number: int
    facts: Any
    state: State
    captured: Captured | None
    known: bool = False
    strides: list[tuple[int, ...]] | None = None
    again: bool = False


class Compiled:
    """Calls of a distributed model that replay what they have recorded; see the head of this file.

    Invariant: all ranks have the same kinds with the same numbers, and know each of them after the same call.
    """

    def __init__(self, handle: Any, model: nn.Module, fallback: bool) -> None:
        # The ``Distributed`` of the model, whose file imports this one.
        self._handle, self._model, self._fallback = handle, model, fallback
        self.kinds: list[_Kind] = []
        self._numbers = count()
        self._warned = False
        self._ranks: tuple[int, ...] = ()

    @property
    def machine(self) -> Machine:
        """Of the model."""
        found: Machine = self._handle.machine
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        model, handle = self._model, self._handle
        if not _usual() or CALL_TRACES:
            return model._call_impl(*args, **kwargs)
        if self.kinds:
            split = next((x for x in tensors_in(args, kwargs) if isinstance(x, SplitTensor)), None)
            kind = found = None
            try:
                cut = (args, kwargs) if split is not None else handle.cut((args, kwargs), in_graph=True)
                found = Given(cut, _modes())
                kind = self._kind(found)
            except (NotCapturedError, DistdlError):
                # The split model tells the user.
                pass
            if kind is not None and kind.known and found is not None:
                grid = handle.grid if split is None else split.partition
                return self._replayed(kind, found, handle._calls_of(grid), tensors_in(args, kwargs))
        forward = vars(model).get("forward", self)
        vars(model)["forward"] = partial(self._met, forward, model.forward)
        try:
            return model._call_impl(*args, **kwargs)
        finally:
            self._put_back(forward)

    def _put_back(self, forward: Any) -> None:
        vars(self._model).pop("forward", None)
        if forward is not self:
            vars(self._model)["forward"] = forward

    def _kind(self, found: Given) -> _Kind | None:
        # The latest ones are the likely ones.
        for kind in reversed(self.kinds):
            if kind.facts == found.facts and kind.state.is_unchanged():
                return kind
        return None

    def _replayed(self, kind: _Kind, found: Given, calls: Any, passed: Sequence[torch.Tensor]) -> Any:
        plain = [x for x in passed if not isinstance(x, SplitTensor) and is_readable(x)]
        described = partial(self._described, kind, passed)
        calls.begin((-1, kind.number), described, trace := CallTrace(), plain, self._handle._checks)
        try:
            result = _Replay(self.machine, kind.captured).run(self._learnt(kind), found.tensors)
        except Exception as error:
            calls.failed(error, trace)
            raise
        calls.abandon()
        return result

    def _described(self, kind: _Kind, passed: Sequence[torch.Tensor]) -> str:
        return f"{self._handle._described(passed, '[]')}; replays kind {kind.number} of its calls"

    def _learnt(self, kind: _Kind) -> list[torch.Tensor]:
        return kind.state.learnt if torch.is_grad_enabled() else []

    def _agree(self, what: str, words: Any) -> dict[int, Any]:
        return gather_words(self.machine.segments, words, f"compile: {what}", self._ranks)

    def agreed(self, problem: str) -> str:
        """The problem of the first rank that has one; empty if none has. Collective."""
        found = [f"rank {rank}: {its}" for rank, its in self._agree("problems", problem).items() if its]
        return found[0] if found else ""

    def _met(self, before: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # In place of the model's forward, for a call that is not known: the arguments are cut.
        self._put_back(before)
        self._ranks = self._handle.running_ranks
        found, problem, kind = None, self._problem(), None
        try:
            found = Given((args, kwargs), _modes())
            kind = self._kind(found)
        except NotCapturedError as error:
            problem = problem or str(error)
        which = -1 if kind is None else kind.number
        if len({*map(str, self._agree("kinds", [which, len(self.kinds)]).values())}) > 1:
            raise MismatchError(
                f"{self._handle._name}: a call is of a kind that some ranks have recorded, and others have"
                " not: do modules have other attributes on some ranks?"
            )
        if kind is None and len(self.kinds) == _MOST:
            if not self._warned:
                self._warned = True
                warn_user(
                    f"{self._handle._name}: it was called in {_MOST} ways with other shapes, types, modes or"
                    " attributes; calls of more kinds are not compiled, and run by the split model"
                )
            return forward(*args, **kwargs)
        if kind is None or kind.again:
            kind = self._recorded(forward, found, problem, kind)
        if kind.captured is None or found is None:
            return forward(*args, **kwargs)
        return self._compared(kind, forward, found)

    def _recorded(
        self, forward: Callable[..., Any], found: Given | None, problem: str, kind: _Kind | None
    ) -> _Kind:
        state, captured, trace = State(self._model), None, CallTrace()
        CALL_TRACES.append(trace)
        try:
            if (problem := self.agreed(problem)) or found is None:
                raise NotCapturedError(problem)
            strides = (kind and kind.strides) or []
            captured = capture(self._model, forward, found, state, strides, self.agreed)
        except NotCapturedError as error:
            self._refuse(str(error))
        finally:
            CALL_TRACES.pop()
        if len({*self._agree("functions", trace.number).values()}) > 1:
            raise MismatchError(f"{self._handle._name}: the ranks have recorded different functions")
        if kind is None:
            facts = None if found is None else found.facts
            self.kinds.append(kind := _Kind(next(self._numbers), facts, state, None))
        kind.state, kind.captured, kind.again = state, captured, False
        return kind

    def _refuse(self, why: str) -> None:
        text = f"{self._handle._name}: compile: a call cannot be replayed: {why}"
        if not self._fallback:
            raise UnsupportedError(f"{text}; {_ADVICE}")
        warn_user(f"{text}; calls of this kind are run by the split model")

    def _problem(self) -> str:
        # What no recording would show.
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        for path, module in self._model.named_modules():
            of_user = len(module._forward_pre_hooks), len(module._forward_hooks)
            if (
                of_user != ((1, 1) if path else (3, 2))
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                return f"module {path or 'model'!r} has hooks of the user's"
            if isinstance(module, DistributedLayer):
                return f"module {path!r} is a layer whose ranks agree on shapes in each call"
            if any(not x.is_cpu for x in module._parameters.values() if x is not None):
                return f"module {path!r} is not on the CPU"
        return ""

    def _compared(self, kind: _Kind, forward: Callable[..., Any], found: Given) -> Any:
        # The split model's results, once they are those of a replay, too.
        replay, state = _Replay(self.machine, kind.captured), kind.state
        with unchanged(state.fixed.values()), torch.no_grad():
            outputs, kept = replay.program.forward(found.tensors)
            buffers = [x.clone() for x in state.fixed.values()]
            drawn = torch.get_rng_state()
        attempt = Attempt(self._model, forward, found, found.tensors, {})
        results = [x.detach() for x in attempt.results]
        names = [*map("result {}".format, range(len(results))), *state.fixed]
        different = _first_different(names, [*outputs, *buffers], [*results, *state.fixed.values()])
        if not torch.equal(drawn, torch.get_rng_state()):
            different = different or "the state of random numbers"
        if self.is_different(kind, different) or not any(attempt.differentiable):
            kind.known = kind.captured is not None
            return attempt.returned(attempt.results)
        behind = [*self._learnt(kind), *[x for x in found.tensors if x.requires_grad]]
        call = _Comparison(self, kind, attempt, replay)
        tensors = InGraph.apply(call, tuple(results), kept, attempt.differentiable, *behind)
        return attempt.returned(tensors)

    def is_different(self, kind: _Kind, what: str) -> bool:
        """Whether a replay differs on any rank; an error unless such calls go on uncompiled. Collective."""
        if found := self.agreed(what):
            if not self._fallback:
                self.kinds.remove(kind)
            kind.captured, kind.known = None, False
            self._refuse(f"{found} of a replay differs from the split model's")
        return bool(found)


class _Replay:
    """One call of a known kind."""

    def __init__(self, machine: Machine, captured: Captured | None) -> None:
        if captured is None:
            raise UnsupportedError("a call that cannot be replayed is replayed")
        self.machine, self.program, self.captured = machine, captured.program, captured

    def run(self, learnt: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns; blocking, collective."""
        captured = self.captured
        with torch.no_grad():
            outputs, kept = self.program.forward(tensors)
        if any(captured.differentiable):
            behind = (*learnt, *[x for x in tensors if x.requires_grad])
            outputs = InGraph.apply(self, outputs, kept, captured.differentiable, *behind)
        return captured.returned(outputs)

    def backward(self, kept: Kept, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Gradients of parameters and inputs; blocking, collective."""
        return self.program.backward(kept, self.given(gradients))

    def given(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Gradients of all differentiable results; ``UnsupportedError`` if a result got none."""
        able = [x for x, each in zip(gradients, self.captured.differentiable, strict=True) if each]
        missing = [at for at, x in enumerate(able) if x is None]
        if missing:
            raise UnsupportedError(
                f"compile: differentiable result {missing[0]} of a compiled model gets no gradient in this"
                " backward, and a replay has one backward, from all results: return those that the loss uses,"
                " or call detach() on the others in the model"
            )
        # In the layout of the results: that of the number 1 for all elements, as of sum(), would be another.
        return [
            x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
            for x, strides in zip(able, self.captured.strides, strict=True)
            if x is not None
        ]


class _Comparison:
    """A call that is replayed and run by the split model; its backward compares the gradients, and agrees."""

    def __init__(self, owner: Compiled, kind: _Kind, attempt: Attempt, replay: _Replay) -> None:
        self._owner, self._kind, self._attempt, self._replay = owner, kind, attempt, replay
        self.machine = owner.machine

    def backward(self, kept: Kept, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Gradients of the split model; blocking, collective."""
        kind, owner, replay = self._kind, self._owner, self._replay
        given, passed = replay.given(gradients), [x for x in gradients if x is not None]
        found, compares = replay.program.backward(kept, given), kind.captured is replay.captured
        if compares and kind.strides is None:
            # Those of a gradient with elements of its own; not those of one number for all elements.
            alike = [torch.empty_like(x).stride() == x.stride() for x in passed]
            own = [(x if dense else y).stride() for x, y, dense in zip(passed, given, alike, strict=True)]
            if owner.agreed("" if own == replay.captured.strides else "other strides"):
                kind.strides, kind.again, compares = own, True, False
        true = self._attempt.gradients(given if compares else passed)
        # The engine of the inner graph has a number of its own.
        note_reached_split()
        names = [f"the gradient of {name!r}" for name in kind.state.names]
        names += [f"the gradient of input {at}" for at in range(len(true) - len(names))]
        if compares and not kind.again:
            kind.known = not owner.is_different(kind, _first_different(names, found, true))
        return true


def _first_different(names: Iterable[str], found: Iterable[Any], true: Iterable[Any]) -> str:
    for name, one, other in zip(names, found, true, strict=False):
        if (one is None) != (other is None):
            return name
        if one is not None and not _equal(one, other):
            return name
    return ""


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # NaN is NaN.
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _usual() -> bool:
    # Whether nothing is on that acts on calls of Python, and that a replay would not see.
    return not (
        compiles() is not None
        or tracer()
        or torch.is_inference_mode_enabled()
        or _hooks_of_saved(False) is not None
        or _has_any_global_hook()
        or OBSERVERS
        or forward_ad._current_level >= 0
    )


def _modes() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
