"""Which ranks the gradients of which parameters are summed over, as modules say by their callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index as as_int
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from distdl_rma.errors import ProtocolError
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.layers.core.parameters import Parameters
from distdl_rma.layers.norm.base import DistributedNorm
from distdl_rma.machine import Machine

# Parameters that some synchronisation has; two of them would sum twice.
_takers: WeakIdKeyDictionary = WeakIdKeyDictionary()
_WEIGHTS = ("get_ranks_synch_weights", "get_sizeof_gradients")
_OTHERS = tuple(name for name in Callbacks.__annotations__ if name not in _WEIGHTS)


@dataclass(eq=False)
class ParameterEntry:
    """A parameter, where it is found, and by which name all ranks that share it know it.

    Parameters
    ----------
    parameter
        The parameter.
    name
        Name alike on the ranks that share it.
    sites
        The modules that use it, each with its name there; the first counts it as its own.
    """

    parameter: nn.Parameter
    name: str
    sites: list[tuple[nn.Module, str]]

    def __post_init__(self) -> None:
        self.learns = self.parameter.requires_grad

    @property
    def taken(self) -> bool:
        """Whether some synchronisation has the parameter."""
        return self.parameter in _takers

    def take(self) -> None:
        """Have it; for others to see."""
        _takers[self.parameter] = True

    def leave(self) -> None:
        """Let others have it."""
        _takers.pop(self.parameter, None)

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return self.parameter.numel() * self.parameter.element_size()

    @property
    def placed(self) -> Iterator[tuple[Parameters, str]]:
        """Parameters of the layers of this library that use it, each with its name there."""
        for module, key in self.sites:
            if isinstance(module, DistributedLayer) and module.placed is not None:
                yield module.placed, key


@dataclass(eq=False)
class Claim:
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
    entries: list[ParameterEntry] = field(default_factory=list)
    # What modules in it use, but others count as their own.
    shared: list[tuple[Claim, ParameterEntry]] = field(default_factory=list)
    # All modules in it, each with its path.
    parts: list[tuple[str, nn.Module]] = field(default_factory=list)
    ranks: tuple[int, ...] = ()
    # Why this rank cannot say what it is asked for.
    complaint: str = ""
    # Whether some of its parameters went elsewhere, and whether it has been looked at before.
    partly: bool = False
    new: bool = True

    @property
    def held_nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(entry.nbytes for entry in (*self.entries, *(entry for _, entry in self.shared)))

    @property
    def layer(self) -> DistributedLayer | None:
        """The module, if it is a layer of this library."""
        return self.module if isinstance(self.module, DistributedLayer) else None

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold copies by the plan of a layer of this library; empty if nobody knows."""
        layer = self.layer
        return () if layer is None or layer.placed is None else layer.placed.holders

    @property
    def stated_by_user(self) -> bool:
        """Whether the ranks are not those that this library would have chosen."""
        if self.layer is not None:
            return "get_ranks_synch_weights" in vars(self.layer)
        return hasattr(self.module, "get_ranks_synch_weights")

    @property
    def says_anything(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.entries or self.shared or self.stated_by_user or self.layer or any(self.buffers))

    @property
    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of plain modules in it, each with its name."""
        for path, part in self.parts:
            if not isinstance(part, DistributedLayer):
                for key, buffer in part.named_buffers(recurse=False):
                    yield f"{path}.{key}" if path else key, buffer

    def without(self, parameters: set[int]) -> Claim:
        """What is left without some parameters, given by ``id``; no longer new."""
        left = [entry for entry in self.entries if id(entry.parameter) not in parameters]
        return replace(
            self, entries=left, partly=self.partly or len(left) < len(self.entries), new=False, complaint=""
        )

    def ask(self) -> None:
        """Ask the module; what is no list of ranks becomes a complaint."""
        try:
            said: Sequence[int] = self.everyone
            if hasattr(self.module, "get_ranks_synch_weights"):
                said = self._callback("get_ranks_synch_weights")()
            self.ranks = tuple(as_int(rank) for rank in said)
        except Exception as error:  # noqa: BLE001 - the user's function; all ranks hear of it
            self.complaint = f"get_ranks_synch_weights() gives no list of ranks: {error!r}"

    def words(self) -> dict[str, Any]:
        """What the ranks compare; JSON can carry it."""
        for other, entry in self.shared:
            if other.ranks != self.ranks:
                self.complaint = self.complaint or (
                    f"{entry.name!r} is shared with {other.name!r} and summed over {list(other.ranks)} there"
                    f" but over {list(self.ranks)} here"
                )
        try:
            said_nbytes, answers = self._said_nbytes(), self._answers()
        except Exception as error:  # noqa: BLE001 - the user's function; all ranks hear of it
            said_nbytes, answers = 0, {}
            self.complaint = self.complaint or f"a callback gives no such thing: {error!r}"
        parameters = {
            entry.name: [*_kind(entry.parameter), entry.parameter.requires_grad] for entry in self.entries
        }
        return {
            "name": self.name,
            # Short for the usual: a copy on all.
            "ranks": None if self.ranks == self.everyone else self.ranks,
            "holders": None if self.holders == self.everyone else self.holders,
            "nbytes": [said_nbytes, self.held_nbytes],
            "answers": answers,
            "complaint": self.complaint,
            "new": self.new,
            "parameters": parameters | {name: [*_kind(buffer), None] for name, buffer in self.buffers},
        }

    def _said_nbytes(self) -> int:
        if self.partly or not hasattr(self.module, "get_sizeof_gradients"):
            return self.held_nbytes
        return as_int(self._callback("get_sizeof_gradients")())

    def _answers(self) -> dict[str, list[Any]]:
        # Of the other callbacks what the user's say, and what holds as far as it is known.
        found = {}
        for name in _OTHERS:
            if self.module is not None and name in vars(self.module):
                known = self._known(name)
                if known is not None:
                    found[name] = [_plain(vars(self.module)[name]()), known]
        return found

    def _known(self, name: str) -> int | list[int] | None:
        layer = self.layer
        if layer is None:
            # A plain module has no statistics; its tensors are not known.
            return [] if name == "get_ranks_synch_norm" else 0 if name == "get_sizeof_norm" else None
        try:
            known = _plain(getattr(type(layer), name)(layer))
        except ProtocolError:
            return None
        # The size of statistics may be known with the first input only.
        return None if known == 0 and isinstance(layer, DistributedNorm) else known

    def _callback(self, name: str) -> Any:
        return getattr(self.module, name)


def _kind(tensor: torch.Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _plain(said: Any) -> int | list[int]:
    return as_int(said) if hasattr(said, "__index__") else [as_int(rank) for rank in said]


def claims_of(module: nn.Module, name: str, machine: Machine, known: dict[int, str]) -> list[Claim]:
    """Parameters of a module and its parts, by who states their ranks, in the order of ``modules()``.

    A part that has ``get_ranks_synch_weights()``, of its own or given, states it for all plain modules in
    it; layers of this library state it for themselves. A plain module that is in none of these counts as
    copied on all ranks. A parameter that several modules share belongs to the first of them.

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
    seen: dict[int, tuple[Claim, ParameterEntry]] = {}
    covers: list[Claim] = []

    # By a list, not by a function that calls itself: its cycle would hold the modules until a collection.
    ahead: list[tuple[nn.Module, str, Claim | None]] = [(module, name, None)]
    while ahead:
        part, path, above = ahead.pop()
        states = any(hasattr(part, name) for name in Callbacks.__annotations__)
        if states or above is None:
            called = part.name if isinstance(part, DistributedLayer) else path or type(part).__name__
            cover = Claim(part if states else None, called, machine.ranks)
            covers.append(cover)
        else:
            cover = above
        where = part.name if isinstance(part, DistributedLayer) else path
        cover.parts.append((where, part))
        for key, parameter in part.named_parameters(recurse=False):
            if id(parameter) in seen:
                owner, entry = seen[id(parameter)]
                entry.sites.append((part, key))
                if owner is not cover:
                    cover.shared.append((owner, entry))
                continue
            full = known.setdefault(id(parameter), f"{where}.{key}" if where else key)
            entry = ParameterEntry(parameter, full, [(part, key)])
            seen[id(parameter)] = cover, entry
            cover.entries.append(entry)
        below = cover if states else above
        children = [(child, f"{path}.{key}" if path else key, below) for key, child in part.named_children()]
        ahead += reversed(children)
    for cover in covers:
        cover.ask()
    return [cover for cover in covers if cover.says_anything]


def by_module(cover: Claim) -> Iterator[list[ParameterEntry]]:
    """Entries of a cover that belong to the same module and have the same dtype, in order."""
    groups: dict[tuple[int, torch.dtype], list[ParameterEntry]] = {}
    for entry in cover.entries:
        groups.setdefault((id(entry.sites[0][0]), entry.parameter.dtype), []).append(entry)
    yield from groups.values()
