"""``GradientSync``: sums gradients over ranks while backward goes on.

One backward of a model with three layers in two buckets, from the last layer to the first:

    torch's backward      layer 3          layer 2                layer 1            end of backward
    hooks of parameters   put              put, bucket 0 is full  put, bucket 1 is full
    bucket 0              . . . . . . . .  start ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~  wait: .grad = sum
    bucket 1              . . . . . . . . . . . . . . . . . . . . start ~~~~~~~~~~~  wait: .grad = sum

Gradients on a device are copied down meanwhile: an allreduce starts as another bucket is full, or at the end.

Two hooks of torch report a gradient: ``_computed`` before torch accumulates it (the earlier ``.grad`` is put
aside, so that only the new gradient is summed), ``_accumulated`` afterwards (it is put into its bucket). A
callback of torch's engine runs ``_finish`` at the end, also if this rank had no gradient for some bucket:
other ranks may have had.

Invariants:

- Outside of a backward every ``.grad`` is either summed over its ranks, or *local* (``slot.local``): this
  rank's own, accumulated in ``no_sync``. The first backward outside of ``no_sync`` sums what is local.
- All ranks of a bucket start its allreduce once in each backward outside of ``no_sync``, with or without
  gradients. So the numbers of their allreduces agree, whatever their losses reach.
- A parameter has one owner (``synchronised``): two would sum twice.
- A backward that fails leaves buckets in unknown states on other ranks: all later ones are refused
  (``_failure``), as nobody knows which allreduces have begun.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, Unpack
from weakref import ref

import torch
from torch import nn

from distdl_rma.errors import ClosedError, DistdlError, ProtocolError, UnsupportedError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import (
    GRAD_CALLS,
    breaks_graph,
    compiles,
    mark_summed_later,
    run_eager,
    uncompiled,
)
from distdl_rma.layers.partitioned.core.callbacks import Callbacks
from distdl_rma.layers.staging import backward_in_this_thread
from distdl_rma.layers.sync.bucket import (
    Bucket,
    BucketKind,
    GradientSlot,
    make_buckets,
    profiled,
    remaining_slots,
)
from distdl_rma.layers.sync.clipping import GradientNorms
from distdl_rma.layers.sync.gradient_groups import GRADIENT_SYNC, Owner, synchronised
from distdl_rma.layers.sync.parameter_hooks import contribution, keep_back, run_kept_back
from distdl_rma.layers.sync.registry import Registry, SyncOptions
from distdl_rma.layers.sync.warnings import warn_of_pitfalls
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.memory.context import Uncopyable


class GradientSync(Uncopyable):
    """Sums the gradients of a training loop over the ranks: one line added to the loop.

    When ``loss.backward()`` returns, every ``.grad`` on every rank is the gradient of the sum (or mean) of
    all ranks' losses. So the loop may clip, step or accumulate as usual. The allreduce of a bucket starts
    with its last gradient, while backward goes on. Modules state by ``get_ranks_synch_weights()`` which ranks
    hold copies of their weights: layers of this library do, others may, and :meth:`register` gives a module
    the callback. Any other module counts as copied on all ranks of the machine. At construction, parameters
    and buffers of all modules but this library's layers are broadcast from the first of their ranks.
    Parameters that are frozen then are not synchronised.

    A gradient lies in the segment; layers of this library write it there. It stays valid until the second
    backward after it, or ``close()``; clone it to keep it longer. Construction is collective over the
    machine. Every rank runs the same backwards, idle ranks included. As a context manager it closes itself.

    Parameters
    ----------
    model
        The same model on all ranks that hold its parts; None if all modules are registered later.
    machine
        The machine, or a partition of its ranks such as ``P_world``; all ranks of the machine take part.
    reduction
        ``"sum"``, or ``"mean"`` to divide: by the number of ranks of the machine, or of the list that a
        callback of the user gives.
    replicas
        Divisor of a mean instead: the number of data-parallel replicas of the model, if each replica is split
        over several ranks and has its own loss.
    bucket_nbytes
        Gradients of consecutive layers share an allreduce of at most so many bytes; 0: one per layer.

    Raises
    ------
    ConfigurationError
        On all ranks of the machine: if an option is invalid, a layer belongs to another ``GradientSync``, or
        callbacks contradict each other: they name ranks outside of M, leave out the caller, differ between
        the ranks that they name, state sizes that the layer does not hold, or name no ranks for parameters
        that several ranks hold.
    SegmentError
        On all ranks, if the gradients do not fit into the segment of one; no memory is taken then.

    Notes
    -----
    Interface document, sections 3.1 and 3.2; requirements A9, A10, A15; ``docs/gradients.md``.

    Examples
    --------
    >>> P_world = MPIPartition(MPI.COMM_WORLD)
    >>> model = nn.Linear(2, 1, bias=False)
    >>> sync = GradientSync(model, P_world)
    >>> model(torch.ones(3, 2)).sum().backward()  # three samples on each of two ranks
    >>> model.weight.grad
    tensor([[6., 6.]])
    """

    def __init__(
        self,
        model: nn.Module | None,
        machine: Machine | Partition,
        *,
        reduction: Literal["sum", "mean"] = "sum",
        replicas: int | None = None,
        bucket_nbytes: int = 1 << 20,
    ) -> None:
        # A distributed model is the owner of its GradientSync.
        handle = None if model is None else getattr(model, "distributed", None)
        self._owner: Owner = getattr(handle, "owner", GRADIENT_SYNC)
        self._machine = Machine.of(machine)
        self._machine.lasting = True
        self._paused = self._closed = self._in_backward = False
        self._options = SyncOptions(reduction, replicas, bucket_nbytes)
        self._registry = Registry(self._machine, self._options, self._owner)
        self._buckets: list[Bucket] = []
        # Number of buckets of each kind that were made so far.
        self._numbers: Counter[BucketKind] = Counter()
        # Slots of parameters that no other rank sums.
        self._alone: list[GradientSlot] = []
        self._norms = GradientNorms(self._machine)
        # Ranks on which plain tensors are equal, if this belongs to a model on split tensors.
        self.alike_on: tuple[int, ...] = ()
        # Weak reference to the end of the running backward; dead if that backward failed.
        self._ending: Callable[[], object] = lambda: None
        # Number of the running backward's gradients that were computed and are not in .grad yet.
        self._on_the_way = 0
        # Slots whose hooks run once the gradients are summed.
        self._waiting: list[GradientSlot] = []
        # The gradients must move out of the segment before it is closed.
        self._machine.segments.before_close(self)
        backward_in_this_thread()
        try:
            self.register(model)
        except BaseException:
            # The user has no object to close.
            self.release()
            raise

    # Gradients of training steps lie in its memory, also if validation registers what was unfrozen.
    @torch.inference_mode(False)
    def register(
        self, module: nn.Module | None, *, name: str | None = None, **callbacks: Unpack[Callbacks]
    ) -> None:
        """Synchronise a module from now on, by its own callbacks or given ones; collective over the machine.

        A module within the model moves to the ranks that its callback gives now, and its parameters are
        broadcast from the first of them. A module that was registered itself, such as the model, is
        registered in its present state: with parameters that were added, replaced, unfrozen or converted, and
        without removed ones. Raises the errors of construction; and, for a module that was not registered
        itself, if gradients of ``no_sync`` on some rank are not summed yet. Nothing has changed then.

        Parameters
        ----------
        module
            Any module; None on ranks that do not have it.
        name
            Name of the module in messages, equal on its ranks.
        callbacks
            Replace the module's own callbacks, for all plain modules in it. They stay with the module.
        """
        self._check_open()
        pending = not self._registry.has(module) and any(slot.unsummed for slot in self._slots)
        busy = "register between steps, with no gradients from no_sync left"
        refusal = self._failure or (busy if pending or self._in_backward else "")
        machine = self._machine
        try:
            with self._registry.adding(module, name, callbacks, refusal) as addition:
                moved, slots = addition.moved, addition.slots(self._options)
                leaving = [b for b in self._buckets if any(slot.name in moved for slot in b.slots)]
                rows = remaining_slots(leaving, moved), [each for each in slots if each[0].kind.travels]
                own = {slot.name for slot in self._slots if slot.local}
                who, limit = self._owner.title, self._options.bucket_nbytes
                title = f"{who} (memory {addition.number})"
                made = make_buckets(machine, rows, limit, self._numbers, title, who)
        except DistdlError as error:
            # Names the layers of any error by their paths.
            machine.labels.make_readable(error)
            raise
        self._buckets += made
        try:
            addition.equalise(machine)
            for bucket in leaving:
                bucket.close()
                self._buckets.remove(bucket)
            for slot in [slot for slot in self._alone if slot.name in moved]:
                slot.release()
                self._alone.remove(slot)
            for bucket in made:
                # On all ranks in one order; gradients may complete buckets in another.
                bucket.allreduce.connect()
                for slot in bucket.slots:
                    self._take_over(slot, bucket)
            for slot in chain.from_iterable(slots):
                slot.local = slot.name in own
                if not slot.kind.travels:
                    self._take_over(slot, None)
        except BaseException:
            self.release()
            raise
        warn_of_pitfalls(
            module, list(map(machine.labels.readable, addition.drifted)), machine, self._owner.title
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward only accumulates this rank's own gradients.

        The next backward outside of it sums all of them. Enter the context with cleared gradients.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @uncompiled
    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of all gradients together; each counts once, even if several ranks hold or share it.

        For any positive order, also ``inf``. Collective over the machine, blocking; returns the same float64
        number on all ranks.
        """
        return self._norm(norm_type)

    def _norm(self, norm_type: float, max_norm: float = math.inf) -> torch.Tensor:
        self._check_open()
        # The first of the ranks that hold a gradient counts it.
        rank = self._machine.rank
        mine = [slot.gradient for slot in self._slots if (*slot.kind.ranks, rank)[0] == rank]
        return self._norms.of(mine, norm_type, any(slot.unsummed for slot in self._slots), max_norm)

    @uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

        Equals ``torch.nn.utils.clip_grad_norm_`` on one machine, also if layers keep parts of their weights
        on several ranks. Collective over the machine, blocking. All ranks raise ``ConfigurationError`` if a
        ``norm_type`` or ``max_norm`` is invalid, ``MismatchError`` if they differ.
        """
        norm = self._norm(norm_type, max_norm)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}, not finite")
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in [slot.gradient for slot in self._slots]:
            if gradient is not None:
                gradient.mul_(factor)
        return norm

    def describe(self) -> list[dict[str, object]]:
        """One row per allreduce, in the order of a backward; local.

        Keys: ``name``, ``ranks``, ``dtype``, ``divisor``, ``parameters`` (their names), ``nbytes``; and, over
        all steps so far, ``in_place_nbytes`` of gradients that layers of this library wrote into the segment,
        and ``copied_nbytes`` of gradients that were copied there after the layer's backward.
        """
        sizes = ("nbytes", "in_place_nbytes", "copied_nbytes")
        return [
            {"name": bucket.name, **bucket.kind._asdict()}
            | {"parameters": [self._label(slot) for slot in bucket.slots]}
            | {size: getattr(bucket, size) for size in sizes}
            for bucket in self._buckets
        ]

    def close(self) -> None:
        """Move the gradients out of the segment and stop; local, idempotent.

        The layers then sum their gradients themselves again.
        """
        if self._closed:
            return
        if any(slot.unsummed for slot in self._slots):
            raise ProtocolError(
                f"{self._owner.title}: closed with gradients from no_sync(), which the next backward sums"
            )
        self.release()

    def release(self) -> None:
        """Leave the segment, even with unsummed gradients; closing the machine calls it."""
        if self._closed:
            return
        self._closed = True
        for slot in self._alone:
            slot.release()
        for bucket in self._buckets:
            bucket.close()
        self._norms.close()

    def __enter__(self) -> GradientSync:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        (self.close if error is None else self.release)()

    @property
    def _slots(self) -> Iterator[GradientSlot]:
        return chain(self._alone, *(bucket.slots for bucket in self._buckets))

    def _label(self, slot: GradientSlot) -> str:
        return self._machine.labels.readable(slot.name)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._owner.title}: already closed")

    def _take_over(self, slot: GradientSlot, bucket: Bucket | None) -> None:
        # From now on the layers do not sum the gradient, and torch's hooks report it.
        parameter = slot.parameter()
        if parameter is None:
            return  # Collected here; other ranks may still have it.
        synchronised[parameter] = self._owner
        mark_summed_later(parameter, True)
        if bucket is None:
            self._alone.append(slot)
            slot.handles = [parameter.register_hook(partial(self._computed_alone, slot))]
            if any(len(placed.holders) > 1 for placed, _ in slot.placed):
                # The user's callback excludes other ranks from the sum.
                slot.take_over(lambda: None)
            return
        slot.handles = [
            parameter.register_hook(partial(self._computed, slot)),
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, bucket, slot)),
        ]
        hooks: Any = parameter._backward_hooks
        hooks.move_to_end(slot.handles[0].id, last=False)
        slot.take_over(lambda: None if self._paused or GRAD_CALLS else bucket.offer(slot))

    def _begin(self) -> None:
        # Called by any first gradient of a backward: other ranks may wait for this rank's other buckets.
        if self._in_backward:
            if self._failure:
                raise ProtocolError(f"{self._owner.title}: {self._failure}")
            return
        self._in_backward = True
        ending = partial(self._finish)
        # If this backward fails, torch drops the callback without calling it.
        self._ending = ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    @property
    def _failure(self) -> str:
        if not self._in_backward or self._ending() is not None:
            return ""
        return (
            f"an earlier backward failed, and ranks may have begun to sum its gradients; {self._owner.anew}"
        )

    def _in_grad_call(self, slot: GradientSlot) -> bool:
        # Whether torch.autograd.grad of split tensors runs, which sums contributions itself.
        if GRAD_CALLS and not set(GRAD_CALLS[-1]) <= {*slot.kind.ranks, self._machine.rank}:
            raise UnsupportedError(
                f"torch.autograd.grad: {self._label(slot)!r} is not on all ranks alike, and has no whole"
                " gradient; use backward(), and .grad of this rank's part"
            )
        return bool(GRAD_CALLS)

    @uncompiled
    def _computed_alone(self, slot: GradientSlot, gradient: torch.Tensor) -> torch.Tensor:
        self._check_open()
        if self._in_grad_call(slot):
            return gradient
        if not self._paused:
            self._begin()
        return gradient / slot.kind.divisor if slot.kind.divisor > 1 else gradient

    @breaks_graph
    def _computed(self, slot: GradientSlot, computed: torch.Tensor | None) -> torch.Tensor | None:
        # The gradient is complete and not yet accumulated.
        if compiles() is not None:
            return run_eager(self._computed, slot, computed)
        slot.missing = computed is None
        if computed is None:
            # An autograd function has returned None for it.
            return None
        parameter = slot.parameter()
        if not self._prepare(slot, parameter):
            return None
        self._on_the_way += not self._paused
        found = contribution(self._machine, slot, computed, self.alike_on) if self.alike_on else None
        if len(parameter._post_accumulate_grad_hooks) > 1:
            keep_back(slot, self._label(slot), self._paused)
        return found

    def _prepare(self, slot: GradientSlot, parameter: Any) -> bool:
        # Puts an earlier gradient aside; returns whether the new one will be summed.
        if self._closed:
            self._check_open()
        if GRAD_CALLS and self._in_grad_call(slot):
            return False
        gradient = parameter.grad
        if parameter.dtype != slot.kind.dtype:
            raise ProtocolError(
                f"parameter {self._label(slot)!r} was made {parameter.dtype} {self._owner.later}"
            )
        if gradient is None:
            slot.local = False
        if self._paused:
            slot.keep_local()
            return True
        if not self._in_backward or self._ending() is None:
            self._begin()
        if slot.ready:
            raise ProtocolError(
                f"the gradient of {self._label(slot)!r} came twice in one backward:"
                " use checkpoint(use_reentrant=False)"
            )
        if gradient is not None and not slot.local:
            # Already summed, or set by the loop: kept aside, so that only the new gradient is summed.
            slot.base, parameter.grad = gradient.clone(), None
        return True

    @breaks_graph
    def _accumulated(self, bucket: Bucket, slot: GradientSlot, parameter: torch.Tensor) -> None:
        if compiles() is not None:
            return run_eager(self._accumulated, bucket, slot, parameter)
        if slot.hooks is not None and slot.hooks.seen:
            slot.hooks.contribute(slot)
        if slot.later:
            parameter._post_accumulate_grad_hooks.update(slot.later)
            self._waiting.append(slot)
        if self._paused or slot.missing:
            return None
        self._on_the_way -= 1
        if bucket.put(slot, parameter.grad):
            profiled(f"GradientSync: start {bucket.name}", bucket.start)
            if bucket.leaving is not None:
                for earlier in self._buckets:
                    if earlier.leaving is not None and earlier.leaving.is_over:
                        earlier.launch()
        # Advances running allreduces while backward computes the next gradients.
        segments = self._machine.segments
        if segments.waiter.under_way:
            segments.progress()
        return None

    @uncompiled
    def _finish(self) -> None:
        # End of backward. Other ranks may have gradients for parameters that got none here.
        try:
            # Refuses parameters that would stay unsummed. Beside split tensors, their uses sum them.
            exact = self.alike_on and self._options.reduction == "sum"
            if not exact and (change := self._registry.watch.later_change()):
                raise ProtocolError(f"{change} {self._owner.later}")
            if self._on_the_way:
                raise ProtocolError(
                    f"{self._owner.title}: torch.autograd.grad of a plain tensor would return local gradients"
                    " of parameters, not their sums; use backward() and .grad, or grad of a split tensor"
                )
            profiled("GradientSync", self._sum)
        except DistdlError as error:
            self._machine.labels.make_readable(error)
            raise
        finally:
            self._in_backward, self._on_the_way = False, 0
            waiting, self._waiting = self._waiting, []
            for bucket in self._buckets:
                bucket.reset()
        for slot in waiting:
            run_kept_back(slot)

    def _sum(self) -> None:
        for bucket in self._buckets:
            if bucket.leaving is None and not bucket.allreduce.running:
                profiled(f"GradientSync: start {bucket.name}", bucket.start)
        for bucket in self._buckets:
            if bucket.leaving is not None:
                bucket.launch()
        for bucket in self._buckets:
            profiled(f"GradientSync: wait {bucket.name}", bucket.wait)
        for bucket in self._buckets:
            if bucket.frozen_in_part:
                raise ProtocolError(
                    f"parameter {self._machine.labels.readable(bucket.frozen_in_part)!r} is frozen on some"
                    " ranks and has a gradient on others: freeze it on all of them"
                )
