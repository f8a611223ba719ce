"""Gradients of replicated weights, summed while backward goes on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from distdl_rma.errors import ClosedError, ConfigurationError, ProtocolError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.replica import Replica, broadcast_from_first
from distdl_rma.layers.tensors import as_tensor, reduction_dtype
from distdl_rma.machine import Machine
from distdl_rma.segments.allreduce import Allreduce

__all__ = ["GradientSync"]

_REDUCTIONS = ("sum", "mean")
_BUCKET_NBYTES = 1 << 20


@runtime_checkable
class SynchronisedLayer(Protocol):
    """A layer that says itself which ranks hold copies of its weights (requirement A9)."""

    replica: Replica

    def get_ranks_synch_weights(self) -> list[int]: ...


class GradientSync:
    """Makes the gradients of a training loop right: one line added to the loop.

    When ``loss.backward()`` returns, every ``.grad`` is the gradient of the sum (or mean) of all ranks'
    losses, on every rank, whatever the loop does next: clip, step, accumulate. The allreduces start as
    soon as the last gradient of a bucket is there, while backward goes on. Distributed layers state their
    ranks by ``get_ranks_synch_weights()``; every other module counts as copied on all ranks of the
    machine, and its parameters and buffers are made equal at construction, the first rank's count.

    A gradient lies in the segment, where the layers of this library put it without a copy. It stays valid
    until the next but one backward, or ``close()``; clone it to keep it longer.

    Collective to construct; every rank runs the same backwards, idle ranks included. Parameters that are
    frozen at construction are left alone.

    Parameters
    ----------
    model
        The model, alike on all ranks.
    machine
        The machine, or a partition of it such as ``P_world``.
    reduction
        ``"sum"``, or ``"mean"`` to divide by the number of ranks that hold the copies.
    bucket_nbytes
        Gradients of consecutive layers travel together up to this many bytes; 0 for one allreduce per
        layer.

    Raises
    ------
    ConfigurationError
        If an option is unknown, or the model is already synchronised by another ``GradientSync``.

    Notes
    -----
    Interface document, sections 3.1 and 3.2; architecture of gradients: ``docs/concepts.md``.
    """

    def __init__(
        self,
        model: nn.Module,
        machine: Machine | Partition,
        *,
        reduction: str = "sum",
        bucket_nbytes: int = _BUCKET_NBYTES,
    ) -> None:
        if reduction not in _REDUCTIONS:
            raise ConfigurationError(f"reduction is one of {_REDUCTIONS}, got {reduction!r}")
        self._machine = Machine.of(machine)
        self._paused = False
        self._closed = False
        self._in_backward = False
        self._handles: list[Any] = []
        groups = _groups(model, self._machine)
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._replicas = [group.replica for group in groups if group.replica is not None]
        if any(replica.taken_over for replica in self._replicas):
            raise ConfigurationError(
                "a layer of this model already belongs to another GradientSync; close that"
            )
        numbers: defaultdict[object, Iterator[int]] = defaultdict(count)
        self._buckets = [
            # Counted per kind: what is alike on the ranks of a bucket.
            _Bucket(self._machine, next(numbers[members[0].kind]), members, reduction)
            for members in _bucketed(groups, bucket_nbytes)
        ]
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._adopt(bucket, slot)
        for replica in self._replicas:
            replica.taken_over = True
        # The gradients must leave the segment before it goes.
        self._machine.segments.before_close(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward only accumulates this rank's own gradients.

        The next backward outside of it sums everything accumulated. Start it with gradients cleared.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> None:
        """Give the gradients memory of their own and stop; local, idempotent.

        The layers then synchronise themselves again.
        """
        if self._closed:
            return
        if any(slot.local and slot.parameter.grad is not None for b in self._buckets for slot in b.slots):
            raise ProtocolError("GradientSync: closed with gradients from no_sync that are not summed yet")
        self.release()

    def release(self) -> None:
        """Leave the segment, whatever is pending; the close of the machine calls it."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        for replica in self._replicas:
            replica.taken_over = False
            replica.sinks.clear()
            replica.adopted.clear()
        for bucket in self._buckets:
            bucket.close()

    def _adopt(self, bucket: _Bucket, slot: _Slot) -> None:
        parameter: Any = slot.parameter  # torch leaves its hooks untyped
        self._handles.append(parameter.register_hook(lambda gradient: self._before(bucket, slot)))
        self._handles.append(
            parameter.register_post_accumulate_grad_hook(lambda _: self._after(bucket, slot))
        )
        if slot.replica is not None:
            slot.replica.adopted[slot.key] = slot.parameter
            slot.replica.sinks[slot.key] = lambda: None if self._paused else bucket.claim(slot)

    def _before(self, bucket: _Bucket, slot: _Slot) -> None:
        # Runs with the gradient of this backward complete and not yet accumulated.
        if self._closed:
            raise ClosedError("GradientSync: already closed")
        gradient = slot.parameter.grad
        if slot.parameter.dtype != slot.dtype:
            raise ProtocolError(
                f"a parameter of {bucket.name!r} was {slot.dtype} when its GradientSync was made and is now"
                f" {slot.parameter.dtype}; make a new one"
            )
        if gradient is None:
            slot.local = False
        if self._paused:
            if gradient is not None and not slot.local and bool(gradient.any()):
                raise ProtocolError(
                    "no_sync: .grad already holds a synchronised gradient, which this rank's own cannot"
                    " be added to; call optimizer.zero_grad() first"
                )
            slot.local = True
            return
        if slot.ready:
            raise ProtocolError(
                f"a gradient of {bucket.name!r} came twice in one backward, or an earlier backward failed:"
                " use checkpoint(use_reentrant=False), or make a new GradientSync"
            )
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        slot.seen = True
        if gradient is not None and not slot.local:
            # Summed already, or the loop's own: kept aside, so that only what is new is summed.
            slot.base = gradient.clone()
            slot.parameter.grad = None

    def _after(self, bucket: _Bucket, slot: _Slot) -> None:
        if self._paused:
            return
        bucket.put(slot)
        if bucket.complete:
            bucket.launch()
        # What travels advances while backward computes the next gradients.
        self._machine.segments.progress()

    def _finish(self) -> None:
        # End of backward: what no gradient came for on this rank may have come on others.
        try:
            self._refuse()
            for bucket in self._buckets:
                if not bucket.allreduce.running:
                    bucket.launch()
            for bucket in self._buckets:
                bucket.land()
        finally:
            self._in_backward = False
            for bucket in self._buckets:
                bucket.forget()

    def _refuse(self) -> None:
        # A gradient is never silently local.
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ProtocolError(
                    f"parameter {name!r} was unfrozen after its GradientSync was made; make a new one"
                )
        if any(slot.seen and not slot.ready for bucket in self._buckets for slot in bucket.slots):
            raise ProtocolError(
                "GradientSync: torch.autograd.grad would return local gradients; use backward()"
            )


class _Slot:
    """A parameter, its place in a bucket, and what is known of its gradient."""

    def __init__(self, parameter: nn.Parameter, key: str, replica: Replica | None) -> None:
        self.parameter, self.key, self.replica = parameter, key, replica
        self.start = 0
        self.claimed = self.seen = self.ready = False
        self.dtype = parameter.dtype
        self.base: torch.Tensor | None = None
        # Whether .grad holds this rank's own share, accumulated under no_sync.
        self.local = False
        # The view of the segment that was handed out last.
        self.lent: torch.Tensor | None = None

    def reclaim(self) -> None:
        """Give a gradient that lies in the segment memory of its own."""
        gradient = self.parameter.grad
        if gradient is not None and self.lent is not None and gradient.data_ptr() == self.lent.data_ptr():
            self.parameter.grad = gradient.clone()
        self.lent = None


class _Group:
    """Parameters of one layer that the same ranks hold."""

    def __init__(self, ranks: tuple[int, ...], slots: list[_Slot], replica: Replica | None) -> None:
        self.ranks, self.slots, self.replica = ranks, slots, replica

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype]:
        return self.ranks, self.slots[0].parameter.dtype

    @property
    def nbytes(self) -> int:
        return sum(s.parameter.numel() * s.parameter.element_size() for s in self.slots)


class _Bucket:
    """Gradients that travel together in one double-buffered allreduce."""

    def __init__(self, machine: Machine, number: int, groups: Sequence[_Group], reduction: str) -> None:
        self.slots = [slot for group in groups for slot in group.slots]
        ranks, dtype = groups[0].kind
        self.name = f"gradients {number}"
        self.numel = 0
        for slot in self.slots:
            slot.start = self.numel
            self.numel += slot.parameter.numel()
        # Behind the gradients one flag per parameter: on how many ranks it had a gradient at all.
        words = self.numel + len(self.slots)
        kind = reduction_dtype(dtype)
        self.allreduce = Allreduce(machine.segments, ranks, words, kind, reduction, self.name)
        # Now, in one order: ranks may complete their buckets in different ones.
        self.allreduce.connect()

    @property
    def complete(self) -> bool:
        return all(slot.ready for slot in self.slots)

    def claim(self, slot: _Slot) -> torch.Tensor | None:
        """Place for a layer to write a gradient to, once per backward."""
        fresh = slot.parameter.grad is None or not slot.local
        if slot.claimed or not fresh or not slot.parameter.requires_grad:
            return None
        slot.claimed = True
        return self._view(slot, as_tensor(self.allreduce.active, slot.dtype))

    def put(self, slot: _Slot) -> None:
        """Make sure that a gradient lies in the active buffer."""
        gradient = slot.parameter.grad
        place = self._view(slot, as_tensor(self.allreduce.active, slot.dtype))
        if gradient is not None and gradient.data_ptr() != place.data_ptr():
            place.copy_(gradient)
        slot.ready = True

    def launch(self) -> None:
        """Start the allreduce; gradients that did not come count as zero."""
        active = as_tensor(self.allreduce.active, self.slots[0].dtype)
        for i, slot in enumerate(self.slots):
            if not slot.ready and slot.local and slot.parameter.grad is not None:
                # Accumulated under no_sync, and not touched by this backward.
                self.put(slot)
            if not slot.ready:
                self._view(slot, active).zero_()
            active[self.numel + i] = float(slot.ready)
        self.allreduce.start()

    def land(self) -> None:
        """Wait, and hand the sums to the parameters."""
        result = as_tensor(self.allreduce.wait(), self.slots[0].dtype)
        present = result[self.numel :].tolist()
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
        for slot in self.slots:
            slot.reclaim()
        self.allreduce.close()

    @staticmethod
    def _view(slot: _Slot, flat: torch.Tensor) -> torch.Tensor:
        count = slot.parameter.numel()
        return flat[slot.start : slot.start + count].view(slot.parameter.shape)


def _groups(model: nn.Module, machine: Machine) -> list[_Group]:
    """Parameters of a model by layer; plain modules are made equal on all ranks on the way."""
    groups, seen = [], set()
    for name, module in model.named_modules():
        own = isinstance(module, SynchronisedLayer)
        ranks = tuple(module.get_ranks_synch_weights()) if own else machine.ranks
        replica = module.replica if own else None
        slots = []
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not own and len(ranks) > 1:
                broadcast_from_first(machine, ranks, [parameter.data], f"{name}.{key}")
            if parameter.requires_grad and parameter.numel() and len(ranks) > 1:
                slots.append(_Slot(parameter, key, replica))
        if not own and len(ranks) > 1:
            buffers = [b for b in module.buffers(recurse=False) if b.numel()]
            broadcast_from_first(machine, ranks, buffers, f"{name} (buffers)")
        by_dtype: dict[torch.dtype, list[_Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.parameter.dtype, []).append(slot)
        groups += [_Group(ranks, members, replica) for members in by_dtype.values()]
    return groups


def _bucketed(groups: list[_Group], limit: int) -> list[list[_Group]]:
    """Layers fused up to a size, the last layer first: the order in which backward reaches them.

    Layers of the same ranks and dtype meet in the same buckets whatever other layers this rank has in
    between: the ranks of a bucket need not be the same ranks in everything else.
    """
    buckets: list[list[_Group]] = []
    unfilled: dict[tuple[tuple[int, ...], torch.dtype], list[_Group]] = {}
    for group in reversed(groups):
        last = unfilled.get(group.kind)
        if last and sum(g.nbytes for g in last) + group.nbytes <= limit:
            last.append(group)
        else:
            unfilled[group.kind] = [group]
            buckets.append(unfilled[group.kind])
    return buckets
