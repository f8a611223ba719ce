"""Which ranks sum a weight's gradient: modules decide it by ``get_ranks_synch_weights()``.

A module with a callback decides for itself and for all plain modules in it, up to the next module with one:

    model                      under no callback: a group of its own, summed over all ranks of the machine
      DistributedConv2d        decides: the ranks that hold copies of its weight
      head                     has a callback of the user: the ranks that it names
        Linear                 in the head's group
      Linear                   under no callback: a group of its own, over all ranks

Invariants of the groups of one ``GradientSync``:

- A parameter is in one group only. If several modules share it, it is that of the first of them; the others
  have it in ``shared``, and must decide for the same ranks.
- All ranks of a group have it, with the same parameters in the same order, shapes and dtypes: gradients of a
  bucket lie one behind the other. ``callback_check.py`` compares this before any memory is taken.
- The order of groups is that of ``modules()``, so ranks with the same modules have the same order.

Layers outside of every ``GradientSync`` decide for themselves: ``Parameters.summed_over``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import index as as_int
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from distdl_rma.geometry.partition import by_key
from distdl_rma.layers.partitioned.core.callbacks import Callbacks
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.layers.partitioned.core.parameters import Parameters
from distdl_rma.segments.machine import Machine


class Owner(NamedTuple):
    """What sums gradients: a ``GradientSync``, or a distributed model that has one; texts for messages."""

    title: str
    # Its name in errors of another owner; advice after a failure; and when a module changed too late.
    another: str
    anew: str
    later: str


GRADIENT_SYNC = Owner(
    "GradientSync",
    "another GradientSync; close that",
    "close this one and make a new one, on all ranks",
    "after its GradientSync was made; register it again",
)
# Parameters with an owner, which other owners refuse: two owners would sum twice.
synchronised: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(eq=False)
class ParameterEntry:
    """A parameter, its name, equal on the ranks that share it, and the modules that use it under which key.

    The first of the ``uses`` is the module that it belongs to.
    """

    parameter: nn.Parameter
    name: str
    uses: list[tuple[nn.Module, str]]

    def __post_init__(self) -> None:
        self.learns = self.parameter.requires_grad

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.parameter.numel() * self.parameter.element_size()

    @property
    def placed(self) -> Iterator[tuple[Parameters, str]]:
        """The ``Parameters`` of this library's layers that use it, each with its key there."""
        for module, key in self.uses:
            if isinstance(module, DistributedLayer) and module.placed is not None:
                yield module.placed, key


@dataclass(eq=False)
class GradientGroup:
    """Parameters for which one module decides over which ranks their gradients are summed.

    For plain modules for which no module decides, ``module`` is None. They count as copied on ``everyone``.
    """

    module: nn.Module | None
    name: str
    # The ranks of the machine.
    everyone: tuple[int, ...]
    entries: list[ParameterEntry] = field(default_factory=list)
    # Parameters that its modules use, but that belong to other groups.
    shared: list[tuple[GradientGroup, ParameterEntry]] = field(default_factory=list)
    # All modules of the group, each with its path.
    parts: list[tuple[str, nn.Module]] = field(default_factory=list)
    # The ranks over which gradients are summed; and an error, if the callback gave no ranks.
    ranks: tuple[int, ...] = ()
    complaint: str = ""

    def decide(self) -> None:
        """Call the module's callback; a result that is no list of ranks becomes a complaint.

        An exception of the user's function on one rank would leave the others waiting for its statement. So
        it travels with the statement, and all ranks raise it.
        """
        try:
            ask = getattr(self.module, "get_ranks_synch_weights", lambda: self.everyone)
            self.ranks = tuple(as_int(rank) for rank in ask())
        except Exception as error:  # noqa: BLE001 - the user's function; all ranks raise it
            self.complaint = f"get_ranks_synch_weights() gives no list of ranks: {error!r}"

    @property
    def layer(self) -> DistributedLayer | None:
        """The module, if it is a layer of this library."""
        return self.module if isinstance(self.module, DistributedLayer) else None

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold copies, as a layer of this library placed them; empty for other modules."""
        placed = None if self.layer is None else self.layer.placed
        return () if placed is None else placed.holders

    @property
    def decided_by_user(self) -> bool:
        """Whether a user's callback chose the ranks, not this library."""
        if self.layer is not None:
            return "get_ranks_synch_weights" in vars(self.layer)
        return hasattr(self.module, "get_ranks_synch_weights")

    @property
    def needs_comparison(self) -> bool:
        """Whether ranks must compare it."""
        return bool(self.entries or self.shared or self.decided_by_user or self.layer or any(self.buffers))

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients, those of shared parameters included."""
        return sum(entry.nbytes for entry in (*self.entries, *(entry for _, entry in self.shared)))

    @property
    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of its plain modules, each with its name."""
        for path, part in self.parts:
            if not isinstance(part, DistributedLayer):
                for key, buffer in part.named_buffers(recurse=False):
                    yield under(path, key), buffer

    def by_module(self) -> Iterable[list[ParameterEntry]]:
        """Entries grouped by module and dtype, in order."""
        return by_key(self.entries, lambda entry: (id(entry.uses[0][0]), entry.parameter.dtype)).values()


def gradient_groups_of(
    module: nn.Module, name: str, machine: Machine, known: Mapping[int, str]
) -> list[GradientGroup]:
    """Parameters of a module and its parts by the module that decides, in the order of ``modules()``.

    A part with a callback such as ``get_ranks_synch_weights()`` decides for all plain modules in it. Layers
    of this library decide for themselves. Other plain modules count as copied on all ranks. A parameter that
    several modules share belongs to the first of them. Paths begin with ``name``. Parameters in ``known``, by
    ``id``, keep their names there.
    """
    seen: dict[int, tuple[GradientGroup, ParameterEntry]] = {}
    groups: list[GradientGroup] = []
    # A list, not a recursive function: such a closure is a cycle, which would keep the modules alive.
    ahead: list[tuple[nn.Module, str, GradientGroup | None]] = [(module, name, None)]
    while ahead:
        part, path, above = ahead.pop()
        where = part.name if isinstance(part, DistributedLayer) else path
        decides = any(hasattr(part, callback) for callback in Callbacks.__annotations__)
        group = above
        if decides or group is None:
            group = GradientGroup(part if decides else None, where or type(part).__name__, machine.ranks)
            groups.append(group)
        group.parts.append((where, part))
        for key, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in seen:
                entry = ParameterEntry(parameter, known.get(id(parameter), under(where, key)), [])
                seen[id(parameter)] = group, entry
                group.entries.append(entry)
            owner, entry = seen[id(parameter)]
            entry.uses.append((part, key))
            if owner is not group:
                group.shared.append((owner, entry))
        below = group if decides else above
        ahead += reversed([(child, under(path, key), below) for key, child in part.named_children()])
    for group in groups:
        group.decide()
    return [group for group in groups if group.needs_comparison]


def under(path: str, key: str) -> str:
    """Name of a module's attribute, from the module's path."""
    return f"{path}.{key}" if path else key
