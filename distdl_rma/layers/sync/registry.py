"""Which modules are synchronised: all ranks add one, or none does; and whether modules change later.

``Registry.adding`` is a transaction in three steps, of which only the last one changes anything:

    each rank    its groups and their statements; why it cannot, if it cannot    ``_addition``
    all ranks    compare these; all raise the first problem, or none does        ``agree``
    each rank    the body makes buckets and hooks; then the groups are kept      ``adding``

An error anywhere leaves the groups, and the callbacks of the module, as they were before. Ranks count their
attempts, so that messages of a failed one cannot be taken for those of the next.

Groups are kept as statements and weak references (:class:`Agreed`): ranks must be able to compare a later
module with them, also if the user has deleted the modules here, on this rank alone.

``ModuleWatch`` finds changes after that, such as an unfrozen parameter, whose gradients nobody would sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from distdl_rma.errors import ConfigurationError
from distdl_rma.layers.checks.generators import generator_state
from distdl_rma.layers.ops.set_up_transfer import broadcast_from_first
from distdl_rma.layers.partitioned.core.callbacks import set_callbacks
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.sync.bucket import BucketKind, GradientSlot
from distdl_rma.layers.sync.callback_check import Words, agree, statement
from distdl_rma.layers.sync.gradient_groups import (
    GradientGroup,
    Owner,
    gradient_groups_of,
    synchronised,
    under,
)
from distdl_rma.segments.machine import Machine

REDUCTIONS = "sum", "mean"
_SUMMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_kind = attrgetter("dtype", "device")


class SyncOptions(NamedTuple):
    """Options of a ``GradientSync``, equal on all ranks."""

    reduction: str
    replicas: int | None
    bucket_nbytes: int

    @property
    def refusal(self) -> str:
        """Why they are invalid; empty if they are valid."""
        reduction, replicas, nbytes = self
        if reduction not in REDUCTIONS:
            return f"reduction is one of {REDUCTIONS}, got {reduction!r}"
        if replicas is not None and (reduction == "sum" or not _at_least(1, replicas)):
            return f"replicas={replicas!r} divides a mean, and is at least 1"
        if not _at_least(0, nbytes):
            return f"bucket_nbytes is a number of bytes, at least 0, got {nbytes!r}"
        return ""

    def divisor(self, group: GradientGroup) -> int:
        """Divisor of the sums of a group's gradients."""
        if self.reduction == "sum":
            return 1
        if self.replicas is not None:
            return self.replicas
        return max(1, len(group.ranks if group.decided_by_user else group.everyone))


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class Agreed(NamedTuple):
    """A group on which all ranks agreed; its statement stays, even if the user deletes the module.

    Module and parameters are weak references, the latter with names. ``root`` was registered.
    """

    statement: Words
    ranks: tuple[int, ...]
    root: Callable[[], nn.Module | None]
    module: Callable[[], nn.Module | None]
    parameters: Sequence[tuple[Callable[[], torch.Tensor | None], str]]

    @classmethod
    def of(cls, group: GradientGroup, statement: Words, root: nn.Module | None) -> Agreed:
        """For a new group."""
        parameters = [(ref(e.parameter), e.name) for e in group.entries]
        return cls(statement, group.ranks, _weak(root), _weak(group.module), parameters)

    def without(self, moved: Collection[str]) -> Agreed:
        """The group without the parameters of these names; its module's callback is not asked again."""
        left = [each for each in self.parameters if each[1] not in moved]
        stated = {name: form for name, form in self.statement["parameters"].items() if name not in moved}
        statement = self.statement | {"parameters": stated, "new": False}
        return self._replace(statement=statement, parameters=left)


def _weak(module: nn.Module | None) -> Callable[[], nn.Module | None]:
    return (lambda: None) if module is None else ref(module)


class Addition(NamedTuple):
    """What all ranks agreed to add: the new groups, and what remains of earlier ones."""

    # Counts attempts to add something, equal on all ranks.
    number: int
    new: list[GradientGroup]
    agreed: list[Agreed]
    # Names of known parameters whose group changes; ranks of earlier groups, by ``id`` of the parameter.
    moved: set[str]
    before: Mapping[int, tuple[int, ...]]
    # Layers with parts of weights, if generators with one seed are in different states.
    drifted: list[str]

    def slots(self, options: SyncOptions) -> list[list[GradientSlot]]:
        """Slots for parameters that need a gradient, in the order of their layers; a list shares a bucket."""
        found = []
        for group in self.new:
            for entries in group.by_module():
                learning = [entry for entry in entries if entry.parameter.requires_grad and entry.nbytes]
                first = entries[0].parameter
                kind = BucketKind(group.ranks, first.dtype, options.divisor(group), first.device)
                if learning:
                    found.append([GradientSlot(entry, kind) for entry in learning])
        return found

    def equalise(self, machine: Machine) -> None:
        """Broadcast parameters and buffers from the first of their ranks; collective, blocking.

        Parameters of this library's layers are equal on their holders from the start. They are only broadcast
        if a user's callback chose the ranks, or the ranks changed.
        """
        together: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for group in self.new:
            tensors = together.setdefault(group.ranks, [])
            for entry in group.entries:
                before = self.before.get(id(entry.parameter), group.ranks)
                if group.layer is None or group.decided_by_user or before != group.ranks:
                    tensors.append(entry.parameter.data)
            tensors.extend(buffer for _, buffer in group.buffers)
        # Ranks that sum together have their tensors in the same order; all ranks sort the lists.
        for ranks, tensors in sorted(together.items(), key=lambda item: item[0]):
            if len(ranks) > 1:
                broadcast_from_first(machine, ranks, tensors, "GradientSync")


class Registry:
    """The groups and modules of one ``GradientSync``."""

    def __init__(self, machine: Machine, options: SyncOptions, owner: Owner) -> None:
        self._machine, self._options, self._owner = machine, options, owner
        self._agreed: list[Agreed] = []
        self.watch, self._attempts = ModuleWatch(), 0

    @contextmanager
    def adding(
        self, module: Any, name: str | None, callbacks: Mapping[str, Any], refusal: str
    ) -> Iterator[Addition]:
        """Add a module with its callbacks, or given ones, unless the body raises; collective, blocking.

        ``refusal`` says why this rank cannot add anything now, empty if it can; the other arguments are those
        of ``GradientSync.register``. Ranks that disagree all raise ``ConfigurationError``. After an error,
        here or in the body, nothing has changed.
        """
        self._attempts += 1
        usual = "" if self._attempts == 1 else f"module {self._attempts}"
        prefix = name or (self.watch.path(module) if self.has(module) else usual)
        if module is not None and not isinstance(module, nn.Module):
            refusal, module = refusal or f"a torch.nn.Module is needed, got {module!r}", None
        own = {} if module is None else vars(module)
        before = {key: own[key] for key in callbacks if key in own}
        try:
            addition = self._addition(module, prefix, callbacks, refusal)
            yield addition
        except BaseException:
            for key in callbacks:
                own.pop(key, None)
            own.update(before)
            raise
        self._agreed = addition.agreed
        if module is not None:
            known = [one() for agreed in self._agreed for one, *_ in agreed.parameters]
            self.watch.add(module, prefix, [one for one in known if one is not None])

    def has(self, module: nn.Module | None) -> bool:
        """Whether a module was registered itself, not only within another."""
        return module is not None and any(agreed.root() is module for agreed in self._agreed)

    def _addition(
        self, module: nn.Module | None, prefix: str, callbacks: Mapping[str, Any], refusal: str
    ) -> Addition:
        if module is not None:
            try:
                set_callbacks(module, f"register({prefix or type(module).__name__})", callbacks)
            except (ConfigurationError, TypeError) as error:
                refusal = refusal or str(error)
            refusal = refusal or not_on_one_device(module) or unfit(module, self._machine)
        known = [(one(), name, each.ranks) for each in self._agreed for one, name in each.parameters]
        names = {id(parameter): name for parameter, name, _ in known if parameter is not None}
        # Without groups of the same root: a module that is added again may have lost some of them.
        others = [agreed for agreed in self._agreed if module is None or agreed.root() is not module]
        new = [] if refusal or module is None else gradient_groups_of(module, prefix, self._machine, names)
        refusal = self._options.refusal or refusal
        added = {id(entry.parameter): entry for group in new for entry in group.entries}
        for key, entry in added.items():
            if entry.parameter in synchronised and key not in names:
                other = synchronised[entry.parameter].another
                refusal = refusal or f"{entry.name!r} already belongs to {other}"
        stay = {name for agreed in others for _, name in agreed.parameters}
        moved = {names[key] for key in added.keys() & names} | ({name for _, name, _ in known} - stay)
        anew = {id(group.module) for group in new if group.module is not None}
        kept = [agreed.without(moved) for agreed in others if id(agreed.module()) not in anew]
        fresh = [Agreed.of(group, statement(group, self._machine.rank), module) for group in new]
        cut = [group.name for group in new if group.layer is not None and group.layer.scattered]
        who, options = self._owner.title, self._options._asdict()
        generator = generator_state() if cut else None
        statements = [agreed.statement for agreed in (*kept, *fresh)]
        title = f"{who} (callbacks {self._attempts})"
        drifted = agree(self._machine, statements, options, refusal, title, generator, who)
        before = {id(parameter): ranks for parameter, _, ranks in known if parameter is not None}
        return Addition(self._attempts, new, kept + fresh, moved, before, cut if drifted else [])


class ModuleWatch:
    """Notices parameters and modules that are replaced, added, unfrozen or converted after they were added.

    It only walks the modules if a dictionary of theirs holds other objects than the last time, or a
    parameter's ``requires_grad`` or dtype has changed. It keeps weak references only.
    """

    def __init__(self) -> None:
        # All modules, with their paths, and with the root that they were added with.
        self._paths = WeakIdKeyDictionary()
        self._added = WeakIdKeyDictionary()
        self._modules: list[ref[nn.Module]] = []
        # At the last walk: ``id`` of all that the dictionaries held, valid as long as all of it lives;
        # ``requires_grad``, and dtypes and devices of the parameters.
        self._held: tuple[list[int], list[bool], list[Any], list[ref[Any]]] = [], [], [], []
        # Dtype and device of each parameter that learned when it was added; None for the others.
        self._learned = WeakIdKeyDictionary()

    def add(self, module: nn.Module, prefix: str, parameters: Iterable[torch.Tensor]) -> None:
        """Watch a module and all its parts from now on; ``parameters`` are all registered ones."""
        for part in [part for part, root in self._added.items() if root() is module]:
            del self._paths[part], self._added[part]
        for path, part in module.named_modules(prefix=prefix):
            self._paths[part], self._added[part] = path, ref(module)
        before, own = self._learned, {*map(id, module.parameters())}
        self._learned = WeakIdKeyDictionary()
        for each in parameters:
            now = _kind(each) if each.requires_grad else None
            self._learned[each] = now if id(each) in own else before.get(each, now)
        self._modules = [*map(ref, self._paths)]
        self._held = [], [], [], []

    def path(self, module: nn.Module | None) -> str:
        """Path of a watched module."""
        return str(self._paths[module])

    def later_change(self) -> str:
        """A description of a change since the modules were added; empty if there is none. Local."""
        modules = [module for one in self._modules if (module := one()) is not None]
        parameters = [x for module in modules for x in module._parameters.values() if x is not None]
        children = [child for module in modules for child in module._modules.values()]
        ids, learns = [*map(id, parameters), *map(id, children)], [x.requires_grad for x in parameters]
        kinds = [*map(_kind, parameters)]
        if (ids, learns, kinds) == self._held[:3]:
            return ""
        found = self.walk()
        if not found:
            # The ``id`` of a dead object may be used again, so a death invalidates the list.
            refs = [ref(one, lambda _: ids.clear()) for one in (*parameters, *modules)]
            self._held = ids, learns, kinds, refs
        return found

    def walk(self) -> str:
        """Describes the first change; empty if there is none.

        A parameter that is frozen now, or was removed, is no change: it gets no gradient that would be lost.
        """
        for part, path in self._paths.items():
            for key, parameter in part._parameters.items():
                # A plain tensor may take a parameter's place for a call.
                if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
                    continue
                before = self._learned.get(parameter)
                if _kind(parameter) == before:
                    continue
                made = "{} on {}".format(*_kind(parameter))
                what = "unfrozen" if before is None else f"made {made}"
                what = what if parameter in self._learned else "replaced or added"
                return f"parameter {under(path, key)!r} was {what}"
            for key, child in part._modules.items():
                if child is not None and child not in self._paths:
                    return f"module {under(path, key)!r} was added"
        return ""


def not_on_one_device(module: nn.Module) -> str:
    """Message about a parameter or buffer that is not where the others are; empty if there is none."""
    first = next(chain(module.parameters(), module.buffers()), None)
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        if isinstance(x, UninitializedParameter) or first is None:
            continue
        if x.is_meta:
            return f"{name!r} is on the device meta, without memory: to_empty(device='cpu'), then fill it"
        if x.device != first.device:
            return (
                f"{name!r} is on {x.device}, but others are on {first.device}: move the model to one device"
            )
    return ""


def unfit(module: nn.Module, machine: Machine) -> str:
    """Why a module cannot be synchronised; empty if it can."""
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
        if isinstance(part, DistributedLayer):
            if part.machine is not machine:
                return f"{name!r} belongs to another machine"
            for key in part.placements or ():
                if not isinstance(part._parameters.get(key), nn.Parameter):
                    return (
                        f"the {key} of {name!r} is computed from other parameters, whose gradients would not"
                        " be summed; use it without, or leave the layer out, and it sums them itself"
                    )
    return ""
