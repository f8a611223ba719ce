"""Placement of a parameter: which ranks keep which box, which ranks use it, and its initial values.

A parameter of shape (6, 4) on a grid of 2 x 2 ranks, of which the first dimension cuts its rows::

    store, "replicated"            store, "root"              use
    rows 0-2   rows 0-2            rows 0-2   nothing         rows 0-2   rows 0-2
    rows 3-5   rows 3-5            rows 3-5   nothing         rows 3-5   rows 3-5

Initial values are those of torch for one machine, whatever the cuts: a model starts alike on any number of
ranks, and tests compare it with torch's. Linear layers hold no whole parameter for that: ``InitialValues``.
"""

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
from distdl_rma.segments.machine import Machine

_DRAWN_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Placement:
    """Where one parameter is kept and where it is used: two decompositions of its global shape.

    Ranks with the same box in ``store`` keep replicas, whose gradients are summed; ranks outside keep none.
    ``use`` has the box that each rank needs in a forward; None if that is its box in ``store``. With ``use``
    the values travel in every forward, and their gradients return in every backward. A value, equal on all
    ranks: who keeps and who needs what follows without a message.
    """

    store: Decomposition
    use: Decomposition | None = None


def whole_placement(
    machine: Machine, root: Partition, users: Partition, shape: Sequence[int], pattern: str
) -> Placement:
    """Whole parameter: replicated on the machine, or on the first of ``root``, which sends to ``users``.

    Replicas are on all ranks of the machine, those outside of the layer's partitions included: a checkpoint
    of any rank is complete, and a model may run on other ranks next.
    """
    if pattern == "replicated":
        return Placement(Decomposition.replicated(machine.partition(), shape))
    first = Partition(root.ranks[:1], (1,), root.me, root.home)
    return Placement(Decomposition.replicated(first, shape), Decomposition.replicated(users, shape))


def block_placement(blocks: Decomposition, pattern: str) -> Placement:
    """Parameter in blocks: each replicated on its users, or on the first, which sends to the others."""
    return Placement(blocks) if pattern == "replicated" else Placement(blocks.one_copy(), blocks)


def part_of(value: nn.Parameter | InitialValues, store: Decomposition) -> nn.Parameter:
    """This rank's part of a parameter, of which the value is the global tensor or creates the part; local."""
    if isinstance(value, InitialValues):
        return nn.Parameter(value.cut(store))
    return nn.Parameter(cut(store, value.detach()), value.requires_grad)


def lasting(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it was made in inference mode, so that training can use it.

    Autograd refuses tensors of inference mode for ever, and models are often built and loaded within it.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def cut(store: Decomposition, whole: torch.Tensor) -> torch.Tensor:
    """Copy of this rank's box of a global tensor; without elements on ranks outside."""
    if not store.partition.active:
        return whole.new_empty(0)
    return whole[store.slices()].clone(memory_format=torch.contiguous_format)


@contextmanager
def as_whole(layer: nn.Module, stores: Mapping[str, Decomposition]) -> Iterator[None]:
    """Context in which parameters and buffers have their global shape, on every rank; local.

    ``stores`` has the decomposition of each tensor, by key. At entry this rank's part is in its box, and all
    else is zero. At exit this rank keeps its box of the tensor, in the part's previous memory if its type is
    the same. The context needs memory for the whole tensors.

    The parameter object stays the same, only its data changes: optimizers hold the object, and other objects
    may share its previous memory.

    Examples
    --------
    >>> layer, P = nn.Linear(3, 1, bias=False), Partition((0, 1), (1, 2), 0)
    >>> store = Decomposition.balanced(P, (1, 3))  # this rank keeps two columns of three
    >>> layer.weight.data = torch.ones(1, 2)
    >>> with as_whole(layer, {"weight": store}):
    ...     print(layer.weight.data)
    tensor([[1., 1., 0.]])
    """
    parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, store in stores.items():
        kept = _tensor_of(layer, key)
        # Skip tensors that are whole here: on a rank that keeps all, or already made whole under another key.
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
                # The tensor was replaced within the context.
                now.data = cut(stores[key], now.data)


def _tensor_of(layer: nn.Module, key: str) -> torch.Tensor | None:
    found = layer._parameters.get(key)
    return layer._buffers.get(key) if found is None else found


@dataclass(frozen=True)
class InitialValues:
    """Uniformly random numbers in [-bound, bound], drawn as torch draws them for the whole parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    bound: float
    dtype: torch.dtype

    def cut(self, store: Decomposition) -> torch.Tensor:
        """This rank's box, in new memory; without elements on ranks outside. Local.

        Every rank draws all numbers, some rows at a time, and keeps its box. Torch's generator is sequential,
        so these are the numbers of the whole tensor, and the generator ends in the same state on every rank.
        Its buffer has at most ``_DRAWN_AT_ONCE`` numbers, or one row.
        """
        partition, box = store.partition, store.own_box
        kept = torch.empty(box.shape if partition.active else (0,), dtype=self.dtype, device="cpu")
        rows, width = self.shape[0], Box.of_shape(self.shape[1:]).volume
        step = min(rows, max(1, _DRAWN_AT_ONCE // max(width, 1)))
        buffer = torch.empty((step, *self.shape[1:]), dtype=self.dtype, device="cpu")
        for first in range(0, rows if width else 0, max(step, 1)):
            drawn = Box.of_shape(self.shape).replace(0, first, min(first + step, rows))
            numbers = buffer[: drawn.shape[0]].uniform_(-self.bound, self.bound)
            common = drawn & box
            if not common.empty:
                kept[common.slices(box)] = numbers[common.slices(drawn)]
        return kept


def linear_values(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype
) -> dict[str, InitialValues | None]:
    """Initial values of ``torch.nn.Linear``, by the name of the parameter."""
    # torch's Kaiming initialisation with a = sqrt(5), with the same roundings: another order of these factors
    # gives numbers that differ from torch's in the last bit, and every test of equality would fail.
    gain = sqrt(2.0 / (1 + sqrt(5) ** 2))
    bound = sqrt(3.0) * (gain / sqrt(in_features)) if in_features else 0.0
    offset = 1 / sqrt(in_features) if in_features else 0.0
    return {
        "weight": InitialValues((out_features, in_features), bound, dtype),
        "bias": InitialValues((out_features,), offset, dtype) if bias else None,
    }
