"""Recording of a call: kernels of torch, and operations of this library, in the order in which they ran.

Between a model and the machine there are rules: which operation a function is for these layouts. For calls of
one kind they find the same answer each time, so a call can be run once more without them. What is left is
seen from two places::

    model(x)              F.conv2d(x, w, b).relu()
      rules               layouts, sites, plans, refusals                     in Python, not needed again
        OperatorFunction  _HaloSchedule, LocalNorm, ...      ---> a step:     the operation as a whole
        torch             relu, add, view, ...               ---> a step:     the kernel, below autograd

The call is a real one: real tensors, real messages, and in the backward torch's own engine. So the steps
are exactly those that the split model takes, with all choices of kernels made, and a rule needs to know
nothing of recordings.

A step names its operands by the *memory* that they show: torch hands a saved tensor out as a new object,
and what is changed in place stays where it is::

    memory is known, same view     the slot of that tensor
    memory is known, other view    a new slot, a view of that tensor
    unknown                        a constant, such as a table that a rule has kept

The recording keeps no computed tensor alive, and so takes no more memory than the call. It has a weak
reference to each storage instead: torch then uses no address of a storage twice, even if its memory is.

A constant may have been computed of data behind the recording's back, as by numpy. What can be seen of this
is refused (``problem``), the rest shows when a replay is compared with the split model on other data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import getclosurevars
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdl_rma.layers.checks.user_frames import user_line
from distdl_rma.layers.ops.core.autograd import RECORDINGS, OperatorFunction, hooks_of_saved
from distdl_rma.layers.ops.core.tensors import AUTOCASTS
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.calls.site import module_path
from distdl_rma.layers.split.tensor import SplitTensor

# Functions that read values into Python without a kernel.
_READ = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
_TENSOR: Any = torch.Tensor
# What a replay cannot do again, or would find otherwise than the recorded call.
_REFUSED: dict[Any, str] = {
    _TENSOR.grad.__get__: "reads the .grad of a tensor, as zero_grad() and an optimizer do",
    _TENSOR.grad.__set__: "sets the .grad of a tensor",
    _TENSOR.data.__set__: "sets the .data of a tensor",
    torch.Tensor.backward: "calls backward(), which belongs behind the step",
    torch.autograd.backward: "calls backward(), which belongs behind the step",
    torch.autograd.grad: "calls torch.autograd.grad()",
    torch.Tensor.register_hook: "registers a hook of a tensor",
    torch.Tensor.register_post_accumulate_grad_hook: "registers a hook of a tensor",
}
# Kernels that return their operand as it is, below autograd.
_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_VIEW = torch.ops.aten.view.default
# Kernels after which a tensor is in other memory.
_MOVE = frozenset({"set_", "resize_", "resize_as_", "set_data"})
_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEX, _MASKS = torch.ops.aten.index.Tensor, (torch.bool, torch.uint8)
# Autograd functions whose backward asks for the graph around it, which a replay does not have.
_OF_GRAPH = frozenset({"_Gathered", "_Port", "_Arguments", "_Result"})
_dispatches: Callable[[], bool] = torch._C._is_torch_function_enabled
INPUT, STATE, CONSTANT, COMPUTED = "an input", "a tensor of the model", "a constant", ""


class Slot(NamedTuple):
    """Stands for a tensor among the arguments of a step."""

    number: int


class Step(NamedTuple):
    """One kernel or operation; ``results`` has slots in the place of tensors."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: Any
    # Whether it may be left out if nobody needs the results.
    pure: bool
    # Number of the operation, and whether the step is its backward.
    context: int | None = None
    backward: bool = False
    # Whether it is in a checkpoint: in its forward, or where a backward computes this again; of a backward,
    # the operation that has then saved its tensors anew.
    again: bool = False
    anew: int | None = None


class Memory(NamedTuple):
    """Where a tensor was: its storage, by a weak reference; addresses of all of it, and of the first element.

    Addresses of a storage whose last tensor died may be another's.
    """

    storage: StorageWeakRef
    addresses: range
    first: int


class Context:
    """In place of torch's context of an autograd function; holds what its backward needs."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors; whoever replays takes them out, so that torch frees them after the backward."""
        self.saved_tensors = tensors

    def mark_dirty(self, *_: Any) -> None:
        """Nothing: the graph that torch sees ends before."""

    mark_non_differentiable = set_materialize_grads = mark_dirty


def slots_in(given: Any) -> Iterator[Slot]:
    """All slots in arguments, or in results."""
    if isinstance(given, Slot):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from slots_in(each)
    elif isinstance(given, dict):
        yield from slots_in([*given.values()])


def used_by(steps: Iterable[Step]) -> set[int]:
    """Numbers of the slots among the arguments of steps."""
    return {slot.number for step in steps for slot in slots_in((step.args, step.kwargs))}


def written(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of the arguments of a kernel that it changes in place."""
    places = [
        (at, each.name)
        for at, each in enumerate(kernel._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in places]


def alias(x: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """A view of the memory of ``x``, which begins so many elements behind it."""
    return x.as_strided(shape, strides, x.storage_offset() + offset)


def ones_of(x: torch.Tensor, strides: Sequence[int], offset: Any = 0) -> torch.Tensor:
    """Ones in the shape and type of ``x``, with other strides, so many elements behind the first."""
    size = 1 + sum((n - 1) * each for n, each in zip(x.shape, strides, strict=True)) if x.numel() else 0
    storage = torch.ones(offset + size, dtype=x.dtype).untyped_storage()
    # No view: matmul computes views otherwise.
    return torch.empty(0, dtype=x.dtype).set_(storage, offset, x.shape, strides)


class Recorder:
    """The steps of one call, as they run; a context in which calls of this thread are noted.

    With ``fuses``, norms are recorded as kernels around their exchanges, for a compiler.
    ``problem`` says why the steps cannot be replayed, empty if they can: the first reason that was met. The
    call goes on in any case, with the right results.
    """

    def __init__(
        self,
        inputs: Iterable[torch.Tensor],
        state: Sequence[torch.Tensor],
        others: Mapping[int, torch.Tensor],
        fuses: bool = False,
    ) -> None:
        self.fuses = fuses
        self.steps: list[Step] = []
        # Of computed tensors the shape, type and place alone, on torch's meta device.
        self.tensors: list[torch.Tensor] = []
        self.kinds: list[str] = []
        # The tensors of the model, by the numbers of their slots.
        self.bound: dict[int, torch.Tensor] = {}
        self.problem, self.notes = "", True
        # Kernels are seen below autocast, and run there, also those of a rule that switches it off.
        self._autocast = AUTOCASTS()
        self._memories: list[Memory | None] = []
        self._by_view: dict[Any, int] = {}
        self._by_storage: dict[int, int] = {}
        # Tensors that are known by their ``id``.
        self._kept: list[torch.Tensor] = []
        # Results of which Python may read values: they follow from numbers of Python alone.
        self.readable: set[int] = set()
        self._contexts = 0
        # Numbers of operations in the forward of a checkpoint, and of the same in its recomputation; those
        # that a recomputation, if one runs, has still to meet.
        self._anew: dict[int, int] = {}
        self._left: Iterator[int] | None = None
        # Whether the step that is noted is in a checkpoint.
        self._inside = False
        # Memory of parameters for which others stand in the recorded call: only modules show the others.
        self._replaced = {x.untyped_storage()._cdata for x in state if id(x) in others and x.numel()}
        for x in state:
            self.bound[self.add(others.get(id(x), x), STATE)] = x
        for x in inputs:
            self.add(x, INPUT)

    def __enter__(self) -> Recorder:
        RECORDINGS.append(self)
        self._modes = ExitStack()
        for mode in (_Kernels(self), _Reads(self)):
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        # No cycle is left: the recording, with all its tensors, is freed as soon as it is of no use.
        self._modes.close()
        RECORDINGS.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of what is one step as a whole, or none, as what makes what a site keeps."""
        before, self.notes = self.notes, False
        try:
            yield
        finally:
            self.notes = before

    def refuse(self, why: str) -> None:
        """Note the first reason for which the steps cannot be replayed, with the user's line."""
        path, at = module_path(), user_line()
        where = f"{f' in module {path!r}' if path else ''}{f' at {at}' if at else ''}"
        self.problem = self.problem or f"{why}{where}"

    def add(self, x: torch.Tensor, kind: str) -> int:
        """Number of the slot of a new tensor."""
        number, memory, form = len(self.tensors), None, x
        if has_memory(x):
            storage, dtype = x.untyped_storage(), x.dtype
            begin, size = storage.data_ptr(), storage.nbytes()
            memory = Memory(StorageWeakRef(storage), range(begin, begin + size), x.data_ptr())
            self._by_storage.setdefault(storage._cdata, number)
            if kind == COMPUTED and not (x.is_conj() or x.is_neg()):
                with self.paused():
                    whole = torch.empty(size // dtype.itemsize, dtype=dtype, device="meta")
                    form = whole.as_strided(x.shape, x.stride(), x.storage_offset())
        self.tensors.append(form)
        self.kinds.append(kind)
        self._memories.append(memory)
        self._name(x, number)
        return number

    def _name(self, x: torch.Tensor, number: int) -> None:
        self._by_view[_view(x)] = number
        if not has_memory(x):
            self._kept.append(x)

    def slot(self, x: torch.Tensor) -> Slot:
        """The slot of an operand."""
        number = self._by_view.get(_view(x))
        if number is None and (x.layout is not torch.strided or x._is_zerotensor()):
            self.refuse(f"a tensor of the layout {x.layout} has no memory of its elements")
            return Slot(self.add(x, CONSTANT))
        if number is not None:
            return Slot(number)
        base = self._around(x)
        if base is None or (memory := self._memories[base]) is None:
            if x.numel() and x.untyped_storage()._cdata in self._replaced:
                self.refuse("a parameter is used that the step does not take from its module")
            return Slot(self.add(x, CONSTANT))
        known = self.tensors[base]
        if known.dtype != x.dtype or known.is_conj() != x.is_conj() or known.is_neg() != x.is_neg():
            self.refuse("memory is used as of another type")
            return Slot(self.add(x, CONSTANT))
        offset = (x.data_ptr() - memory.first) // x.element_size()
        found = Slot(self.add(x, COMPUTED))
        self._note(alias, (Slot(base), tuple(x.shape), x.stride(), offset), {}, found, True)
        return found

    def _note(self, *step: Any) -> None:
        self.steps.append(Step(*step)._replace(again=self._inside))

    def memory(self, number: int) -> int:
        """Which memory the tensor of a slot shows."""
        memory = self._memories[number]
        return -1 - number if memory is None else memory.storage.cdata

    def _around(self, x: torch.Tensor) -> int | None:
        # A slot in the memory that a tensor shows; arrays of numpy may begin anywhere in it.
        if not x.numel():
            return None
        found = self._by_storage.get(x.untyped_storage()._cdata)
        if found is None:
            at = x.data_ptr()
            for number in self._by_storage.values():
                memory = self._memories[number]
                if memory and at in memory.addresses and not memory.storage.expired():
                    return number
        return found

    def slots(self, given: Any) -> Any:
        """Arguments with slots in the place of tensors."""
        if isinstance(given, torch.Tensor):
            return self.slot(given)
        if isinstance(given, (list, tuple)) and not hasattr(given, "_fields"):
            return type(given)(map(self.slots, given))
        for x in _held(given):
            # What a function holds is that of the recorded call in each replay.
            if self.kinds[self.slot(x).number] in {COMPUTED, INPUT}:
                self.refuse("an operation is given a tensor that a function or a dict holds")
        return given

    def results(self, found: Any, kind: str = COMPUTED) -> Any:
        """What a step returned, with new slots in the place of tensors."""
        if isinstance(found, torch.Tensor):
            return Slot(self.add(found, kind))
        return tuple(self.results(each, kind) for each in found) if isinstance(found, (list, tuple)) else None

    def kernel(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a kernel of torch, and note it."""
        self._checkpoint()
        given, named = self.slots(args), {key: self.slots(each) for key, each in kwargs.items()}
        kinds = {self.kinds[self.slot(x).number] for x in tensors_in(args, kwargs)}
        if func in _SAME or (func is _VIEW and [*args[0].shape] == args[1]):
            found = func(*args, **kwargs)
            self._name(found, given[0].number)
            return found
        random = torch.Tag.nondeterministic_seeded in func.tags
        # A table that a rule has kept. What the user's code has kept may change, and is read in each replay.
        fixed = kinds == {CONSTANT} and not (random or func._schema.is_mutable or _dispatches())
        if not fixed:
            self._check(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            # A number that Python made a tensor of: a new one in each call.
            func, fixed = torch.ops.aten.clone.default, False
        found = func(*args, **kwargs)
        run = partial(_below_autocast, func) if self._autocast else func
        if fixed:
            self.results(found, CONSTANT)
        else:
            # Batch norms of torch change running statistics, and do not say so.
            pure = not (random or func._schema.is_mutable or "batch_norm" in func._schema.name)
            # A buffer that was changed in place stays what it is: the model's.
            same = isinstance(found, torch.Tensor) and self._by_view.get(_view(found)) in self.bound
            results = None if same else self.results(found)
            self._note(run, given, named, results, pure)
            if func._schema.is_mutable:
                self.readable.clear()
            elif pure and self._is_readable(args, kwargs) and "empty" not in func._schema.name:
                self.readable.update(slot.number for slot in slots_in(results))
        return found

    def _is_readable(self, *given: Any) -> bool:
        return {self.slot(x).number for x in tensors_in(*given)} <= self.readable

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = func._schema.name.removeprefix("aten::")
        # Indexing by integers gives the same shape for all values.
        by_mask = func is not _INDEX or any(x.dtype in _MASKS for x in tensors_in(args[1]))
        if by_mask and not _VALUES.isdisjoint(func.tags) and not self._is_readable(args, kwargs):
            self.refuse(f"{name.strip('_')} makes Python, or a shape, depend on the values of a tensor")
        if name in _MOVE:
            self.refuse(f"{name} gives a tensor other memory")
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            self.refuse("numbers are drawn from a generator of its own, not from torch's default one")
        for one in tensors_in(written(func, args, kwargs)):
            base = self._around(one)
            kind = COMPUTED if base is None else self.kinds[base]
            if kind in {INPUT, CONSTANT} or (kind == STATE and self.tensors[base or 0].requires_grad):
                self.refuse(f"{name} changes {kind} in place, which is no buffer")

    def _checkpoint(self) -> list[int]:
        # Operations of the checkpoint whose forward runs. When it begins, its recomputation is told of us.
        hooks = hooks_of_saved(False)
        self._inside = hooks is not None
        if not hooks or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
            if hooks and self._left is None:
                self.refuse("saved tensors pass through hooks, which are none of torch's checkpoint")
            return []
        if self._left is not None:
            self.refuse("a checkpoint is within another one")
        frame = getclosurevars(hooks[0]).nonlocals["frame"]
        if getattr(frame.recompute_fn, "func", None) is not _again:
            numbers = torch.get_rng_state()
            self.steps.append(Step(torch.get_rng_state, (), {}, self.results(numbers), False))
            frame.recompute_fn = partial(_again, frame.recompute_fn, list[int](), numbers)
        return frame.recompute_fn.args[1]

    def again(
        self, run: Callable[..., object], operations: Sequence[int], numbers: torch.Tensor, args: Any
    ) -> None:
        """Run the forward of a checkpoint again, within a backward; it draws the same ``numbers``."""
        at, self._left, before = len(self.steps), iter(operations), torch.get_rng_state()
        self.steps.append(Step(_begin_random, (self.slot(numbers),), {}, self.results(before), False))
        try:
            run(*args)
        finally:
            self.steps.append(Step(_begin_random, (self.slot(before),), {}, None, False))
            with self.paused():
                # Otherwise it was told to draw others (``preserve_rng_state``).
                if not torch.equal(torch.get_rng_state(), before):
                    del self.steps[-1], self.steps[at]
            self._left = None

    def applied(self, function: type[OperatorFunction], args: tuple[Any, ...]) -> Any:
        """Apply an autograd function; its forward and its backward are steps."""
        noted = _noted(function) if self.notes and function.is_step else function
        plain: Any = super(torch.autograd.Function, noted)
        return plain.apply(*args)

    def forward(self, function: type[OperatorFunction], ctx: Any, args: Sequence[Any]) -> Any:
        """Run the forward of an autograd function as one step."""
        if function.__name__ in _OF_GRAPH:
            self.refuse(
                "full_tensor() in a graph, an autograd function of the user's or a backward hook of a module"
            )
        operations = self._checkpoint()
        self._contexts, ctx.noted = self._contexts + 1, self._contexts
        operations.append(ctx.noted)
        if self._left is not None:
            self._anew[next(self._left, -1)] = ctx.noted
        given, step = self.slots(args), _Forward(function, ctx.needs_input_grad)
        with self.paused():
            found = function.forward(ctx, *args)
        self._note(step, given, {}, self.results(found), False, ctx.noted)
        return found

    def backward(self, function: type[OperatorFunction], ctx: Any, gradients: Sequence[Any]) -> Any:
        """Run the backward of an autograd function as one step."""
        self._checkpoint()
        given, same = self.slots(tuple(gradients)), Context(ctx.needs_input_grad)
        # A checkpoint computes them again now, as steps, and hands them out only once.
        vars(same).update(vars(ctx), saved_tensors=ctx.saved_tensors)
        with self.paused():
            found = function.backward(same, *gradients)
        step: Any = function.backward
        of = ctx.noted, True, False, self._anew.get(ctx.noted)
        self.steps.append(Step(step, given, {}, self.results(found), False, *of))
        return found

    def called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as one step."""
        if any(isinstance(each, torch.Generator) for each in kwargs.values()):
            self.refuse("numbers are drawn from a generator of its own, not from torch's default one")
        self._checkpoint()
        given = self.slots(args)
        with self.paused():
            found = function(*args, **kwargs)
        self._note(function, given, kwargs, self.results(found), False)
        return found


def _again(run: Callable[..., object], operations: Sequence[int], numbers: torch.Tensor, *args: Any) -> None:
    # What torch calls in place of ``run``. It knows no recorder: a graph that does would never be freed.
    RECORDINGS[-1].again(run, operations, numbers, args)


def _begin_random(numbers: torch.Tensor) -> torch.Tensor:
    # Sets the state of torch's random numbers, and returns what it was.
    before = torch.get_rng_state()
    torch.set_rng_state(numbers)
    return before


def _below_autocast(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._DisableAutocast():
        return func(*args, **kwargs)


def _held(x: Any) -> list[torch.Tensor]:
    # Tensors in dicts and named tuples, and in functions.
    inner = [each.cell_contents for each in getattr(x, "__closure__", None) or ()]
    if isinstance(x, partial):
        inner += [x.func, *x.args, *x.keywords.values()]
    return [*tensors_in(x, inner), *chain.from_iterable(map(_held, inner))]


def has_memory(x: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory."""
    return x.layout is torch.strided and not x._is_zerotensor() and x.numel() > 0


def _view(x: torch.Tensor) -> Any:
    if not has_memory(x):
        return id(x)
    storage, offset = x.untyped_storage()._cdata, x.storage_offset()
    return storage, offset, x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


class _Forward:
    """Forward of an autograd function, without torch's graph: returns the context, too."""

    def __init__(self, function: type[OperatorFunction], needs: tuple[bool, ...]) -> None:
        self._forward, self._needs = function.forward, needs

    def __call__(self, *args: Any) -> Any:
        ctx = Context(self._needs)
        return ctx, self._forward(ctx, *args)


@cache
def _noted(function: type[OperatorFunction]) -> Any:
    # The same autograd function, noted. Its node in the graph has the same name.
    def forward(ctx: Any, *args: Any) -> Any:
        return RECORDINGS[-1].forward(function, ctx, args)

    def backward(ctx: Any, *gradients: Any) -> Any:
        if not RECORDINGS:
            return function.backward(ctx, *gradients)
        return RECORDINGS[-1].backward(function, ctx, gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(function.__name__, (function,), methods)


class _Kernels(TorchDispatchMode):
    """Sees each kernel of torch below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._recorder.notes:
            return func(*args, **kwargs)
        if any(issubclass(each, SplitTensor) for each in types):
            with self:
                return SplitTensor.__torch_dispatch__(func, types, args, kwargs)
        return self._recorder.kernel(func, args, kwargs)


class _Reads(TorchFunctionMode):
    """Sees functions that read values of tensors into Python without a kernel."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self._recorder, kwargs or {}
        if recorder.notes and _dispatches() and func in _REFUSED:
            recorder.refuse(f"the step {_REFUSED[func]}")
            with warnings.catch_warnings():
                # Of a tensor that stands for a parameter.
                warnings.simplefilter("ignore")
                return func(*args, **kwargs)
        # Within rules, functions are those of blocks.
        if _dispatches() and any(issubclass(each, SplitTensor) for each in types):
            with self:
                return SplitTensor.__torch_function__(func, types, args, kwargs)
        reads = recorder.notes and getattr(func, "__name__", "") in _READ
        number = recorder.slot(args[0]).number if reads else 0
        if reads and recorder.kinds[number] != CONSTANT and number not in recorder.readable:
            recorder.refuse(f"{func.__name__}() reads the values of a tensor into Python")
        return func(*args, **kwargs)
