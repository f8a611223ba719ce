"""``model.compile()`` and ``capture``: calls of a known kind are replayed without the rules of functions.

What happens to a call, by its kind (``capture/kinds.py``)::

    new          recorded on other numbers, forward and backward, and compiled by Inductor; ranks agree
      |          that all can replay it. Then, in the same call, and until a backward has been compared:
    compared     replayed and run by the split model, on the user's numbers: results, buffers and
      |          gradients must be equal, bit by bit, or to rounding if they are compiled. The user gets
      |          those of the split model
    known        replayed
    refused      run by the split model (``fallback=True``), or an error on all ranks

Agreement. All ranks must do the same with a call, since all of it exchanges data. Each call begins with the
comparison with which each call of a split model begins (``Calls.begin``); the number of its kind is one of
the facts that must be alike. It ends before the first operation: a rank that does otherwise is an error on
all.
What follows in a call of a new kind is rare: words, exchanged before each step (``agreed``).
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from distdl_rma.errors import ConfigurationError, DistdlError, UnsupportedError
from distdl_rma.layers.capture.attempt import Attempt, Captured, laid_out, record, recorded_strides, unchanged
from distdl_rma.layers.capture.kinds import Given, NotCapturedError, OtherNumbersError, State, alike, refuse
from distdl_rma.layers.capture.program import Backward, Gradients, Kept
from distdl_rma.layers.capture.regions import CompilerError
from distdl_rma.layers.checks.gradient_origin import note_reached_split
from distdl_rma.layers.checks.model_calls import Calls, CallTrace
from distdl_rma.layers.checks.user_frames import warn_user
from distdl_rma.layers.dtypes import is_readable
from distdl_rma.layers.ops.core.allocator import freed_at_once
from distdl_rma.layers.ops.core.autograd import compiles, hooks_of_saved, tracer
from distdl_rma.layers.ops.core.result_memory import drop_idle
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.calls.site import CALL_TRACES
from distdl_rma.layers.split.calls.table import OBSERVERS
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.machine import Machine

# Kinds, and recordings of one for gradients of other layouts.
_MOST, _TIMES = 8, 3
# Of compiled kernels, times the root of the resolution: 1e-3 in float32.
_ROUNDING = 3.0
# Times the deadline of a wait for others: they may compile for minutes.
_PATIENCE = 20
_has_any_global_hook: Any = torch_module._has_any_global_hook
_UNREAD = "an object that it names cannot be read"
_ADVICE = "compile(fallback=True) runs such calls by the split model, and without compile() all are"


@dataclass
class _Kind:
    """A kind of calls. ``captured`` is None if it is refused.

    ``strides`` are set if a backward had other gradients than the recorded one: of other results, or in
    other layouts. Then the next call records ``again``, some ``times``. ``raised`` is what recording raised.
    """

    number: int
    facts: Any
    state: State
    captured: Captured | None
    known: bool = False
    strides: Sequence[tuple[int, ...] | None] = ()
    times: int = 0
    again: bool = False
    seconds: float = 0.0
    raised: str = ""

    def __str__(self) -> str:
        if self.captured is None:
            return f"{self.number}: runs by the split model"
        program, state = self.captured.program, "is replayed" if self.known else "is not compared yet"
        return (
            f"{self.number}: {program.steps} steps, {program.operations} of them exchange data and"
            f" {program.regions} are compiled regions; recorded in {self.seconds:.2f} s, {state}"
        )


class Compiled:
    """Calls of a step, which are replayed once their kind is known; see the head of this file.

    The step is a distributed model, or a function that calls one.

    Invariant: all ranks have the same kinds with the same numbers, and know each of them after the same call.
    """

    def __init__(
        self,
        handle: Any,
        model: nn.Module,
        fallback: bool,
        backend: str,
        step: Callable[..., Any] | None = None,
    ) -> None:
        # The ``Distributed`` of the model, whose file imports this one.
        self._handle, self._model, self._fallback, self._step = handle, model, fallback, step
        self.fuses = backend == "inductor"
        self.machine: Machine = handle.machine
        self._function: Callable[..., Any] = step or model._call_impl
        self.kinds: list[_Kind] = []
        self._numbers, self._warned = count(), False
        self._ranks: tuple[int, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step; blocking, collective."""
        if CALL_TRACES or not _usual():
            return self._function(*args, **kwargs)
        passed, problem = tensors_in(args, kwargs), ""
        whole = not any(isinstance(x, SplitTensor) for x in passed)
        try:
            # Whole inputs of a model may have gradients, which their parts take there.
            cuts = self._step is None and whole
            given = self._handle.cut((args, kwargs), in_graph=True) if cuts else (args, kwargs)
            found = Given(given, _modes())
        except NotCapturedError as error:
            found, problem = None, str(error)
        except DistdlError:
            # The split model tells the user.
            return self._function(*args, **kwargs)
        kind, calls = self._kind(found), self._handle.calls_with(passed)
        if kind is not None and kind.known and found is not None:
            return self._replayed(kind, found, calls, passed)
        if kind is None or kind.captured is not None:
            which = -1 if kind is None else kind.number
            self._handle.begin(calls, passed, (args, kwargs), trace := CallTrace(), len(self.kinds), which)
            if kind is None and len(self.kinds) == _MOST:
                calls.abandon()
                self._warn_of_many()
            else:
                # No later call takes so much memory: it goes back.
                with self._apart(calls, trace), freed_at_once(pieces=False):
                    if kind is None or kind.again:
                        kind = self._recorded(found, problem or self._problem(), kind, calls, trace)
                    if kind.captured is not None and found is not None:
                        return self._compared(kind, found)
        result = self._function(*args, **kwargs)
        if kind is not None and kind.raised:
            # The program's numbers did not raise it.
            self._refuse(kind.raised)
        return result

    def _warn_of_many(self) -> None:
        # Once: to find what has changed takes as long as to copy all that is compared.
        if not self._warned:
            self._warned = True
            changed = next((f", such as {name!r}" for name, _ in self.kinds[-1].state.changes()), "")
            warn_user(
                f"{self._handle.name}: it was called in {_MOST} ways with other shapes, types, modes or"
                f" attributes{changed}; calls of more kinds are not compiled, and run by the split model"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A copy has recorded nothing.
        return {**vars(self), "kinds": []}

    def __repr__(self) -> str:
        kinds = [str(kind) for kind in self.kinds]
        return "\n".join([f"{len(kinds)} kinds of calls of {self._handle.name}", *kinds])

    def _kind(self, found: Given | None) -> _Kind | None:
        # The latest ones are the likely ones.
        for kind in reversed(self.kinds):
            if found is not None and kind.facts == found.facts and kind.state.is_unchanged():
                return kind
        return None

    def _replayed(self, kind: _Kind, found: Given, calls: Any, passed: Sequence[torch.Tensor]) -> Any:
        plain = [x for x in passed if not isinstance(x, SplitTensor) and is_readable(x)]

        def described() -> str:
            return f"{self._handle.described(passed, '[]')}; replays kind {kind.number} of its calls"

        calls.begin((-1, kind.number), described, trace := CallTrace(), plain, self._handle.checks)
        try:
            result = _Replay(self.machine, kind.captured).run(self._learnt(kind), found.tensors)
        except Exception as error:
            calls.failed(error, trace)
            raise
        calls.abandon()
        return result

    def _learnt(self, kind: _Kind) -> list[torch.Tensor]:
        return [*kind.state.learnt.values()] if torch.is_grad_enabled() else []

    def agreed(self, problem: str) -> str:
        """The problem of the first rank that has one; empty if none has. Collective."""
        given = gather_words(self.machine.segments, problem, "compile: problems", self._ranks)
        return next((f"rank {rank}: {its}" for rank, its in given.items() if its), "")

    @contextmanager
    def _apart(self, calls: Calls, trace: CallTrace) -> Iterator[None]:
        # Context in which the model's hooks compare nothing: the step is compared as a whole.
        self._ranks, self._handle.recorded = calls.ranks, True
        CALL_TRACES.append(trace)
        try:
            yield
        except Exception as error:
            calls.failed(error, trace)
            raise
        else:
            calls.end(trace)
        finally:
            CALL_TRACES.pop()
            self._handle.recorded = False

    def _recorded(
        self, found: Given | None, problem: str, kind: _Kind | None, calls: Calls, trace: CallTrace
    ) -> _Kind:
        captured, raised, began = None, "", time.perf_counter()
        strides = () if kind is None else kind.strides
        # A recording must not read values; the run of the split model notes plain tensors.
        noted, trace.met = trace.met, None
        try:
            state = State(self._model, self._step)
        except Exception as error:  # noqa: BLE001 - all ranks refuse the call
            state, problem = State(nn.Module()), f"{_UNREAD}: {type(error).__name__}: {error}"
        try:
            refuse(self.agreed(problem))
            if found is not None:
                captured = self._captured(found, state, strides)
        except OtherNumbersError as error:
            cause, raised = error.__cause__ or error, str(error)
            calls.failed(cause, trace)
            if self.machine.segments.notices.any_failed:
                raise cause from None
        except NotCapturedError as error:
            self._refuse(str(error))
        trace.met = noted
        if kind is None:
            kind = _Kind(next(self._numbers), found and found.facts, state, None)
            # Arguments that have no description are refused in each call.
            self.kinds += [kind] if found is not None else []
        kind.state, kind.captured, kind.again, kind.raised = state, captured, False, raised
        kind.seconds += time.perf_counter() - began
        return kind

    def _captured(self, found: Given, state: State, strides: Sequence[tuple[int, ...] | None]) -> Captured:
        given = self._function, found, state, strides, self.agreed, self._handle.bucket_nbytes
        with _compiling(self._handle.name, self.machine) as told:
            try:
                return record(*given, told if self.fuses else None)
            except CompilerError as error:
                self.fuses = False
                warn_user(
                    f"{self._handle.name}: compile: Inductor compiles nothing here, so calls are replayed by"
                    f" torch's kernels, as by compile(backend='replay'): {error}"
                )
                return record(*given)
            finally:
                # The compiler leaves cycles of objects behind.
                gc.collect() if self.fuses else None
                drop_idle()

    def _refuse(self, why: str) -> None:
        text = f"{self._handle.name}: compile: a call cannot be replayed: {why}"
        if not self._fallback:
            raise UnsupportedError(f"{text}; {_ADVICE}")
        warn_user(f"{text}; calls of this kind are run by the split model")

    def _problem(self) -> str:
        # What no recording would show.
        try:
            # Torch does it in a recording, and makes the directory of what it has compiled.
            import_module("torch._dynamo")
        except (ImportError, OSError) as error:
            return f"torch cannot load its compiler: {error}"
        for path, module in self._model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                return f"module {path or 'model'!r} has backward hooks"
            if isinstance(module, DistributedLayer):
                return f"module {path!r} is a layer whose ranks agree on shapes in each call"
            if any(not x.is_cpu for x in module._parameters.values() if x is not None):
                return f"module {path!r} is not on the CPU"
        return ""

    def _compared(self, kind: _Kind, found: Given) -> Any:
        # The split model's results, once they are those of a replay, too.
        replay, state = _Replay(self.machine, kind.captured), kind.state
        with unchanged(state.fixed.values()), torch.no_grad():
            outputs, kept = replay.program.forward(found.tensors)
            after = _after(state)
        attempt = Attempt(self._function, found, state, found.tensors, {})
        captured = replay.captured
        results = [attempt.results[n].detach() for n in captured.chosen]
        different = replay.first_different(map("result {}".format, captured.chosen), outputs, results)
        different = different or replay.first_different(*after, _after(state)[1])
        if not alike(tuple(attempt.plain), tuple(captured.attempt.plain)):
            different = different or f"a plain result, {captured.attempt.plain} in place of {attempt.plain},"
        if self.is_different(kind, different) or not any(attempt.differentiable):
            kind.known = kind.captured is not None
            return attempt.returned([attempt.results[n] for n in attempt.chosen])
        behind = [*self._learnt(kind), *[x for x in found.tensors if x.requires_grad]]
        backward = Backward(_Comparison(self, kind, attempt, replay), [[*range(len(behind))]])
        return attempt.returned(backward.behind(tuple(results), kept, captured.differentiable, behind))

    def is_different(self, kind: _Kind, what: str) -> bool:
        """Whether a replay differs on any rank; an error unless such calls go on uncompiled. Collective."""
        if found := self.agreed(what):
            if not self._fallback:
                self.kinds.remove(kind)
            kind.captured, kind.known = None, False
            self._refuse(f"{found} of a replay differs from the split model's")
        return bool(found)


@contextmanager
def _compiling(name: str, machine: Machine) -> Iterator[Callable[[int], None]]:
    # Ranks wait longer for each other; and a line for the user, on the first rank, says how many regions of a
    # call Inductor has compiled.
    waiter, began = machine.segments.waiter, time.perf_counter()
    shows, timeout = machine.rank == 0 and sys.stderr.isatty(), waiter.timeout
    waiter.timeout = timeout * _PATIENCE

    def told(regions: int) -> None:
        if shows:
            seconds = time.perf_counter() - began
            sys.stderr.write(f"\r{name}: Inductor has compiled {regions} regions, {seconds:.0f} s")
            sys.stderr.flush()

    try:
        yield told
    finally:
        waiter.timeout = timeout
        if shows:
            sys.stderr.write("\n")


class _Replay:
    """One call of a known kind."""

    def __init__(self, machine: Machine, captured: Any) -> None:
        self.captured: Captured = captured
        self.machine, self.program = machine, self.captured.program
        self.rounding = _ROUNDING * self.program.resolution**0.5

    def run(self, learnt: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        """What the model returns; blocking, collective."""
        captured = self.captured
        with torch.no_grad():
            outputs, kept = self.program.forward(tensors)
        if any(captured.differentiable):
            behind = (*learnt, *[x for x in tensors if x.requires_grad])
            backward = Backward(self, self.program.pieces)
            outputs = backward.behind(outputs, kept, captured.differentiable, behind)
        else:
            # One of them may be an input.
            outputs = tuple(y.detach() for y in outputs)
        return captured.attempt.returned(outputs)

    def backward(
        self, some: Gradients, kept: Kept, gradients: Sequence[torch.Tensor | None]
    ) -> Iterator[None]:
        """Put gradients of parameters and inputs into ``some``, by pieces; blocking, collective."""
        return self.program.backward(some, kept, self.given(gradients))

    def given(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The gradients in the recorded layout; ``UnsupportedError`` if they are of other results."""
        able, strides = self.able(gradients), self.captured.strides
        if [x is None for x in able] != [each is None for each in strides]:
            raise UnsupportedError(
                "compile: a backward begins at other results of a compiled model than its first backward, and"
                " a replay has one backward: return what the loss uses, or detach() the others in the model"
            )
        both = zip(able, strides, strict=True)
        return [laid_out(x, each) for x, each in both if x is not None and each is not None]

    def first_different(self, names: Iterable[str], found: Iterable[Any], true: Iterable[Any]) -> str:
        """The first tensor that differs from the split model's by more than rounding; empty if none does."""
        return _first_different(names, found, true, lambda x: self.rounding and self.rounding * _largest([x]))

    def able(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Those of differentiable results."""
        return [x for x, each in zip(gradients, self.captured.differentiable, strict=True) if each]


def _after(state: State) -> tuple[list[str], list[torch.Tensor]]:
    # What a call may have changed: buffers, and the state of random numbers.
    values = [*map(torch.clone, state.fixed.values()), torch.get_rng_state()]
    return [*state.fixed, "the state of random numbers"], values


class _Comparison:
    """A call that is replayed and run by the split model; its backward compares the gradients, and agrees."""

    def __init__(self, owner: Compiled, kind: _Kind, attempt: Attempt, replay: _Replay) -> None:
        self._owner, self._kind, self._attempt, self._replay = owner, kind, attempt, replay
        self.machine = owner.machine

    def backward(
        self, some: Gradients, kept: Kept, gradients: Sequence[torch.Tensor | None]
    ) -> Iterator[None]:
        """Put gradients of the split model into ``some``, in one piece; blocking, collective."""
        kind, owner, replay = self._kind, self._owner, self._replay
        captured, able = replay.captured, replay.able(gradients)
        own = [x if x is None else recorded_strides(x, owner.fuses) for x in able]
        again = False
        compares = kind.captured is captured
        if compares and kind.times < _TIMES:
            again = bool(owner.agreed("" if own == captured.strides else "other gradients"))
        found, after = Gradients(), (list[str](), list[torch.Tensor]())
        if compares and not again:
            given = replay.given(gradients)
            able = [given.pop(0) if x is not None else None for x in able]
            with unchanged(kind.state.fixed.values()):
                for _ in captured.program.backward(found, kept, [x for x in able if x is not None]):
                    pass
                # A checkpoint computes again, and so may change buffers and draw.
                after = _after(kind.state)
        elif again:
            kind.strides, kind.again, kind.times = own, True, kind.times + 1
        chosen = [n for n, each in zip(captured.chosen, captured.differentiable, strict=True) if each]
        true = self._attempt.gradients(chosen, able)
        # The engine of the inner graph has a number of its own.
        note_reached_split()
        names = [f"the gradient of {name!r}" for name in kind.state.learnt]
        names += [f"the gradient of input {at}" for at in range(len(true) - len(names))]
        if compares and not again:
            places = [*chain.from_iterable(captured.program.pieces)]
            found = [found[places.index(n)] for n in range(len(places))]
            # A small gradient, or one that is zero but for rounding, is a sum of large numbers.
            allowed = replay.rounding and replay.rounding * _largest([*true, *gradients])
            different = _first_different(names, found, true, lambda _: allowed)
            different = different or replay.first_different(*after, _after(kind.state)[1])
            kind.known = not owner.is_different(kind, different)
        some += true
        yield


def _first_different(
    names: Iterable[str], found: Iterable[Any], true: Iterable[Any], allowed: Callable[[Any], float]
) -> str:
    # Bit by bit if no difference is allowed. NaN is NaN.
    for name, one, other in zip(names, found, true, strict=False):
        if one is None or other is None:
            same = one is other
        elif same := one.shape == other.shape and one.dtype == other.dtype:
            equal, most = (one == other) | (one.isnan() & other.isnan()), allowed(other)
            if most and _is_rounded(one):
                equal |= (one - other).abs() <= most
            same = bool(equal.all())
        if not same:
            return name
    return ""


def _largest(tensors: Iterable[torch.Tensor | None]) -> float:
    # Of all finite elements.
    some = [x.detach().abs() for x in tensors if x is not None and x.numel() and _is_rounded(x)]
    return max((float(x.where(x.isfinite(), 0).max()) for x in some), default=0.0)


def _is_rounded(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _usual() -> bool:
    # Whether nothing is on that acts on calls of Python, and that a replay would not see.
    return not (
        compiles() is not None
        or tracer()
        or torch.is_inference_mode_enabled()
        or hooks_of_saved(False) is not None
        or _has_any_global_hook()
        or OBSERVERS
        or forward_ad._current_level >= 0
    )


def _modes() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), autocast, torch.get_default_dtype()


def check_options(name: str, backend: object, fallback: object) -> None:
    """Raise ``ConfigurationError`` if the options of a compiled call are wrong."""
    if backend not in ("inductor", "replay") or not isinstance(fallback, bool):
        raise ConfigurationError(
            f"{name}: the backend is 'inductor' or 'replay', and fallback True or False, got {backend!r} and"
            f" {fallback!r}; what is called with plain tensors only can be compiled by torch.compile"
        )


def capture(step: Callable[..., Any], *, backend: str = "inductor", fallback: bool = False) -> Compiled:
    """Compile calls of a function that calls a distributed model, as ``model.compile()`` does of a model.

    With a loss in the function, its rule and its sum over the ranks are replayed, too. The function may read
    other variables: of its closure, globals that it names, attributes of its object; if one of them is
    another object, or another number or text, the call is of another kind. It must not change them, and
    returns split tensors. ``docs/compile.md`` says what else is refused. Local; calls of the result are
    collective and blocking.

    Parameters
    ----------
    step
        A function or a method that names one distributed model. Whole tensors among its arguments may not
        require gradients.
    backend
        ``"inductor"`` or ``"replay"``, as of ``model.compile``.
    fallback
        What happens to calls that cannot be replayed: ``UnsupportedError`` on all ranks, or, if true, a
        warning, and the function is called as it is.

    Examples
    --------
    >>> model = distribute(nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
    >>> step = capture(lambda x, target: (model(x) - target).square().mean())
    >>> for _ in range(3):  # the last one is a replay
    ...     step(torch.rand(1, 1, 8, 8), torch.zeros(1, 1, 8, 8)).backward()
    """
    if not hasattr(getattr(step, "__func__", step), "__code__"):
        raise ConfigurationError(
            f"capture: takes a function or a method, got {step!r}; a model has compile()"
        )
    check_options("capture", backend, fallback)
    name = getattr(step, "__qualname__", "the step")
    try:
        modules = State(nn.Module(), step).modules
    except Exception as error:
        raise UnsupportedError(f"capture: {name}: {_UNREAD}: {type(error).__name__}: {error}") from error
    found = [module for module in modules if "distributed" in vars(module)]
    if len(found) != 1 or getattr(step, "__self__", None) in found:
        raise ConfigurationError(
            f"capture: {name} must name one distributed model, and be no method of it; it names {len(found)}."
            " Let its closure, a global or an attribute of its object be distribute(model). A model alone"
            " has compile()"
        )
    return Compiled(vars(found[0])["distributed"], found[0], fallback, backend, step)
