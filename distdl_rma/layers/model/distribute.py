"""``distribute``: unchanged models on split tensors; inputs are cut, gradients are summed.

The model stays the same object with the same code. Hooks around its forward do everything; one call, in the
order in which torch runs them:

    _refuse_graph     compilers and tracers are refused, before anything is on a stack
    _root             the outermost module is put on the stack of running modules (``entering.py``)
    _enter            begins a trace; compares how the ranks begin, with which parameters and inputs
                      (``Calls.begin``); cuts plain inputs that have the dimensions of the grid
      forward         as the user wrote it: each function of a split tensor goes to its rule, and is noted
      hooks of parts  each module in turn is on the stack, so that calls have its path
    pop_module        takes the outermost module off the stack, also after an error
    _end              compares the traces of the ranks (``Calls.end``); inputs that were changed in place, and
                      buffers that became split, become plain (``leaving.py``)

The backward is torch's. Its gradients reach the hooks of a ``GradientSync``, which sums them over the ranks.

Who has what: the model has its :class:`Distributed` as an attribute, which refers back weakly. That has the
GradientSync, a ``Calls`` for each set of ranks that it was called with, and the samplers of replicas.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any, Literal, Self, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distdl_rma.errors import (
    ArgumentError,
    ConfigurationError,
    PartitionError,
    ProtocolError,
    ShapeError,
    UnsupportedError,
)
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.checks.arguments import mark_compared
from distdl_rma.layers.checks.generators import random_draw
from distdl_rma.layers.checks.gradient_origin import GradientCheck
from distdl_rma.layers.checks.model_calls import Calls, CallTrace, Check
from distdl_rma.layers.dtypes import DTYPES, is_readable
from distdl_rma.layers.model.compiled import Compiled, check_options
from distdl_rma.layers.model.entering import ModuleHook
from distdl_rma.layers.model.leaving import Inputs, became_split, make_buffers_plain, write
from distdl_rma.layers.model.replica_check import ReplicaSampler
from distdl_rma.layers.ops.core.autograd import (
    ENOUGH,
    breaks_graph,
    compiles,
    mark_summed_later,
    tracer,
    uncompiled,
)
from distdl_rma.layers.ops.core.tensors import AUTOCASTS, problem_with
from distdl_rma.layers.split.calls import site
from distdl_rma.layers.split.calls.loss_origin import LOSS_ORIGIN, Backwards
from distdl_rma.layers.split.calls.signatures import tensors_in
from distdl_rma.layers.split.calls.site import CALL_TRACES, thread_inside
from distdl_rma.layers.split.entry import grid_for
from distdl_rma.layers.split.layout import balanced, described
from distdl_rma.layers.split.plain_operands import beside
from distdl_rma.layers.split.shard import Grid, shard
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.layers.staging import AUTOCASTING, refuse_autocast
from distdl_rma.layers.sync.gradient_groups import Owner
from distdl_rma.layers.sync.gradients import GradientSync
from distdl_rma.layers.sync.registry import REDUCTIONS, ModuleWatch, not_on_one_device
from distdl_rma.layers.sync.warnings import warn_of_start
from distdl_rma.segments.consensus import together
from distdl_rma.segments.machine import Machine

M = TypeVar("M", bound=nn.Module)
_KEY = "distributed"


@dataclass
class _Running:
    """A running call of a model."""

    error: BaseException | None  # that was being handled when it began
    generator: torch.Tensor  # state of torch's generator of random numbers then
    calls: Calls | None = None
    plain: Sequence[torch.Tensor] = ()  # inputs that were plain
    inputs: Inputs | None = None  # None if nothing was cut


class Distributed:
    """State of a distributed model: how its inputs are cut, and what sums its gradients.

    It is the model's attribute ``distributed``. A copy of the model gets its own, with a name, a GradientSync
    and comparisons of its own.

    Examples
    --------
    >>> model = distribute(nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
    >>> x = torch.rand(1, 1, 8, 8)
    >>> with model.distributed.no_sync():
    ...     model(x).mean().backward()
    >>> model(x).mean().backward()  # gradients are the sum of both
    >>> model.distributed.close()
    >>> model(x).shape  # of a plain tensor again
    torch.Size([1, 1, 8, 8])
    """

    def __init__(self, model: nn.Module, machine: Machine, grid: Grid, options: dict[str, Any]) -> None:
        self.machine, self.grid, self.fallback = machine, grid, options["fallback"]
        self.checks = bool(options["check_copies"])
        self._options = {key: options[key] for key in ("reduction", "replicas", "bucket_nbytes")}
        # Calls that are replayed, and whether one is recorded, or run beside a replay, and compared by that.
        self.captured: Compiled | None = None
        self.recorded = False
        # Of gradients that are summed at a time.
        self.bucket_nbytes = int(options["bucket_nbytes"])
        self._unfollow = LOSS_ORIGIN.begin(machine, self) if self.checks else None
        number = machine.kept["models"] = machine.kept.get("models", 0) + 1
        self.name, self._copies = f"{type(model).__name__} (distributed model {number})", count(1)
        self._belongs_to(model)
        self._root = self._hook("")
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
            model.register_forward_pre_hook(self._root, prepend=True),
            model.register_forward_pre_hook(_refuse_graph, prepend=True),
            model.register_forward_hook(site.pop_module, always_call=True),
            model.register_forward_hook(self._end, always_call=True),
            model.register_state_dict_pre_hook(self._before_state_dict),
        ]
        self._of_parts: list[RemovableHandle] = []
        self._look(model)

    def _belongs_to(self, model: nn.Module) -> None:
        # All that a copy does not share with the original.
        self._model = weakref.ref(model)
        self._sync: GradientSync | None = None
        # Empty until the first call: a deep copy is not complete yet.
        self._modules: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._watch: ModuleWatch | None = None
        # A change of the model that its ``GradientSync`` does not know yet.
        self._change = ""
        self._calls: dict[tuple[int, ...], Calls] = {}
        # The comparisons of parameters and buffers.
        self._replicas: list[ReplicaSampler] = []
        # At most one call, as models are called by one thread at a time; more after an interrupt only.
        self._running: list[_Running] = []
        # A tensor of the model, whose device is the model's; None without any.
        self._first: torch.Tensor | None = None

    def _hook(self, path: str) -> ModuleHook:
        return ModuleHook(path, self.fallback == "move", not self._synchronises)

    def _look(self, model: nn.Module) -> None:
        # Registers hooks on all present modules, so that each reports that it runs.
        for handle in self._of_parts:
            handle.remove()
        self._of_parts, parts = [], [*model.named_modules()]
        for path, module in parts[1:]:
            self._of_parts += [
                module.register_forward_pre_hook(self._hook(path), prepend=True),
                module.register_forward_hook(site.pop_module, always_call=True),
            ]
        if not self._synchronises:
            for parameter in model.parameters():
                # DDP or FSDP sums these gradients, also of uses in a loss, and compares the replicas.
                mark_summed_later(parameter, True)
                mark_compared(parameter, True)
        self._modules = [(path, weakref.ref(module)) for path, module in parts]
        self._first = next(chain(model.parameters(), model.buffers()), None)
        self._watch = watch = ModuleWatch()
        watch.add(model, "", model.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        model = memo.get(id(self._model()))
        if not isinstance(model, nn.Module):
            raise UnsupportedError("model.distributed belongs to its model: copy that")
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(vars(self))
        if twin._unfollow is not None:
            # Even if this model closes. If only some ranks have a copy, the next model's ``begin`` discards
            # what they noted.
            twin._unfollow = LOSS_ORIGIN.follow_for(twin)
        twin.captured = None
        twin.name, twin._copies = f"{self.name} (copy {next(self._copies)})", count(1)
        twin._belongs_to(model)
        twin._root = copy.deepcopy(self._root, memo)
        twin._handles = copy.deepcopy(self._handles, memo)
        twin._of_parts = copy.deepcopy(self._of_parts, memo)
        return twin

    @property
    def owner(self) -> Owner:
        """Texts about this model for messages of its ``GradientSync``."""
        return Owner(
            self.name,
            f"{self.name}; model.distributed.close() first",
            "model.distributed.close() and distribute() the model again, on all ranks",
            "after a call of the model had begun; change it before",
        )

    @property
    def sync(self) -> GradientSync:
        """Its ``GradientSync``; a copy's is made, collectively, by its first call that records a graph.

        ``ConfigurationError`` with ``reduction="none"``.
        """
        if not self._synchronises:
            raise ConfigurationError(
                f"{self.name}: with reduction='none' it sums no gradients; DistributedDataParallel and"
                " fully_shard have a no_sync() of their own"
            )
        if self._sync is None:
            self._sync = GradientSync(self._model(), self.machine, **self._options)
            self._sync.alike_on = (self.grid if isinstance(self.grid, Partition) else self.machine).ranks
        return self._sync

    @property
    def _synchronises(self) -> bool:
        return bool(self._options["reduction"] != "none")

    def partition(self, dims: int) -> Partition:
        """The grid for tensors of ``dims`` dimensions."""
        return grid_for(self.grid, self.machine, dims)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward only accumulates; as :meth:`GradientSync.no_sync`."""
        return self.sync.no_sync()

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Context in which ranks do not compare replicas and arguments; entered on all ranks."""
        before, self.checks = self.checks, False
        try:
            yield
        finally:
            self.checks = before

    def compile(self, backend: str = "inductor", *, fallback: bool = False) -> None:
        """Replay calls of the model that are of a known kind, without the rules of its functions; local.

        It is ``model.compile``, in place of torch's. The first call of a kind records it, compiles what lies
        between two exchanges, and compares a replay with the split model, the gradients in its backward;
        later ones replay. ``docs/compile.md`` says what a kind is, and what is refused. A call of another
        kind records again; at most 8 kinds are recorded.

        Parameters
        ----------
        backend
            ``"inductor"``: torch's compiler fuses the kernels between exchanges, so that results are those of
            the split model to rounding. It needs a C++ compiler; without one, a warning says so, and the
            backend is the other. ``"replay"``: torch's kernels and the operations of this library, in their
            order; results, gradients and random numbers are those of the split model, bit by bit.
        fallback
            What happens to calls that cannot be replayed: ``UnsupportedError`` on all ranks, or, if true, a
            warning, and the split model runs them.

        Examples
        --------
        >>> model = distribute(nn.Conv2d(1, 1, 3, padding=1), {"H": -1})
        >>> model.compile()
        >>> for _ in range(3):  # the last one is a replay
        ...     model(torch.rand(1, 1, 8, 8)).mean().backward()
        """
        check_options(f"{self.name}: compile", backend, fallback)
        if (model := self._model()) is not None:
            model._compiled_call_impl = self.captured = Compiled(self, model, fallback, backend)

    def close(self) -> None:
        """Turn the model back into one for plain tensors; local, idempotent.

        ``UnsupportedError``, when it is closed, names a buffer to which a cut split tensor was assigned since
        the last call of the model.
        """
        if self._sync is not None:
            self._sync.close()
        if self._unfollow is not None:
            self._unfollow()
        for handle in (*self._handles, *self._of_parts):
            handle.remove()
        self._handles, self._of_parts, self._calls = [], [], {}
        for replicas in self._replicas:
            replicas.forget()
        model = self._model()
        if model is not None:
            for parameter in () if self._synchronises else model.parameters():
                mark_summed_later(parameter, False)
                mark_compared(parameter, False)
            vars(model).pop("compile", None)
            vars(model).pop("_compiled_call_impl", None)
            if vars(model).pop(_KEY, None) is not None:
                make_buffers_plain(model.named_modules())

    def _before_state_dict(self, model: nn.Module, *_: Any) -> None:
        make_buffers_plain(model.named_modules())

    def cut(self, arguments: Any, in_graph: bool = False) -> Any:
        """Arguments in which the grid cuts whole tensors, those with the most dimensions; local.

        The parts are leaves. With ``in_graph``, parts of tensors that require a gradient are in their graph.
        """
        return self._inputs(arguments, in_graph).arguments

    def _inputs(self, arguments: Any, in_graph: bool) -> Inputs:
        dims, first = self._cut_dims(tensors_in(arguments)), self._first

        def changed(x: torch.Tensor) -> torch.Tensor:
            if x.dim() != dims or isinstance(x, SplitTensor):
                return x
            partition = self.partition(dims)
            problem = problem_with(x, f"an input of shape {tuple(x.shape)}")
            if problem:
                raise ShapeError(f"{self.name}: {problem}")
            if first is not None and x.device != first.device:
                raise ShapeError(self._elsewhere(x, first.device))
            if not x.is_cpu:
                refuse_autocast(x.device)
            if not (in_graph and x.requires_grad and torch.is_grad_enabled()):
                return shard(partition, x)
            layout = balanced(partition, x.shape)
            # In memory of its own, as by ``shard``: changes in place are written to all of ``x`` later.
            return SplitTensor(beside(x, layout)[layout.slices()].clone(), layout)

        return Inputs(arguments, changed)

    def _elsewhere(self, x: torch.Tensor, device: torch.device) -> str:
        return (
            f"{self.name}: an input of shape {tuple(x.shape)} is on {x.device}, but the model is on {device}"
            "; move one of them by .to()"
        )

    def _cut_dims(self, given: Sequence[torch.Tensor]) -> int:
        # Tensors of other dimensions, such as token ids beside an image, stay plain.
        if isinstance(self.grid, Partition):
            return len(self.grid.shape)
        return max([x.dim() for x in given if x.dim() in _IMAGES], default=0)

    @uncompiled
    def _enter(self, _model: nn.Module, args: Any, kwargs: Any) -> Any:
        if other := thread_inside():
            raise ProtocolError(
                f"{self.name}: called while thread {other!r} is in a call of a distributed model; what the"
                " ranks do in turn is of one thread at a time"
            )
        given = tensors_in(args, kwargs)
        split = [x for x in given if isinstance(x, SplitTensor)]
        dims = self._cut_dims(given)
        whole = [x for x in given if not split and x.dim() == dims]
        running = _Running(sys.exc_info()[1], torch.get_rng_state())
        if not self.recorded:
            while self._running:
                # A call that ended without its hook, as by an interrupt.
                self._leave_trace()
            CALL_TRACES.append(trace := CallTrace())
            self._running.append(running)
            running.calls = self.calls_with(given)
            running.plain = [x for x in given if type(x) in (torch.Tensor, nn.Parameter)]
            if self.begin(running.calls, given, (args, kwargs), trace):
                # Begins the outermost module again, whose hook may have changed.
                site.pop_module()
                self._root(_model, ())
        for x in split:
            if (first := self._first) is not None and x._local.device != first.device:
                raise ShapeError(self._elsewhere(x, first.device))
        if not whole:
            if not split:
                self._check_missed(given, args, kwargs)
            return None
        running.inputs = self._inputs((args, kwargs), in_graph=True)
        return running.inputs.arguments

    def begin(
        self, calls: Calls, given: Sequence[torch.Tensor], arguments: Any, trace: CallTrace, *more: int
    ) -> bool:
        """Compare a call with those of the other ranks; whether the hooks of modules are new; collective.

        ``more`` are further numbers that must be equal on all ranks.
        """
        args, kwargs = arguments
        plain = repr([*filter(_is_plain, args), *((k, v) for k, v in kwargs.items() if _is_plain(v))])
        changed = self._notice_changes()
        facts = *more, *self._facts(given), len(args), crc32(plain.encode()), bool(self._change)
        # Plain inputs are whole. Sparse ones are not compared.
        alike = [x for x in given if type(x) in (torch.Tensor, nn.Parameter) and is_readable(x)]
        calls.begin(facts, partial(self.described, given, plain), trace, alike, self.checks)
        if self._change and self._sync is not None:
            # The call's beginning compared the change, so all ranks have it.
            self._sync.register(self._model())
        self._change = ""
        if torch.is_grad_enabled() and self._synchronises:
            # A copy of a model makes its GradientSync here: all ranks are in the call.
            _ = self.sync
        return changed

    @uncompiled
    def _end(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if self.recorded or not self._running or thread_inside():
            return
        call, trace = self._leave_trace()
        # This hook also runs when the forward raises.
        error, calls = sys.exc_info()[1], call.calls
        if calls is None:
            return
        # An error that was being handled when the call began is not the model's.
        if error is None or error is call.error:
            changes = [*became_split(self._parts(), call.plain)]
            if call.inputs is not None:
                changes += call.inputs.changes(chain(call.plain, model.parameters(), model.buffers()))
            trace.steps += [change.step for change in changes]
            if not torch.equal(call.generator, torch.get_rng_state()):
                # All ranks draw the numbers for the whole tensor, so all generators moved.
                trace.steps.append(random_draw(call.generator))
            calls.end(trace)
            write(changes)
            if call.inputs is not None:
                call.inputs.leave_containers()
        elif isinstance(error, ENOUGH):
            calls.abandon()
        else:
            calls.failed(error, trace)

    def _check_missed(self, given: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        # Nothing was cut: raises if an input was probably meant to be.
        if any(isinstance(x, np.ndarray) for x in (*args, *kwargs.values())):
            raise ArgumentError(f"{self.name}: takes tensors, got a numpy array; pass torch.from_numpy(x)")
        dims = self.grid.dim if isinstance(self.grid, Partition) else 0
        for x in given:
            if x.dim() == dims - 1 and x.is_floating_point():
                raise ShapeError(
                    f"{self.name}: an input of shape {tuple(x.shape)} has {dims - 1} dimensions, the grid"
                    f" cuts tensors of {dims}; is the batch dimension missing? x.unsqueeze(0) is a batch of"
                    " one"
                )

    def _notice_changes(self) -> bool:
        # Replaced modules, unfrozen parameters, other dtypes: includes them in hooks and comparisons.
        change = "" if self._watch is None else self._watch.later_change()
        model = self._model()
        if model is None or (self._watch is not None and not change):
            return False
        self._look(model)
        for replicas in self._replicas:
            replicas.forget()
        self._change = change
        return True

    def _leave_trace(self) -> tuple[_Running, CallTrace]:
        return self._running.pop(), CALL_TRACES.pop() or CallTrace()

    def calls_with(self, given: Sequence[torch.Tensor]) -> Calls:
        """Comparisons of calls with these arguments, among the ranks that have parts of them."""
        split = next((x for x in given if isinstance(x, SplitTensor)), None)
        grid = self.grid if split is None else split.partition
        ranks = grid.ranks if isinstance(grid, Partition) else self.machine.ranks
        found = self._calls.get(ranks)
        if found is None:
            checks: list[Check] = [Backwards.of(self.machine, ranks), GradientCheck.of(self.machine, ranks)]
            if self._synchronises:
                # Otherwise whatever sums the gradients of replicas compares these.
                self._replicas.append(ReplicaSampler(self._model, self.machine, ranks))
                checks.insert(0, self._replicas[-1])
            found = self._calls[ranks] = Calls(self.machine, ranks, self.name, checks)
        return found

    def _parts(self) -> list[tuple[str, nn.Module]]:
        return [(path, module) for path, one in self._modules if (module := one()) is not None]

    def _facts(self, given: Sequence[torch.Tensor]) -> tuple[int, ...]:
        # Numbers that must be equal on all ranks of a call: modes, and what follows from shapes and layouts.
        # Ranks compare one hash of all; the words of ``_described`` are made only if it differs.
        facts = [*_modes(), *[part.training for _, one in self._modules if (part := one()) is not None]]
        for x in given:
            # Read without the table of functions.
            block = x._local if isinstance(x, SplitTensor) else x
            kind = DTYPES.index(block.dtype) if block.dtype in DTYPES else -1
            where = block.is_cpu + 2 * block.is_meta + 4 * (block.layout is torch.strided)
            facts += [*x.shape, kind, block.requires_grad, where]
            if isinstance(x, SplitTensor):
                layout = x.decomposition
                facts += [-1 if axis is None else axis for axis in layout.axes]
                facts += [hash(split) for split in layout.splits]
        return tuple(facts)

    def described(self, given: Sequence[torch.Tensor], plain: str) -> str:
        """What a call passes, and in which modes it is, for messages; local."""
        grad, inference, autocast = _modes()
        parts = self._parts()
        mode = parts[0][1].training
        others = [path for path, module in parts if module.training != mode]
        but = f" but for {', '.join(map(repr, others))}" if others else ""
        graph = "records a graph" if grad and not inference else "records no graph"
        short = " under autocast" if autocast else ""
        passed = ", ".join([*map(_said, given), *([plain] if plain != "[]" else [])]) or "no tensor"
        changed = f"; its {self._change} since the last call" if self._change else ""
        if changed and (model := self._model()) is not None:
            device = next((x.device for x in model.parameters()), None)
            changed += f"; {not_on_one_device(model) or f'the model is on {device}'}"
        return f"passes {passed}, is in {'train' if mode else 'eval'}(){but}, {graph}{short}{changed}"


def _modes() -> tuple[int, ...]:
    # Modes of torch that must be equal on all ranks.
    kinds = [kind for kind in AUTOCASTING if torch.is_autocast_enabled(kind)] if AUTOCASTS() else []
    return (
        int(torch.is_grad_enabled()),
        int(torch.is_inference_mode_enabled()),
        crc32(str([*map(torch.get_autocast_dtype, kinds)]).encode()) if kinds else 0,
    )


def _is_plain(x: Any) -> bool:
    # Whether its text is equal on all ranks.
    return x is None or isinstance(x, (bool, int, float, str))


def _said(x: torch.Tensor) -> str:
    cut = f", {described(x.decomposition)}" if isinstance(x, SplitTensor) else ""
    block = x._local if isinstance(x, SplitTensor) else x
    kind = f"{x.dtype}{'' if block.is_cpu else f' on {block.device}'}"
    return f"{tuple(x.shape)} of {kind}{cut}{', which requires a gradient' if x.requires_grad else ''}"


_NO_GRAPH = (
    "a distributed model computes on split tensors, which are in no graph; compile what is called with plain"
    " tensors, or run it as it is"
)


@breaks_graph
def _refuse_graph(*_arguments: Any) -> None:
    # The first hook: if it raises, no module is on the stack that would have to be popped.
    if found := "torch.compile" if compiles() is not None else tracer():
        raise UnsupportedError(f"{found}: {_NO_GRAPH}")


_IMAGES = (3, 4, 5)  # dimensions of batches of signals, images and volumes


def distribute(
    model: M,
    grid: Grid,
    *,
    reduction: Literal["sum", "mean", "none"] = "sum",
    replicas: int | None = None,
    bucket_nbytes: int = 1 << 20,
    fallback: Literal["move", "error"] = "move",
    check_copies: bool = True,
) -> M:
    """Make a model compute on split tensors: the same object, parameters and state dict; exact or refused.

    Calls take :class:`SplitTensor`. A plain tensor with the dimensions of the grid counts as whole, equal on
    all ranks, and is cut. The output is split, or replicated if no dimension is left to cut; a loss is
    written as for one machine. After ``backward()`` every ``.grad`` on every rank equals that of the model
    alone. Collective over the machine; parameters and buffers are broadcast from its first rank.

    Parameters
    ----------
    model
        Any module; layers of this library may be in it.
    grid
        How many blocks each dimension of an input is cut into, on the ranks of COMM_WORLD. The letters of
        ``{"H": 2, "W": 2}`` are the dimensions in torch's order: N samples, C channels, then D depth, H
        height and W width; (N, C, W) is a signal, (N, C, H, W) an image, (N, C, D, H, W) a volume. A
        dimension that is not named is whole. ``-1``, for one of them, means as many blocks as ranks are left:
        ``{"H": -1}`` has a block of rows for each rank. ``"2x2"`` and ``(2, 2)`` are for the last dimensions,
        here H and W. Or a partition of all ranks of its machine.
    reduction, replicas, bucket_nbytes
        Of :class:`GradientSync`. With ``reduction="none"`` there is none: every ``.grad`` is this rank's
        contribution, which ``DistributedDataParallel`` or ``fully_shard`` over all ranks sum
        (``docs/torch-distributed.md``). Parameters and buffers are not broadcast; they must be equal on the
        ranks of the grid.
    fallback
        ``"move"``: if a function cannot act on the layout of its inputs, they are redistributed by the rules
        of ``docs/split-functions.md``. ``"error"``: ``UnsupportedError`` instead.
    check_copies
        Whether each call compares parts of parameters, buffers, plain inputs, and plain arguments of
        functions in the model between the ranks, in the messages at its beginning and end
        (``docs/convert.md`` says what is found when). ``MismatchError`` on all ranks names the
        first difference.

    Raises
    ------
    ConfigurationError
        On all ranks: if the model is distributed already, or an option is invalid; and as ``GradientSync``.
    ArgumentError, PartitionError
        On all ranks: if the grid has no known form, or its product is not the number of ranks.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
    >>> model = distribute(model, {"H": -1})  # a block of rows for each rank
    >>> x = torch.rand(2, 1, 64, 48)  # the same on all ranks
    >>> y = model(x)
    >>> y.shape, y.to_local().shape
    (torch.Size([2, 1, 64, 48]), torch.Size([2, 1, 32, 48]))
    >>> y.square().mean().backward()  # gradients of all parameters are whole, and equal on all ranks
    """
    machine = Machine.of(grid) if isinstance(grid, Partition) else Machine.on()
    # Whether gradients are summed by others, or a mean over replicas is taken: the grid may leave out ranks.
    apart = reduction == "none" or replicas is not None
    options: dict[str, Any] = {"fallback": fallback, "reduction": reduction, "check_copies": check_copies}
    wrong, alike = ConfigurationError, "they must be alike"
    with together(machine, machine.ranks, "distribute", failed=wrong, differs=wrong, advice=alike) as facts:
        _check(model, machine, grid, apart, options)
        facts |= {"grid": str(grid.shape if isinstance(grid, Partition) else grid), **options}
        facts["device"] = next((x.device.type for x in chain(model.parameters(), model.buffers())), "")
    # The GradientSync compares these itself.
    options |= {"replicas": replicas, "bucket_nbytes": bucket_nbytes}
    handle = Distributed(model, machine, grid, options)
    # Set before the GradientSync is made, which reads it.
    vars(model)[_KEY], vars(model)["compile"] = handle, handle.compile
    try:
        _ = reduction == "none" or handle.sync
    except BaseException:
        handle.close()
        raise
    warn_of_start(machine)
    return model


# The values of options that are words.
_WORDS = {"fallback": ("move", "error"), "reduction": (*REDUCTIONS, "none")}


def _check(model: nn.Module, machine: Machine, grid: Grid, apart: bool, options: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"distribute: takes a torch.nn.Module, got {model!r}")
    for name, (*others, last) in _WORDS.items():
        if options[name] not in (*others, last):
            listed = f"{', '.join(map(repr, others))} or {last!r}"
            raise ConfigurationError(f"distribute: {name} is {listed}, got {options[name]!r}")
    for path, part in model.named_modules():
        if _KEY in vars(part):
            raise ConfigurationError(
                f"distribute: {f'the part {path!r} of the model' if path else 'this model'} is distributed"
                f" already; model{f'.{path}' if path else ''}.distributed.close() first"
            )
    if found := not_on_one_device(model):
        raise ConfigurationError(f"distribute: {found}")
    if not isinstance(grid, Partition):
        # For the largest number of dimensions, to find now whether the grid fits the ranks.
        grid_for(grid, machine, _IMAGES[-1])
    elif not apart and set(grid.ranks) != set(machine.ranks):
        raise PartitionError(
            f"distribute: {grid} has not all ranks of its machine {machine.ranks}; the gradients are summed"
            " over these. Say replicas= if the others have other samples, or reduction='none' if others sum"
        )
