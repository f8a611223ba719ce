"""Buckets: gradients that share an allreduce, and their places in its buffer.

    buffer in the segment   | weight 2 | bias 2 | weight 1 | flag flag flag |
                                                             one for each gradient
    .grad of each parameter is a view of its place, so the sum is there without a copy

- An allreduce of many small gradients costs one message in place of many. Gradients are joined in the order
  in which a backward reaches them, so that the first bucket can start early.
- The flags tell what a sum of zeros cannot: whether any rank had a gradient. Infinity plus zeros is infinity;
  minus infinity stands for a frozen parameter, and both together are NaN, an error.
- There are two buffers in turn: ``.grad`` stays valid until the second backward after it.
- Torch assigns a computed gradient to ``.grad`` without a copy if nothing else refers to it. So a layer of
  this library may write its gradient into the place that ``offer`` gives it, and no byte is copied.
- Gradients on a device have their places in memory there, as large as the buffer: one copy goes down before
  the sum, and one comes up after it. The one that goes down runs beside the kernels of the backward, and the
  allreduce starts where the host looks next: as another bucket is full, or at the end (``launch``).

Whoever has a view of the buffer keeps the memory of the bucket alive (``_Tenancy``): a program may keep
``.grad`` after it has dropped model and GradientSync.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple
from weakref import finalize, ref

import numpy as np
import torch
from torch.autograd import profiler

from distdl_rma import errors
from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.layers.arithmetic import reduction_dtype
from distdl_rma.layers.dtypes import as_words
from distdl_rma.layers.ops.core.autograd import mark_summed_later
from distdl_rma.layers.ops.core.tensors import as_tensor
from distdl_rma.layers.partitioned.core.parameters import Parameters
from distdl_rma.layers.staging import Descent, from_host, to_host
from distdl_rma.layers.sync.gradient_groups import ParameterEntry, synchronised
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.consensus import gather_words
from distdl_rma.segments.large_arrays import copy as copy_words
from distdl_rma.segments.machine import Machine


class BucketKind(NamedTuple):
    """Gradients of one kind may share a bucket: ranks that sum them, dtype, divisor of the sums, device."""

    ranks: tuple[int, ...]
    dtype: torch.dtype
    divisor: int
    device: torch.device = torch.device("cpu")

    @property
    def travels(self) -> bool:
        """Whether other ranks sum the gradients too."""
        return len(self.ranks) > 1

    def allreduce(self, machine: Machine, count: int, dtype: torch.dtype, name: str) -> Allreduce:
        """Sum or mean of ``count`` elements over the ranks; local to make."""
        op, element = "sum" if self.divisor == 1 else "mean", reduction_dtype(dtype)
        return Allreduce(machine.segments, self.ranks, count, element, op, name, divisor=self.divisor)


class GradientSlot:
    """A parameter, its number in a bucket, and the state of its gradient.

    The parameter refers to the slot, by its hooks; the slot only has a weak reference. So a parameter that
    the user deletes is freed.

    Within a backward: ``offered`` is set when a layer asks for the place, ``base`` when the gradient is
    computed, ``ready`` when it lies in the buffer; ``Bucket.reset`` clears all three at the end. Across
    backwards: ``local`` is set in ``no_sync`` and cleared by a sum, and ``in_segment`` by whoever moves
    ``.grad``. ``GradientSync`` and ``Bucket`` write them, nobody else.
    """

    def __init__(self, entry: ParameterEntry, kind: BucketKind) -> None:
        self.kind, self.name, self.nbytes, self.shape = kind, entry.name, entry.nbytes, entry.parameter.shape
        # Returns None after the parameter was freed. Keep the result only within a call: if only a graph has
        # the parameter, torch may not see another reference.
        self.parameter: Callable[[], Any] = ref(entry.parameter)
        self._placed = [(ref(one), key) for one, key in entry.placed]
        self.number = 0
        # In the running backward: whether a layer was offered the place, whether the gradient has arrived,
        # and the earlier .grad, to which the sum is added.
        self.offered = self.ready = False
        # Whether the node of the parameter has run without a gradient.
        self.missing = False
        self.base: torch.Tensor | None = None
        # Whether .grad holds this rank's own gradient, accumulated under no_sync.
        self.local = False
        # The view of the segment that was last assigned to .grad.
        self.in_segment: torch.Tensor | None = None
        self.handles: list[Any] = []
        # ``ParameterHooks``, if the user has hooks on the parameter.
        self.hooks: Any = None
        # The user's post-accumulate hooks, postponed until the gradient is summed.
        self.later: dict[int, Callable[[torch.Tensor], object]] = {}
        # Whether this rank contributes a gradient that all ranks computed identically; None if unknown.
        self.contributes_common: bool | None = None

    def anew(self) -> GradientSlot:
        """A slot of the same parameter, for another bucket."""
        twin = copy(self)
        twin.handles, twin.hooks, twin.in_segment, twin.local, twin.later = [], None, None, False, {}
        return twin

    @property
    def gradient(self) -> torch.Tensor | None:
        """The parameter's ``.grad``."""
        return getattr(self.parameter(), "grad", None)

    @property
    def placed(self) -> list[tuple[Parameters, str]]:
        """The ``Parameters`` of this library's layers that use it, each with its key there."""
        return [(placed, key) for one, key in self._placed if (placed := one()) is not None]

    @property
    def flag(self) -> float:
        """Infinity with a gradient in this backward, minus infinity for a frozen parameter, else 0."""
        if self.ready:
            return math.inf
        return 0.0 if getattr(self.parameter(), "requires_grad", True) else -math.inf

    @property
    def pending(self) -> bool:
        """Whether .grad holds an unsummed gradient."""
        return self.local and self.gradient is not None

    @property
    def unsummed(self) -> bool:
        """Whether .grad holds an unsummed gradient that is not zero."""
        return self.pending and bool(self.gradient.any())  # type: ignore[union-attr]

    def keep_local(self) -> None:
        """Let .grad accumulate this rank's own gradient, as under ``no_sync``."""
        gradient = self.gradient
        if gradient is not None and not self.local and bool(gradient.any()):
            raise ProtocolError(
                "no_sync: .grad already holds a synchronised gradient, which this rank's own cannot"
                " be added to; call optimizer.zero_grad() first"
            )
        self.local = True

    def take_over(self, offer: Callable[[], torch.Tensor | None]) -> None:
        """Stop the layers from summing the gradient, and let them write it to the offered place."""
        for placed, key in self.placed:
            placed.take_over(key, self.parameter(), offer)

    def release(self) -> None:
        """Give the parameter back to its layers; its gradient moves out of the segment."""
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
        """Copy a gradient that lies in the segment to other memory."""
        gradient, lies = self.gradient, self.in_segment
        if gradient is not None and lies is not None and gradient.data_ptr() == lies.data_ptr():
            self.parameter().grad = gradient.clone()
        self.in_segment = None


class _Tenancy:
    # Keeps a bucket's memory: the bucket and every tensor in that memory refer to it.
    pass


class _Lent(np.ndarray[Any, Any]):
    # A view of a buffer, which torch's tensors in it refer to.
    tenancy: _Tenancy


class Bucket:
    """Gradients of one kind that share an allreduce, whose name is equal on its ranks; local.

    In each backward: ``offer`` and ``put`` for each gradient, ``start`` once, ``launch`` once where it is
    ``leaving`` a device, ``wait`` once, ``reset``. What
    did not arrive before ``start`` counts as zero. Memory is released by ``close()``, or when the bucket and
    all gradients in it are freed.
    """

    def __init__(self, machine: Machine, name: str, slots: Sequence[GradientSlot]) -> None:
        self.kind, self.name, self.slots = slots[0].kind, name, slots
        dtype = self.kind.dtype
        # A complex number is two real ones. Several ranks' vectors lie one behind the other, so each vector
        # has an even number of words.
        words = 2 if dtype.is_complex else 1
        self._dtype = dtype.to_real() if dtype.is_complex else dtype
        self._counts = [slot.shape.numel() * words for slot in slots]
        for number, slot in enumerate(slots):
            slot.number = number
        self.nbytes = sum(self._counts) * self._dtype.itemsize
        # Bytes of gradients that were written into the segment, and of those that were copied there.
        self.in_place_nbytes = self.copied_nbytes = 0
        # Behind the gradients, one flag per parameter. The sum is NaN if a parameter has a gradient on some
        # ranks and is frozen on others.
        self._counts.append(len(slots))
        self._counts.append(-sum(self._counts) % words)
        self.allreduce = self.kind.allreduce(machine, sum(self._counts), self._dtype, name)
        self._tenancy = _Tenancy()
        finalize(self._tenancy, self.allreduce.close)
        self._missing = len(slots)
        # Name of a parameter that had a gradient on some ranks and was frozen on others in this backward.
        self.frozen_in_part = ""
        # Views of the gradients and of the flags, by ``id`` of the buffer. Few buffers, which stay.
        self._views: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        self._written: tuple[list[torch.Tensor], torch.Tensor] | None = None
        # Gradients of the buffer, and in their place memory on the device, likewise; none on the CPU.
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # The copy of gradients from the device, between ``start`` and ``launch``.
        self.leaving: Descent | None = None

    def offer(self, slot: GradientSlot) -> torch.Tensor | None:
        """Place for a layer to write its gradient to, once per backward; None if the gradient accumulates."""
        fresh = slot.parameter().grad is None or not slot.local
        if slot.offered or not fresh or not slot.parameter().requires_grad:
            return None
        slot.offered = True
        # A new tensor: torch assigns it to .grad if nothing else refers to it, and copies otherwise.
        return self._places()[0][slot.number].detach()

    def put(self, slot: GradientSlot, gradient: torch.Tensor | None) -> bool:
        """Make a slot's gradient lie in the active buffer; return whether it was the last one."""
        place = (self._written or self._places())[0][slot.number]
        if gradient is not None:
            # Only a gradient in an offered place may already lie there.
            if slot.offered and gradient.is_set_to(place):
                self.in_place_nbytes += slot.nbytes
            else:
                place.copy_(gradient)
                self.copied_nbytes += slot.nbytes
        slot.ready = True
        self._missing -= 1
        return not self._missing

    def start(self) -> None:
        """Start the allreduce, or the copy from a device; gradients that did not arrive count as zero."""
        places, flags = self._places()
        for slot in self.slots if self._missing else ():
            if not slot.ready and slot.pending:
                # Accumulated under no_sync; this backward added nothing.
                self.put(slot, slot.gradient)
            if not slot.ready:
                places[slot.number].zero_()
        if self._missing:
            flags.copy_(torch.tensor([slot.flag for slot in self.slots]))
        else:
            flags.fill_(math.inf)
        self._written = None
        if self._staged:
            _, there = self._staged[id(self.allreduce.active)]
            self.leaving = to_host([there])
        else:
            self.allreduce.start()

    def launch(self) -> None:
        """Start the allreduce of gradients that are ``leaving`` their device; waits for the copy."""
        here, _ = self._staged[id(self.allreduce.active)]
        (words,) = self.leaving.wait()  # type: ignore[union-attr]
        copy_words(as_words(here), words)
        self.leaving = None
        self.allreduce.start()

    def wait(self) -> None:
        """Wait, and assign the sums to ``.grad``; blocking."""
        total = self.allreduce.wait()
        gradients, flags = self._views_of(total)
        if self._staged:
            here, there = self._staged[id(total)]
            from_host([as_words(here)], here.numel(), here.dtype, there.device, there)
        for slot, gradient, flag in zip(self.slots, gradients, flags.tolist(), strict=True):
            parameter = slot.parameter()
            if parameter is None:
                continue
            if not flag > 0:
                if math.isnan(flag):
                    self.frozen_in_part = slot.name
                    continue
                # No rank has a gradient. An old one moves out before its buffer is used again.
                slot.move_out()
                continue
            if not slot.ready and parameter.grad is not None:
                slot.base = parameter.grad.clone()
            slot.in_segment = gradient if slot.base is None else None
            parameter.grad = slot.in_segment if slot.base is None else slot.base.add_(gradient)
            slot.local = False

    def reset(self) -> None:
        """Prepare for the next backward."""
        self._missing, self.frozen_in_part, self.leaving = len(self.slots), "", None
        for slot in self.slots:
            slot.base = None
            slot.offered = slot.ready = False

    def close(self) -> None:
        """Release parameters and memory; local, idempotent."""
        for slot in self.slots:
            slot.release()
        self._views, self._staged, self._written = {}, {}, None
        self.allreduce.close()

    def _places(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        # Views of the buffer for this backward, which changes with each allreduce.
        if self._written is None:
            self._written = self._views_of(self.allreduce.active)
        return self._written

    def _views_of(self, buffer: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        views = self._views.get(id(buffer))
        if views is None:
            lent: Any = buffer.view(_Lent)
            lent.tenancy = self._tenancy
            whole = as_tensor(lent, self._dtype)
            *parts, flags, _ = torch.split(whole, self._counts)
            if self.kind.device.type != "cpu":
                here = whole[: sum(self._counts[:-2])]
                there = torch.empty_like(here, device=self.kind.device)
                self._staged[id(buffer)] = here, there
                parts = [*torch.split(there, self._counts[:-2])]
            if self.kind.dtype.is_complex:
                parts = [torch.view_as_complex(part.view(-1, 2)) for part in parts]
            # Detached, to be assigned to .grad repeatedly: not one of several views of a split.
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
    """Buckets of lists that stay together, row by row, with their memory; collective, blocking.

    ``numbers`` counts the earlier buckets of each kind, equal on their ranks. ``title`` and ``who`` are for
    messages. The layers still have their parameters, and the buckets' ranks are not connected yet. If a rank
    cannot make its buckets, all ranks raise its error, and nothing has changed.
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
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        failure = [type(error).__name__, str(error)]
        # Makes room for the messages.
        discard()
    for rank, theirs in gather_words(machine.segments, failure, title).items():
        if theirs:
            discard()
            raise vars(errors).get(theirs[0], ConfigurationError)(f"{who}: on rank {rank}: {theirs[1]}")
    numbers.update(bucket.kind for bucket in made)
    return made


def bucketed(row: Sequence[Sequence[GradientSlot]], limit: int) -> list[list[GradientSlot]]:
    """Lists of slots joined up to a size, the last one first: the order in which backward reaches them.

    Other layers in between do not matter: the ranks of a bucket need not share those. So each rank makes the
    same buckets of a kind, whatever else it has. A list stays together, even if it is larger than the limit.
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


def remaining_slots(leaving: Sequence[Bucket], moved: set[str]) -> list[list[GradientSlot]]:
    """Slots for new buckets: those of ``leaving`` whose parameters are not in ``moved``, by name."""
    # In the order of the model: a backward's first bucket is the model's last.
    kept = [[s for s in bucket.slots if s.name not in moved] for bucket in reversed(leaving)]
    return [[slot.anew() for slot in slots] for slots in kept if slots]


def profiled(title: str, act: Callable[[], None]) -> None:
    """Call a function in a range of torch's profiler, if that is on."""
    if profiler._is_profiler_enabled:
        with profiler.record_function(title):
            act()
    else:
        act()
