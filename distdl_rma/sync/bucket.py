"""Gradients that travel together, and where each of them lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distdl_rma.layers.core.parameters import Offer
from distdl_rma.machine import Machine
from distdl_rma.ops.tensors import as_tensor, reduction_dtype
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.sync.claims import ParameterEntry


@dataclass(frozen=True)
class BucketKind:
    """What gradients have in common that may travel together.

    Parameters
    ----------
    ranks
        Ranks that they are summed over.
    dtype
        Their type.
    divisor
        What the sums are divided by.
    """

    ranks: tuple[int, ...]
    dtype: torch.dtype
    divisor: int


class GradientSlot:
    """A parameter, its place in a bucket, and what is known of its gradient."""

    def __init__(self, entry: ParameterEntry, kind: BucketKind) -> None:
        self.entry, self.parameter, self.kind = entry, entry.parameter, kind
        self.start = 0
        self.claimed = self.seen = self.ready = False
        self.dtype = entry.parameter.dtype
        self.base: torch.Tensor | None = None
        # Whether .grad holds this rank's own share, accumulated under no_sync.
        self.local = False
        # The view of the segment that was handed out last.
        self.lent: torch.Tensor | None = None
        self.handles: list[Any] = []

    @property
    def pending(self) -> bool:
        """Whether .grad holds what is yet to be summed."""
        return self.local and self.parameter.grad is not None

    @property
    def unsummed(self) -> bool:
        """Whether that is more than zeros."""
        return self.pending and bool(self.parameter.grad.any())  # type: ignore[union-attr]

    def counted_by(self, rank: int) -> bool:
        """Whether a rank is the one that counts this gradient for all that hold it."""
        return not self.kind.ranks or self.kind.ranks[0] == rank

    def take_over(self, offer: Offer) -> None:
        """Have the layers leave the summing to others, and write the gradient where they say."""
        for placed, key in self.entry.placed:
            placed.take_over(key, self.parameter, offer)

    def release(self) -> None:
        """Leave the parameter alone from now on; its gradient gets memory of its own."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for placed, key in self.entry.placed:
            placed.let_go(key)
        self.entry.leave()
        self.reclaim()

    def reclaim(self) -> None:
        """Give a gradient that lies in the segment memory of its own."""
        gradient = self.parameter.grad
        if gradient is not None and self.lent is not None and gradient.data_ptr() == self.lent.data_ptr():
            self.parameter.grad = gradient.clone()
        self.lent = None


@dataclass(frozen=True)
class SlotGroup:
    """Parameters of one module, in the order of its layers: what a bucket takes as a whole."""

    kind: BucketKind
    slots: list[GradientSlot]

    @property
    def nbytes(self) -> int:
        """Bytes of their gradients."""
        return sum(slot.entry.nbytes for slot in self.slots)


class Bucket:
    """Gradients that travel together in one double-buffered allreduce.

    Parameters
    ----------
    machine
        The machine.
    name
        For messages, alike on the ranks of the bucket.
    groups
        What is in it; all of one kind.
    """

    def __init__(self, machine: Machine, name: str, groups: Sequence[SlotGroup]) -> None:
        self.kind, self.name = groups[0].kind, name
        self.slots = [slot for group in groups for slot in group.slots]
        # A complex number travels as two real ones.
        dtype, self._words = self.kind.dtype, 1
        if dtype.is_complex:
            dtype, self._words = dtype.to_real(), 2
        self._dtype = dtype
        self.numel = 0
        for slot in self.slots:
            slot.start = self.numel
            self.numel += slot.parameter.numel() * self._words
        # Bytes of gradients that were found in the segment, and of those that had to be copied there.
        self.in_place_nbytes = self.copied_nbytes = 0
        # Behind the gradients one flag per parameter: on how many ranks it had a gradient at all.
        words = self.numel + len(self.slots)
        # Vectors of several ranks lie one behind the other, and complex numbers want whole pairs before them.
        words += -words % self._words
        ranks, divisor = self.kind.ranks, self.kind.divisor
        element, op = reduction_dtype(dtype), "sum" if divisor == 1 else "mean"
        self.allreduce = Allreduce(machine.segments, ranks, words, element, op, name, divisor=divisor)

    def connect(self) -> None:
        """Meet the other ranks; blocking. All buckets in one order: they may be complete in another."""
        self.allreduce.connect()

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients in it."""
        return self.numel * self._dtype.itemsize

    @property
    def complete(self) -> bool:
        """Whether all gradients are there."""
        return all(slot.ready for slot in self.slots)

    def claim(self, slot: GradientSlot) -> torch.Tensor | None:
        """Place for a layer to write a gradient to, once per backward."""
        fresh = slot.parameter.grad is None or not slot.local
        if slot.claimed or not fresh or not slot.parameter.requires_grad:
            return None
        slot.claimed = True
        return self._view(slot, as_tensor(self.allreduce.active, self._dtype))

    def put(self, slot: GradientSlot) -> None:
        """Make sure that a gradient lies in the active buffer."""
        gradient = slot.parameter.grad
        place = self._view(slot, as_tensor(self.allreduce.active, self._dtype))
        if gradient is not None:
            if gradient.data_ptr() == place.data_ptr():
                self.in_place_nbytes += slot.entry.nbytes
            else:
                place.copy_(gradient)
                self.copied_nbytes += slot.entry.nbytes
        slot.ready = True

    def launch(self) -> None:
        """Start the allreduce; gradients that did not come count as zero."""
        active = as_tensor(self.allreduce.active, self._dtype)
        for i, slot in enumerate(self.slots):
            if not slot.ready and slot.pending:
                # Accumulated under no_sync, and not touched by this backward.
                self.put(slot)
            if not slot.ready:
                self._view(slot, active).zero_()
            active[self.numel + i] = float(slot.ready)
        self.allreduce.start()

    def land(self) -> None:
        """Wait, and hand the sums to the parameters."""
        result = as_tensor(self.allreduce.wait(), self._dtype)
        present = result[self.numel : self.numel + len(self.slots)].tolist()
        for slot, ranks_with_gradient in zip(self.slots, present, strict=True):
            if ranks_with_gradient:
                if not slot.ready and slot.parameter.grad is not None:
                    slot.base = slot.parameter.grad.clone()
                gradient = self._view(slot, result)
                slot.lent = gradient if slot.base is None else None
                slot.parameter.grad = gradient if slot.base is None else slot.base.add_(gradient)
                slot.local = False
            else:
                # Untouched on all ranks: moved out of the segment before its buffer is used again.
                slot.reclaim()

    def forget(self) -> None:
        """Be ready for the next backward."""
        for slot in self.slots:
            slot.base = None
            slot.claimed = slot.seen = slot.ready = False

    def close(self) -> None:
        """Release the parameters and give the memory back; local, idempotent."""
        for slot in self.slots:
            slot.release()
        self.allreduce.close()

    def _view(self, slot: GradientSlot, flat: torch.Tensor) -> torch.Tensor:
        part = flat[slot.start : slot.start + slot.parameter.numel() * self._words]
        if self._words == 2:
            part = torch.view_as_complex(part.view(-1, 2))
        return part.view(slot.parameter.shape)


def bucketed(groups: Sequence[SlotGroup], limit: int) -> list[list[SlotGroup]]:
    """Groups fused up to a size, the last one first: the order in which backward reaches them.

    Layers of the same kind meet in the same buckets whatever other layers this rank has in between: the
    ranks of a bucket need not be the same ranks in everything else.
    """
    buckets: list[list[SlotGroup]] = []
    unfilled: dict[BucketKind, list[SlotGroup]] = {}
    for group in reversed(groups):
        last = unfilled.get(group.kind)
        if last and sum(g.nbytes for g in last) + group.nbytes <= limit:
            last.append(group)
        else:
            unfilled[group.kind] = [group]
            buckets.append(unfilled[group.kind])
    return buckets
