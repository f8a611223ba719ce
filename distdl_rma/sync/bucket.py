"""Buckets: gradients that travel together in one allreduce, and where in it each of them lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple
from weakref import finalize, ref

import numpy as np
import torch
from torch.autograd import profiler

from distdl_rma import errors
from distdl_rma.checks.consensus import gather_words
from distdl_rma.dtypes import reduction_dtype
from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.layers.core.parameters import Parameters
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import mark_summed_later
from distdl_rma.ops.core.tensors import as_tensor
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.sync.claims import ParameterEntry, synchronised


class BucketKind(NamedTuple):
    """What gradients have in common that may travel together: ranks that sum them, type, divisor of sums."""

    ranks: tuple[int, ...]
    dtype: torch.dtype
    divisor: int

    @property
    def travels(self) -> bool:
        """Whether other ranks sum the gradients too."""
        return len(self.ranks) > 1


class GradientSlot:
    """A parameter, its number in a bucket, and what is known of its gradient.

    The parameter holds it, by its hooks, and not the other way round: what the user lets go of is freed.
    """

    def __init__(self, entry: ParameterEntry, kind: BucketKind) -> None:
        self.kind, self.name, self.nbytes, self.shape = kind, entry.name, entry.nbytes, entry.parameter.shape
        # None once nobody else has it. Not to be kept beyond a call: where only a graph has it, torch may not
        # see that somebody does.
        self.parameter: Callable[[], Any] = ref(entry.parameter)
        self._placed = [(ref(one), key) for one, key in entry.placed]
        self.number = 0
        # In the running backward: whether a layer was offered the place, whether the gradient is there, and
        # what .grad held before, to which it is added.
        self.offered = self.ready = False
        self.base: torch.Tensor | None = None
        # Whether .grad holds this rank's own share, accumulated under no_sync.
        self.local = False
        # The view of the segment that .grad was made last.
        self.in_segment: torch.Tensor | None = None
        self.handles: list[Any] = []
        # What shows hooks of the user the gradient, if there are any.
        self.hooks: Any = None
        # Hooks of the user that want what was accumulated, kept from it until all ranks have it.
        self.later: dict[int, Callable[[torch.Tensor], object]] = {}
        # Whether this rank contributes a gradient that all ranks computed identically; None before the first.
        self.contributes_common: bool | None = None

    def anew(self) -> GradientSlot:
        """The same parameter, for another bucket."""
        twin = copy(self)
        twin.handles, twin.hooks, twin.in_segment, twin.local, twin.later = [], None, None, False, {}
        return twin

    @property
    def gradient(self) -> torch.Tensor | None:
        """Its ``.grad``."""
        gradient: torch.Tensor | None = getattr(self.parameter(), "grad", None)
        return gradient

    @property
    def placed(self) -> list[tuple[Parameters, str]]:
        """Parameters of the layers of this library that use it, each with its name there."""
        return [(placed, key) for one, key in self._placed if (placed := one()) is not None]

    @property
    def pending(self) -> bool:
        """Whether .grad holds what is yet to be summed."""
        return self.local and self.gradient is not None

    @property
    def unsummed(self) -> bool:
        """Whether that is more than zeros."""
        return self.pending and bool(self.gradient.any())  # type: ignore[union-attr]

    def keep_apart(self) -> None:
        """Have .grad accumulate this rank's own share, as under ``no_sync``."""
        gradient = self.gradient
        if gradient is not None and not self.local and bool(gradient.any()):
            raise ProtocolError(
                "no_sync: .grad already holds a synchronised gradient, which this rank's own cannot"
                " be added to; call optimizer.zero_grad() first"
            )
        self.local = True

    def take_over(self, offer: Callable[[], torch.Tensor | None]) -> None:
        """Have the layers leave the summing to a GradientSync, and write the gradient where it offers."""
        for placed, key in self.placed:
            placed.take_over(key, self.parameter(), offer)

    def release(self) -> None:
        """Leave the parameter alone from now on; its gradient gets memory of its own."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.hooks = None
        for placed, key in self.placed:
            placed.let_go(key)
        parameter = self.parameter()
        if parameter is not None:
            synchronised.pop(parameter, None)
            mark_summed_later(parameter, False)
        self.move_out()

    def move_out(self) -> None:
        """Give a gradient that lies in the segment memory of its own."""
        gradient, lies = self.gradient, self.in_segment
        if gradient is not None and lies is not None and gradient.data_ptr() == lies.data_ptr():
            self.parameter().grad = gradient.clone()
        self.in_segment = None


class _Tenancy:
    # Of a bucket's memory: that of the bucket, and of every tensor that lies there, dropped or not.
    pass


class _Lent(np.ndarray[Any, Any]):
    # What torch holds of a buffer as long as a tensor is in it.
    tenancy: _Tenancy


class Bucket:
    """Gradients of one kind that travel together in one allreduce, its name alike on its ranks; local.

    Memory is given back by ``close()``, or when neither the bucket nor a gradient in it is there any more.
    """

    def __init__(self, machine: Machine, name: str, slots: Sequence[GradientSlot]) -> None:
        self.kind, self.name, self.slots = slots[0].kind, name, slots
        ranks, dtype, divisor = self.kind
        # A complex number travels as two real ones, and wants whole pairs before it: vectors of several ranks
        # lie one behind the other.
        words = 2 if dtype.is_complex else 1
        self._dtype = dtype.to_real() if dtype.is_complex else dtype
        self._counts = [slot.shape.numel() * words for slot in slots]
        for number, slot in enumerate(slots):
            slot.number = number
        self.nbytes = sum(self._counts) * self._dtype.itemsize
        # Bytes of gradients that were found in the segment, and of those that had to be copied there.
        self.in_place_nbytes = self.copied_nbytes = 0
        # Behind the gradients one flag per parameter: on how many ranks it had a gradient at all.
        self._counts.append(len(slots))
        self._counts.append(-sum(self._counts) % words)
        count, element = sum(self._counts), reduction_dtype(self._dtype)
        op = "sum" if divisor == 1 else "mean"
        self.allreduce = Allreduce(machine.segments, ranks, count, element, op, name, divisor=divisor)
        self._tenancy = _Tenancy()
        finalize(self._tenancy, self.allreduce.close)
        self._missing = len(slots)
        # Views of the gradients and of the flags, by ``id`` of the buffer: there are few, and they stay.
        self._views: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        self._written: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def offer(self, slot: GradientSlot) -> torch.Tensor | None:
        """Place for a layer to write a gradient to, once per backward; None if it lies elsewhere already."""
        fresh = slot.parameter().grad is None or not slot.local
        if slot.offered or not fresh or not slot.parameter().requires_grad:
            return None
        slot.offered = True
        # A tensor of its own: torch makes .grad of what nobody else has, and a copy of anything else.
        return self._places()[0][slot.number].detach()

    def put(self, slot: GradientSlot, gradient: torch.Tensor | None) -> bool:
        """Make sure that a slot's gradient lies in the active buffer; return whether it was the last one."""
        place = (self._written or self._places())[0][slot.number]
        if gradient is not None:
            # Only what a layer was offered lies there.
            if slot.offered and gradient.data_ptr() == place.data_ptr():
                self.in_place_nbytes += slot.nbytes
            else:
                place.copy_(gradient)
                self.copied_nbytes += slot.nbytes
        slot.ready = True
        self._missing -= 1
        return not self._missing

    def start(self) -> None:
        """Start the allreduce; gradients that did not come count as zero."""
        places, flags = self._places()
        for slot in self.slots if self._missing else ():
            if not slot.ready and slot.pending:
                # Accumulated under no_sync, and not touched by this backward.
                self.put(slot, slot.gradient)
            if not slot.ready:
                places[slot.number].zero_()
        if self._missing:
            flags.copy_(torch.tensor([float(slot.ready) for slot in self.slots]))
        else:
            flags.fill_(1.0)
        self._written = None
        self.allreduce.start()

    def wait(self) -> None:
        """Wait, and hand the sums to the parameters."""
        gradients, flags = self._views_of(self.allreduce.wait())
        for slot, gradient, ranks_with_gradient in zip(self.slots, gradients, flags.tolist(), strict=True):
            parameter = slot.parameter()
            if parameter is None:
                continue
            if not ranks_with_gradient:
                # Untouched on all ranks: moved out of the segment before its buffer is used again.
                slot.move_out()
                continue
            if not slot.ready and parameter.grad is not None:
                slot.base = parameter.grad.clone()
            slot.in_segment = gradient if slot.base is None else None
            parameter.grad = slot.in_segment if slot.base is None else slot.base.add_(gradient)
            slot.local = False

    def reset(self) -> None:
        """Be ready for the next backward."""
        self._missing = len(self.slots)
        for slot in self.slots:
            slot.base = None
            slot.offered = slot.ready = False

    def close(self) -> None:
        """Release the parameters and give the memory back; local, idempotent."""
        for slot in self.slots:
            slot.release()
        self._views, self._written = {}, None
        self.allreduce.close()

    def _places(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        # Where this backward writes; the buffer changes with each allreduce.
        if self._written is None:
            self._written = self._views_of(self.allreduce.active)
        return self._written

    def _views_of(self, buffer: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        views = self._views.get(id(buffer))
        if views is None:
            lent: Any = buffer.view(_Lent)
            lent.tenancy = self._tenancy
            *parts, flags, _ = torch.split(as_tensor(lent, self._dtype), self._counts)
            if self.kind.dtype.is_complex:
                parts = [torch.view_as_complex(part.view(-1, 2)) for part in parts]
            # Tensors that .grad is made again and again: none of several views that came of one call.
            shaped = [part.view(slot.shape).detach() for part, slot in zip(parts, self.slots, strict=True)]
            views = self._views[id(buffer)] = shaped, flags
        return views


def make_buckets(
    machine: Machine,
    rows: Iterable[Sequence[Sequence[GradientSlot]]],
    limit: int,
    numbers: Counter[BucketKind],
    title: str,
    who: str,
) -> list[Bucket]:
    """Buckets of lists that travel as a whole, row by row, with their memory; collective, blocking.

    ``numbers`` counts those of each kind that there were: what is alike on their ranks. ``title`` and ``who``
    are for messages. Nothing is taken from
    the layers yet, and the ranks of a bucket have not met in it. If some rank cannot make its own, all raise
    its error, and nothing has changed.
    """
    counted, made, failure = numbers.copy(), list[Bucket](), list[str]()

    def discard() -> None:
        for bucket in made:
            bucket.allreduce.close()

    try:
        for slots in (slots for row in rows for slots in bucketed(row, limit)):
            kind = slots[0].kind
            made.append(Bucket(machine, f"gradients {counted[kind]}", slots))
            counted[kind] += 1
    except Exception as error:  # noqa: BLE001 - all ranks hear of it
        failure = [type(error).__name__, str(error)]
        # What the ranks say to each other needs memory too.
        discard()
    for rank, said in gather_words(machine.segments, failure, title).items():
        if said:
            discard()
            raise vars(errors).get(said[0], ConfigurationError)(f"{who}: on rank {rank}: {said[1]}")
    numbers.update(bucket.kind for bucket in made)
    return made


def bucketed(row: Sequence[Sequence[GradientSlot]], limit: int) -> list[list[GradientSlot]]:
    """Lists of slots fused up to a size, the last one first: the order in which backward reaches them.

    Layers of the same kind meet in the same buckets whatever other layers this rank has in between: the
    ranks of a bucket need not be the same ranks in everything else.
    """
    buckets: list[list[GradientSlot]] = []
    unfilled: dict[BucketKind, list[GradientSlot]] = {}
    for slots in reversed(row):
        kind = slots[0].kind
        last = unfilled.get(kind)
        if last and sum(slot.nbytes for slot in (*last, *slots)) <= limit:
            last.extend(slots)
        else:
            unfilled[kind] = list(slots)
            buckets.append(unfilled[kind])
    return buckets


def left_of(leaving: Sequence[Bucket], moved: set[str]) -> list[list[GradientSlot]]:
    """Slots to put together anew: what travelled with parameters, by name, that move elsewhere."""
    # The first to come in a backward is the last of the model.
    kept = [[s for s in bucket.slots if s.name not in moved] for bucket in reversed(leaving)]
    return [[slot.anew() for slot in slots] for slots in kept if slots]


def profiled(title: str, act: Callable[[], None]) -> None:
    """Call a function in a range of torch's profiler; without one as good as free."""
    if profiler._is_profiler_enabled:
        with profiler.record_function(title):
            act()
    else:
        act()
