"""Regions of a program: kernels between two exchanges, which Inductor, torch's compiler, makes one of.

A program is a list of steps. Between two operations of this library they are mostly elementwise, or sums::

    halo and convolution | sum, multiply | exchange | subtract, multiply, add, relu | halo and convolution
    a step                 a region        a step     a region                        a step

A region becomes one step, a call of code that Inductor writes and a C++ compiler translates. Operations stay
what they are, in their order: messages are the same with and without a compiler.

A region has no effect but its results. A step that changes memory of before the region is in none. Memory of
the region itself may be changed in it, as by ``relu_`` behind a sum: all tensors that show it then have its
last values, as in the recording. Views that are used behind a region are made behind it, of its results.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from distdl_rma.layers.capture.recording import (
    COMPUTED,
    Recorder,
    Slot,
    Step,
    alias,
    ones_of,
    slots_in,
    used_by,
    written,
)
from distdl_rma.layers.dtypes import sum_dtype
from distdl_rma.layers.ops.core.tensors import no_autocast

_aten: Any = torch.ops.aten
# What Inductor fuses, beside views and the kernels that torch calls pointwise.
_MEANS = frozenset({_aten.mean.default, _aten.mean.dim})
_SUMS = _MEANS | {_aten.sum.default, _aten.sum.dim_IntList}
_FUSED = _SUMS | {
    _aten._to_copy.default,
    _aten.mse_loss.default,
    _aten.mse_loss_backward.default,
    _aten.leaky_relu_backward.default,
    _aten.elu_backward.default,
    _aten.hardtanh_backward.default,
}
# Views of memory that begins elsewhere than the tensor.
_PLACED = frozenset({alias, _aten.as_strided.default})
# Views that torch does not call so.
_VIEWS = frozenset({alias, _aten._unsafe_view.default, _aten._reshape_alias.default})
# So many neighbours are summed in their own type, at most.
_FEW = 256
# Fewer kernels are left to torch.
_FEWEST = 2


# Translated regions of this process, the latest ones: blocks of a network are often alike.
_LATEST = 1000
_TRANSLATED: dict[Any, Callable[..., Any]] = {}


class CompilerError(Exception):
    """What Inductor, or the C++ compiler, said."""


class Regions:
    """Puts one step in the place of each region of a recording.

    ``number`` counts them, and ``told`` is called with it.
    """

    def __init__(self, recorder: Recorder, told: Callable[[int], object]) -> None:
        self._recorder, self._told, self.number = recorder, told, 0
        # Memory that was there before the call.
        self._given = {recorder.memory(n) for n, kind in enumerate(recorder.kinds) if kind != COMPUTED}

    def of(self, steps: Sequence[Step], kept: Iterable[int]) -> list[Step]:
        """The steps with their regions compiled; ``kept`` are slots that are used behind them.

        ``CompilerError`` if a region cannot be compiled.
        """
        found, behind = list[Step](), {*kept}
        for run in reversed(self._runs(steps, behind)):
            found[:0] = self._region(run, behind) if _kernels(run) else run
            behind |= used_by(run)
        return found

    def _runs(self, steps: Sequence[Step], kept: set[int]) -> list[list[Step]]:
        # Steps that can be fused together; all others are alone.
        found, run, own = list[list[Step]](), list[Step](), set[int]()
        last = {n: at for at, step in enumerate(steps) for n in used_by([step])} | dict.fromkeys(
            kept, len(steps)
        )
        for at, step in enumerate(steps):
            if self._is_fused(step, own) and self._is_over(step, own, {n for n in last if last[n] > at}):
                run.append(step)
                own |= {self._recorder.memory(n) for n in _made([step])} if not _is_view(step) else set()
            else:
                found += [run, [step]]
                run, own = [], set()
        return [each for each in [*found, run] if each]

    def _is_fused(self, step: Step, own: set[int]) -> bool:
        function = _kernel(step)
        if function in _PLACED:
            return self._recorder.memory(step.args[0].number) in own
        if not isinstance(function, torch._ops.OpOverload):
            return False
        if not (torch.Tag.pointwise in function.tags or _is_view(step) or function in _FUSED):
            return False
        tensors = [self._recorder.tensors[n] for n in used_by([step]) | {*_made([step])}]
        simple = all(x.layout is torch.strided and x.numel() and not x.is_complex() for x in tensors)
        return simple and torch.Tag.nondeterministic_seeded not in function.tags

    def _is_over(self, step: Step, own: set[int], later: set[int]) -> bool:
        # Whether a step changes no memory, but such of the region itself, or such that nobody else needs as
        # it was: the region then has a copy of its own.
        recorder = self._recorder
        for n in self._changed(step):
            memory = recorder.memory(n)
            if memory in self._given:
                return False
            others = {each for each in later if recorder.memory(each) == memory and each < _made([step])[0]}
            if not (memory in own or (self._is_whole(n) and not others)):
                return False
        return True

    def _changed(self, step: Step) -> list[int]:
        function = _kernel(step)
        if not isinstance(function, torch._ops.OpOverload):
            return []
        return [slot.number for slot in slots_in(written(function, step.args, step.kwargs))]

    def _region(self, run: Sequence[Step], behind: set[int]) -> list[Step]:
        # The step of a region, and the views behind it.
        made, memory = {*_made(run)}, self._recorder.memory
        kernels = _kernels(run)
        # Of each memory, the tensor that stands for it behind the region: the only one that is needed there,
        # if it is all of the memory, or the first one that showed it.
        first = {memory(n): n for n in reversed(_made(kernels))}
        needed = [n for n in sorted(made & behind) if memory(n) in first]
        times = Counter(map(memory, needed))
        alone = {memory(n): n for n in needed if times[memory(n)] == 1 and self._is_whole(n)}
        results_of = first | alone
        wanted, after = made & behind, list[Step]()
        for step in reversed(run):
            others = {n for n in _made([step]) if n in wanted and results_of.get(memory(n)) != n}
            if others and _is_view(step):
                after.append(step)
                wanted |= used_by([step]) & made
            elif others:
                # What was changed in place: the operand itself.
                (operand,) = self._changed(step)
                after.append(Step(_same, (Slot(operand),), {}, step.results, True))
                wanted.add(operand)
        outputs = [n for n in sorted(wanted) if results_of.get(memory(n)) == n]
        inputs = sorted(used_by(run) - made)
        if not outputs:
            return after[::-1]
        if (function := self._compiled(run, inputs, outputs)) is None:
            return [*run]
        self.number += 1
        self._told(self.number)
        given, results = (tuple(map(Slot, some)) for some in (inputs, outputs))
        return [Step(function, given, {}, results, True), *after[::-1]]

    def _is_whole(self, number: int) -> bool:
        x = self._recorder.tensors[number]
        return x.numel() * x.element_size() == x.untyped_storage().nbytes()

    def _compiled(
        self, run: Sequence[Step], inputs: Sequence[int], outputs: Sequence[int]
    ) -> Callable[..., Any] | None:
        # None if the results would have another layout than the recorded ones, or share memory.
        changed = {n for step in run for n in self._changed(step)}.intersection(inputs)

        def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            both = zip(inputs, given, strict=True)
            values = {n: x.clone() if n in changed else x for n, x in both}
            for step in run:
                kernel = _kernel(step)
                args, kwargs = (_filled(some, values) for some in (step.args, step.kwargs))
                if (found := _sum(kernel, args, kwargs)) is None:
                    found = kernel(*args, **kwargs)
                elif found.dtype != (dtype := tensors[step.results.number].dtype):
                    found = found.to(dtype)
                _assign(step.results, found, values)
            return tuple(values[n] for n in outputs)

        tensors = self._recorder.tensors
        # Of integers some that can be divided by.
        examples = [ones_of(x, x.stride(), x.storage_offset()) for x in map(tensors.__getitem__, inputs)]
        key = _text(run, inputs, outputs, examples)
        try:
            with torch.no_grad(), no_autocast(), warnings.catch_warnings():
                # Those of the compiler's own code.
                warnings.simplefilter("ignore")
                if (code := _TRANSLATED.get(key)) is None:
                    code = _TRANSLATED[key] = _translated(function, examples)
                    _TRANSLATED.pop(next(iter(_TRANSLATED))) if len(_TRANSLATED) > _LATEST else None
                results = code(*examples)
        except Exception as error:
            what = str(error).strip().partition("\n")[0]
            raise CompilerError(f"{type(error).__name__}: {what}") from error
        same = all(x.stride() == tensors[n].stride() for x, n in zip(results, outputs, strict=True))
        # Others may change them in place.
        known, new = ({x.untyped_storage().data_ptr() for x in some} for some in (examples, results))
        return code if same and len(new - known) == len(results) else None


def _translated(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    # Imported here: the compiler takes as long to import as torch.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    table = select_decomp_table()
    graph = make_fx(torch.func.functionalize(function), table, tracing_mode="fake")(*examples)
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # A process of MPI must not fork.
    with config.patch(compile_threads=1, layout_optimization=False):
        code: Any = compile_fx_inner(graph, fakes)
    # Without what only a first call needs.
    call = code.current_callable
    return lambda *given: call([*given])


def _text(run: Sequence[Step], inputs: Any, outputs: Any, examples: Sequence[torch.Tensor]) -> Any:
    # What a region does, with slots numbered anew.
    numbers = {n: Slot(at) for at, n in enumerate([*inputs, *_made(run)])}
    steps = [
        (str(_kernel(step)), _filled(step.args, numbers), _filled(step.kwargs, numbers), len(_made([step])))
        for step in run
    ]
    forms = [(x.dtype, x.shape, x.stride(), x.storage_offset()) for x in examples]
    return repr([steps, [numbers[n] for n in outputs], forms])


def _kernel(step: Step) -> Any:
    # Without what switches autocast off: compiled code knows none.
    function = step.function
    return function.args[0] if isinstance(function, partial) and function.args else function


def _is_view(step: Step) -> bool:
    function = _kernel(step)
    return function in _VIEWS or bool(getattr(function, "is_view", False))


def _kernels(run: Sequence[Step]) -> list[Step]:
    # Those of a region; of few, torch's.
    found = [step for step in run if not _is_view(step)]
    return found if len(found) >= _FEWEST else []


def _sum(kernel: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    # A sum of floats; None for all other kernels. Compiled code adds elements one after the other, and
    # converts them to float64 one by one. So few neighbours are added in their type, and these sums in
    # float64.
    if kernel is _aten.mse_loss.default and args[2:] != (0,):
        kernel = _aten.sum.default if args[2:] == (2,) else _aten.mean.default
        args = ((args[0] - args[1]).square(),)
    if kernel not in _SUMS:
        return None
    x, *args = args
    dtype = kwargs.get("dtype", x.dtype)
    if not (x.is_floating_point() and dtype.is_floating_point):
        return None
    x, last = x.to(sum_dtype(dtype)), x.dim() - 1
    if last >= 0 and last in {dim % x.dim() for dim in (args and args[0]) or (-1,)}:
        few = next(n for n in range(min(_FEW, x.shape[-1]), 0, -1) if x.shape[-1] % n == 0)
        x = x.unflatten(-1, (-1, few))
        x = x.mean(-1) if kernel in _MEANS else x.sum(-1)
    return kernel(x, *args, **kwargs | {"dtype": torch.float64})


def _made(steps: Sequence[Step]) -> list[int]:
    return [slot.number for step in steps for slot in slots_in(step.results)]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _filled(given: Any, values: dict[int, Any]) -> Any:
    # Arguments of a step with tensors in the place of slots.
    if isinstance(given, Slot):
        return values[given.number]
    if isinstance(given, dict):
        return {key: _filled(each, values) for key, each in given.items()}
    return type(given)(_filled(each, values) for each in given) if type(given) in (list, tuple) else given


def _assign(results: Any, found: Any, values: dict[int, torch.Tensor]) -> None:
    if isinstance(results, Slot):
        values[results.number] = found
    elif isinstance(results, tuple):
        for each, one in zip(results, found, strict=True):
            _assign(each, one, values)
