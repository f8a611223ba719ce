"""Programs: what a recording has noted, as two functions of Python without branches, and their graph.

::

    recording     steps of the forward            steps of the backward
                     |  without those whose results nobody needs
                     v                               v
    program       def forward(v3):                def backward(c7, v3, v12, g0):
                      c7, v9 = s0(v3, v1)             v20, v21 = s4(c7, g0)
                      v12 = s1(v9)                    return v21, v20
                      del v9
                      return v12, c7, ...

    graph         one autograd function; its inputs are those of the model and its parameters, so hooks of
                  parameters and of a GradientSync run as always, when the whole backward has ended

Parameters and buffers (``v1``) are globals of the functions: the objects themselves, which an optimizer
changes. A tensor is deleted behind its last use, as torch would free it. All that the backward needs goes
through ``save_for_backward``: torch frees it after the backward, raises if it was changed in place meanwhile,
and keeps it for ``retain_graph``. An operation's context (``c7``) is new in each forward. So calls may
overlap: several forwards may come before a backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distdl_rma.layers.capture.recording import CONSTANT, INPUT, STATE, Recorder, Slot, Step
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative

_LITERAL = (bool, int, str, type(None))


class Kept(NamedTuple):
    """What a forward leaves for its backward: contexts of operations, and tensors."""

    contexts: tuple[Any, ...]
    tensors: tuple[Any, ...]


class Program:
    """The forward of a recording, and its backward if there is one.

    ``length`` is the number of steps of the forward. ``outputs``, ``gradients`` (of the outputs, arguments of
    the backward) and ``found`` (gradients of inputs and parameters) are slots, None for no gradient.
    """

    def __init__(
        self,
        recorder: Recorder,
        length: int,
        outputs: Sequence[Slot],
        gradients: Sequence[Slot] = (),
        found: Sequence[Slot | None] = (),
    ) -> None:
        back = _needed(recorder.steps[length:], found)
        made = {slot.number for step in back for slot in _slots(step.results)}
        behind = {slot.number for slot in _slots([*found, *[(step.args, step.kwargs) for step in back]])}
        behind -= made | {slot.number for slot in gradients}
        # In the order of slots, which is the same in each process.
        saved = [f"v{n}" for n in sorted(behind) if recorder.kinds[n] != CONSTANT]
        contexts = [f"c{n}" for n in sorted({step.context for step in back if step.context is not None})]
        forth = _needed(recorder.steps[:length], [*outputs, *map(Slot, behind)])
        # Global names of the functions: tensors that are in no call's arguments, and what has no text.
        self._names: dict[str, Any] = {
            f"v{n}": recorder.bound.get(n, recorder.tensors[n])
            for n, kind in enumerate(recorder.kinds)
            if kind in {CONSTANT, STATE} and (n in behind or n in _used(forth) or Slot(n) in outputs)
        }
        inputs = [f"v{n}" for n, kind in enumerate(recorder.kinds) if kind == INPUT]
        end = ", ".join(
            [
                self._text(tuple(outputs)),
                *("(" + "".join(f"{name}, " for name in some) + ")" for some in (contexts, saved)),
            ]
        )
        self._forward = self._function(forth, inputs, end)
        given = [f"v{slot.number}" for slot in gradients]
        self._backward = self._function(back, [*contexts, *saved, *given], self._text(tuple(found)))
        self.steps, self.operations = len(forth) + len(back), sum(s.context is not None for s in forth + back)

    def forward(self, inputs: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Kept]:
        """The outputs, and what the backward needs; blocking, collective, without a graph."""
        outputs, contexts, tensors = self._forward(*inputs)
        return outputs, Kept(contexts, tensors)

    def backward(self, kept: Kept, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Gradients of inputs and parameters; blocking, collective."""
        found: tuple[torch.Tensor | None, ...] = self._backward(*kept.contexts, *kept.tensors, *gradients)
        return found

    def _function(self, steps: Sequence[Step], arguments: Sequence[str], end: str) -> Callable[..., Any]:
        lines, stay = [f"def function({', '.join(arguments)}):"], {*_NAMES.findall(end), *arguments}
        made = {f"v{slot.number}" for step in steps for slot in _slots(step.results)}
        last = {f"v{n}": at for at, step in enumerate(steps) for n in _used([step])}
        for at, step in enumerate(steps):
            given = [f"c{step.context}"] if step.backward else []
            given += [*map(self._text, step.args)]
            given += [f"{key}={self._text(each)}" for key, each in step.kwargs.items()]
            context = "" if step.context is None or step.backward else f"c{step.context}, "
            lines.append(
                f" {context}{_target(step.results)} = {self._text(step.function)}({', '.join(given)})"
            )
            own = {f"v{n}" for n in _used([step])} | {f"v{slot.number}" for slot in _slots(step.results)}
            over = [name for name in own & made - stay if last.get(name, at) <= at]
            lines += [f" del {', '.join(sorted(over))}"] if over else []
        names = self._names
        # The text has nothing but numbered names and numbers.
        exec(compile("\n".join([*lines, f" return {end}"]), "<replay>", "exec"), names)
        function: Callable[..., Any] = names.pop("function")
        return function

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


def _slots(given: Any) -> Iterator[Slot]:
    if isinstance(given, Slot):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _slots(each)
    elif isinstance(given, dict):
        yield from _slots([*given.values()])


def _used(steps: Iterable[Step]) -> set[int]:
    return {slot.number for step in steps for slot in _slots((step.args, step.kwargs))}


def _target(results: Any) -> str:
    # What a result is assigned to.
    if isinstance(results, Slot):
        return f"v{results.number}"
    return f"({''.join(f'{_target(each)}, ' for each in results)})" if isinstance(results, tuple) else "_"


def _needed(steps: Sequence[Step], results: Iterable[Any]) -> list[Step]:
    # Without steps whose results nobody uses, such as the views that torch makes for saved tensors.
    needed, kept = {slot.number for slot in _slots([*results])}, list[Step]()
    for step in reversed(steps):
        if not step.pure or any(slot.number in needed for slot in _slots(step.results)):
            kept.append(step)
            needed |= _used([step])
    return kept[::-1]


class InGraph(OperatorFunction):
    """Puts results of a program, computed without a graph, behind the inputs and parameters of a model.

    ``call`` has a ``machine``, and a ``backward`` of what was kept and of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Any,
        outputs: tuple[torch.Tensor, ...],
        kept: Kept,
        differentiable: Sequence[bool],
        *_behind: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The outputs; those that are not differentiable get no graph."""
        ctx.call, ctx.machine, ctx.contexts = call, call.machine, kept.contexts
        ctx.counts = [len(each.to_save) for each in kept.contexts]
        saved = [*kept.tensors]
        for each in kept.contexts:
            saved += each.to_save
            each.to_save = ()
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[y for y, able in zip(outputs, differentiable, strict=True) if not able])
        return outputs

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients by the backward of the program; blocking."""
        saved, contexts = [*ctx.saved_tensors], ctx.contexts
        for each, count in zip(reversed(contexts), reversed(ctx.counts), strict=True):
            each.saved_tensors = tuple(saved[len(saved) - count :])
            del saved[len(saved) - count :]
        try:
            found = ctx.call.backward(Kept(contexts, tuple(saved)), gradients)
        finally:
            for each in contexts:
                each.saved_tensors = ()
        return None, None, None, None, *found
