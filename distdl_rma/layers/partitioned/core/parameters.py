"""The parameters of a layer: how values reach the ranks that use them, and how gradients are summed.

A placement says where a parameter is kept and where it is used. If these are the same, nothing travels in a
forward, and replicas sum their gradients in the backward. If not, values travel and gradients return::

    "replicated"    rank 0: w    rank 1: w    rank 2: w       backward: one allreduce of all gradients
    "root"          rank 0: w  -> rank 1  -> rank 2           forward: broadcast, backward: sum-reduce
    shares          rank 0: b0   rank 1: b1   rank 2: b2      forward: gather, backward: reduce-scatter

The sums of several replicated parameters are one message, of all their gradients behind each other: a layer's
weight and bias cost one round. A ``GradientSync`` goes further and sums whole models in buckets; it takes the
sums over, and a layer then only computes gradients.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from distdl_rma.errors import ConfigurationError, ProtocolError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.arithmetic import reduction_dtype
from distdl_rma.layers.ops.core.autograd import OperatorFunction, first_derivative
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.staged import Moves, movement_between
from distdl_rma.layers.ops.core.tensors import as_tensor
from distdl_rma.layers.ops.set_up_transfer import broadcast_from_first
from distdl_rma.layers.partitioned.core.callbacks import wrong_ranks
from distdl_rma.layers.partitioned.core.input_facts import Trainable
from distdl_rma.layers.partitioned.core.placement import Placement
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.machine import Machine

# Returns memory in the segment for the gradient of one parameter, in every backward; None if there is none. A
# gradient that is written there at once is not copied there before its sum.
Offer = Callable[[], "torch.Tensor | None"]

_CALLBACK = "get_ranks_synch_weights"
# Machines that have warned that gradients of plain modules stay local.
_warned: WeakSet[Machine] = WeakSet()


class Parameters:
    """The parameters of one layer with their placements: replicas, and movement to users; local to construct.

    Every backward sums the gradients of replicas before it returns. Once a ``GradientSync`` takes over, the
    layer only computes gradients, and writes them to memory that the ``GradientSync`` offers.

    Always true: replicas are bitwise equal after construction (``equalise``). They stay so if programs change
    them alike, since each gets the same sum. A gradient is summed by this class or by a ``GradientSync``,
    never by both and never by neither: ``taken_over`` decides it for all parameters of the layer at once.
    """

    def __init__(self, layer: nn.Module, site: CallSite, placements: Mapping[str, Placement]) -> None:
        # The layer owns this; a reference cycle would free the layer late.
        self._layer = weakref.ref(layer)
        self.site, self.placements = site, dict(placements)
        # Parameters whose gradients a ``GradientSync`` sums, and its offers of memory for them.
        self.taken_over: dict[str, tuple[torch.Tensor, Offer]] = {}
        rank = site.machine.rank
        # All parameters that a rank keeps have their replicas on the same ranks.
        holders = (place.store.holders(rank) for place in self.placements.values())
        self.holders = max(holders, key=len, default=()) or (rank,)
        self._travels = {key: p.use for key, p in self.placements.items() if p.use is not None}
        # Only one of the replicas is sent.
        self._givers = {key: self.placements[key].store.one_copy() for key in self._travels}
        self._sends = {key: not givers.box(rank).empty for key, givers in self._givers.items()}
        self._movements: dict[tuple[str, torch.dtype], Moves] = {}
        # By all that a sum depends on, since the layer's dtype and the ranks of its user's callback may
        # change. Sums that are not used any more keep their memory: a program that alternates would else
        # connect anew.
        self._sums: dict[tuple[tuple[int, ...], int, torch.dtype], Allreduce] = {}
        self._own_answer: tuple[int, ...] | None = None
        # Parameters whose gradients ranks exchange in the backward of a call; None if they exchange none.
        self.trainable: Trainable | None = None

    def equalise(self) -> None:
        """Broadcast the values of the first holder to the other holders; collective over these, blocking.

        Ranks with other seeds would else train different models whose gradients are summed.
        """
        if len(self.holders) > 1:
            broadcast_from_first(self.site.machine, self.holders, list(self._kept().values()), self.site.name)

    def use(self) -> dict[str, torch.Tensor]:
        """Parameters as this rank uses them in a forward; blocking if values travel.

        What is returned is in the graph of what is kept, over as many steps as are needed: kept values, then
        a sum of gradients over replicas, then a movement to the users. The backward takes these in reverse.
        """
        kept = self._kept()
        # One comparison of types in the usual case.
        if {*map(type, kept.values())} != {nn.Parameter}:
            self._warn_of_replaced(kept)
        if self.taken_over:
            self._check_taken_over(kept)
        used = kept
        ranks, summed = self._summed(kept)
        if summed:
            # Sums come before a replica is sent: its gradient is the sum of all replicas.
            tensors = _SummedGradients.apply(self, ranks, *summed.values())
            used = kept | dict(zip(summed, tensors, strict=True))
        if not self._travels:
            return used
        # All start before the first is waited for, so that they travel together.
        requests = {}
        for key, use in self._travels.items():
            movement, values = self._movement(key, used[key].dtype, use), used[key]
            sent = values if self._sends[key] else values.flatten()[:0]
            requests[key] = movement.start(sent, values.requires_grad)
        return used | {key: request.movement.wait(request) for key, request in requests.items()}

    def connect(self) -> None:
        """Exchange addresses for the values that travel, and for their gradients; blocking."""
        kept = self._kept()
        self._summed(kept)
        for key, use in self._travels.items():
            self._movement(key, kept[key].dtype, use).connect()

    def summed_over(self) -> tuple[int, ...]:
        """Ranks that gradients are summed over, this one included.

        A callback of the user may be set at any time, and is called every time; the layer's own method once.
        """
        layer: Any = self._layer()
        if _CALLBACK in vars(layer):
            return stated_ranks(layer, self.site, self.holders)
        if self._own_answer is None:
            self._own_answer = stated_ranks(layer, self.site, self.holders)
        return self._own_answer

    def take_over(self, key: str, parameter: torch.Tensor, offer: Offer) -> None:
        """Leave the sum of a parameter's gradients to a ``GradientSync``, which may offer memory for them."""
        self.taken_over[key] = parameter, offer

    def let_go(self, key: str) -> None:
        """Undo ``take_over``; idempotent."""
        self.taken_over.pop(key, None)

    def offered(self, key: str) -> torch.Tensor | None:
        """Memory in the segment to write a parameter's gradient to; None if there is none now."""
        taken = self.taken_over.get(key)
        return None if taken is None else taken[1]()

    def fill(self, key: str, gradient: torch.Tensor) -> torch.Tensor:
        """Copy a gradient to the offered memory in the segment, if any; returns where the gradient is."""
        place = self.offered(key)
        return gradient if place is None else place.copy_(gradient)

    def sum(self, ranks: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum gradients over some of the holders; blocking. The caller owns the results.

        They are copied out of the segment, as autograd keeps a gradient while the next sum is written there.
        """
        machine, name = self.site
        count, dtype = sum(gradient.numel() for gradient in gradients), gradients[0].dtype
        total = self._sums.get((ranks, count, dtype))
        if total is None:
            over = "" if ranks == self.holders else f" over ranks {list(ranks)}"
            element, title = reduction_dtype(dtype), f"{name} (gradients{over})"
            total = Allreduce(machine.segments, ranks, count, element, name=title)
            self._sums[ranks, count, dtype] = total
        flat = as_tensor(total.active, dtype)
        parts, device = [gradient.reshape(-1) for gradient in gradients], gradients[0].device
        if device.type == "cpu":
            torch.cat(parts, out=flat)
        else:
            flat.copy_(torch.cat(parts))
        total.start()
        parts = as_tensor(total.wait(), dtype).to(device).split([part.numel() for part in parts])
        return [p.clone().view(g.shape) for p, g in zip(parts, gradients, strict=True)]

    def _kept(self) -> dict[str, torch.Tensor]:
        layer: Any = self._layer()
        own = layer._parameters
        # A parametrisation replaces a parameter by a computed attribute: torch removes the parameter, and a
        # property of the layer's class returns the computed one.
        return {key: getattr(layer, key) if own.get(key) is None else own[key] for key in self.placements}

    def _summed(self, kept: dict[str, torch.Tensor]) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        # Ranks that sum gradients in the backward of this call, and the parameters that have some. The others
        # must have the same parameters, in the same order, so that their sums are of the same elements:
        # ``trainable`` travels with the facts of the call, and ``check_trainable`` compares it.
        self.trainable = None
        ranks = () if self.taken_over else self.summed_over()
        if not torch.is_grad_enabled():
            return (), {}
        if self._travels:
            self.trainable = -1, tuple([key for key, p in kept.items() if p.requires_grad])
        if len(ranks) < 2:
            return (), {}
        # Computations may skip parameters without elements, and may do so on some ranks only.
        learning = {key: p for key, p in kept.items() if p.requires_grad and p.numel()}
        if not self._travels:
            self.trainable = ranks[0], (*learning,)
        return ranks, learning

    def _check_taken_over(self, kept: Mapping[str, torch.Tensor]) -> None:
        # A parameter that the GradientSync does not know would have the gradient of this rank alone, and
        # replicas would drift apart without an error.
        for key, parameter in kept.items():
            taken, _ = self.taken_over.get(key, (None, None))
            # A parameter without elements has no gradient to sum.
            if taken is not parameter and parameter.requires_grad and parameter.numel():
                raise ProtocolError(
                    f"{self.site.name!r}: a parameter was unfrozen or replaced after its gradients were"
                    " registered to be summed, or is computed from others; call register(model) of the"
                    " GradientSync on all ranks, or the whole distributed model, which registers itself"
                )

    def _warn_of_replaced(self, kept: Mapping[str, torch.Tensor]) -> None:
        # torch.func.grad of a whole model sums gradients of this layer, and none of a plain nn.Linear: half
        # of the gradients would be those of all ranks. Once for a machine: programs do this in every step.
        machine, layer = self.site.machine, self._layer()
        if self.taken_over or machine.size == 1 or machine in _warned or not torch.is_grad_enabled():
            return
        # functional_call puts plain tensors among the layer's own parameters; parametrisations do not.
        own = vars(layer)["_parameters"]
        odd = {key for key, values in kept.items() if not isinstance(values, nn.Parameter)}
        if any(kept[key].requires_grad for key in odd & own.keys()):
            _warned.add(machine)
            warnings.warn(
                f"{self.site.name!r}: its parameters are replaced in this call, as torch.func.functional_call"
                " does. The gradients of distributed layers are summed over their ranks; those of plain"
                " modules are each rank's own, and are to be summed by the program",
                stacklevel=2,
            )

    def _movement(self, key: str, dtype: torch.dtype, use: Decomposition) -> Moves:
        movement = self._movements.get((key, dtype))
        if movement is None:
            movement = movement_between(self.site, self._givers[key], use, dtype, key)
            self._movements[key, dtype] = movement
        return movement


def stated_ranks(layer: Any, site: CallSite, holders: Sequence[int]) -> tuple[int, ...]:
    """Checked ranks of ``get_ranks_synch_weights``: some of the holders, this one included."""
    machine = site.machine
    ranks = tuple(layer.get_ranks_synch_weights()) or (machine.rank,)
    if problem := wrong_ranks(ranks, machine.rank, holders):
        error = ConfigurationError(f"{site.name!r}: {problem}")
        # The other ranks do not know of the error, and would wait for this one.
        machine.fail(error)
        raise error
    return ranks


class _SummedGradients(OperatorFunction):
    """Identity in the forward; the backward sums gradients over the ranks.

    One node for all parameters of a layer: autograd runs it once it has the gradients of all, as one message.
    """

    @staticmethod
    def forward(
        ctx: Any, owner: Parameters, ranks: tuple[int, ...], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.owner, ctx.ranks, ctx.machine = owner, ranks, owner.site.machine
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.owner.sum(ctx.ranks, gradients)
