"""Which modules are synchronised, and over which ranks: what their callbacks say, compared and put to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from distdl_rma.errors import ConfigurationError
from distdl_rma.layers.core.callbacks import answer
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.machine import Machine
from distdl_rma.ops.set_up_transfer import broadcast_from_first
from distdl_rma.sync.bucket import BucketKind, GradientSlot, SlotGroup
from distdl_rma.sync.claims import Claim, ParameterEntry, by_module, claims_of
from distdl_rma.sync.consensus import check
from distdl_rma.sync.plain_modules import generator_state

_REDUCTIONS = ("sum", "mean")
_learning = attrgetter("requires_grad")
_SUMMED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class Options:
    """Options of a ``GradientSync``, alike on all ranks."""

    reduction: str
    replicas: int | None
    bucket_nbytes: int

    @property
    def refusal(self) -> str:
        """What is wrong with them; empty if nothing is."""
        replicas, nbytes = self.replicas, self.bucket_nbytes
        if self.reduction not in _REDUCTIONS:
            return f"reduction is one of {_REDUCTIONS}, got {self.reduction!r}"
        if replicas is not None and (self.reduction == "sum" or not _at_least(1, replicas)):
            return f"replicas={replicas!r} divides a mean, and is at least 1"
        if not _at_least(0, nbytes):
            return f"bucket_nbytes is a number of bytes, at least 0, got {nbytes!r}"
        return ""

    def divisor(self, cover: Claim, size: int) -> int:
        """What the sums of a cover's gradients are divided by, on a machine of some size."""
        if self.reduction == "sum":
            return 1
        if self.replicas is not None:
            return self.replicas
        return max(1, len(cover.ranks)) if cover.stated_by_user else size


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Admission:
    """A module that was admitted, and what is still to be done.

    Parameters
    ----------
    moved
        Parameters, by ``id``, that are no longer where they were.
    groups
        All parameters of the module that need a gradient, in the order of its layers.
    equalise
        Makes parameters and buffers those of the first of their ranks; collective over the machine, blocking.
    undo
        Admits it no longer, if nothing else was done yet; local.
    drifted
        Names of layers whose weights are not whole on every rank, if equally seeded generators of random
        numbers are in different states by now.
    """

    moved: set[int]
    groups: list[SlotGroup]
    equalise: Callable[[], None]
    undo: Callable[[], None]
    drifted: list[str]


class Registry:
    """The modules of one synchronisation, and who states the ranks of what.

    Parameters
    ----------
    machine
        The machine.
    options
        As of ``GradientSync``.
    """

    def __init__(self, machine: Machine, options: Options) -> None:
        self._machine, self._options = machine, options
        self._covers: list[Claim] = []
        # For messages, and to tell which are the same on other ranks; by ``id``.
        self._names: dict[int, str] = {}
        self._admitted = 0
        self._entries: dict[int, ParameterEntry] = {}
        # All modules with their paths, by ``id``.
        self._parts: dict[int, tuple[str, nn.Module]] = {}
        # What their dictionaries held when they were last walked, and which parameters did not learn then.
        self._seen: list[object] | None = None
        self._tables: list[dict[str, Any]] = []
        self._resting: list[nn.Parameter] = []

    def admit(self, module: Any, name: str | None, callbacks: Mapping[str, Any], refusal: str) -> Admission:
        """Admit a module with its callbacks, or those given; collective over the machine, blocking.

        Parameters
        ----------
        module, name, callbacks
            As of ``GradientSync.register``.
        refusal
            Why this rank cannot admit anything now; empty if it can.

        Raises
        ------
        ConfigurationError
            On all ranks, if something does not fit together; nothing has changed then.
        """
        self._admitted += 1
        prefix = name or ("" if self._admitted == 1 else f"module {self._admitted}")
        names, new = dict(self._names), list[Claim]()
        if module is not None and not isinstance(module, nn.Module):
            refusal, module = refusal or f"a torch.nn.Module is needed, got {module!r}", None
        undo = self._undoing(module, callbacks)
        if module is not None:
            try:
                answer(module, f"register({prefix or type(module).__name__})", callbacks)
            except (ConfigurationError, TypeError) as error:
                refusal = refusal or str(error)
            refusal = refusal or unfit(module, self._machine)
            new = [] if refusal else claims_of(module, prefix, self._machine, names)
        moved = {id(entry.parameter) for cover in new for entry in cover.entries}
        kept = [cover.without(moved) for cover in self._covers]
        kept = [cover for cover in kept if cover.says_anything and id(cover.module) not in _modules(new)]
        try:
            title = f"GradientSync (callbacks {self._admitted})"
            refusal = self._options.refusal or refusal or self._taken(new)
            cut = [cover.name for cover in new if cover.layer is not None and cover.layer.scattered]
            state = generator_state() if cut else None
            drifted = check(self._machine, [*kept, *new], asdict(self._options), refusal, title, state)
        except ConfigurationError:
            undo()
            raise
        elsewhere = {id(e.parameter): cover.ranks for cover in self._covers for e in cover.entries}
        self._covers, self._names = kept + new, names
        self._entries = {id(e.parameter): e for cover in self._covers for e in cover.entries}
        for path, part in () if module is None else module.named_modules(prefix=prefix):
            self._parts[id(part)] = path, part
        self._seen = None
        groups = [group for cover in new for group in self._groups_of(cover)]
        return Admission(moved, groups, partial(self._equalise, new, elsewhere), undo, cut if drifted else [])

    def _undoing(self, module: nn.Module | None, callbacks: Mapping[str, Any]) -> Callable[[], None]:
        # What puts everything back that admitting a module changes here and in the module.
        state = self._covers, self._names, self._entries, dict(self._parts)
        given = {} if module is None else vars(module)
        before = {key: given[key] for key in callbacks if key in given}

        def undo() -> None:
            self._covers, self._names, self._entries, self._parts = state
            self._seen = None
            for key in callbacks:
                given.pop(key, None)
            given.update(before)

        return undo

    def changed(self) -> str:
        """What is no longer as it was when it was admitted; empty if everything is. Local.

        The modules are walked only if some dictionary of theirs holds something else than it did the last
        time, or a parameter that did not learn then does now.
        """
        now = self._held()
        seen = self._seen
        same = seen is not None and len(now) == len(seen) and all(map(is_, now, seen))
        if same and not any(map(_learning, self._resting)):
            return ""
        found = self._walk()
        self._seen = None if found else now
        self._resting = [p for p in now if isinstance(p, nn.Parameter) and not p.requires_grad]
        return found

    def _held(self) -> list[object]:
        # All parameters and children of the modules; the references keep others from looking the same.
        if self._seen is None:
            parts = [part for _, part in self._parts.values()]
            self._tables = [*(part._parameters for part in parts), *(part._modules for part in parts)]
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def _walk(self) -> str:
        for path, part in self._parts.values():
            for key, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    entry = self._entries.get(id(parameter))
                    if entry is None or not entry.learns:
                        what = "replaced or added" if entry is None else "unfrozen"
                        return f"parameter {_under(path, key)!r} was {what}"
            for key, child in part._modules.items():
                if child is not None and id(child) not in self._parts:
                    return f"module {_under(path, key)!r} was added"
        return ""

    def _taken(self, new: Sequence[Claim]) -> str:
        for cover in new:
            for entry in cover.entries:
                if entry.taken and id(entry.parameter) not in self._entries:
                    return f"{entry.name!r} already belongs to another GradientSync; close that"
        return ""

    def _groups_of(self, cover: Claim) -> list[SlotGroup]:
        groups = []
        for entries in by_module(cover):
            kind = BucketKind(
                cover.ranks, entries[0].parameter.dtype, self._options.divisor(cover, self._machine.size)
            )
            slots = [GradientSlot(e, kind) for e in entries if e.parameter.requires_grad and e.nbytes]
            if slots:
                groups.append(SlotGroup(kind, slots))
        return groups

    def _equalise(self, covers: Sequence[Claim], elsewhere: Mapping[int, tuple[int, ...]]) -> None:
        # Parameters and buffers become those of the first of their ranks. Layers of this library are equal on
        # their holders from the start, and may have gone their own way since, if their user said so.
        together: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for cover in covers:
            tensors = together.setdefault(cover.ranks, [])
            for entry in cover.entries:
                before = elsewhere.get(id(entry.parameter), cover.ranks)
                if cover.layer is None or cover.stated_by_user or before != cover.ranks:
                    tensors.append(entry.parameter.data)
            tensors.extend(buffer for _, buffer in cover.buffers)
        # What the same ranks hold comes in the same order on all of them; the order of the rest is free.
        for ranks, tensors in sorted(together.items(), key=lambda item: item[0]):
            if len(ranks) > 1:
                broadcast_from_first(self._machine, ranks, tensors, "GradientSync")


def unfit(module: nn.Module, machine: Machine) -> str:
    """Why a module cannot be synchronised at all; empty if it can."""
    for path, part in module.named_modules():
        name = part.name if isinstance(part, DistributedLayer) else path or type(part).__name__
        for key, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, UninitializedParameter):
                return f"{name!r} has parameters without a shape yet; call the model once before"
            if parameter.requires_grad and parameter.dtype not in _SUMMED:
                return (
                    f"the {key} of {name!r} is {parameter.dtype}, whose gradients cannot be summed: freeze"
                    f" it, or use one of {[str(dtype) for dtype in _SUMMED]}"
                )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            return f"{name!r} has sparse gradients, which cannot be summed; build it with sparse=False"
        if not isinstance(part, DistributedLayer):
            continue
        if part.machine is not machine:
            return f"{name!r} belongs to another machine"
        for key in part.placements or ():
            if not isinstance(part._parameters.get(key), nn.Parameter):
                return (
                    f"the {key} of {name!r} is computed from other parameters, whose gradients would not be"
                    " summed; leave the layer out, and it sums them itself"
                )
    return ""


def _under(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _modules(covers: Sequence[Claim]) -> set[int]:
    return {id(cover.module) for cover in covers if cover.module is not None}
