"""Autograd of operations: guards of forward and backward, and graphs on ranks without gradients.

The backward of an operation moves gradients, so that all its ranks have to run it, each from its own graph.
What can go wrong, and what this file does about it::

    a rank's input needs no gradient,     its graph would end before the operation: an ``anchor`` keeps the
    that of another rank does             operation in the graph
    a rank has no part of the output      it gets a tensor without elements that hangs in the graph (``idle``,
                                          ``deliver``); its sum, or the loss of all ranks, runs the backward
    a rank raises in its backward         the others are told, and raise where they wait
    (``first_derivative``) a checkpoint runs the forward again   it does so where the first saved tensor is
    needed: every rank saves one
                                          at the same place (``recomputed_by_all``)
    torch.compile would trace a wait      the graph breaks around operations (``uncompiled``)
    create_graph asks for the gradient    exact for local kernels; refused where data move
    of a gradient
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
import torch.utils.checkpoint
from torch._compile import _disable_dynamo

from distdl_rma.errors import DistdlError, ExchangeTimeout, PeerFailedError, SegmentError, UnsupportedError
from distdl_rma.layers.checks.gradient_origin import RUNNING, backward_id
from distdl_rma.layers.staging import explain_memory
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.virtual_ranks.turns import of_each_rank
from distdl_rma.segments.waiting.error_texts import OF_SEVERAL_RANKS

# Errors that one rank alone may raise. Any other error of this library is raised by all ranks of a layer, or
# by a rank that has not sent anything yet.
_FAILURES = ExchangeTimeout, PeerFailedError, SegmentError
# torch ends a recomputation under checkpointing by this exception, once it has all saved tensors: no failure.
ENOUGH: tuple[type[BaseException], ...] = tuple(
    kind for name, kind in vars(torch.utils.checkpoint).items() if name == "_StopRecomputationError"
)
_REASON = "distributed layers exchange data with other ranks, which is no part of a graph"
# Hooks of the compiler into function calls. They are part of torch itself: the compiler is not imported.
_frames: Any = torch._C._dynamo.eval_frame
compiles: Callable[[], object] = _frames.get_eval_frame_callback
hooks_of_saved: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


_fake: Callable[[], object] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


class _Layer(Protocol):
    @property
    def machine(self) -> Machine: ...
    def refuse(self, problem: str) -> None: ...


L = TypeVar("L", bound=_Layer)
Q = ParamSpec("Q")
R = TypeVar("R")


def uncompiled(function: Callable[Q, R]) -> Callable[Q, R]:
    """Function at which ``torch.compile`` breaks its graph, and inside of which it compiles nothing.

    ``torch.compiler.disable`` does the same, but imports the compiler, which doubles torch's import time.
    """

    @wraps(function)
    def entry(*args: Q.args, **kwargs: Q.kwargs) -> R:
        return function(*args, **kwargs) if compiles() is None else run_eager(function, *args, **kwargs)

    return breaks_graph(entry)


@_disable_dynamo
def run_eager(function: Callable[Q, R], *args: Q.args, **kwargs: Q.kwargs) -> R:
    """Call a function eagerly: the compiler compiles nothing inside of it."""
    return function(*args, **kwargs)


def breaks_graph(function: Callable[Q, R]) -> Callable[Q, R]:
    """Mark a function so that ``torch.compile`` neither compiles nor traces it; return the function."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    # After a graph break, torch would compile the called function next.
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(marked.__code__)
    else:
        action = _frames._FrameAction
        skip = _frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _frames.set_code_exec_strategy(marked.__code__, skip)
    return function


def tracer() -> str:
    """Name of the part of torch that traces the current calls; empty if none does."""
    if torch._C._is_tracing():
        return "torch.jit"
    return "torch.func" if _transforms_active() else "torch.export" if _fake() is not None else ""


# The ``Recorder`` of ``layers/capture`` that notes the operations of a call; empty if there is none.
RECORDINGS: list[Any] = of_each_rank()


class OperatorFunction(torch.autograd.Function):
    """An autograd function whose ``apply`` skips torch's slow code for transforms if none is active.

    torch's own ``apply`` looks for transforms in Python at every call, which costs as much as a small layer.
    """

    # Whether its forward and its backward are a step each of a recording; else their kernels are.
    is_step = True
    # Whether the backward returns the gradients that it gets.
    hands_on = False

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Apply the function, as ``torch.autograd.Function.apply``."""
        if RECORDINGS:
            return RECORDINGS[-1].applied(cls, args)
        if _transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        plain: Any = super(torch.autograd.Function, cls)
        return plain.apply(*args)


def as_step(function: Callable[Q, R]) -> Callable[Q, R]:
    """Function that is one step of a recording, whatever it does; it may read values, and raise for some."""

    @wraps(function)
    def called(*args: Q.args, **kwargs: Q.kwargs) -> R:
        if RECORDINGS and RECORDINGS[-1].notes:
            return RECORDINGS[-1].called(function, *args, **kwargs)
        return function(*args, **kwargs)

    return called


def first_derivative(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Backward that raises ``UnsupportedError`` under ``create_graph``: its result is no constant.

    Except that of a function which hands its gradients on (``hands_on``), if these are constants.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # Grad mode is on in a backward only under create_graph.
        if torch.is_grad_enabled() and not (
            ctx._forward_cls.hands_on and not any(each.requires_grad for each in gradients)
        ):
            raise UnsupportedError(
                "distributed layers have no second derivatives: create_graph=True is refused; for a penalty"
                " on the slope along v take the difference of outputs (f(x + h * v) - f(x - h * v)) / (2 * h)"
            )
        # The lines of note_reached_split, without the cost of a call.
        if RUNNING.number != (number := backward_id()):
            RUNNING.number, RUNNING.behind = number, None
        try:
            return backward(ctx, *gradients) if compiles() is None else run_eager(backward, ctx, *gradients)
        except Exception as error:
            explain_memory(error, type(ctx).__name__, gradients)
            # Operations that wait for peers, or that peers wait for, set ctx.machine.
            _report(getattr(ctx, "machine", None), error, of_all=True)
            raise

    return breaks_graph(checked)


def reports_failures(forward: Callable[Concatenate[L, Q], R]) -> Callable[Concatenate[L, Q], R]:
    """Forward of a layer that reports a failure of this rank to all ranks, so that no peer waits for it."""

    @wraps(forward)
    def watched(layer: L, /, *args: Q.args, **kwargs: Q.kwargs) -> R:
        try:
            if compiles() is not None:
                return run_eager(forward, layer, *args, **kwargs)
            found: Any = forward(layer, *args, **kwargs)
            if hooks_of_saved(False) is not None and type(found) is torch.Tensor and may_recompute():
                found = recomputed_by_all(found)
            return found
        except ENOUGH:
            raise
        except Exception as error:
            problem = misfit(forward, layer, args, kwargs) if isinstance(error, TypeError) else ""
            if problem:
                layer.refuse(problem)
            _report(layer.machine, error)
            raise

    return breaks_graph(watched)


def misfit(
    function: Callable[..., object], layer: object, args: Iterable[Any], named: Mapping[str, Any]
) -> str:
    """Error text if the arguments of a call are not those of a method; empty otherwise."""
    found = signature(function)
    try:
        found.bind(layer, *args, **named)
    except TypeError as error:
        return f"{error}, wanted ({', '.join([*found.parameters][1:])})"
    return ""


@uncompiled
def _report(machine: Machine | None, error: Exception, of_all: bool = False) -> None:
    # All ranks raise a refusal: peers need no message, and the machine stays usable. Any other error in a
    # forward is a failure: the peers must not wait. In a backward (of_all) all ranks may raise the same error
    # of torch. This rank then reports that it raised, so that a rank without the error stops waiting. Memory
    # is lacking on this rank alone.
    if machine is None:
        return
    machine.labels.make_readable(error)
    failures = OF_SEVERAL_RANKS if of_all else _FAILURES
    refused = isinstance(error, DistdlError) and not isinstance(error, failures)
    if refused or machine.closed:
        return
    if not of_all or isinstance(error, torch.OutOfMemoryError):
        machine.fail(error)
    elif isinstance(error, OF_SEVERAL_RANKS):
        machine.fail(error) if machine.lasting else machine.settle(error)
    else:
        machine.segments.announce_error(error)


# Attribute of parameters whose gradient a GradientSync sums.
_SYNCHRONISED = "_distdl_rma_synchronised"
# Per running torch.autograd.grad, the innermost last: the ranks over which its caller sums the gradients.
GRAD_CALLS: list[tuple[int, ...]] = of_each_rank()


def mark_summed_later(parameter: torch.Tensor, marked: bool) -> None:
    """Mark, or unmark, a parameter whose gradient ``GradientSync``, DDP or FSDP sums: rules then do not."""
    if marked:
        setattr(parameter, _SYNCHRONISED, True)
    else:
        vars(parameter).pop(_SYNCHRONISED, None)


def is_synchronised(parameter: torch.Tensor) -> bool:
    """Whether a ``GradientSync`` sums the gradient of a leaf."""
    return _SYNCHRONISED in parameter.__dict__


@contextmanager
def grad_call(ranks: tuple[int, ...]) -> Iterator[None]:
    """Context of a ``torch.autograd.grad`` whose caller sums the returned gradients over these ranks."""
    GRAD_CALLS.append(ranks)
    try:
        yield
    finally:
        GRAD_CALLS.pop()


class GradientNeeds(NamedTuple):
    """Tensors whose gradient any rank of a layer needs; all its ranks then take part in the backward.

    Of split tensors each rank knows this without a message; layers with plain tensors exchange it with the
    shapes.
    """

    input: bool
    weights: bool
    others: tuple[bool, ...] = ()  # inputs after the first

    @property
    def inputs(self) -> tuple[bool, ...]:
        """Whether any rank needs the gradient of each input."""
        return self.input, *self.others

    @property
    def any(self) -> bool:
        """Whether there is a backward at all."""
        return self.input or self.weights or True in self.others

    @classmethod
    def of_any(cls, needs: Iterable[GradientNeeds]) -> GradientNeeds:
        """Union of the ranks' needs."""
        inputs, weights, others = zip(*needs, strict=True)
        return cls(any(inputs), any(weights), tuple(map(any, zip(*others, strict=True))))


def anchor(needed: bool) -> torch.Tensor | None:
    """Empty input that puts an operation in the graph of a rank whose own inputs need no gradient.

    ``needed`` says whether any rank needs a gradient: then all of them have the operation in their graphs.
    """
    return None if not (needed and torch.is_grad_enabled()) else torch.empty(0, requires_grad=True)


def anchored(y: torch.Tensor, needed: bool = True) -> torch.Tensor:
    """``y``, in a graph even where this rank needs no gradient, so that the rank can call ``backward``."""
    able = y.is_floating_point() or y.is_complex()
    root = None if y.requires_grad or not able else anchor(needed)
    return y if root is None else _Anchored.apply(root, y)


class _Anchored(OperatorFunction):
    """Copy of ``y`` in the graph of ``root``, which gets no gradient."""

    @staticmethod
    def forward(_ctx: Any, _root: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # A copy, so that it can be changed in place. A sum with zeros fails for types that cannot be added.
        return y.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def idle(x: torch.Tensor, others: Iterable[torch.Tensor | None] = ()) -> torch.Tensor:
    """Empty tensor in the graph of all arguments: of the shape of ``x`` if that is empty, else (b, 0)."""
    y = x.flatten()[:0].reshape(*x.shape[:1], 0) if x.numel() else x.clone()
    return recomputed_by_all(tied(y, others))


class _Recomputed(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y.new_empty(0))
        # Otherwise the output would be a view, which cannot be changed in place.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor]:
        # In a checkpoint this access runs the forward again.
        _ = ctx.saved_tensors
        return (gradient,)


# Attribute of hooks that return saved tensors as they were.
_KEEPS_VALUES = "_distdl_rma_keeps_values"
F = TypeVar("F", bound=Callable[..., object])


def keeps_values(pack: F) -> F:
    """Mark a hook that packs saved tensors as one whose counterpart never runs the forward again."""
    setattr(pack, _KEEPS_VALUES, True)
    return pack


def may_recompute() -> bool:
    """Whether the hooks of saved tensors that are in place may be those of a checkpoint."""
    hooks = hooks_of_saved(False)
    return hooks is not None and not hasattr(hooks[0], _KEEPS_VALUES)


def recomputed_by_all(y: torch.Tensor) -> torch.Tensor:
    """``y``, a new tensor, with a saved tensor in its graph: a checkpoint of any rank recomputes there.

    A checkpoint recomputes where the backward first needs a saved tensor, and up to the last saved tensor.
    Ranks without elements may save nothing, and would recompute elsewhere than peers that wait for them.
    """
    if y.grad_fn is None or y._is_view() or not may_recompute() or not torch.is_grad_enabled():
        return y
    return _Recomputed.apply(y)


def tied(y: torch.Tensor, others: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """``y``, also in the graph of other tensors, for example weights: they get a gradient of zeros.

    A parameter without a gradient would never be counted as ready by those who sum it over the ranks. The
    result is on the device of the others.
    """
    for other in others:
        if other is not None:
            y = (y if other.is_cpu else y.to(other.device)) + other.flatten()[:0].sum()
    return y


def deliver(y: torch.Tensor, active: bool, batch: int | None) -> torch.Tensor:
    """Result of a rank: ``y``, or outside of the output partition a tensor without elements.

    The backward of an empty result runs the backward of ``y``, for which other ranks wait.
    """
    if active:
        return y
    return (y.flatten()[:0] if y.numel() else y).reshape((0,) if batch is None else (batch, 0))
