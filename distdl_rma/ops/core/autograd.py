"""What operations need of autograd: guards of forward and backward, graphs of ranks that only take part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
import torch.utils.checkpoint
from torch._compile import _disable_dynamo

from distdl_rma.checks.gradient_origin import RUNNING, number_of_backward
from distdl_rma.errors import DistdlError, ExchangeTimeout, PeerFailedError, SegmentError, UnsupportedError
from distdl_rma.machine import Machine
from distdl_rma.segments.waiting.liveness import OF_SEVERAL_RANKS

# Errors that one rank alone may raise. All ranks of a layer raise the others of this library, or a rank
# raises them before it has sent anything.
_FAILURES = ExchangeTimeout, PeerFailedError, SegmentError
# How torch ends a recomputation under checkpointing as soon as nothing more is needed: no failure.
ENOUGH: tuple[type[BaseException], ...] = tuple(
    kind for name, kind in vars(torch.utils.checkpoint).items() if name == "_StopRecomputationError"
)
_REASON = "distributed layers exchange data with other ranks, which is no part of a graph"
# What looks at the functions that are called: part of torch itself, unlike the compiler.
_frames: Any = torch._C._dynamo.eval_frame
compiles: Callable[[], object] = _frames.get_eval_frame_callback
_hooks_of_saved: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


_fake: Callable[[], object] = partial(
    torch._C._get_dispatch_mode,
    torch._C._TorchDispatchModeKey.FAKE,
)


class _Layer(Protocol):
    @property
    def machine(self) -> Machine: ...


L = TypeVar("L", bound=_Layer)
Q = ParamSpec("Q")
R = TypeVar("R")


def uncompiled(function: Callable[Q, R]) -> Callable[Q, R]:
    """Function at which ``torch.compile`` breaks its graph, and inside of which it compiles nothing.

    As ``torch.compiler.disable``, which imports the compiler, and that takes as long as torch itself: this
    leaves it to those who compile.
    """

    @wraps(function)
    def entry(*args: Q.args, **kwargs: Q.kwargs) -> R:
        if compiles() is None:
            return function(*args, **kwargs)
        return apart(function, *args, **kwargs)

    return breaks_graph(entry)


@_disable_dynamo
def apart(function: Callable[Q, R], *args: Q.args, **kwargs: Q.kwargs) -> R:
    """Call a function, in which nothing is compiled."""
    return function(*args, **kwargs)


def breaks_graph(function: Callable[Q, R]) -> Callable[Q, R]:
    """The same function, marked as one that ``torch.compile`` neither compiles nor looks into."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    # Where a graph is broken, the function called there would be the next to be compiled.
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(marked.__code__)
    else:
        action = _frames._FrameAction
        skip = _frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _frames.set_code_exec_strategy(marked.__code__, skip)
    return function


def tracer() -> str:
    """What follows the functions that are called now, instead of computing; empty if nothing does."""
    if torch._C._is_tracing():
        return "torch.jit"
    if _transforms_active():
        return "torch.func"
    return "torch.export" if _fake() is not None else ""


class OperatorFunction(torch.autograd.Function):
    """An autograd function whose ``apply`` leaves out what torch does for transforms, where there are none.

    That takes longer than the rest of it, and most operations of a step come by here.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's."""
        if _transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        plain: Any = super(torch.autograd.Function, cls)
        return plain.apply(*args)


def first_derivative(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Backward that refuses to be differentiated itself, instead of taking its result for a constant."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # Grad mode is on in a backward only under create_graph.
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "distributed layers have no second derivatives: create_graph=True is refused"
            )
        # As note_reached_split, without a call of Python.
        if RUNNING.number != (number := number_of_backward()):
            RUNNING.number, RUNNING.behind = number, None
        try:
            return backward(ctx, *gradients) if compiles() is None else apart(backward, ctx, *gradients)
        except Exception as error:
            # Those operations that wait for peers, or are waited for, know their machine.
            _report(getattr(ctx, "machine", None), error, of_all=True)
            raise

    return breaks_graph(checked)


def tells_peers(forward: Callable[Concatenate[L, Q], R]) -> Callable[Concatenate[L, Q], R]:
    """Forward of a layer whose failure on one rank becomes known to those that wait for it.

    What all ranks of the layer refuse alike leaves the machine usable; anything else, on one rank alone,
    would leave its peers waiting for data that never comes.
    """

    @wraps(forward)
    def watched(layer: L, /, *args: Q.args, **kwargs: Q.kwargs) -> R:
        try:
            if compiles() is not None:
                return apart(forward, layer, *args, **kwargs)
            found: Any = forward(layer, *args, **kwargs)
            if _hooks_of_saved(False) is not None and type(found) is torch.Tensor:
                found = recomputed_alike(found)
            result: R = found
            return result
        except ENOUGH:
            raise
        except Exception as error:
            _report(layer.machine, error)
            raise

    return breaks_graph(watched)


@uncompiled
def _report(machine: Machine | None, error: Exception, of_all: bool = False) -> None:
    # A refusal that all ranks raise alike needs no message to the peers. Any other error in a forward is a
    # failure: the peers must not wait. In a backward (``of_all``) every rank may meet the same error of
    # torch: this rank says that it raised, so that a rank without the error stops waiting.
    if machine is None:
        return
    machine.labels.make_readable(error)
    failures = OF_SEVERAL_RANKS if of_all else _FAILURES
    refused = isinstance(error, DistdlError) and not isinstance(error, failures)
    if refused or machine.closed:
        return
    if not of_all:
        machine.fail(error)
    elif isinstance(error, OF_SEVERAL_RANKS):
        machine.fail(error) if machine.lasting else machine.settle(error)
    else:
        machine.segments.raised(error)


# Of a parameter whose gradient a GradientSync sums.
_SYNCHRONISED = "_distdl_rma_synchronised"
# Ranks that sum the gradients that torch.autograd.grad is asked for, while it runs.
ASKED: list[tuple[int, ...]] = []


def mark_summed_later(parameter: torch.Tensor, marked: bool) -> None:
    """Mark a parameter whose gradient a ``GradientSync``, or torch's DDP or FSDP, sums; or take that back.

    Rules do not sum the gradient where the parameter is used.
    """
    if marked:
        setattr(parameter, _SYNCHRONISED, True)
    else:
        vars(parameter).pop(_SYNCHRONISED, None)


def is_synchronised(parameter: torch.Tensor) -> bool:
    """Whether a ``GradientSync`` sums the gradient of a leaf."""
    return _SYNCHRONISED in parameter.__dict__


@contextmanager
def asking(ranks: tuple[int, ...]) -> Iterator[None]:
    """Context of a backward whose caller sums over some ranks the gradients that it asks for."""
    ASKED.append(ranks)
    try:
        yield
    finally:
        ASKED.pop()


def asked() -> tuple[int, ...] | None:
    """Ranks that sum what the running backward was asked for; None if gradients go to ``.grad``."""
    return ASKED[-1] if ASKED else None


class GradientNeeds(NamedTuple):
    """What any rank of a layer needs the gradient of, so that all of them take part in the backward."""

    input: bool
    weights: bool
    others: tuple[bool, ...] = ()  # inputs behind the first

    @property
    def inputs(self) -> tuple[bool, ...]:
        """Of each input."""
        return self.input, *self.others

    @property
    def any(self) -> bool:
        """Whether there is a backward at all."""
        return self.input or self.weights or True in self.others

    @classmethod
    def of_any(cls, needs: Iterable[GradientNeeds]) -> GradientNeeds:
        """What at least one rank needs."""
        inputs, weights, others = zip(*needs, strict=True)
        return cls(any(inputs), any(weights), tuple(map(any, zip(*others, strict=True))))


def anchor(needed: bool) -> torch.Tensor | None:
    """Input that keeps an operation in the graph of a rank whose own inputs need no gradient."""
    if not (needed and torch.is_grad_enabled()):
        return None
    return torch.empty(0, requires_grad=True)


def anchored(y: torch.Tensor, needed: bool = True) -> torch.Tensor:
    """``y`` in a graph if it is in none, so that a rank that no gradient concerns may call backward too."""
    able = y.is_floating_point() or y.is_complex()
    root = None if y.requires_grad or not able else anchor(needed)
    if root is None:
        return y
    tied: torch.Tensor = _Anchored.apply(root, y)
    return tied


class _Anchored(OperatorFunction):
    """A tensor as it is, in the graph of another one that gets no gradient from it."""

    @staticmethod
    def forward(_ctx: Any, _root: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # A copy, which may be changed in place; a sum with zeros would not do for types that only move.
        return y.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def idle(x: torch.Tensor, others: Iterable[torch.Tensor | None] = ()) -> torch.Tensor:
    """Output of an idle rank: a clone of its input without the elements, in the graph of all that is given.

    An input without elements keeps its shape, any other becomes one of shape (b, 0).
    """
    y = x.flatten()[:0].reshape(*x.shape[:1], 0) if x.numel() else x.clone()
    return recomputed_alike(tied(y, others))


class _Recomputed(OperatorFunction):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y.new_empty(0))
        # Not a view, which nobody could change in place.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor]:
        # Where that is a checkpoint, the forward runs again here.
        _ = ctx.saved_tensors
        return (gradient,)


def recomputed_alike(y: torch.Tensor) -> torch.Tensor:
    """A new tensor, in whose backward a checkpoint runs its forward again, if it is in one.

    A checkpoint does so where something is needed that was saved, and up to the last of that. Ranks without
    elements may save nothing: without this they would do so elsewhere than others, who wait for them.
    """
    if y.grad_fn is None or y._is_view() or _hooks_of_saved(False) is None or not torch.is_grad_enabled():
        return y
    recomputed: torch.Tensor = _Recomputed.apply(y)
    return recomputed


def tied(y: torch.Tensor, others: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """``y`` in the graph of other tensors too, such as weights, whose gradients are then zero."""
    for other in others:
        if other is not None:
            y = y + other.flatten()[:0].sum()
    return y


def deliver(y: torch.Tensor, active: bool, batch: int | None) -> torch.Tensor:
    """Result of a rank: ``y``, or outside of the output partition a tensor without elements.

    The backward of an empty result reaches what ``y`` came from: other ranks wait for it there.
    """
    if active:
        return y
    return (y.flatten()[:0] if y.numel() else y).reshape((0,) if batch is None else (batch, 0))
