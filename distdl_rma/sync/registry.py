"""Which modules are synchronised: added on all ranks or on none, and watched for later changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from distdl_rma.errors import ConfigurationError
from distdl_rma.layers.core.callbacks import answer
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.machine import Machine
from distdl_rma.ops.set_up_transfer import broadcast_from_first
from distdl_rma.sync.bucket import BucketKind, GradientSlot
from distdl_rma.sync.claims import Claim, claims_of, synchronised, under
from distdl_rma.sync.consensus import agree
from distdl_rma.sync.plain_modules import generator_state

_REDUCTIONS = ("sum", "mean")
_SUMMED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_learns = attrgetter("requires_grad")


class SyncOptions(NamedTuple):
    """Options of a ``GradientSync``, alike on all ranks."""

    reduction: str
    replicas: int | None
    bucket_nbytes: int

    @property
    def refusal(self) -> str:
        """What is wrong with them; empty if nothing is."""
        reduction, replicas, nbytes = self
        if reduction not in _REDUCTIONS:
            return f"reduction is one of {_REDUCTIONS}, got {reduction!r}"
        if replicas is not None and (reduction == "sum" or not _at_least(1, replicas)):
            return f"replicas={replicas!r} divides a mean, and is at least 1"
        if not _at_least(0, nbytes):
            return f"bucket_nbytes is a number of bytes, at least 0, got {nbytes!r}"
        return ""

    def divisor(self, claim: Claim) -> int:
        """What the sums of a claim's gradients are divided by."""
        if self.reduction == "sum":
            return 1
        if self.replicas is not None:
            return self.replicas
        return max(1, len(claim.ranks if claim.decided_by_user else claim.everyone))


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class Addition(NamedTuple):
    """What all ranks agreed to add: its own claims, and those that are left of earlier ones."""

    # Counts what was tried to be added, alike on all ranks.
    number: int
    new: list[Claim]
    kept: list[Claim]
    # Parameters, by ``id``, that are no longer where they were; and the ranks of earlier claims, likewise.
    moved: set[int]
    before: Mapping[int, tuple[int, ...]]
    # Layers whose weights are not whole on every rank, if equally seeded generators are in different states.
    drifted: list[str]

    def slots(self, options: SyncOptions) -> list[list[GradientSlot]]:
        """Parameters that need a gradient, in the order of their layers: lists that travel as a whole."""
        found = []
        for claim in self.new:
            for entries in claim.by_module():
                learning = [entry for entry in entries if entry.parameter.requires_grad and entry.nbytes]
                kind = BucketKind(claim.ranks, entries[0].parameter.dtype, options.divisor(claim))
                if learning:
                    found.append([GradientSlot(entry, kind) for entry in learning])
        return found

    def equalise(self, machine: Machine) -> None:
        """Make parameters and buffers those of the first of their ranks; collective, blocking.

        Layers of this library are equal on their holders from the start, and may have gone their own way
        since, if their user said so.
        """
        together: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for claim in self.new:
            tensors = together.setdefault(claim.ranks, [])
            for entry in claim.entries:
                before = self.before.get(id(entry.parameter), claim.ranks)
                if claim.layer is None or claim.decided_by_user or before != claim.ranks:
                    tensors.append(entry.parameter.data)
            tensors.extend(buffer for _, buffer in claim.buffers)
        # What the same ranks hold comes in the same order on all of them; the order of the rest is free.
        for ranks, tensors in sorted(together.items(), key=lambda item: item[0]):
            if len(ranks) > 1:
                broadcast_from_first(machine, ranks, tensors, "GradientSync")


class Registry:
    """The claims and modules of one ``GradientSync``."""

    def __init__(self, machine: Machine, options: SyncOptions) -> None:
        self._machine, self._options = machine, options
        self._claims: list[Claim] = []
        self.watch = ModuleWatch()
        self._attempts = 0

    @contextmanager
    def adding(
        self, module: Any, name: str | None, callbacks: Mapping[str, Any], refusal: str
    ) -> Iterator[Addition]:
        """Add a module with its callbacks, or those given, unless the body raises; collective, blocking.

        ``refusal`` is why this rank cannot add anything now, empty if it can; the rest is as of
        ``GradientSync.register``. What does not fit together is a ``ConfigurationError`` on all ranks. After
        an error, here or in the body, nothing has changed.
        """
        self._attempts += 1
        prefix = name or ("" if self._attempts == 1 else f"module {self._attempts}")
        if module is not None and not isinstance(module, nn.Module):
            refusal, module = refusal or f"a torch.nn.Module is needed, got {module!r}", None
        own = {} if module is None else vars(module)
        before = {key: own[key] for key in callbacks if key in own}
        try:
            addition = self._agreed(module, prefix, callbacks, refusal)
            yield addition
        except BaseException:
            for key in callbacks:
                own.pop(key, None)
            own.update(before)
            raise
        self._claims = addition.kept + addition.new
        if module is not None:
            self.watch.add(module, prefix, self._claims)

    def _agreed(
        self, module: nn.Module | None, prefix: str, callbacks: Mapping[str, Any], refusal: str
    ) -> Addition:
        if module is not None:
            try:
                answer(module, f"register({prefix or type(module).__name__})", callbacks)
            except (ConfigurationError, TypeError) as error:
                refusal = refusal or str(error)
            refusal = refusal or unfit(module, self._machine)
        known = [(claim, entry) for claim in self._claims for entry in claim.entries]
        names = {id(entry.parameter): entry.name for _, entry in known}
        new = [] if refusal or module is None else claims_of(module, prefix, self._machine, names)
        refusal = self._options.refusal or refusal
        added = {id(entry.parameter): entry for claim in new for entry in claim.entries}
        for key, entry in added.items():
            if entry.parameter in synchronised and key not in names:
                refusal = refusal or f"{entry.name!r} already belongs to another GradientSync; close that"
        anew = {id(claim.module) for claim in new if claim.module is not None}
        kept = [claim.without(added) for claim in self._claims]
        kept = [claim for claim in kept if claim.says_anything and id(claim.module) not in anew]
        cut = [claim.name for claim in new if claim.layer is not None and claim.layer.scattered]
        title, options = f"GradientSync (callbacks {self._attempts})", self._options._asdict()
        generator = generator_state() if cut else None
        drifted = agree(self._machine, [*kept, *new], options, refusal, title, generator)
        before = {id(entry.parameter): claim.ranks for claim, entry in known}
        return Addition(self._attempts, new, kept, set(added), before, cut if drifted else [])


class ModuleWatch:
    """Notices parameters and modules that are replaced, added or unfrozen after they were registered.

    The modules are walked only if some dictionary of theirs holds something else than it did the last time,
    or a parameter that did not learn then does now.
    """

    def __init__(self) -> None:
        # All modules with their paths, by ``id``.
        self._modules: dict[int, tuple[str, nn.Module]] = {}
        # What their dictionaries held when they were last walked, and which parameters did not learn then.
        self._tables: list[dict[str, Any]] = []
        self._held: list[object] | None = None
        self._frozen: list[nn.Parameter] = []
        # Which parameters learned when they were registered, by ``id``.
        self._learned: dict[int, bool] = {}

    def add(self, module: nn.Module, prefix: str, claims: Iterable[Claim]) -> None:
        """Watch a module and all in it, given the claims of all that is registered now."""
        self._learned = {id(entry.parameter): entry.learns for claim in claims for entry in claim.entries}
        self._modules |= {id(part): (path, part) for path, part in module.named_modules(prefix=prefix)}
        modules = [part for _, part in self._modules.values()]
        self._tables = [*(part._parameters for part in modules), *(part._modules for part in modules)]
        self._held = None

    def later_change(self) -> str:
        """What is no longer as it was when it was added; empty if everything is. Local."""
        # The references keep others from looking the same.
        now: list[object] = list(chain.from_iterable(map(dict.values, self._tables)))
        held = self._held
        same = held is not None and len(now) == len(held) and all(map(is_, now, held))
        if same and not any(map(_learns, self._frozen)):
            return ""
        found = self.walk()
        self._held = None if found else now
        self._frozen = [p for p in now if isinstance(p, nn.Parameter) and not p.requires_grad]
        return found

    def walk(self) -> str:
        """The first change; empty if there is none."""
        for path, part in self._modules.values():
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.requires_grad or self._learned.get(id(parameter)):
                    continue
                what = "unfrozen" if id(parameter) in self._learned else "replaced or added"
                return f"parameter {under(path, key)!r} was {what}"
            for key, child in part._modules.items():
                if child is not None and id(child) not in self._modules:
                    return f"module {under(path, key)!r} was added"
        return ""


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
        if isinstance(part, DistributedLayer):
            if part.machine is not machine:
                return f"{name!r} belongs to another machine"
            for key in part.placements or ():
                if not isinstance(part._parameters.get(key), nn.Parameter):
                    return (
                        f"the {key} of {name!r} is computed from other parameters, whose gradients would not"
                        " be summed; leave the layer out, and it sums them itself"
                    )
    return ""
