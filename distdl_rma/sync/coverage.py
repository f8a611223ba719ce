"""Which ranks the gradients of which parameters are summed over, as modules say by their callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index as as_int
from typing import Any

import torch
from torch import nn

from distdl_rma.layers.layer import DistributedLayer
from distdl_rma.layers.normalisation import DistributedNorm
from distdl_rma.layers.replica import Replica
from distdl_rma.machine import Machine

__all__ = ["Cover", "Entry", "by_module", "covers_of"]

_WEIGHTS = ("get_ranks_synch_weights", "get_sizeof_gradients")
_NORM = {"get_ranks_synch_norm", "get_sizeof_norm"}


@dataclass(eq=False)
class Entry:
    """A parameter, where it is found, and by which name all ranks that share it know it.

    Parameters
    ----------
    parameter
        The parameter.
    module, key
        The module that it belongs to, and its name there.
    name
        Name alike on the ranks that share it.
    """

    parameter: nn.Parameter
    module: nn.Module
    key: str
    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.parameter.numel() * self.parameter.element_size()

    @property
    def replica(self) -> Replica | None:
        """What offers the layer a place for its gradient; None of plain modules."""
        return self.module.replica if isinstance(self.module, DistributedLayer) else None


@dataclass(eq=False)
class Cover:
    """Parameters whose ranks one module states, by its callbacks or its user's.

    Parameters
    ----------
    module
        The module that is asked; None where nobody states anything: a plain module.
    name
        Of that module.
    everyone
        Ranks of the machine, which hold copies of what nobody states anything of.
    """

    module: nn.Module | None
    name: str
    everyone: tuple[int, ...]
    entries: list[Entry] = field(default_factory=list)
    # All modules in it, each with its path.
    parts: list[tuple[str, nn.Module]] = field(default_factory=list)
    ranks: tuple[int, ...] = ()
    # Why this rank cannot say what it is asked for.
    complaint: str = ""
    # Whether some of its parameters went elsewhere.
    partly: bool = False

    @property
    def held_nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def layer(self) -> DistributedLayer | None:
        """The module, if it is a layer of this library."""
        return self.module if isinstance(self.module, DistributedLayer) else None

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold copies by the plan of a layer of this library; empty if nobody knows."""
        layer = self.layer
        if layer is None or not layer.placed:
            return ()
        return layer.placed.replica.holders

    @property
    def stated_by_user(self) -> bool:
        """Whether the ranks are not those that this library would have chosen."""
        if self.layer is not None:
            return "get_ranks_synch_weights" in vars(self.layer)
        return hasattr(self.module, "get_ranks_synch_weights")

    def without(self, parameters: set[int]) -> Cover:
        """What is left without some parameters, given by ``id``."""
        left = [entry for entry in self.entries if id(entry.parameter) not in parameters]
        if len(left) == len(self.entries):
            return self
        return replace(self, entries=left, partly=True)

    @property
    def answers_for_a_norm(self) -> bool:
        """Whether a user has given a callback about statistics."""
        return isinstance(self.module, DistributedNorm) and any(key in vars(self.module) for key in _NORM)

    def ask(self) -> None:
        """Ask the module; what is no list of ranks becomes a complaint."""
        try:
            said: Sequence[int] = self.everyone
            if hasattr(self.module, "get_ranks_synch_weights"):
                said = self._callback("get_ranks_synch_weights")()
            self.ranks = tuple(as_int(rank) for rank in said)
        except Exception as error:  # noqa: BLE001 - the user's function; all ranks hear of it
            self.complaint = f"get_ranks_synch_weights() gives no list of ranks: {error!r}"

    def said_nbytes(self) -> int:
        """What ``get_sizeof_gradients()`` says."""
        if self.module is None or self.partly or not hasattr(self.module, "get_sizeof_gradients"):
            return self.held_nbytes
        return as_int(self._callback("get_sizeof_gradients")())

    def norm(self) -> dict[str, Any]:
        """What a norm's callbacks say, and what holds; only where a user has given them."""
        layer, said = self.layer, {}
        if layer is not None and self.answers_for_a_norm:
            for name in _NORM & vars(layer).keys():
                said[name] = [_plain(vars(layer)[name]()), _plain(getattr(type(layer), name)(layer))]
        return said

    def words(self) -> dict[str, Any]:
        """What the ranks compare; JSON can carry it."""
        try:
            said_nbytes, norm = self.said_nbytes(), self.norm()
        except Exception as error:  # noqa: BLE001 - the user's function; all ranks hear of it
            said_nbytes, norm = 0, {}
            self.complaint = self.complaint or f"a callback gives no number of bytes: {error!r}"
        return {
            "name": self.name,
            # Short for the usual: a copy on all.
            "ranks": None if self.ranks == self.everyone else self.ranks,
            "holders": None if self.holders == self.everyone else self.holders,
            "stated": self.module is not None,
            "nbytes": [said_nbytes, self.held_nbytes],
            "norm": norm,
            "complaint": self.complaint,
            "parameters": {
                entry.name: [list(entry.parameter.shape), str(entry.parameter.dtype).removeprefix("torch.")]
                for entry in self.entries
            },
        }

    def _callback(self, name: str) -> Any:
        return getattr(self.module, name)


def _plain(said: Any) -> int | list[int]:
    return as_int(said) if isinstance(said, int) else [as_int(rank) for rank in said]


def covers_of(module: nn.Module, name: str, machine: Machine, known: dict[int, str]) -> list[Cover]:
    """Parameters of a module and its parts, by who states their ranks, in the order of ``modules()``.

    A part that has ``get_ranks_synch_weights()``, of its own or given, states it for all plain modules in
    it; layers of this library state it for themselves. A plain module that is in none of these counts as
    copied on all ranks. A parameter that several modules share is found once.

    Parameters
    ----------
    module
        The module.
    name
        What its path begins with; may be empty.
    machine
        The machine.
    known
        Names of parameters from earlier, by ``id``; new ones are added.
    """
    seen: set[int] = set()
    covers: list[Cover] = []

    def walk(part: nn.Module, path: str, above: Cover | None) -> None:
        states = any(hasattr(part, name) for name in _WEIGHTS)
        if states or above is None:
            called = part.name if isinstance(part, DistributedLayer) else path or type(part).__name__
            cover = Cover(part if states else None, called, machine.ranks)
            covers.append(cover)
        else:
            cover = above
        where = part.name if isinstance(part, DistributedLayer) else path
        cover.parts.append((where, part))
        for key, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                full = known.setdefault(id(parameter), f"{where}.{key}" if where else key)
                cover.entries.append(Entry(parameter, part, key, full))
        for key, child in part.named_children():
            walk(child, f"{path}.{key}" if path else key, cover if states else above)

    walk(module, name, None)
    found = [cover for cover in covers if cover.entries or cover.answers_for_a_norm]
    for cover in found:
        cover.ask()
    return found


def by_module(cover: Cover) -> Iterator[list[Entry]]:
    """Entries of a cover that belong to the same module and have the same dtype, in order."""
    groups: dict[tuple[int, torch.dtype], list[Entry]] = {}
    for entry in cover.entries:
        groups.setdefault((id(entry.module), entry.parameter.dtype), []).append(entry)
    yield from groups.values()
