"""Which modules are synchronised, and over which ranks: what their callbacks say, compared and put to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from distdl_rma.errors import ConfigurationError
from distdl_rma.layers.callbacks import answer
from distdl_rma.layers.layer import DistributedLayer
from distdl_rma.layers.replica import broadcast_from_first
from distdl_rma.machine import Machine
from distdl_rma.sync.bucket import Group, Kind, Slot
from distdl_rma.sync.checking import check
from distdl_rma.sync.coverage import Cover, by_module, covers_of

__all__ = ["Roster"]

_REDUCTIONS = ("sum", "mean")


class Roster:
    """The modules of one synchronisation, and who states the ranks of what.

    Parameters
    ----------
    machine
        The machine.
    reduction, replicas
        As of ``GradientSync``.
    options
        What else has to be alike on all ranks.

    Attributes
    ----------
    frozen
        Parameters that needed no gradient when they were admitted, by name.
    """

    def __init__(
        self, machine: Machine, reduction: str, replicas: int | None, options: Mapping[str, object]
    ) -> None:
        self._machine, self._reduction, self._replicas = machine, reduction, replicas
        self._options = {"reduction": reduction, "replicas": replicas, **options}
        self._covers: list[Cover] = []
        # For messages, and to tell which are the same on other ranks; by ``id``.
        self._names: dict[int, str] = {}
        self._admitted = 0
        self.frozen: dict[str, nn.Parameter] = {}

    def admit(
        self, module: nn.Module | None, name: str | None, callbacks: Mapping[str, Any]
    ) -> tuple[set[int], list[Group]]:
        """Admit a module with its callbacks, or those given; collective over the machine, blocking.

        Returns
        -------
        set of int
            Parameters, by ``id``, that are no longer where they were.
        list of Group
            All parameters of the module that need a gradient, in the order of its layers.

        Raises
        ------
        ConfigurationError
            On all ranks, if something does not fit together; nothing has changed then.
        """
        self._admitted += 1
        prefix = name or ("" if self._admitted == 1 else f"module {self._admitted}")
        before = dict(vars(module)) if module is not None else {}
        new: list[Cover] = []
        refusal = self._refused_options()
        if module is not None:
            try:
                answer(module, f"register({prefix or type(module).__name__})", callbacks)
            except (ConfigurationError, TypeError) as error:
                refusal = refusal or str(error)
            new = covers_of(module, prefix, self._machine, self._names)
        moved = {id(entry.parameter) for cover in new for entry in cover.entries}
        kept = [cover.without(moved) for cover in self._covers]
        try:
            title = f"GradientSync (callbacks {self._admitted})"
            check(self._machine, [*kept, *new], self._options, refusal or self._taken(new), title)
        except ConfigurationError:
            for key in callbacks if module is not None else ():
                vars(module).pop(key, None)
                vars(module).update({key: before[key]} if key in before else {})
            raise
        self._covers = [cover for cover in kept if cover.entries] + new
        for cover in new:
            self._equalise(cover)
        frozen = {entry.name: entry.parameter for cover in self._covers for entry in cover.entries}
        self.frozen = {key: parameter for key, parameter in frozen.items() if not parameter.requires_grad}
        return moved, [group for cover in new for group in self._groups_of(cover)]

    def _refused_options(self) -> str:
        if self._reduction not in _REDUCTIONS:
            return f"reduction is one of {_REDUCTIONS}, got {self._reduction!r}"
        if self._replicas is not None and (self._reduction == "sum" or self._replicas < 1):
            return f"replicas={self._replicas!r} divides a mean, and is at least 1"
        return ""

    def _taken(self, new: Sequence[Cover]) -> str:
        ours = {id(cover.module) for cover in self._covers}
        for cover in new:
            layer = cover.layer
            taken = layer is not None and layer.replica is not None and layer.replica.taken_over
            if taken and id(layer) not in ours:
                return f"{cover.name!r} already belongs to another GradientSync; close that"
        return ""

    def _groups_of(self, cover: Cover) -> list[Group]:
        groups = []
        for entries in by_module(cover):
            kind = Kind(cover.ranks, entries[0].parameter.dtype, self._divisor(cover))
            slots = [Slot(e, kind) for e in entries if e.parameter.requires_grad and e.nbytes]
            if slots:
                groups.append(Group(kind, slots))
        return groups

    def _divisor(self, cover: Cover) -> int:
        if self._reduction == "sum":
            return 1
        if self._replicas is not None:
            return self._replicas
        return max(1, len(cover.ranks)) if cover.stated_by_user else self._machine.size

    def _equalise(self, cover: Cover) -> None:
        # Parameters and buffers become those of the first of their ranks; layers of this library are equal.
        if cover.layer is not None or len(cover.ranks) < 2:
            return
        for entry in cover.entries:
            broadcast_from_first(self._machine, cover.ranks, [entry.parameter.data], entry.name)
        for path, part in cover.parts:
            if not isinstance(part, DistributedLayer):
                buffers = [buffer for buffer in part.buffers(recurse=False) if buffer.numel()]
                broadcast_from_first(self._machine, cover.ranks, buffers, f"{path} (buffers)")
