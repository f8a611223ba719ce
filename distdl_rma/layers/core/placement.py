"""Where a parameter is kept: which ranks keep which box of it, which use it, and what it starts with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.machine import Machine

_DRAWN_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Placement:
    """Where one parameter lives and where it is used; both cut its global shape.

    Ranks with the same box in ``store`` keep equal copies, whose gradients are summed; ranks outside keep
    none of it. Where ``use`` is given, which box each rank needs in a forward, the values travel in every
    forward, and their gradients back in every backward.
    """

    store: Decomposition
    use: Decomposition | None = None

    @classmethod
    def everywhere(cls, machine: Machine, shape: torch.Size) -> Placement:
        """A copy on every rank of the machine."""
        return cls(Decomposition.replicated(machine.partition(), shape))


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
    return Placement(blocks) if pattern == "replicated" else Placement(blocks.one_copy(), blocks)


def register(
    layer: nn.Module,
    values: Mapping[str, nn.Parameter | InitialValues | None],
    placements: Mapping[str, Placement],
) -> None:
    """Give a layer this rank's parts of its parameters, which training can use wherever they are made; local.

    A value is the global one, alike on all ranks, or makes this rank's part of it; None for a parameter that
    the layer lacks.
    """
    for key, value in values.items():
        if value is None:
            layer.register_parameter(key, None)
            continue
        store = placements[key].store
        with torch.inference_mode(False):
            if isinstance(value, torch.Tensor):
                shard, learns = cut(store, value.detach()), value.requires_grad
            else:
                shard, learns = value.cut(store), True
            layer.register_parameter(key, nn.Parameter(shard, learns))


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
    there then, in the memory that it was in. Takes the memory of the whole tensors meanwhile. ``stores`` says
    by key which box a rank keeps.
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


@dataclass(frozen=True)
class InitialValues:
    """Uniformly random numbers in [-bound, bound], drawn as torch draws them for the whole parameter.

    No rank ever holds more of them than its own part.
    """

    shape: tuple[int, ...]  # of the whole parameter
    bound: float
    dtype: torch.dtype

    def cut(self, store: Decomposition) -> torch.Tensor:
        """This rank's box, in memory of its own; without elements on ranks outside.

        Torch's generator gives one number after the other, so rows drawn in turn are those of the whole
        tensor, and leave the generator where the whole tensor leaves it: on every rank, whatever it keeps.
        """
        partition = store.partition
        box = store.box(partition.me) if partition.active else None
        kept = torch.empty(box.shape if box else (0,), dtype=self.dtype, device="cpu")
        rows, width = self.shape[0], Box.of_shape(self.shape[1:]).volume
        step = min(rows, max(1, _DRAWN_AT_ONCE // max(width, 1)))
        buffer = torch.empty((step, *self.shape[1:]), dtype=self.dtype, device="cpu")
        for first in range(0, rows if width else 0, max(step, 1)):
            drawn = Box.of_shape(self.shape).replace(0, first, min(first + step, rows))
            numbers = buffer[: drawn.shape[0]].uniform_(-self.bound, self.bound)
            common = drawn & box if box else None
            if box and common and not common.empty:
                kept[common.slices(box)] = numbers[common.slices(drawn)]
        return kept


def linear_values(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype | None
) -> dict[str, InitialValues | None]:
    """What ``torch.nn.Linear`` starts with, by the name of the parameter."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    # torch's Kaiming initialisation with a = sqrt(5), rounding by rounding.
    gain = sqrt(2.0 / (1 + sqrt(5) ** 2))
    bound = sqrt(3.0) * (gain / sqrt(in_features)) if in_features else 0.0
    offset = 1 / sqrt(in_features) if in_features else 0.0
    return {
        "weight": InitialValues((out_features, in_features), bound, kind),
        "bias": InitialValues((out_features,), offset, kind) if bias else None,
    }
