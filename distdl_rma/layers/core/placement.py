"""Where the parameters of a layer live, and where they are used."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch
from torch import nn

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.replica import Replica
from distdl_rma.machine import Machine
from distdl_rma.ops.movement import Movement, Request

# Machines on which somebody was told that gradients of plain modules stay local.
_warned: WeakSet[Machine] = WeakSet()


class InitialValues(Protocol):
    """Initial values of a parameter that no rank ever holds as a whole."""

    @property
    def requires_grad(self) -> bool:
        """As of the parameter."""

    def cut(self, store: Decomposition) -> torch.Tensor:
        """This rank's box, in memory of its own; without elements on ranks outside."""


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives and where it is used; both cut its global shape.

    Parameters
    ----------
    store
        Which box each rank keeps. Ranks with the same box keep equal copies, whose gradients are summed;
        ranks outside keep none of it.
    use
        Which box each rank needs in a forward; None where it is the one that it keeps. Otherwise the
        values travel in every forward, and their gradients back in every backward.
    """

    store: Decomposition
    use: Decomposition | None = None

    @classmethod
    def everywhere(cls, machine: Machine, shape: torch.Size) -> Placement:
        """A copy on every rank of the machine."""
        return cls(Decomposition.replicated(machine.partition(), shape))

    @property
    def moves(self) -> bool:
        """Whether the values travel to where they are used."""
        return self.use is not None


def whole_placement(
    machine: Machine, root: Partition, users: Partition, shape: Sequence[int], pattern: str
) -> Placement:
    """Whole parameter: on all ranks of the machine, or on the first of ``root`` and sent to ``users``."""
    if pattern == "replicated":
        return Placement(Decomposition.replicated(machine.partition(), shape))
    first = Partition(root.ranks[:1], (1,), root.me, root.home)
    return Placement(Decomposition.replicated(first, shape), Decomposition.replicated(users, shape))


def block_placement(blocks: Decomposition, pattern: str) -> Placement:
    """Parameter in blocks: on all ranks that use a block, or on the first of them and sent to the others."""
    return Placement(blocks) if pattern == "replicated" else Placement(one_copy(blocks), blocks)


class Weights:
    """The parameters of one layer, cut and placed, and how they get to where they are used; local to make.

    Parameters
    ----------
    layer
        The module that has the parameters.
    machine
        The machine.
    name
        Name of the layer.
    placements
        Name to placement, of all that there are.
    ask
        Over which ranks the gradients of this rank's copies are summed; empty if over none.
    """

    def __init__(
        self,
        layer: nn.Module,
        machine: Machine,
        name: str,
        placements: Mapping[str, Placement],
        ask: Callable[[], Sequence[int]],
    ) -> None:
        self.placements = dict(placements)
        # The layer has this, not the other way round: otherwise it would be freed late.
        self._layer = weakref.ref(layer)
        self._machine, self._name = machine, name
        self._movements: dict[tuple[str, torch.dtype], Movement] = {}
        # Copies of one layer's parameters are on the same ranks, wherever a rank keeps any.
        stores = [p.store for p in self.placements.values() if machine.rank in p.store.partition]
        copies = max((copies_of(store) for store in stores), key=len, default=(machine.rank,))
        self.replica = Replica(machine, copies, name, ask)

    def equalise(self) -> None:
        """Make copies equal: the values of the first of their ranks count; collective, blocking."""
        self.replica.equalise([self._kept(key) for key in self.placements])

    def use(self) -> dict[str, torch.Tensor]:
        """Parameters as this rank uses them in a forward; blocking where they travel."""
        kept = [self._kept(key) for key in self.placements]
        if any(type(values) is not nn.Parameter for values in kept):
            self._warn_of_replaced(kept)
        # Copies are tied before one of them travels: its gradient comes back to all.
        used: dict[str, torch.Tensor] = dict(zip(self.placements, self.replica.tie(*kept), strict=True))  # type: ignore[arg-type]
        flights = {
            key: self._start(key, used[key], place.use)
            for key, place in self.placements.items()
            if place.use is not None
        }
        return used | {key: flight.movement.wait(flight) for key, flight in flights.items()}

    def _warn_of_replaced(self, kept: Sequence[torch.Tensor]) -> None:
        # What is computed from other parameters is no parameter of the layer's own; this is one by its name.
        own = vars(self._layer())["_parameters"]
        replaced = any(
            values.requires_grad and not isinstance(values, nn.Parameter) and key in own
            for key, values in zip(self.placements, kept, strict=True)
        )
        alone = self._machine.size == 1 or self._machine in _warned
        if replaced and torch.is_grad_enabled() and not self.replica.taken_over and not alone:
            _warned.add(self._machine)
            warnings.warn(
                f"{self._name!r}: its parameters are replaced in this call, as torch.func.functional_call"
                " does. The gradients of distributed layers are summed over their ranks; those of plain"
                " modules are each rank's own, and are to be summed by the program",
                stacklevel=2,
            )

    def connect(self) -> None:
        """Exchange addresses for the values that travel, and for their gradients; blocking."""
        for key, place in self.placements.items():
            if place.use is not None:
                self._movement(key, self._kept(key).dtype, place.use).connect()

    def _kept(self, key: str) -> torch.Tensor:
        parameter: torch.Tensor = getattr(self._layer(), key)
        return parameter

    def _movement(self, key: str, dtype: torch.dtype, use: Decomposition) -> Movement:
        movement = self._movements.get((key, dtype))
        if movement is None:
            exchange = Exchange(self._machine.rank, one_copy(self.placements[key].store), use)
            movement = Movement(self._machine, exchange, dtype, f"{self._name} ({key})")
            self._movements[key, dtype] = movement
        return movement

    def _start(self, key: str, parameter: torch.Tensor, use: Decomposition) -> Request:
        movement = self._movement(key, parameter.dtype, use)
        # One of the copies travels, the others stay.
        sent = parameter.flatten()[:0] if movement.forward.exchange.own.empty else parameter
        return movement.start(sent, parameter.requires_grad)


def register(
    layer: nn.Module,
    values: Mapping[str, nn.Parameter | InitialValues | None],
    placements: Mapping[str, Placement],
) -> None:
    """Give a layer this rank's parts of its parameters, which training can use wherever they are made; local.

    Parameters
    ----------
    layer
        The module that gets the parameters.
    values
        Name to global initial value, alike on all ranks, or to what makes this rank's part of it; None for
        a parameter that the layer lacks.
    placements
        Name to placement, of all that are not None.
    """
    for key, value in values.items():
        if value is None:
            layer.register_parameter(key, None)
            continue
        store = placements[key].store
        with torch.inference_mode(False):
            shard = cut(store, value.detach()) if isinstance(value, torch.Tensor) else value.cut(store)
            layer.register_parameter(key, nn.Parameter(shard, value.requires_grad))


def lasting(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; of one that was made in inference mode a copy that was not, so that training can use it."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def cut(store: Decomposition, whole: torch.Tensor) -> torch.Tensor:
    """This rank's box of a global tensor, in memory of its own; without elements on ranks outside."""
    if not store.partition.active:
        return whole.new_empty(0)
    return whole[store.slices()].clone(memory_format=torch.contiguous_format)


@contextmanager
def as_whole(layer: nn.Module, stores: Mapping[str, Decomposition]) -> Iterator[None]:
    """Context in which parameters and buffers have their global shape, on every rank; local.

    What this rank keeps is in its place, the rest is zero. Afterwards each rank keeps its part of what is
    there then, in the memory that it was in. Takes the memory of the whole tensors meanwhile.

    Parameters
    ----------
    layer
        The module that has them.
    stores
        Which box of each a rank keeps, by key.
    """
    parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, store in stores.items():
        kept = _tensor_of(layer, key)
        # A rank that keeps all of it has nothing to do; nor has a tensor that is whole by another name.
        if kept is not None and tuple(kept.shape) != store.shape:
            parts[key] = kept, kept.data
            whole = kept.data.new_zeros(store.shape)
            if store.partition.active:
                whole[store.slices()] = kept.data
            kept.data = whole
    try:
        yield
    finally:
        for key, (kept, part) in parts.items():
            mine = cut(stores[key], kept.data)
            kept.data = part.copy_(mine) if mine.dtype == part.dtype else mine
            now = _tensor_of(layer, key)
            if now is not None and now is not kept and tuple(now.shape) == stores[key].shape:
                # Another one was put in its place.
                now.data = cut(stores[key], now.data)


def _tensor_of(layer: nn.Module, key: str) -> torch.Tensor | None:
    found = layer._parameters.get(key)
    return layer._buffers.get(key) if found is None else found


def copies_of(store: Decomposition) -> tuple[int, ...]:
    """Ranks that keep the same box as this one, itself included."""
    partition = store.partition
    index = partition.index_of(partition.me)
    fixed = {d: i for d, (i, axis) in enumerate(zip(index, store.axes, strict=True)) if axis is not None}
    return partition.slab(fixed).ranks


def one_copy(store: Decomposition) -> Decomposition:
    """The same boxes, each on the first of the ranks that keep it only."""
    spare = {d: 0 for d, axis in enumerate(store.axes) if axis is None}
    return Decomposition(store.partition.slab(spare), store.splits, store.axes)
