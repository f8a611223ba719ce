"""Which modules are synchronised: added on all ranks or on none, and watched for later changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from distdl_rma.sync.bucket import BucketKind, GradientSlot
from distdl_rma.sync.claims import Claim, claims_of, taken, under
from distdl_rma.sync.consensus import agree
from distdl_rma.sync.plain_modules import generator_state

_REDUCTIONS = ("sum", "mean")
_SUMMED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)
_learns = attrgetter("requires_grad")


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

    def divisor(self, claim: Claim, size: int) -> int:
        """What the sums of a claim's gradients are divided by, on a machine of some size."""
        if self.reduction == "sum":
            return 1
        if self.replicas is not None:
            return self.replicas
        return max(1, len(claim.ranks)) if claim.decided_by_user else size


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Addition:
    """What all ranks agreed to add: its own claims, and those that are left of earlier ones.

    ``moved`` are parameters, by ``id``, that are no longer where they were; ``drifted`` names layers whose
    weights are not whole on every rank, if equally seeded generators are in different states by now.
    """

    machine: Machine
    options: Options
    new: list[Claim]
    kept: list[Claim]
    moved: set[int]
    # Ranks of earlier claims, by ``id`` of the parameter.
    before: Mapping[int, tuple[int, ...]]
    drifted: list[str]

    def slots(self) -> list[list[GradientSlot]]:
        """Parameters that need a gradient, in the order of their layers: lists that travel as a whole."""
        found = []
        for claim in self.new:
            divisor = self.options.divisor(claim, self.machine.size)
            for entries in claim.by_module():
                kind = BucketKind(claim.ranks, entries[0].parameter.dtype, divisor)
                found.append(
                    [GradientSlot(e, kind) for e in entries if e.parameter.requires_grad and e.nbytes]
                )
        return [slots for slots in found if slots]

    def equalise(self) -> None:
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
                broadcast_from_first(self.machine, ranks, tensors, "GradientSync")


class Registry:
    """The claims and modules of one ``GradientSync``."""

    def __init__(self, machine: Machine, options: Options) -> None:
        self._machine, self._options = machine, options
        self._claims: list[Claim] = []
        self._watch = ModuleWatch()
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
            self._watch.add(module, prefix)

    def _agreed(
        self, module: nn.Module | None, prefix: str, callbacks: Mapping[str, Any], refusal: str
    ) -> Addition:
        machine = self._machine
        if module is not None:
            try:
                answer(module, f"register({prefix or type(module).__name__})", callbacks)
            except (ConfigurationError, TypeError) as error:
                refusal = refusal or str(error)
            refusal = refusal or unfit(module, machine)
        names = {id(e.parameter): e.name for claim in self._claims for e in claim.entries}
        new = [] if refusal or module is None else claims_of(module, prefix, machine, names)
        refusal = self._options.refusal or refusal
        for entry in chain.from_iterable(claim.entries for claim in new):
            if entry.parameter in taken and id(entry.parameter) not in names:
                refusal = refusal or f"{entry.name!r} already belongs to another GradientSync; close that"
        moved = {id(entry.parameter) for claim in new for entry in claim.entries}
        anew = {id(claim.module) for claim in new if claim.module is not None}
        kept = [claim.without(moved) for claim in self._claims]
        kept = [claim for claim in kept if claim.says_anything and id(claim.module) not in anew]
        cut = [claim.name for claim in new if claim.layer is not None and claim.layer.scattered]
        drifted = agree(
            machine,
            [*kept, *new],
            asdict(self._options),
            refusal,
            f"GradientSync (callbacks {self._attempts})",
            generator_state() if cut else None,
        )
        before = {id(e.parameter): claim.ranks for claim in self._claims for e in claim.entries}
        return Addition(machine, self._options, new, kept, moved, before, cut if drifted else [])

    def later_change(self) -> str:
        """What is no longer as it was when it was added; empty if everything is. Local."""
        return self._watch.later_change(self._claims)


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

    def add(self, module: nn.Module, prefix: str) -> None:
        """Watch a module and all in it."""
        self._modules |= {id(part): (path, part) for path, part in module.named_modules(prefix=prefix)}
        modules = [part for _, part in self._modules.values()]
        self._tables = [*(part._parameters for part in modules), *(part._modules for part in modules)]
        self._held = None

    def later_change(self, claims: Iterable[Claim]) -> str:
        """What is not as the claims have it; empty if everything is."""
        # The references keep others from looking the same.
        now: list[object] = list(chain.from_iterable(map(dict.values, self._tables)))
        held = self._held
        same = held is not None and len(now) == len(held) and all(map(is_, now, held))
        if same and not any(map(_learns, self._frozen)):
            return ""
        found = self.walk({id(e.parameter): e.learns for claim in claims for e in claim.entries})
        self._held = None if found else now
        self._frozen = [p for p in now if isinstance(p, nn.Parameter) and not p.requires_grad]
        return found

    def walk(self, learned: Mapping[int, bool]) -> str:
        """The first change, given which parameters learned, by ``id``; empty if there is none."""
        for path, part in self._modules.values():
            for key, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad and not learned.get(id(parameter)):
                    what = "unfrozen" if id(parameter) in learned else "replaced or added"
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
