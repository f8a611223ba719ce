"""Programs: what a recording has noted, as two functions of Python without branches, and their graph.

::

    recording     steps of the forward            steps of the backward
                     |  without those whose results nobody needs, regions as one step (``regions.py``)
                     v                               v
    program       def forward(v3):                def backward(c7, v3, v12, g0):
                      c7, v9 = s0(v3, v1)             v20, v21 = s4(c7, g0)
                      v12 = s1(v9)                    some += v21,; yield
                      del v9                          v23 = s5(v20)
                      return v12, c7, ...             some += v23,; yield

    graph         ... <- Piece <- Piece <- InGraph <- loss          gradients of ``nbytes`` each (``pieces``)
                     weight   weight   weight

The backward is a generator. Each node of the graph runs it up to the next ``yield``, and returns gradients
of the parameters behind it. So torch accumulates these, and a GradientSync sums them over the ranks, while
the backward goes on, and hooks of parameters run as always.

Parameters and buffers (``v1``) are globals of the functions: the objects themselves, which an optimizer
changes. A tensor is deleted behind its last use, as torch would free it. All that the backward needs goes
through ``save_for_backward``: torch frees it after the backward, raises if it was changed in place meanwhile,
and keeps it for ``retain_graph``. An operation's context (``c7``) is new in each forward. So calls may
overlap: several forwards may come before a backward.

A checkpoint (``torch.utils.checkpoint``) saves its inputs alone, and its forward runs again in the backward.
An operation's backward then gets the tensors that were saved anew, in the context of the first time, as in
torch::

    forward        c5, v9 = s0(v3);  c5.saved_tensors = ()
    backward       c8, v30 = s0(v3)                                      the same operation again
                   c5.saved_tensors, c8.saved_tensors = c8.saved_tensors, ()
                   v31 = s7(c5, v29)                                     its backward
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.capture.recording import (
    CONSTANT,
    INPUT,
    STATE,
    Recorder,
    Slot,
    Step,
    slots_in,
    used_by,
)
from distdl_rma.layers.capture.regions import Regions
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.layers.ops.core.tensors import no_autocast

# Bytes of saved tensors from which on they are freed while the backward runs.
_MUCH = 1 << 22


class Kept(NamedTuple):
    """What a forward leaves for its backward: contexts of operations, and tensors."""

    contexts: tuple[Any, ...]
    tensors: tuple[Any, ...]


# Gradients of a piece; whoever takes them leaves an empty list.
Gradients = list[torch.Tensor | None]


class Program:
    """The forward of a recording, and its backward if there is one.

    ``length`` is the number of steps of the forward. ``outputs``, ``gradients`` (of the outputs, arguments of
    the backward) and ``found`` (gradients of inputs and parameters) are slots, None for no gradient. A piece
    of the backward ends when it has ``nbytes`` of these. ``regions`` compiles what it can.
    """

    def __init__(
        self,
        recorder: Recorder,
        length: int,
        outputs: Sequence[Slot],
        gradients: Sequence[Slot] = (),
        found: Sequence[Slot | None] = (),
        nbytes: int = 0,
        regions: Regions | None = None,
    ) -> None:
        back = _needed(recorder.steps[length:], found)
        if regions is not None:
            back = regions.of(back, {slot.number for slot in slots_in([*found])})
        made = {slot.number for step in back for slot in slots_in(step.results)}
        behind = {slot.number for slot in slots_in([*found, *[(step.args, step.kwargs) for step in back]])}
        behind -= made | {slot.number for slot in gradients}
        # Parameters and buffers that a backward needs for checkpoints alone are read as they then are. All
        # else is saved, in the order of slots, which is the same in each process.
        parts = recorder.steps[:length], recorder.steps[length:]
        first, then = (used_by(s for s in part if not s.again and s.results is not None) for part in parts)
        unsaved = {n for n in behind - (first & then) if recorder.kinds[n] == STATE}
        saved = [f"v{n}" for n in sorted(behind - unsaved) if recorder.kinds[n] != CONSTANT]
        # Operations of checkpoints, and those that save their tensors anew.
        self._anew = {step.context: step.anew for step in back if step.anew is not None}
        needed = {step.context for step in back if step.context is not None}
        contexts = [f"c{n}" for n in sorted(needed - {step.context for step in back if step.again})]
        forth = _needed(recorder.steps[:length], [*outputs, *map(Slot, behind)])
        if regions is not None:
            forth = regions.of(forth, behind | {slot.number for slot in outputs})
        named = behind | used_by(forth) | {slot.number for slot in outputs}
        # Global names of the functions: tensors that are in no call's arguments, and what has no text.
        self._names: dict[str, Any] = {
            f"v{n}": recorder.bound.get(n, recorder.tensors[n])
            for n, kind in enumerate(recorder.kinds)
            if kind in {CONSTANT, STATE} and n in named
        }
        inputs = [f"v{n}" for n, kind in enumerate(recorder.kinds) if kind == INPUT]
        end = ", ".join(
            [
                self._text(tuple(outputs)),
                *("(" + "".join(f"{name}, " for name in some) + ")" for some in (contexts, saved)),
            ]
        )
        self._forward = self._function(forth, inputs, {len(forth): f"return {end}"})
        given = [f"v{slot.number}" for slot in gradients]
        # Number of the step behind which the memory of each gradient is complete.
        memory = [*map(recorder.memory, range(len(recorder.tensors)))]
        last = {memory[n]: at for n, at in sorted(_last_uses(back).items(), key=itemgetter(1))}
        ready = [-1 if slot is None else last.get(memory[slot.number], -1) for slot in found]
        returned = {f"v{slot.number}" for slot in found if slot is not None and slot.number in made}
        self.pieces, ends = list[list[int]](), dict[int, str]()
        # torch frees what a node has saved when the node has run. Much of it: the first one returns at once.
        piece, size, much = list[int](), 0, sum(recorder.tensors[n].nbytes for n in behind) > _MUCH
        for at in [*range(-1, len(back))]:
            new = [n for n, when in enumerate(ready) if when == at]
            piece += new
            size += sum(recorder.tensors[slot.number].nbytes for n in new if (slot := found[n]))
            full = (new and size > nbytes and max(ready) > at) or (much and at < 0)
            if at == len(back) - 1 or full:
                end = f"some += {self._text(tuple(found[n] for n in piece))}"
                # Nobody else may hold a gradient: torch then keeps it, and copies nothing.
                over = returned.intersection(_NAMES.findall(end))
                ends[at + 1] = "; ".join([end, *(f"del {name}" for name in sorted(over)), "yield"])
                self.pieces.append(piece)
                piece, size = [], 0
        self._backward = self._function(back, ["some", *contexts, *saved, *given], ends)
        # Of the coarsest type: compiled kernels round otherwise than torch's, which are equal.
        types = {x.dtype for x in recorder.tensors if x.is_floating_point() and regions is not None}
        self.resolution = max((torch.finfo(dtype).eps for dtype in types), default=0.0)
        self.regions = 0 if regions is None else regions.number
        self.steps, self.operations = len(forth) + len(back), sum(s.context is not None for s in forth + back)

    def forward(self, inputs: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Kept]:
        """The outputs, and what the backward needs; blocking, collective, without a graph."""
        outputs, contexts, tensors = self._forward(*inputs)
        return outputs, Kept(contexts, tensors)

    def backward(self, some: Gradients, kept: Kept, gradients: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put gradients of inputs and parameters into ``some``, ``pieces`` by turns; blocking, collective."""
        return self._backward(some, *kept.contexts, *kept.tensors, *gradients)

    def _function(
        self, steps: Sequence[Step], arguments: Sequence[str], ends: dict[int, str]
    ) -> Callable[..., Any]:
        # ``ends`` are lines before the step with that number. The names in them stay until then.
        lines = [f"def function({', '.join(arguments)}):"]
        stay = {*_NAMES.findall(" ".join(ends.values())), *[f"c{n}" for n in self._anew.values()]}
        made = {f"v{slot.number}" for step in steps for slot in slots_in(step.results)} | {*arguments}
        last = {f"v{n}": at for n, at in _last_uses(steps).items()}
        for at, step in enumerate(steps):
            lines += [f" {ends[at]}"] if at in ends else []
            given = [f"c{step.context}"] if step.backward else []
            given += [*map(self._text, step.args)]
            given += [f"{key}={self._text(each)}" for key, each in step.kwargs.items()]
            context = "" if step.context is None or step.backward else f"c{step.context}, "
            if step.anew is not None:
                new = f"c{step.anew}.saved_tensors"
                lines.append(f" c{step.context}.saved_tensors, {new} = {new}, ()")
            lines.append(
                f" {context}{_target(step.results)} = {self._text(step.function)}({', '.join(given)})"
            )
            # What it has saved is freed, as torch would, or a checkpoint.
            emptied = step.backward or step.context in self._anew
            lines += [f" c{step.context}.saved_tensors = ()"] if emptied else []
            own = {f"v{n}" for n in used_by([step])} | {f"v{slot.number}" for slot in slots_in(step.results)}
            over = [name for name in own & made - stay if last.get(name, at) <= at]
            over += [context[:-2]] if context and context[:-2] not in stay else []
            lines += [f" del {', '.join(sorted(over))}"] if over else []
        names = self._names
        # The text has nothing but numbered names and numbers.
        exec(compile("\n".join([*lines, f" {ends[len(steps)]}"]), "<replay>", "exec"), names)
        return names.pop("function")

    def _text(self, x: Any) -> str:
        # Python's text of an argument; what has none becomes a global.
        if isinstance(x, Slot):
            return f"v{x.number}"
        if type(x) in (list, tuple):
            parts = "".join(f"{self._text(each)}, " for each in x)
            return f"[{parts}]" if type(x) is list else f"({parts})"
        if type(x) in (bool, int, type(None)):
            return repr(x)
        name = f"k{len(self._names)}"
        self._names[name] = x
        return name


_NAMES = re.compile(r"[cv]\d+")


def _last_uses(steps: Iterable[Step]) -> dict[int, int]:
    # Of each slot, the last step that is given it, or makes it.
    return {slot.number: at for at, step in enumerate(steps) for slot in slots_in(step[1:4])}


def _target(results: Any) -> str:
    # What a result is assigned to.
    if isinstance(results, Slot):
        return f"v{results.number}"
    return f"({''.join(f'{_target(each)}, ' for each in results)})" if isinstance(results, tuple) else "_"


def _needed(steps: Sequence[Step], results: Iterable[Any]) -> list[Step]:
    # Without steps whose results nobody uses, such as the views that torch makes for saved tensors.
    needed, kept = {slot.number for slot in slots_in([*results])}, list[Step]()
    for step in reversed(steps):
        if not step.pure or any(slot.number in needed for slot in slots_in(step.results)):
            kept.append(step)
            needed |= used_by([step])
    return kept[::-1]


class Backward:
    """The backward of a call, whose pieces are nodes of torch's graph: each of them runs it a piece further.

    ``call`` has a ``machine``, and a ``backward`` of what was kept and of the gradients.
    """

    def __init__(self, call: Any, pieces: Sequence[Sequence[int]]) -> None:
        self.call, self._pieces = call, pieces
        self._gradients, self._left = Gradients(), 0
        self._run: Iterator[None] = iter(())

    def behind(
        self,
        outputs: tuple[torch.Tensor, ...],
        kept: Kept,
        differentiable: Sequence[bool],
        ends: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, with a graph that leads to parameters and inputs: the ``ends``."""
        first, *others = [[ends[n] for n in piece] for piece in self._pieces]
        # Each node leads to the next one by a tensor without elements.
        token = torch.empty(0)
        for piece in reversed(others):
            token = Piece.apply(self, token, *piece)
        return InGraph.apply(self, outputs, kept, differentiable, token, *first)

    def begin(self, kept: Kept, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """A gradient for the token, and those of the first piece."""
        self._run, self._left = self.call.backward(self._gradients, kept, gradients), len(self._pieces)
        return self.go_on()

    def go_on(self) -> tuple[torch.Tensor | None, ...]:
        """A gradient for the token, and those of the next piece."""
        if not self._left:
            raise UnsupportedError("compile: a part of the backward of a replay runs again, without the rest")
        with no_autocast():
            next(self._run)
        self._left -= 1
        self._run = self._run if self._left else iter(())
        found = torch.empty(0), *self._gradients
        self._gradients.clear()
        return found


class Piece(OperatorFunction):
    """A further piece of a backward."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, token: torch.Tensor, *_ends: torch.Tensor) -> torch.Tensor:
        """The token of this piece."""
        ctx.backward_of, ctx.machine = backward, backward.call.machine
        return token.clone()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of parameters and inputs; blocking."""
        return None, *ctx.backward_of.go_on()


class InGraph(OperatorFunction):
    """Puts results of a program, computed without a graph, behind the inputs and parameters of a model."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        outputs: tuple[torch.Tensor, ...],
        kept: Kept,
        differentiable: Sequence[bool],
        _token: torch.Tensor,
        *_ends: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The outputs; those that are not differentiable get no graph."""
        ctx.backward_of, ctx.machine, ctx.contexts = backward, backward.call.machine, kept.contexts
        ctx.counts = [len(each.saved_tensors) for each in kept.contexts]
        saved = [*kept.tensors]
        for each in kept.contexts:
            saved += each.saved_tensors
            each.saved_tensors = ()
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        # Others than those that the program has: these may be what saved views are views of.
        outputs = tuple(y.detach() for y in outputs)
        ctx.mark_non_differentiable(*[y for y, able in zip(outputs, differentiable, strict=True) if not able])
        return outputs

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients of the first piece; blocking."""
        saved, contexts, backward = [*ctx.saved_tensors], ctx.contexts, ctx.backward_of
        for each, count in zip(reversed(contexts), reversed(ctx.counts), strict=True):
            each.saved_tensors = tuple(saved[len(saved) - count :])
            del saved[len(saved) - count :]
        return None, None, None, None, *backward.begin(Kept(contexts, tuple(saved)), gradients)
